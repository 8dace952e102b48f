"""A captured step cut into parts that can be put together anew: what comes before the layers, a layer, what follows.

Three layers are captured however many the model has: the first, one from the middle, the last. Each runs twice, because
a gradient that is added to another one costs a kernel that the first of a step does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from costmodel.operators.any_operator import AnyOperator
from e2e.lowering.families.work import size_bytes
from e2e.parallelism.layers.part_memory import PartKey, PartMemory, memory_of_parts
from e2e.step.collective_names import EARLY, INSIDE_LAYERS
from e2e.step.execution_graph import CallInfo, Duration, HostWork, Kernel, Launch, RankGraph, Synchronize, TaskKind
from e2e.step.memory import ACCUMULATE_GRAD, EXPERT_DIMENSIONS
from e2e.step.operator_trace import OperatorCall, OperatorTrace, tensors

CAPTURED_LAYERS = 3
FIRST, LAST = "first", "last"
# A part's name: what precedes the layers, the place of a captured layer, what follows the layers.
Name = str | int
# (place of a captured layer, module inside it, operator) -> whether selective recomputation runs it again.
Repeats = Callable[[int, str, str], bool]
# Pass, whether backward, part.
Key = tuple[int, bool, Name]


def nothing_again(place: int, module: str, operator: str) -> bool:
    """The :data:`Repeats` of layers that keep all."""
    return False


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel to launch, or several as one: a task without its place. Durations of the kernel and of its launch, where
    known.
    """

    name: str
    kind: TaskKind
    operators: tuple[AnyOperator, ...]
    call: int | None
    duration: Duration | None = None
    launch: Duration | None = None
    kernels: tuple[Kernel, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerCollective:
    """A collective inside a layer that the compute stream waits for. ``size_bytes``: what one rank puts in; ``group``:
    as in :data:`e2e.step.collective_names.INSIDE_LAYERS`; ``early``: only what follows the next kernel waits;
    ``pieces``: it is one of so many of this size that start as one.
    """

    kind: str
    size_bytes: int
    call: int
    group: str = "tp"
    early: bool = False
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Ready:
    """The gradient of one parameter is there. ``experts``: it is of the weights of all experts of a layer."""

    size_bytes: int
    experts: bool = False


@dataclass(frozen=True, slots=True)
class Called:
    """The host calls so many operators in what follows, those inside others too."""

    operators: int


Item = HostWork | Synchronize | Work | LayerCollective | Ready | Called


@dataclass(frozen=True)
class Part:
    """One direction of a piece of the model."""

    items: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Pieces:
    """``forward[name]``, ``backward[name]`` and ``accumulate[name]`` (gradients are added to those of earlier passes).

    ``core``: of each layer's forward part, what selective recomputation runs again. ``chosen``: what recomputation by
    operators runs again (attention and every second product are kept); ``needed``: what recomputation of whole layers
    runs, up to the last operator whose result the backward pass needs. ``leading``: layers that are like the first; all
    others are like the second. ``weights``, ``added_weights``: gradients of weights, where they are apart from
    ``backward`` and ``accumulate`` (:mod:`e2e.parallelism.layers.weight_gradients`). ``memory``: what the passes of
    each part allocate and free.
    """

    forward: Mapping[Name, Part]
    backward: Mapping[Name, Part]
    accumulate: Mapping[Name, Part]
    core: Mapping[Name, Part]
    calls: Mapping[int, CallInfo]
    leading: int = 1
    chosen: Mapping[Name, Part] = field(default_factory=dict)
    needed: Mapping[Name, Part] = field(default_factory=dict)
    weights: Mapping[Name, Part] = field(default_factory=dict)
    added_weights: Mapping[Name, Part] = field(default_factory=dict)
    memory: Mapping[Name, PartMemory] = field(default_factory=dict)

    def again(self, recompute: str) -> Mapping[Name, Part]:
        """What of each layer's forward pass ``recompute=`` runs again before its backward pass."""
        known = {"none": {}, "selective": self.core, "operators": self.chosen, "full": self.needed or self.forward}
        return known[recompute]

    def with_items(self, rewrite: Callable[[tuple[Item, ...]], tuple[Item, ...]]) -> Pieces:
        """All parts with ``rewrite`` of their items; what they allocate stays the same."""

        def parts(given: Mapping[Name, Part]) -> dict[Name, Part]:
            return {name: replace(part, items=rewrite(part.items)) for name, part in given.items()}

        return replace(
            self,
            forward=parts(self.forward),
            backward=parts(self.backward),
            accumulate=parts(self.accumulate),
            core=parts(self.core),
            chosen=parts(self.chosen),
            needed=parts(self.needed),
            weights=parts(self.weights),
            added_weights=parts(self.added_weights),
        )

    def captured(self, name: Name, layers: int) -> Name:
        """The captured part that stands for part ``name`` of a model of ``layers`` layers."""
        if not isinstance(name, int):
            return name
        if name < self.leading:
            return 0
        return CAPTURED_LAYERS - 1 if name == layers - 1 else 1


@dataclass(frozen=True)
class _Unit:
    """``inner``: the call and all below it."""

    call: OperatorCall
    items: tuple[Item, ...]
    inner: tuple[OperatorCall, ...] = ()


def parts_of(trace: OperatorTrace, layers_path: str) -> dict[int, Key]:
    """Call -> the pass, direction and part of the model that it belongs to; see :func:`cut`."""
    inner = _inner_calls(trace)
    outermost = [_Unit(call, ()) for call in trace.calls if call.parent is None]
    keys = _assigned(outermost, _layer_pattern(layers_path))
    return {call.id: key for key, unit in keys for call in inner[unit.call.id]}


def cut(
    trace: OperatorTrace,
    graph: RankGraph,
    layers_path: str,
    repeats: Repeats = nothing_again,
    never_made: Collection[int] | None = None,
) -> Pieces:
    """The parts of ``trace``, which holds two passes over :data:`CAPTURED_LAYERS` layers; ``graph``: it lowered.

    ``layers_path``: module path of the list of layers. ``repeats``: what selective recomputation runs again,
    communication left out. ``never_made``: of compiled code, storages of the trace
    that it does not need. Recomputation by operators keeps in eager code the result of every operator that it names; in
    compiled code only of those behind which something is computed again, for the partitioner of AOTAutograd saves what
    the backward pass needs (``min_cut_rematerialization_partition``).
    """
    groups: dict[Key, list[_Unit]] = {}
    for key, unit in _assigned(list(_units(trace, graph)), _layer_pattern(layers_path)):
        groups.setdefault(key, []).append(unit)
    forward = {name: _part(units) for (run, back, name), units in groups.items() if run == 0 and not back}
    backward = {name: _part(units) for (run, back, name), units in groups.items() if run == 0 and back}
    accumulate = {name: _part(units) for (run, back, name), units in groups.items() if run == 1 and back}
    for each in (backward, accumulate):
        each.update({name: Part() for name in forward if name not in each})  # of frozen weights there may be none
    core: dict[Name, Part] = {}
    chosen: dict[Name, Part] = {}
    needed: dict[Name, Part] = {}
    repeated: set[int] = set()
    saved: set[int] = set()
    for (run, back, name), units in groups.items():
        if run == 0 and not back and isinstance(name, int):
            rest = _until_needed(units, groups.get((0, True, name), []))
            needed[name] = _part(rest)
            kept = _kept_operators(units)
            chosen[name] = _part([unit for unit in rest if unit.call.id not in kept])
            named = units if never_made is None else rest
            saved.update(call.id for unit in named if unit.call.id in kept for call in unit.inner)
            own = f"{layers_path}.{name}."
            inside = [
                unit
                for unit in units
                if unit.call.module.startswith(own)
                and repeats(name, unit.call.module.removeprefix(own), unit.call.name)
                and not _meets(unit)
            ]
            repeated.update(call.id for unit in inside for call in unit.inner)
            core[name] = _part(inside)
    places: dict[int, PartKey] = dict(parts_of(trace, layers_path))
    memory = memory_of_parts(trace, places, repeated, saved, never_made or ())
    return Pieces(forward, backward, accumulate, core, graph.calls, 1, chosen, needed, memory=memory)


def _layer_pattern(layers_path: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(layers_path)}\.(\d+)(?:\.|$)")


def _assigned(units: list[_Unit], pattern: re.Pattern[str]) -> Iterator[tuple[Key, _Unit]]:
    """Each unit with its pass, direction and part; what names no layer belongs to the part before it but at ends."""
    run, back, name = 0, False, FIRST  # type: tuple[int, bool, Name]
    for unit in units:
        call = unit.call
        if call.phase == "optimizer":
            return
        if (call.phase == "backward") != back:
            run, back = (run, True) if not back else (run + 1, False)
            name = LAST if back else FIRST
        matched = pattern.match(call.module)
        if matched:
            name = int(matched[1])
        elif call.module or not back:
            name = _outside(name, back)
        yield (run, back, name), unit


def _outside(name: Name, back: bool) -> Name:
    end, part = (0, FIRST) if back else (CAPTURED_LAYERS - 1, LAST)
    return part if name == end else name


def _units(trace: OperatorTrace, graph: RankGraph) -> Iterator[_Unit]:
    """The outermost operators in the order of the script, each with its actions."""
    calls = {call.id: call for call in trace.calls}
    found: dict[int, list[Item]] = {}
    for actions in graph.threads.values():
        current: list[Item] = []
        for action in actions:
            if isinstance(action, HostWork) and action.kind == "T1" and action.call is not None:
                current = found.setdefault(action.call, [])
            if isinstance(action, Launch):
                task = graph.tasks[action.task]
                call = calls[task.call] if task.call is not None else None
                inside = INSIDE_LAYERS.get(call.name) if call is not None else None
                if call is not None and inside is not None:
                    early = call.name in EARLY
                    current.append(LayerCollective(inside[0], _put_in(call, inside[0]), call.id, inside[1], early))
                else:
                    current.append(Work(task.name, task.kind, task.operators, task.call))
            elif isinstance(action, HostWork | Synchronize):
                current.append(action)
    gradients = _gradients(trace)
    inner = _inner_calls(trace)
    for place in gradients:
        found.setdefault(place, [])  # of compiled code nothing else may be left of these
    for place in sorted(found):
        yield _Unit(calls[place], (*found[place], *gradients.get(place, ())), tuple(inner.get(place, [calls[place]])))


def _inner_calls(trace: OperatorTrace) -> dict[int, list[OperatorCall]]:
    """Outermost call -> itself and all calls below it."""
    inner: dict[int, list[OperatorCall]] = {}
    outermost: dict[int, int] = {}
    for call in trace.calls:
        top = outermost[call.id] = call.id if call.parent is None else outermost[call.parent]
        inner.setdefault(top, []).append(call)
    return inner


# Among them those in 8 bits: torchao's tensors go through ``aten.mm``, where the policy of the checkpoint sees them.
PRODUCTS = ("aten::linear", "aten::mm", "aten::addmm", "aten::matmul", "float8::mm")
ATTENTIONS = (
    "attention::fused",
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention",
)


def _kept_operators(units: Iterable[_Unit]) -> set[int]:
    """Outermost calls whose results are kept: attention, and products but for every second (the save list of
    torchtitan's ``apply_ac``, which counts ``mm``)."""
    kept: set[int] = set()
    products = 0
    for unit in units:
        if unit.call.name in PRODUCTS:
            products += 1
            if products % 2:
                kept.add(unit.call.id)
        elif unit.call.name in ATTENTIONS:
            kept.add(unit.call.id)
    return kept


def _until_needed(units: Sequence[_Unit], backward: Iterable[_Unit]) -> list[_Unit]:
    """``units`` up to the last whose result ``backward`` reads: there PyTorch's checkpoint stops a recomputed layer."""
    read = {tensor.storage for unit in backward for call in unit.inner for tensor in tensors(call.inputs)}
    last = 0
    for place, unit in enumerate(units):
        given = {tensor.storage for tensor in tensors(unit.call.inputs)}  # views of these are made, and read, too
        made = {tensor.storage for call in unit.inner for tensor in tensors(call.outputs)}
        if (made - given) & read:
            last = place
    return list(units[: last + 1])


def _meets(unit: _Unit) -> bool:
    """Whether ``unit`` is communication, which hooks put in front of attention and behind its last product."""
    return any(isinstance(item, LayerCollective) for item in unit.items)


def _put_in(call: OperatorCall, kind: str) -> int:
    """Bytes that a rank puts in; of an exchange what it takes out, where that is more."""
    given = sum(size_bytes(tensor) for tensor in tensors(call.inputs))
    return max(given, sum(size_bytes(tensor) for tensor in tensors(call.outputs))) if kind == "all_to_all" else given


def _gradients(trace: OperatorTrace) -> dict[int, tuple[Ready, ...]]:
    """Outermost call -> the gradient that it completes."""
    parents = {call.id: call.parent for call in trace.calls}
    accumulating = {call.id for call in trace.calls if call.name == ACCUMULATE_GRAD}
    found: dict[int, tuple[Ready, ...]] = {}
    for call in trace.calls:
        if call.parent in accumulating:
            top = call.parent
            while parents[top] is not None:
                top = parents[top]  # type: ignore[assignment]
            given = next(tensors(call.inputs), None)
            if given is not None and top not in found:
                found[top] = (Ready(size_bytes(given), len(given.shape) == EXPERT_DIMENSIONS),)
    return found


def _part(units: Iterable[_Unit]) -> Part:
    found = list(units)
    called = sum(len(unit.inner) or 1 for unit in found)
    items = tuple(item for unit in found for item in unit.items)
    return Part((Called(called), *items) if called else items)
