"""Compilation of a lowered module to machine code: TVM's pipeline around the scheduled kernels, object files of
single kernels, the memory plan of a run, and the layers of the kernels.

Nearly all of the time of a build is spent on the kernels, and TVM compiles them one after the other. Most kernels of
the next build are those of the previous one: it differs by a fusion, a few configurations, or one more output. So
every kernel becomes a separate object file, made by a pool of threads (TVM and LLVM do not hold Python's lock while
they compile), and is linked into every library that needs it.

The compiled library identifies its kernels by their symbols only, and equal layers share one. The variables that the
calls are bound to have the names of ONNX nodes, so they are recorded before memory planning drops them.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.runtime.vm import VirtualMachine

from costmodel.base.errors import OutputError
from costmodel.base.process import Terminated, usable_cores
from fusion.model.conv_graph import result_name
from fusion.model.library_messages import write_failure
from fusion.model.named_arrays import to_tvm
from fusion.relax.bindings import static_shape
from fusion.relax.leftovers import LEGALIZATIONS, LeftoverKernel, ScheduleLeftovers, leftover_kernels
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.kernel_compilation import pass_context, tir_pipeline

# Calls that remain at this point of the pipeline; each runs one function of the library.
_CALLS = frozenset({"relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed"})


def kernel_layers(mod: tvm.IRModule, function: str = "main") -> tuple[str, ...]:
    """Return the name of the variable that each kernel call of ``function`` defines, in program order; the name of the
    result (:func:`fusion.model.conv_graph.result_name`) if the variable, or a view of it, is one.

    Empty if the function is not a plain sequence of calls: then the data decide which kernels run.
    """
    body = mod[function].body
    bindings = [binding for block in body.blocks for binding in block.bindings]
    if any(isinstance(binding.value, relax.If) for binding in bindings):
        return ()
    sources = {binding.var: _source(binding.value) for binding in bindings}
    values = {binding.var: binding.value for binding in bindings}
    results = _results(body.body, values)
    outputs: dict[relax.Var, str] = {}
    for index, result in enumerate(results):
        while sources.get(result) is not None:
            result = sources[result]
        outputs.setdefault(result, result_name(index))
    return tuple(
        outputs.get(binding.var, binding.var.name) for binding in bindings if _operator(binding.value) in _CALLS
    )


def _results(body: relax.Expr, values: dict[relax.Var, relax.Expr]) -> list[relax.Var]:
    """Return the variables that a function returns."""
    while isinstance(body, relax.Var) and isinstance(values.get(body), (relax.Var, relax.Tuple)):
        body = values[body]
    fields = body.fields if isinstance(body, relax.Tuple) else [body]
    return [field for field in fields if isinstance(field, relax.Var)]


def _source(value: relax.Expr) -> relax.Var | None:
    """Return the variable of which ``value`` is an alias or a view, else None."""
    if _operator(value) == "relax.reshape":
        value = value.args[0]
    return value if isinstance(value, relax.Var) else None


def _operator(value: relax.Expr) -> str | None:
    return getattr(value.op, "name", None) if isinstance(value, relax.Call) else None


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one network in bytes."""

    # Storage of intermediates and outputs, which a run holds until it ends: the peak, without inputs.
    activation_bytes: int
    # Constants, each counted once.
    weight_bytes: int
    # Tile buffers inside kernels, of all threads of the kernel with the largest.
    scratch_bytes: int


def activation_bytes(mod: tvm.IRModule, function: str = "main") -> int:
    """Return the bytes of all storage that ``function`` allocates, after ``StaticPlanBlockMemory`` and
    ``LowerAllocTensor``.

    The virtual machine keeps each allocation until the function returns; tensors that are never needed at the same time
    share one.
    """
    total = 0
    for block in mod[function].body.blocks:
        for binding in block.bindings:
            call = binding.value
            if isinstance(call, relax.Call) and getattr(call.op, "name", "") == "relax.memory.alloc_storage":
                sizes = list(call.args[0].values)
                if all(isinstance(size, tirx.IntImm) for size in sizes):  # else the size depends on the data
                    total += math.prod(int(size) for size in sizes)
    return total


def weight_bytes(mod: tvm.IRModule, function: str = "main") -> int:
    """Return the bytes of the constants of ``function``."""
    seen: dict[Any, int] = {}

    def visit(expression: relax.Expr) -> None:
        if isinstance(expression, tvm.ir.GenericConst) and hasattr(expression.value, "shape"):
            tensor = expression.value
            seen[tensor] = math.prod(tensor.shape) * _itemsize(str(tensor.dtype))

    relax.analysis.post_order_visit(mod[function], visit)
    return sum(seen.values())


def scratch_bytes(mod: tvm.IRModule, cpu: CpuTarget) -> int:
    """Return the bytes of the tile buffers of the kernel with the most, one set per thread; registers are
    not counted.
    """
    most = 0
    for function in mod.functions.values():
        if isinstance(function, tirx.PrimFunc):
            most = max(most, _buffers(function))
    return cpu.threads * most


