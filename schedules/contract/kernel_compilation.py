"""Compilation of template kernels to machine code."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

from schedules.contract.cpu_target import LIBRARY_REQUEST, CpuTarget, tiles_refused
from schedules.contract.tile_operations import TILE_ATTRIBUTE, tile_definitions
from schedules.contract.vector_operations import definitions

if TYPE_CHECKING:
    import tvm
    from tvm import tirx

# Attribute of functions made by a template, with its family. They are completely scheduled.
TEMPLATE_ATTRIBUTE = "fusion.template"
# Attribute of functions that call operations of :mod:`schedules.contract.vector_operations`, which are linked into
# their module: dtypes separated by commas, and ``tiles`` for :mod:`schedules.contract.tile_operations`.
VECTOR_ATTRIBUTE = "fusion.vector_operations"
_PIPELINE = "fusion.kernels"


def pass_context() -> AbstractContextManager[Any]:
    """TVM settings for compiling template kernels.

    ``StorageRewrite`` would drop the annotation that keeps registers out of the workspace pool
    (:func:`schedules.loops.emit.registers`). It would only merge the two or three tile buffers of a kernel, which are
    in use at the same time anyway.
    """
    import tvm

    return tvm.transform.PassContext(opt_level=3, config={"tirx.disable_storage_rewrite": True})


def compile_kernel(function: tirx.PrimFunc, cpu: CpuTarget, emulated: bool = False) -> Any:
    """Compile ``function`` into a callable on TVM tensors. ``emulated``: see :func:`compile_function`."""
    return compile_function(function, cpu, emulated)["main"]


def compile_function(function: tirx.PrimFunc, cpu: CpuTarget, emulated: bool = False) -> Any:
    """Compile the template kernel ``function`` into a module, with the name ``main``.

    ``emulated``: emulate instructions that ``cpu`` may lack (slow), to check kernels for other CPUs.
    """
    import tvm

    named = function.with_attr({"global_symbol": "main", TEMPLATE_ATTRIBUTE: "kernel"})
    with pass_context():
        return tvm.compile(tvm.IRModule({"main": named}), target=cpu.tvm_target(), tir_pipeline=tir_pipeline(emulated))


@cache
def tir_pipeline(emulated: bool = False) -> str:
    """Name of the registered TVM pipeline for modules of template kernels and other functions.

    ``emulated``: see :func:`compile_function`. Other functions use TVM's own pipeline, template kernels only the
    required passes: ``CompactBufferAllocation``, a third of the compilation time, would only remove padding that
    spreads a buffer over cache sets, and ``HoistIfThenElse`` and ``RemoveNoOp`` have no effect on them.
    """
    import tvm

    name = f"{_PIPELINE}.emulated" if emulated else _PIPELINE

    def pipeline() -> tuple[Any, Any, Any]:
        lower, finish_host, finish_device = tvm.tirx.get_tir_pipeline("default")

        @tvm.transform.module_pass(opt_level=0, name=name)
        def run(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
            kernels = {var: f for var, f in mod.functions.items() if TEMPLATE_ATTRIBUTE in (f.attrs or {})}
            others = {var: f for var, f in mod.functions.items() if var not in kernels}
            lowered = dict(_kernel_passes()(tvm.IRModule(kernels, attrs=mod.attrs)).functions) if kernels else {}
            lowered = {var: _with_vector_operations(f, emulated) for var, f in lowered.items()}
            if others:
                lowered.update(lower(tvm.IRModule(others, attrs=mod.attrs)).functions)
            return tvm.IRModule(lowered, attrs=mod.attrs)

        return run, finish_host, finish_device

    tvm.tirx.register_tir_pipeline(name, pipeline)
    return name


def _with_vector_operations(function: Any, emulated: bool) -> Any:
    """``function`` with the definitions of the vector operations it calls, if any."""
    from tvm import ir, tirx

    if VECTOR_ATTRIBUTE not in (function.attrs or {}):
        return function
    dtypes = str(function.attrs[VECTOR_ATTRIBUTE]).split(",")
    source = definitions(dtypes, emulated)
    if TILE_ATTRIBUTE in dtypes:
        source += tile_definitions(emulated)
        if not emulated:
            tiles_refused()  # request permission for kernels that run in this process, outside a library
            source += LIBRARY_REQUEST
    text = ir.StringImm(source)
    return function.with_body(tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, function.body))


def _kernel_passes() -> tvm.transform.Sequential:
    """TVM's ``s_tir`` pipeline for a CPU without passes that have no effect on final loops and buffers.

    ``BF16ComputeLegalize`` is left out too: kernels do no arithmetic in 16-bit types, and it would convert task buffers
    of such types to FP32.
    """
    import tvm
    from tvm import s_tir, tirx

    return tvm.transform.Sequential(
        [
            s_tir.transform.CanonicalizeLoop(),
            s_tir.transform.ConvertBlocksToOpaque(),
            s_tir.transform.StmtSimplify(),
            s_tir.transform.LowerOpaqueBlock(),
            tirx.transform.FlattenBuffer(),
            tirx.transform.NarrowDataType(32),
            s_tir.transform.LoopPartition(),
            tirx.transform.VectorizeLoop(True),
            tirx.transform.UnrollLoop(),
            s_tir.transform.RenormalizeSplitPattern(),
            tirx.transform.StmtSimplify(),
            s_tir.transform.RewriteUnsafeSelect(),
            tirx.transform.CommonSubexprElim(),
            tirx.transform.VerifyMemory(),
            tirx.transform.AnnotateEntryFunc(),
            tirx.transform.SplitHostDevice(),
            tirx.transform.MakePackedAPI(),
            tirx.transform.BF16StorageLegalize(),
        ],
        name="fusion.kernel_passes",
    )
