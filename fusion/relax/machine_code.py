"""Compilation of a lowered module to machine code: TVM's pipeline around the scheduled kernels."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.runtime.vm import VirtualMachine

from costmodel.base.errors import OutputError
from fusion.model.named_arrays import to_tvm
from fusion.model.write_failure import write_failure
from fusion.relax.bindings import static_shape
from fusion.relax.kernel_calls import kernel_layers
from fusion.relax.kernel_objects import KernelObjects, separately_compiled
from fusion.relax.leftovers import LeftoverKernel, ScheduleLeftovers, leftover_kernels
from fusion.relax.memory_plan import MemoryPlan, activation_bytes, scratch_bytes, weight_bytes
from fusion.relax.vector_functions import LEGALIZATIONS
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.kernel_compilation import pass_context, tir_pipeline

_VIEWS = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")


@dataclass(frozen=True, eq=False)
class CompiledModule:
    """Machine code of a module."""

    executable: Any
    # Kernels that no template made, and their schedules.
    leftovers: tuple[LeftoverKernel, ...]
    # Memory of a run of ``main``; None if there is no such function.
    memory: MemoryPlan | None = None
    # Layer of each kernel call (:func:`kernel_layers`).
    layers: tuple[str, ...] = ()
    _machines: list[VirtualMachine] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def export_library(self, file_name: str | os.PathLike[str]) -> None:
        """Write a shared library that needs only TVM's runtime. ``OutputError`` if it cannot be written."""
        path = Path(file_name)
        try:
            self.executable.export_library(str(path))
        except (OSError, RuntimeError) as error:
            reason = write_failure(path, error)
            raise OutputError(
                f"{path}: the compiled model cannot be written: {reason}; choose another place, or free some"
            ) from error

    def machine(self) -> VirtualMachine:
        """Return the virtual machine on the CPU of this process, made once. It has one set of frames, so it runs one
        call at a time.
        """
        if not self._machines:
            self._machines.append(VirtualMachine(self.executable, tvm.cpu()))
        return self._machines[0]

    def __call__(self, *arrays: np.ndarray, function: str = "main") -> tuple[np.ndarray, ...]:
        """Run once; return the results in the order of the function. Calls of several threads are serialised.

        ``arrays``: NumPy arrays, or tensors of any library with DLPack.
        """
        arguments = [to_tvm(array) for array in arrays]
        with self._lock:
            result = self.machine()[function](*arguments)
            return tuple(value.numpy() for value in ([result] if hasattr(result, "numpy") else result))

    def bind(self, *arrays: np.ndarray, function: str = "main") -> Callable[[], Any]:
        """Return the cheapest call on fixed inputs, for timing; not thread-safe."""
        tensors = [to_tvm(array) for array in arrays]
        self.machine().save_function(function, f"bound_{function}", *tensors, include_return=False)
        return self.machine()[f"bound_{function}"]


def build(
    mod: tvm.IRModule, cpu: CpuTarget, objects: KernelObjects | None = None, emulated: bool = False
) -> CompiledModule:
    """Compile a module, lowered (:func:`fusion.relax.layout_lowering.lower`) or not, for ``cpu``.

    ``objects``: store that kernels are taken from, and added to if missing; without it all are compiled. ``emulated``:
    without ``objects``, with a slow emulation of the instructions that ``cpu`` may lack.
    """
    target = cpu.tvm_target()
    planned: list[int] = []

    def note(planned_module: tvm.IRModule) -> None:
        if any(variable.name_hint == "main" for variable in planned_module.get_global_vars()):
            planned.append(activation_bytes(planned_module))

    pipeline = memory_pipeline(note)
    if objects is not None:
        pipeline = tvm.transform.Sequential([pipeline, separately_compiled(objects)], name="fusion.linked_kernels")
    with target:
        scheduled = scheduling_pipeline(cpu)(mod)
        with pass_context():
            executable = tvm.compile(scheduled, target, relax_pipeline=pipeline, tir_pipeline=tir_pipeline(emulated))
    if not planned:
        return CompiledModule(executable, leftover_kernels(scheduled))
    memory = MemoryPlan(planned[0], weight_bytes(scheduled), scratch_bytes(scheduled, cpu))
    return CompiledModule(executable, leftover_kernels(scheduled), memory, kernel_layers(scheduled))


def scheduling_pipeline(cpu: CpuTarget) -> tvm.transform.Sequential:
    """Return the passes from Relax operators to scheduled kernels. Template kernels are opaque to them and stay
    unchanged.
    """
    return tvm.transform.Sequential(
        [
            relax.transform.CanonicalizeBindings(),
            relax.backend.DispatchSampling(),
            relax.backend.DispatchSortScan(),
            relax.transform.LegalizeOps(
                {**dict.fromkeys(_VIEWS, legalize_view), **LEGALIZATIONS, "relax.quantize": legalize_quantize}
            ),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            relax.transform.DeadCodeElimination(),
            ScheduleLeftovers(cpu),
        ],
        name="fusion.scheduling",
    )


def legalize_view(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Keep a reshape as a reshape: the virtual machine makes a view, where a kernel would copy."""
    shape = static_shape(call)
    if shape is None or static_shape(call.args[0]) is None:
        return call.op.get_attr("FLegalize")(builder, call)
    return call if call.op.name == "relax.reshape" else relax.op.reshape(call.args[0], shape)


def legalize_quantize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower quantisation with rounding to nearest, ties to even, as in ONNX; TVM's own rounds ties away from zero."""
    dtype, axis = str(call.ty.dtype), int(call.attrs.axis)
    if "int" not in dtype:
        return call.op.get_attr("FLegalize")(builder, call)
    least, most = (float(bound(dtype).value) for bound in (tirx.min_value, tirx.max_value))

    def quantise(data: te.Tensor, scale: te.Tensor, zero: te.Tensor) -> te.Tensor:
        def of(parameter: te.Tensor, at: Sequence[Any]) -> Any:
            alone = all(int(size) == 1 for size in parameter.shape)
            return parameter[(0,) * len(parameter.shape) if alone else (at[axis % len(at)],)].astype("float32")

        def element(*at: Any) -> Any:
            value = tirx.nearbyint(data[at].astype("float32") / of(scale, at)) + of(zero, at)
            return tirx.min(tirx.max(value, tirx.const(least, "float32")), tirx.const(most, "float32")).astype(dtype)

        return te.compute(data.shape, element, name="quantised")

    return builder.call_te(quantise, *call.args, primfunc_name_hint="quantize")


def memory_pipeline(planned: Callable[[tvm.IRModule], None] = lambda _: None) -> tvm.transform.Sequential:
    """Return the passes that plan memory: every intermediate is in storage that is reused within one run.

    ``planned`` is called with the module when all of its storage has been assigned.
    """

    @tvm.transform.module_pass(opt_level=0, name="fusion.planned_memory")
    def show(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        planned(mod)
        return mod

    return tvm.transform.Sequential(
        [
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
            relax.transform.StaticPlanBlockMemory(),
            relax.transform.LowerAllocTensor(),
            show,
            relax.transform.CanonicalizeBindings(),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ],
        name="fusion.memory",
    )
