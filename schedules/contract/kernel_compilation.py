"""Machine code of template kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from schedules.contract.cpu_target import CpuTarget

if TYPE_CHECKING:
    from tvm import tirx


def pass_context() -> AbstractContextManager[Any]:
    """TVM's settings under which template kernels are compiled.

    ``StorageRewrite`` drops the annotation that keeps registers out of the workspace pool
    (:func:`schedules.loops.emit.registers`). What it would merge are a kernel's two or three tile buffers, which
    are in use at the same time anyway.
    """
    import tvm

    return tvm.transform.PassContext(opt_level=3, config={"tirx.disable_storage_rewrite": True})


def compile_kernel(function: tirx.PrimFunc, cpu: CpuTarget) -> Any:
    """``function`` as something that is called with TVM tensors."""
    import tvm

    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    with pass_context():
        return tvm.compile(module, target=cpu.tvm_target())["main"]
