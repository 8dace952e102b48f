"""A model of few layers, captured and cut into parts that can be recombined: before, in and after the layers.

Three layers are captured, however many the model has: the first, a middle one, the last. Each runs twice, since adding
a gradient to an earlier one costs a kernel that the first gradient of a step does not need. The optimizer is captured
apart. Imports ``torch``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from costmodel.base.errors import InputError
from costmodel.operators.any_operator import AnyOperator
from e2e.capture.python_calls import Uncounted
from e2e.capture.session import CapturedWorkload, capture
from e2e.lowering.families.work import size_bytes
from e2e.lowering.lower_trace import lower
from e2e.lowering.torch_compile import compile_rank, fused_storages
from e2e.parallelism.part_memory import PartKey, PartMemory, memory_of_parts
from e2e.step.collective_names import EARLY, INSIDE_LAYERS
from e2e.step.execution_graph import CallInfo, Duration, HostWork, Kernel, Launch, RankGraph, Synchronize, TaskKind
from e2e.step.memory import ACCUMULATE_GRAD, EXPERT_DIMENSIONS, peak_memory
from e2e.step.operator_trace import OperatorCall, OperatorTrace, tensors
from e2e.step.options import StepOptions

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


def call_parts(trace: OperatorTrace, layers_path: str) -> dict[int, Key]:
    """Return call -> its pass, direction and part of the model; see :func:`cut_trace`."""
    inner = _inner_calls(trace)
    outermost = [_Unit(call, ()) for call in trace.calls if call.parent is None]
    keys = _assigned(outermost, _layer_pattern(layers_path))
    return {call.id: key for key, unit in keys for call in inner[unit.call.id]}


def cut_trace(
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
    places: dict[int, PartKey] = dict(call_parts(trace, layers_path))
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
                    current.append(Work(task.name, task.kind, task.operators, task.call, task.duration))
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


# Parameters of the optimizer -> function that runs one step.
CapturedOptimizer = Callable[[list[nn.Parameter]], Callable[[], Any]]


@dataclass(frozen=True)
class CapturedModel:
    """Captured model."""

    pieces: Pieces
    # Shapes of the parameters of each part.
    shapes: Mapping[Name, Sequence[tuple[int, ...]]]
    # Shape of the word embedding, if the head shares it.
    tied: tuple[int, ...] | None
    dtype: torch.dtype
    boundary_bytes: int
    # Shapes of the trained parameters (None: all).
    trained: Mapping[Name, Sequence[tuple[int, ...]]] | None = None


@dataclass(frozen=True)
class ModelSource:
    """Model of :data:`CAPTURED_LAYERS` layers."""

    name: str
    module: nn.Module
    layers: nn.ModuleList
    # Forward pass that returns the loss, or the scores.
    forward: Callable[[], torch.Tensor]
    # Shape of the activations between layers.
    boundary_shape: tuple[int, ...]
    # Modules that selective recomputation runs again.
    repeats: Repeats = nothing_again
    # Layers of the whole model that are like its first.
    leading: int = 1


def capture_model(
    source: ModelSource,
    options: StepOptions,
    ends_compiled: bool = True,
) -> CapturedModel:
    """Capture two passes over ``source``, split into parts.

    Each layer is compiled if ``options`` request it and, with ``ends_compiled``, also the parts before and after the
    layers.
    """
    module = source.module
    free: torch.Tensor | None = None

    def step() -> None:
        nonlocal free
        with Uncounted():  # of all layers, or of the optimizer
            module.zero_grad(set_to_none=True)
        for _ in range(2):
            output = source.forward()
            # Scores, in inference, are not scalar: a gradient made before the captured step marks the parts' borders.
            free = output.new_empty(()).expand(output.shape) if free is None and output.dim() else free
            output.backward(free)

    trace = capture(CapturedWorkload(source.name, module, step), options)
    path = next(name for name, each in module.named_modules() if each is source.layers)
    graph = lower(trace, options)
    unneeded: set[int] | None = None
    if options.compile:
        parts = {
            call: part for call, part in call_parts(trace, path).items() if ends_compiled or isinstance(part[2], int)
        }
        unneeded = fused_storages(graph, trace, parts)
        graph = compile_rank(graph, trace, parts)
    pieces = replace(cut_trace(trace, graph, path, source.repeats, unneeded), leading=source.leading)
    shapes, tied = _shapes(source)
    dtype = next(module.parameters()).dtype
    boundary = torch.empty(source.boundary_shape, dtype=dtype, device="meta")
    trained = None
    if not all(parameter.requires_grad for parameter in module.parameters()):
        trained, tied = _shapes(source, trained=True)[0], None  # a frozen embedding has no shared gradients
    return CapturedModel(pieces, shapes, tied, dtype, boundary.nbytes, trained)


def find_layers(module: nn.Module, source: str, first_differs: bool = False) -> nn.ModuleList:
    """Return the list of identical layers with most parameters; raise ``InputError`` if there is none.

    ``first_differs``: the first layer may differ.
    """
    found = [each for each in module.modules() if isinstance(each, nn.ModuleList) and _alike(each, first_differs)]
    if not found:
        raise InputError(
            f"{source}: has no list of alike layers, so it cannot be put together for --parallel; "
            "give a --script with --gpus"
        )
    return max(found, key=lambda each: sum(parameter.numel() for parameter in each.parameters()))


def _alike(layers: nn.ModuleList, first_differs: bool) -> bool:
    """True if all layers have parameters of the same shapes."""
    if len(layers) != CAPTURED_LAYERS:
        return False
    shapes = [[tuple(parameter.shape) for parameter in layer.parameters()] for layer in layers]
    return all(each == shapes[1] for each in shapes[1 if first_differs else 0 :])


def _shapes(
    source: ModelSource, trained: bool = False
) -> tuple[dict[Name, list[tuple[int, ...]]], tuple[int, ...] | None]:
    """Return the shapes of parameters before, in and after the layers, in model order. ``trained``: trained parameters
    only.
    """
    places: dict[int, Name] = {
        id(parameter): place for place, layer in enumerate(source.layers) for parameter in layer.parameters()
    }
    found: dict[Name, list[tuple[int, ...]]] = {
        FIRST: [],
        **{place: [] for place in range(len(source.layers))},
        LAST: [],
    }
    current: Name = FIRST
    for parameter in source.module.parameters():
        current = places.get(id(parameter), current if current == FIRST else LAST)
        if parameter.requires_grad or not trained:
            found[current].append(tuple(parameter.shape))
    tied = _tied_weight(source.module)
    return found, None if tied is None else tuple(tied.shape)


def _tied_weight(module: Any) -> torch.Tensor | None:
    """Return the word embedding if the head shares it, or None."""
    if not hasattr(module, "get_output_embeddings"):
        return getattr(module, "tied_weight", None)
    head = module.get_output_embeddings()
    embedding: torch.Tensor = module.get_input_embeddings().weight
    return embedding if head is not None and head.weight is embedding else None


def capture_optimizer(
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    make: CapturedOptimizer,
    options: StepOptions,
    calls: dict[int, CallInfo],
) -> tuple[tuple[Item, ...], int]:
    """Capture one steady optimizer step over parameters of ``shapes`` with gradients; add its calls to ``calls``.

    Return its items, and the peak bytes of temporary tensors.
    """
    with torch.device("meta"):
        parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
    holder = nn.ParameterList(parameters)
    trace = capture(CapturedWorkload("optimizer", holder, make(parameters)), options)
    graph = lower(trace)
    offset = max(calls, default=-1) + 1
    for info in graph.calls.values():
        parent = None if info.parent is None else info.parent + offset
        calls[info.id + offset] = replace(info, id=info.id + offset, phase="optimizer", parent=parent)
    items: list[Item] = [Called(len(trace.calls))]
    for action in graph.threads["main"]:
        if isinstance(action, Launch):
            task = graph.tasks[action.task]
            number = None if task.call is None else task.call + offset
            items.append(Work(task.name, task.kind, task.operators, number, task.duration))
        elif isinstance(action, HostWork):
            items.append(HostWork(action.kind, None if action.call is None else action.call + offset))
        elif isinstance(action, Synchronize):
            call = None if action.call is None else action.call + offset
            items.append(Synchronize(action.stream, action.event, None, call))
    return tuple(items), peak_memory(trace).breakdown["temporary"]
