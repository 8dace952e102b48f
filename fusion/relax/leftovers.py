"""Code of functions that no template covers: element-wise functions as vector expressions, and schedules, parallel
over space with vectors along the innermost dimension.

TVM's own code of an element-wise function calls a library for every value; here they are the functions of epilogues
(:func:`schedules.loops.emit.activate`), as expressions for vectors of a compiled loop nest. Clipping is covered as
well: TVM's own code replaces NaN by a bound.

If a schedule rule does not apply to a function, a simpler one is tried; the last resort is the unscheduled function,
so that no imported model fails to compile because of its schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, te, tirx
from tvm.s_tir.dlight.analysis import SBlockInfo, normalize_prim_func
from tvm.s_tir.dlight.analysis.common_analysis import collect_vars_used_in_prim_expr

from fusion.relax.bindings import static_shape
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.kernel_compilation import TEMPLATE_ATTRIBUTE
from schedules.loops import emit


def _exp(x: Any) -> Any:
    """Return exp of any argument: the square of its root, so that zero and infinity are reached."""
    root = emit.exp(x * tirx.const(0.5, "float32"), 1)
    return root * root


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "relax.exp": _exp,
    "relax.erf": lambda x: emit.erf(x, 1),
    "relax.sin": lambda x: emit.sine(x, 1),
    "relax.tanh": lambda x: emit.activate(x, "tanh", 1),
    "relax.sigmoid": lambda x: emit.activate(x, "sigmoid", 1),
    "relax.nn.silu": lambda x: emit.activate(x, "silu", 1),
    "relax.nn.gelu": lambda x: emit.activate(x, "gelu", 1),
    "relax.nn.gelu_tanh": lambda x: emit.activate(x, "gelu_tanh", 1),
}


def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower a call of one of the functions on float32 to TIR; other dtypes by TVM's own rule."""
    name, data = call.op.name, call.args[0]
    if str(call.ty.dtype) != "float32":
        return call.op.get_attr("FLegalize")(builder, call)
    function = _FUNCTIONS[name]

    def compute(tensor: te.Tensor) -> te.Tensor:
        return te.compute(tensor.shape, lambda *at: function(tensor[at]), name="values")

    return builder.call_te(compute, data, primfunc_name_hint=name.rpartition(".")[2])


_LIMITS: dict[str, Callable[[Any, Any], Any]] = {"relax.maximum": tirx.max, "relax.minimum": tirx.min}


