"""The Relax pass ``FuseConvPairs`` for external pipelines (docs/relax-pass.md)."""

from schedules.contract.tvm_import import lacks_compiler

if lacks_compiler():
    raise ImportError(
        "fusion.passes needs TVM's compiler, but this process loaded a tuned model with TVM's runtime alone: import "
        "fusion.passes before the first fusion.load, or use another process"
    )
