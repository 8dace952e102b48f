"""Parts of a captured step that can be recombined: the part before the layers, a layer, the part after the layers.

Three layers are captured, however many the model has: the first, a middle one, the last. Each runs twice, since adding
a gradient to an earlier one costs a kernel that the first gradient of a step does not need.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from costmodel.operators.any_operator import AnyOperator
from e2e.lowering.families.work import size_bytes
from e2e.parallelism.part_memory import PartKey, PartMemory, memory_of_parts
from e2e.step.collective_names import EARLY, INSIDE_LAYERS
from e2e.step.execution_graph import CallInfo, Duration, HostWork, Kernel, Launch, RankGraph, Synchronize, TaskKind
from e2e.step.memory import ACCUMULATE_GRAD, EXPERT_DIMENSIONS
from e2e.step.operator_trace import OperatorCall, OperatorTrace, tensors

CAPTURED_LAYERS = 3
FIRST, LAST = "first", "last"
# Name of a part: before the layers, the index of a captured layer, after the layers.
Name = str | int
# (index of a captured layer, module inside it, operator) -> True if selective recomputation runs it again.
Repeats = Callable[[int, str, str], bool]
# Pass, True for backward, part.
Key = tuple[int, bool, Name]


def nothing_again(place: int, module: str, operator: str) -> bool:
    """Return False: the :data:`Repeats` of layers without recomputation."""
    return False


@dataclass(frozen=True, slots=True)
class Work:
    """Kernel to launch, or several as one: a task without its index. Durations of the kernel and its launch, if
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
    """Collective inside a layer that the compute stream waits for."""

    kind: str
    # Input of one rank.
    size_bytes: int
    call: int
    # As in :data:`e2e.step.collective_names.INSIDE_LAYERS`.
    group: str = "tp"
    # True if the next kernel does not wait for it, only later work.
    early: bool = False
    # Number of transfers of this size that are started as one.
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Ready:
    """The gradient of one parameter is complete. ``experts``: it is that of the weights of all experts of a layer."""

    size_bytes: int
    experts: bool = False


@dataclass(frozen=True, slots=True)
class Called:
    """Number of operators called by the host in the following items, including nested ones."""

    operators: int


Item = HostWork | Synchronize | Work | LayerCollective | Ready | Called


@dataclass(frozen=True)
class Part:
    """One direction of a part of the model."""

    items: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Pieces:
    """Parts of a model by name."""

    forward: Mapping[Name, Part]
    backward: Mapping[Name, Part]
    # Backward parts with gradients added to those of earlier passes.
    accumulate: Mapping[Name, Part]
    # Forward operators of each layer that selective recomputation runs again.
    core: Mapping[Name, Part]
    calls: Mapping[int, CallInfo]
    # Number of layers like the first; all others are like the second.
    leading: int = 1
    # Forward operators that recomputation by operators runs again (attention and every second product are kept).
    chosen: Mapping[Name, Part] = field(default_factory=dict)
    # Forward operators that recomputation of whole layers runs, up to the last one whose output the backward pass
    # needs.
    needed: Mapping[Name, Part] = field(default_factory=dict)
    # Allocations and frees of the passes of each part.
    memory: Mapping[Name, PartMemory] = field(default_factory=dict)

    def again(self, recompute: str) -> Mapping[Name, Part]:
        """Return the forward operators of each layer that ``recompute=`` runs again before its backward pass."""
        known = {"none": {}, "selective": self.core, "operators": self.chosen, "full": self.needed or self.forward}
        return known[recompute]

    def with_items(self, rewrite: Callable[[tuple[Item, ...]], tuple[Item, ...]]) -> Pieces:
        """Return all parts with their items rewritten by ``rewrite``; allocations stay the same."""

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
        )

    def captured(self, name: Name, layers: int) -> Name:
        """Return the captured part that represents part ``name`` of a model of ``layers`` layers."""
        if not isinstance(name, int):
            return name
        if name < self.leading:
            return 0
        return CAPTURED_LAYERS - 1 if name == layers - 1 else 1