def legalize_limits(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower a call that clips floats such that NaN stays NaN; other dtypes by TVM's own rule."""
    name, dtype, shape = call.op.name, str(call.ty.dtype), static_shape(call)
    if "float" not in dtype or shape is None:
        return call.op.get_attr("FLegalize")(builder, call)
    if name in _LIMITS:
        tensors, bounds = list(call.args), (-math.inf, math.inf)
    elif name == "relax.nn.relu":
        tensors, bounds = [call.args[0]], (0.0, math.inf)
    else:
        tensors, bounds = [call.args[0]], (float(call.args[1].value), float(call.args[2].value))
    low, high = (None if math.isinf(bound) else tirx.const(bound, dtype) for bound in bounds)

    def element(data: Sequence[te.Tensor], at: Sequence[Any]) -> Any:
        if name not in _LIMITS:
            return emit.within(data[0][at], low, high)
        left, right = (_broadcast(each, at) for each in data)
        # If the two do not compare, the second is taken. TVM simplifies ``left == left`` as if NaN did not exist.
        return tirx.Select(tirx.isnan(left), left, _LIMITS[name](left, right))

    def compute(*data: te.Tensor) -> te.Tensor:
        return te.compute(shape, lambda *at: element(data, at), name="values")

    return builder.call_te(compute, *tensors, primfunc_name_hint=name.rpartition(".")[2])


def _broadcast(tensor: te.Tensor, at: Sequence[Any]) -> Any:
    """Return the element of ``tensor`` at a position of the shape that it is broadcast to."""
    last = at[len(at) - len(tensor.shape) :]
    return tensor[tuple(0 if int(size) == 1 else index for size, index in zip(tensor.shape, last, strict=True))]


LEGALIZATIONS = {
    **dict.fromkeys(_FUNCTIONS, legalize),
    **dict.fromkeys(("relax.nn.relu", "relax.clip", *_LIMITS), legalize_limits),
}


SCHEDULE_ATTRIBUTE = "fusion.schedule"
# One thread computes fewer values than this faster than a parallel region starts.
_PARALLEL_VALUES = 8192
_SHORTEST_VECTOR = 4
# An inlined producer is computed once per read of its consumer: limit of the total number of its own reads.
_REPEATED_READS = 64


@dataclass(frozen=True)
class LeftoverKernel:
    """Kernel that no template made, and its schedule.

    The innermost loops of schedules without explicit vectors are left to LLVM, which vectorizes simple ones.
    """

    name: str
    # ``parallel-vectorized``, ``parallel``, ``vectorized`` (too small for threads) or ``serial``.
    schedule: str


def leftover_kernels(mod: tvm.IRModule) -> tuple[LeftoverKernel, ...]:
    """Return the kernels of a module that no template made, sorted by name."""
    found = [
        LeftoverKernel(variable.name_hint, str(function.attrs.get(SCHEDULE_ATTRIBUTE, "serial")))
        for variable, function in mod.functions.items()
        if isinstance(function, tirx.PrimFunc) and TEMPLATE_ATTRIBUTE not in (function.attrs or {})
    ]
    return tuple(sorted(found, key=lambda kernel: kernel.name))


@tvm.transform.module_pass(opt_level=0, name="ScheduleLeftovers")
class ScheduleLeftovers:
    """Module pass that schedules every S-TIR function that no template made."""

    def __init__(self, cpu: CpuTarget) -> None:
        self.cpu = cpu

    def transform_module(self, mod: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
        scheduled = tvm.IRModule(mod.functions, attrs=mod.attrs, global_infos=mod.global_infos)
        for variable, function in mod.functions.items():
            if isinstance(function, tirx.PrimFunc) and TEMPLATE_ATTRIBUTE not in (function.attrs or {}):
                scheduled.update_func(variable, schedule_leftover(function, self.cpu))
        return scheduled


def schedule_leftover(function: tirx.PrimFunc, cpu: CpuTarget) -> tirx.PrimFunc:
    """Return ``function`` scheduled by the best rule that applies and lowers; the attribute ``fusion.schedule`` names
    the schedule.
    """
    for rule in (_parallel_vectorized, _parallel_outermost):
        try:
            scheduled = rule(function, cpu)
            _check_lowers(scheduled, cpu)
        except (RuntimeError, ValueError, IndexError):  # TVM's errors for a rule that does not apply
            continue
        return scheduled.with_attr(SCHEDULE_ATTRIBUTE, _describe(scheduled))
    return function.with_attr(SCHEDULE_ATTRIBUTE, _describe(function))


def _describe(function: tirx.PrimFunc) -> str:
    kinds: set[int] = set()
    tvm_ffi.structural_walk(function.body, (tirx.For, lambda loop: kinds.add(int(loop.kind))), order="post")
    names = {"parallel": tirx.ForKind.PARALLEL, "vectorized": tirx.ForKind.VECTORIZED}
    return "-".join(name for name, kind in names.items() if int(kind) in kinds) or "serial"


def _check_lowers(function: tirx.PrimFunc, cpu: CpuTarget) -> None:
    """Raise TVM's error if it cannot lower ``function`` to loops."""
    named = function.with_attr("global_symbol", "leftover")
    mod = tirx.transform.BindTarget(cpu.tvm_target().with_host(cpu.tvm_target()))(tvm.IRModule({"leftover": named}))
    tirx.get_tir_pipeline("s_tir")[0](mod)


# --- rules ---------------------------------------------------------------------------------------


def _parallel_vectorized(function: tirx.PrimFunc, cpu: CpuTarget) -> tirx.PrimFunc:
    schedule = s_tir.Schedule(function)
    _inline_producers(schedule)
    blocks = normalize_prim_func(schedule)
    if not blocks:
        raise ValueError("not in normal form")
    for block in blocks:
        if set(block.dom_kind()) - {"S", "R"} or not all(isinstance(_extent(loop.dom), int) for loop in block.iters):
            raise ValueError("opaque or dynamic loops")
        if block.is_injective():
            _schedule_injective(schedule, block, cpu.lanes)
        else:
            _schedule_reduction(schedule, block, cpu.lanes)
    return schedule.mod["main"]


def _parallel_outermost(function: tirx.PrimFunc, cpu: CpuTarget) -> tirx.PrimFunc:
    """Parallelise the outermost spatial loop of every block; the rest is left to LLVM."""
    schedule = s_tir.Schedule(function)
    root = schedule.get_sblock("root")
    for block in schedule.get_child_blocks(root):
        loops = schedule.get_loops(block)
        if loops and schedule.get(block).iter_vars[0].iter_type == tirx.IterVar.DataPar:
            schedule.parallel(loops[0])
    return schedule.mod["main"]


def _inline_producers(schedule: s_tir.Schedule) -> None:
    """Inline cheap injective producers into their only consumer; not padding into a reduction, where its predicate
    would be innermost.
    """
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        consumers = schedule.get_consumers(block)
        if len(consumers) != 1 or _has_reduction(schedule, block):
            continue
        if _has_reduction(schedule, consumers[0]) and _is_conditional(schedule.get(block).body):
            continue
        times = len(_reads(schedule, consumers[0], schedule.get(block).writes[0].source))
        if times > 1 and times * len(_reads(schedule, block)) > _REPEATED_READS:
            continue
        # Not every injective block can be inlined (a reshape into an opaque block): such a block is scheduled
        # separately.
        try:
            schedule.compute_inline(block)
        except s_tir.schedule.ScheduleError:
            continue


def _schedule_injective(schedule: s_tir.Schedule, block: SBlockInfo, lanes: int) -> None:
    loops = [loop.loop_rv for loop in block.iters]
    values = math.prod(_extent(loop.dom) for loop in block.iters)
    if not loops:
        return
    inner = _extent(block.iters[-1].dom)
    if len(loops) > 1 and _vector(inner, lanes) < lanes and _reads_alike(schedule, block):
        loops, inner = [schedule.fuse(*loops)], values
    _parallel_and_vector(schedule, loops, inner, values, lanes)


def _parallel_and_vector(
    schedule: s_tir.Schedule, loops: list[Any], inner: int, values: int, lanes: int
) -> None:  # fmt: skip
    """Parallelise the outer loops and vectorise the innermost; a single loop is split for both."""
    vector = _vector(inner, lanes)
    if len(loops) == 1 and inner > vector > 1:
        outer, last = schedule.split(loops[0], [None, vector])
        loops, inner = [outer, last], vector
    if len(loops) > 1 and values >= _PARALLEL_VALUES:
        schedule.parallel(schedule.fuse(*loops[:-1]))
    if vector >= _SHORTEST_VECTOR:
        last = loops[-1] if inner == vector else schedule.split(loops[-1], [None, vector])[1]
        schedule.vectorize(last)


def _schedule_reduction(schedule: s_tir.Schedule, block: SBlockInfo, lanes: int) -> None:
    spatial = [loop for loop in block.iters if loop.kind == "S"]
    reduced = [loop for loop in block.iters if loop.kind == "R"]
    values = math.prod(_extent(loop.dom) for loop in block.iters)
    contiguous = _contiguous_variables(schedule, block)
    if spatial and spatial[-1].var in contiguous and _extent(spatial[-1].dom) >= _SHORTEST_VECTOR:
        _reduce_across(schedule, block, spatial, reduced, values, lanes)
    elif reduced[-1].var in contiguous and _vector(_extent(reduced[-1].dom), lanes) >= _SHORTEST_VECTOR:
        _reduce_along(schedule, block, spatial, reduced, values, lanes)
    else:
        schedule.reorder(*[loop.loop_rv for loop in (*spatial, *reduced)])
        _parallel(schedule, [loop.loop_rv for loop in spatial], values)


def _reduce_across(
    schedule: s_tir.Schedule, block: SBlockInfo, spatial: Sequence[Any], reduced: Sequence[Any], values: int, lanes: int
) -> None:
    """Vectorise over adjacent results, with the reduction outside; a row of results that is not a multiple of a vector
    length is left to LLVM.
    """
    outside, inner = [loop.loop_rv for loop in spatial[:-1]], spatial[-1].loop_rv
    vector = _vector(_extent(spatial[-1].dom), lanes)
    if vector >= _SHORTEST_VECTOR:
        outer, inner = schedule.split(inner, [None, vector])
        outside.append(outer)
    schedule.reorder(*outside, *(loop.loop_rv for loop in reduced), inner)
    _parallel(schedule, outside, values)
    if vector >= _SHORTEST_VECTOR:
        schedule.vectorize(inner)
    _decompose(schedule, block.block_rv, reduced[0].loop_rv)


def _reduce_along(
    schedule: s_tir.Schedule, block: SBlockInfo, spatial: Sequence[Any], reduced: Sequence[Any], values: int, lanes: int
) -> None:
    """Keep a vector of partial results along the reduction, then reduce its lanes."""
    schedule.reorder(*[loop.loop_rv for loop in (*spatial, *reduced)])
    _, lane = schedule.split(reduced[-1].loop_rv, [None, _vector(_extent(reduced[-1].dom), lanes)])
    dimensions = len(schedule.get(block.block_rv).writes[0].region)
    partial = schedule.rfactor(lane, factor_axis=dimensions)
    loops = schedule.get_loops(partial)
    _parallel(schedule, loops[: len(spatial)], values)
    schedule.vectorize(loops[-1])
    _decompose(schedule, partial, loops[len(spatial)])
    _parallel(schedule, schedule.get_loops(block.block_rv)[: len(spatial)], values // _extent(reduced[-1].dom) * lanes)


def _decompose(schedule: s_tir.Schedule, block: Any, loop: Any) -> None:
    """Separate the initialisation, in vectors if the block itself is vectorised."""
    innermost = schedule.get(schedule.get_loops(block)[-1]).kind
    init = schedule.get_loops(schedule.decompose_reduction(block, loop))[-1]
    if innermost == tirx.ForKind.VECTORIZED and schedule.get(init).kind == tirx.ForKind.SERIAL:
        schedule.vectorize(init)


# --- facts ---------------------------------------------------------------------------------------


def _parallel(schedule: s_tir.Schedule, loops: Sequence[Any], values: int) -> None:
    if loops and values >= _PARALLEL_VALUES:
        schedule.parallel(schedule.fuse(*loops) if len(loops) > 1 else loops[0])


def _extent(dom: Any) -> Any:
    return int(dom) if isinstance(dom, int | tirx.IntImm) else dom


def _vector(extent: int, lanes: int) -> int:
    """Return the longest vector of at most ``lanes`` values that divides ``extent``."""
    return math.gcd(extent, lanes)


def _has_reduction(schedule: s_tir.Schedule, block: Any) -> bool:
    return any(item.iter_type != tirx.IterVar.DataPar for item in schedule.get(block).iter_vars)


def _is_conditional(body: Any) -> bool:
    """True if a value depends on a condition, as padding does."""
    found = []

    def check(call: tvm.ir.Call) -> None:
        if getattr(call.op, "name", "").endswith("if_then_else"):
            found.append(call)

    tvm_ffi.structural_walk(body, (tvm.ir.Call, check), order="post")
    return bool(found)


def _reads(schedule: s_tir.Schedule, block: Any, buffer: tirx.Buffer | None = None) -> list[tvm.ir.TensorLoad]:
    """Return the reads in the body of ``block``; with ``buffer``, only reads of that buffer."""
    found: list[tvm.ir.TensorLoad] = []
    tvm_ffi.structural_walk(schedule.get(block).body, (tvm.ir.TensorLoad, found.append), order="post")
    return [read for read in found if buffer is None or read.source.same_as(buffer)]


def _contiguous_variables(schedule: s_tir.Schedule, block: SBlockInfo) -> set[Any]:
    """Return the variables in the last index of a read: they move through memory element by element."""
    regions = [region.region for region in schedule.get(block.block_rv).reads if len(region.region)]
    return {var for region in regions for var in collect_vars_used_in_prim_expr(region[-1].min)}


def _reads_alike(schedule: s_tir.Schedule, block: SBlockInfo) -> bool:
    """True if every tensor is read at the same element that is written, so that all loops may be fused."""
    statement = schedule.get(block.block_rv)
    written = [str(axis.min) for axis in statement.writes[0].region]
    shape = [str(size) for size in statement.writes[0].source.shape]
    for region in statement.reads:
        if [str(axis.min) for axis in region.region] not in (written, []):
            return False
        if [str(size) for size in region.source.shape] not in (shape, []):
            return False
    return True