def _buffers(function: tirx.PrimFunc) -> int:
    total = 0
    left: list[Any] = [function.body]
    while left:
        statement = left.pop()
        if isinstance(statement, tirx.AllocBuffer) and statement.buffer.scope() != "local":
            extents = statement.buffer.shape
            if all(isinstance(extent, tirx.IntImm) for extent in extents):
                total += math.prod(int(extent) for extent in extents) * _itemsize(str(statement.buffer.dtype))
        left.extend(getattr(statement, "seq", ()))
        inner = (getattr(statement, name, None) for name in ("body", "then_case", "else_case", "block"))
        left.extend(each for each in inner if each is not None)
    return total


def _itemsize(dtype: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:  # bfloat16 and other types that NumPy lacks
        return -(-int(tvm.DataType(dtype).bits) // 8)


# TVM joins the names of all operators fused into a kernel, and a file name may have at most 255 bytes.
_LONGEST_NAME = 96


@dataclass(frozen=True, eq=False)
class KernelObject:
    """``function`` compiled into the object file ``path`` under the name ``symbol``."""

    function: tirx.PrimFunc
    symbol: str
    path: Path


class KernelObjects:
    """Store of object files for one CPU in ``directory``, which is kept afterwards. Thread-safe."""

    def __init__(self, directory: Path, cpu: CpuTarget, threads: int | None = None) -> None:
        """Store objects in ``directory``; ``threads``: kernels compiled in parallel (default: the cores of this
        process).
        """
        self._directory = directory
        self._target = cpu.tvm_target()
        self._threads = threads or usable_cores()
        self._known: dict[int, list[tuple[tirx.PrimFunc, Future[KernelObject]]]] = {}
        self._lock = Lock()
        self._seconds = 0.0
        self._stopped = False

    @property
    def seconds(self) -> float:
        """Wall time in :meth:`compile` so far."""
        return self._seconds

    def stop(self) -> None:
        """Cancel the kernels that are not started yet, as the job ends; their futures raise ``CancelledError``."""
        self._stopped = True

    def compile(self, functions: Mapping[str, tirx.PrimFunc]) -> dict[str, KernelObject]:
        """Return the objects of ``functions`` by the same names. Raises TVM's error if it cannot compile one,
        ``OutputError`` if the disk is full.
        """
        started = time.monotonic()
        with ThreadPoolExecutor(self._threads) as pool:
            asked = {name: self._asked(name, function, pool) for name, function in functions.items()}
            try:
                made = {name: future.result() for name, future in asked.items()}
            except (KeyboardInterrupt, Terminated):
                self.stop()
                raise
        self._seconds += time.monotonic() - started
        return made

    def _asked(self, name: str, function: tirx.PrimFunc, pool: ThreadPoolExecutor) -> Future[KernelObject]:
        anonymous = function.without_attr("global_symbol")
        digest = tvm_ffi.structural_hash(anonymous)
        with self._lock:
            alike = self._known.setdefault(digest, [])
            for known, future in alike:
                if tvm_ffi.structural_equal(known, anonymous):
                    return future
            # The name helps when profiling the library; the digest and the number make it unique.
            symbol = f"{name[:_LONGEST_NAME]}_{digest & 0xFFFFFFFFFFFFFFFF:016x}_{len(alike)}"
            future = pool.submit(self._compile, anonymous, symbol)
            alike.append((anonymous, future))
        return future

    def _compile(self, function: tirx.PrimFunc, symbol: str) -> KernelObject:
        if self._stopped:
            raise CancelledError
        module = tvm.IRModule({symbol: function.with_attr("global_symbol", symbol)})
        with pass_context():  # contexts are thread-local
            compiled = tvm.tirx.build(module, target=self._target, pipeline=tir_pipeline())
        path = self._directory / f"{symbol}.o"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_object_code(compiled))
        except OSError as error:
            raise OutputError(
                f"{path}: a compiled kernel cannot be written: {error.strerror}; choose another place, or free some"
            ) from error
        return KernelObject(function, symbol, path)


def _object_code(compiled: Any) -> bytes:
    """Return the object file of a module, written to memory: LLVM ends the whole process if a disk is full."""
    with open(os.memfd_create("object"), "rb") as memory:
        compiled.write_to_file(f"/proc/self/fd/{memory.fileno()}", "o")
        return memory.read()


def separately_compiled(objects: KernelObjects) -> tvm.transform.Pass:
    """Return the last Relax pass: it replaces every kernel by the symbol of an object file, which is linked."""

    @tvm.transform.module_pass(opt_level=0, name="fusion.kernel_objects")
    def replace(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        functions: dict[Any, Any] = dict(mod.functions.items())
        kernels = {
            variable.name_hint: function
            for variable, function in functions.items()
            if isinstance(function, tirx.PrimFunc)
        }
        made = objects.compile(kernels)
        for variable in functions:
            if variable.name_hint in made:
                functions[variable] = relax.ExternFunc(made[variable.name_hint].symbol)
        linked = {each.symbol: each for each in made.values()}
        libraries = [tvm.runtime.load_static_library(str(each.path), [symbol]) for symbol, each in linked.items()]
        replaced = tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
        return replaced.with_attr("external_mods", libraries)

    return replace


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


def build_executable(
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