@dataclass(frozen=True)
class _Unit:
    """Outermost call; ``inner``: the call and all its nested calls."""

    call: OperatorCall
    items: tuple[Item, ...]
    inner: tuple[OperatorCall, ...] = ()


def parts_of(trace: OperatorTrace, layers_path: str) -> dict[int, Key]:
    """Return call -> its pass, direction and part of the model; see :func:`cut`."""
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
    """Return the parts of ``trace``, which holds two passes over :data:`CAPTURED_LAYERS` layers; ``graph``: lowered
    trace.

    ``layers_path``: module path of the list of layers. ``repeats``: operators that selective recomputation runs again,
    except communication. ``never_made``: storages of the trace that compiled code does not need, or None for eager
    code. Recomputation by operators keeps, in eager code, the output of every operator that it names; in compiled code
    only the outputs that later recomputation needs, since AOTAutograd's partitioner saves what the backward pass needs
    (``min_cut_rematerialization_partition``).
    """
    groups: dict[Key, list[_Unit]] = {}
    for key, unit in _assigned(list(_units(trace, graph)), _layer_pattern(layers_path)):
        groups.setdefault(key, []).append(unit)
    forward = {name: _part(units) for (run, back, name), units in groups.items() if run == 0 and not back}
    backward = {name: _part(units) for (run, back, name), units in groups.items() if run == 0 and back}
    accumulate = {name: _part(units) for (run, back, name), units in groups.items() if run == 1 and back}
    for each in (backward, accumulate):
        each.update({name: Part() for name in forward if name not in each})  # frozen weights may have none
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
    """Yield each unit with its pass, direction and part; a unit outside all layers belongs to the preceding part, or to
    an end.
    """
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
    """Yield the outermost operators in script order, each with its actions."""
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
        found.setdefault(place, [])  # compiled code may leave nothing else of these
    for place in sorted(found):
        yield _Unit(calls[place], (*found[place], *gradients.get(place, ())), tuple(inner.get(place, [calls[place]])))


def _inner_calls(trace: OperatorTrace) -> dict[int, list[OperatorCall]]:
    """Return outermost call -> itself and all its nested calls."""
    inner: dict[int, list[OperatorCall]] = {}
    outermost: dict[int, int] = {}
    for call in trace.calls:
        top = outermost[call.id] = call.id if call.parent is None else outermost[call.parent]
        inner.setdefault(top, []).append(call)
    return inner


# Products, including those in 8 bits: torchao's tensors call ``aten.mm``, which the checkpoint policy sees.
PRODUCTS = ("aten::linear", "aten::mm", "aten::addmm", "aten::matmul", "float8::mm")
ATTENTIONS = (
    "attention::fused",
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention",
)


def _kept_operators(units: Iterable[_Unit]) -> set[int]:
    """Return the outermost calls whose outputs are kept: attention, and every second product (the save list of
    torchtitan's ``apply_ac``, which counts ``mm``).
    """
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
    """Return ``units`` up to the last whose output ``backward`` reads, where PyTorch's checkpoint stops recomputing a
    layer.
    """
    read = {tensor.storage for unit in backward for call in unit.inner for tensor in tensors(call.inputs)}
    last = 0
    for place, unit in enumerate(units):
        given = {tensor.storage for tensor in tensors(unit.call.inputs)}  # views of these are also made and read
        made = {tensor.storage for call in unit.inner for tensor in tensors(call.outputs)}
        if (made - given) & read:
            last = place
    return list(units[: last + 1])


def _meets(unit: _Unit) -> bool:
    """True if ``unit`` is communication, which hooks add before attention and after its last product."""
    return any(isinstance(item, LayerCollective) for item in unit.items)


def _put_in(call: OperatorCall, kind: str) -> int:
    """Return the input bytes of a rank; for an exchange the larger of input and output."""
    given = sum(size_bytes(tensor) for tensor in tensors(call.inputs))
    return max(given, sum(size_bytes(tensor) for tensor in tensors(call.outputs))) if kind == "all_to_all" else given


def _gradients(trace: OperatorTrace) -> dict[int, tuple[Ready, ...]]:
    """Return outermost call -> gradient that it completes."""
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
