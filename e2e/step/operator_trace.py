"""Operator trace of the host: the common form of captures and execution traces.

An :class:`OperatorTrace` lists the operators called by one rank, their order and nesting, their tensors, and the ranges
around them. It has no times (a profile adds them) and no kernels: :mod:`e2e.lowering` turns operators into device work.

Ranges (:class:`NamedRanges`) are those named by a script (``record_function``). A call is in the ranges that were open
for its thread when it was made: those entered by the script, and in the backward pass also those around ``backward()``.
A backward call is also in the ranges of its forward call, found by autograd's sequence numbers. A name may be entered
often, and inside itself. Where a range begins or ends, Python enters or leaves a part of the script: such a gap between
operators takes ten to a hundred times as long as a gap inside one part, whichever operator follows. These gaps
therefore have separate names among the host overheads (:func:`gap_names`), one per border, except two that are longer
than all others: the gap before the first operator of an optimizer step, and the gap where the profiler counts a step.

Phases (:func:`settled_phases`): a source marks those that are certain: autograd's own calls are ``backward``, calls
inside ``Optimizer.step`` are ``optimizer``, those of the data loader ``data``; all other calls come as ``forward``.
Many of these are not part of the forward pass: gradient clipping and a scaler's check for infinities lie between
backward pass and optimizer, averages of weights and ``loss.item()`` after the optimizer. A call certainly belongs to
the forward pass if it has the sequence number of an autograd node that ran later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, Protocol

from e2e.step.collective_names import FUNCTIONAL, kind_of

# Ranges marked by PyTorch: its steps and hooks, modules of a recorder.
_OF_PYTORCH = (
    "Optimizer.", "ProfilerStep#", "enumerate(DataLoader)", "[pytorch|", "nn.Module: ", "DistributedDataParallel.",
    "torch.distributed.", "FSDP::", "FullyShardedDataParallel.", "nccl:", "gloo:", "ncclx:", "## process_group",
    "Torch-Compiled", "TorchDynamo", "AOTDispatcher", "CompiledFunction", "Inductor", "Pregraph",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NamedRange:
    """One entry of the range ``name``; ``parent``: id of the enclosing entry."""

    id: int
    name: str
    parent: int | None = None


@dataclass(frozen=True)
class NamedRanges:
    """Range entries and the calls in them. Calls nested in a call of either table share its entry."""

    # Id -> entry.
    entered: Mapping[int, NamedRange] = field(default_factory=dict)
    # Operator call -> innermost entry in which it was made.
    of_call: Mapping[int, int] = field(default_factory=dict)
    # Backward call -> innermost entry in which its forward call was made.
    of_forward: Mapping[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.entered)

    def within(self, calls: Collection[int]) -> NamedRanges:
        """Return the ranges restricted to ``calls`` and the entries around them."""
        of_call = {call: entry for call, entry in self.of_call.items() if call in calls}
        of_forward = {call: entry for call, entry in self.of_forward.items() if call in calls}
        kept = {each.id for entry in {*of_call.values(), *of_forward.values()} for each in self.chain(entry)}
        return NamedRanges({entry: each for entry, each in self.entered.items() if entry in kept}, of_call, of_forward)

    def chain(self, entry: int | None) -> tuple[NamedRange, ...]:
        """Return ``entry`` and its enclosing entries, outermost first."""
        found: list[NamedRange] = []
        while entry is not None:
            found.append(self.entered[entry])
            entry = self.entered[entry].parent
        return tuple(reversed(found))


def of_forward_calls(calls: Iterable[tuple[int, int | None, bool]], of_call: Mapping[int, int]) -> dict[int, int]:
    """Return backward call -> entry in which its forward call was made: the last one with its sequence number, which
    made the autograd node.

    ``calls``: id, autograd's sequence number and True for backward calls, in program order.
    """
    numbered = [(call, sequence, backward) for call, sequence, backward in calls if sequence is not None]
    made = {sequence: of_call.get(call) for call, sequence, backward in numbered if not backward}
    found = {call: made.get(sequence) for call, sequence, backward in numbered if backward}
    return {call: entry for call, entry in found.items() if entry is not None}


class NestedCall(Protocol):
    """Operator call with a link to its enclosing call."""

    @property
    def parent(self) -> int | None:
        """Id of the enclosing call."""
        ...


def around(ranges: NamedRanges, calls: Mapping[int, NestedCall], call: int | None) -> tuple[NamedRange, ...]:
    """Return the entries in which ``call`` was made, outermost first."""
    return ranges.chain(_looked_up(ranges.of_call, calls, call))


def around_forward(ranges: NamedRanges, calls: Mapping[int, NestedCall], call: int | None) -> tuple[NamedRange, ...]:
    """Return the entries in which the forward call of a backward call was made, outermost first."""
    return ranges.chain(_looked_up(ranges.of_forward, calls, call))


def names_around(ranges: NamedRanges, calls: Mapping[int, NestedCall], call: int | None) -> Iterator[str]:
    """Iterate over the names of all ranges of ``call``, without repetition."""
    entries = (*around(ranges, calls, call), *around_forward(ranges, calls, call))
    yield from dict.fromkeys(each.name for each in entries)


def is_named_by_script(name: str) -> bool:
    """True if the range was named by a script, not by PyTorch."""
    return not name.startswith(_OF_PYTORCH)


def _looked_up(table: Mapping[int, int], calls: Mapping[int, NestedCall], call: int | None) -> int | None:
    """Return the entry in ``table`` of ``call`` or of its nearest enclosing call, or None."""
    while call is not None:
        if call in table:
            return table[call]
        info = calls.get(call)
        call = None if info is None else info.parent
    return None


Phase = Literal["forward", "backward", "optimizer", "data", "other"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Tensor as seen by an operator."""

    # Id of the tensor object.
    id: int
    # Id of the memory, shared by views.
    storage: int
    # Elements per dimension.
    shape: tuple[int, ...]
    # As in :mod:`costmodel.operators.layers` (``float32``, ``bfloat16`` ...).
    dtype: str
    # ``cuda:0``, ``cpu`` ...
    device: str
    # Strides in elements; None if the source does not give them.
    stride: tuple[int, ...] | None = None


# Prefix of captured launches of Triton kernels.
TRITON = "triton::"
# Adam on the host, in one loop over all parameters.
CPU_ADAM = "deepspeed::cpu_adam"
# Attribute of captured launches of Triton kernels whose source multiplies matrices.
PRODUCTS = "multiplies matrices"
# Attribute of calls in a forward pass that runs again inside the backward pass.
RECOMPUTED = "recomputed"
# Attribute of the last call of compiled code in a forward pass: the storages that the code returns.
RETURNED = "returned"
# Attribute of calls that make a tensor of a list of the script: the number of its numbers.
NUMBERS = "numbers"
# Arguments of operators: tensors, numbers, texts, ``None``, and (nested) tuples of these.
Value = Tensor | int | float | bool | str | None | tuple["Value", ...]


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator call."""

    id: int
    # Name in the framework (``aten::addmm``, ``c10d::allreduce_`` ...), without the overload.
    name: str
    # Id of the enclosing call, None at the top level.
    parent: int | None
    # Host thread: 0 is the main thread, 1 the autograd thread.
    thread: int
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    # As marked by the source; lowering completes it (:func:`e2e.step.operator_trace.settled_phases`).
    phase: Phase = "other"
    # Links a backward operator with its forward operator.
    sequence: int | None = None
    # Path of the ``nn.Module`` that runs the call, if known.
    module: str = ""
    # Other information of the source (process group, overload).
    attributes: Mapping[str, Value] = field(default_factory=dict)
    # Line of the program that makes the call, or whose backward pass it is (``model.py:73``), if known.
    line: str = ""
    # Python functions that the program called since the call before, if they were counted.
    functions: int = 0


@dataclass(frozen=True)
class RepeatedPass:
    """Forward and backward pass of accumulated gradients that stands for others of its step."""

    # Ids of its first call and of the first one behind it.
    begin: int
    end: int
    # Number of equal passes that are not among the calls.
    more: int


@dataclass(frozen=True)
class OperatorTrace:
    """Calls of one rank in the order in which they began (a parent before its children)."""

    calls: tuple[OperatorCall, ...]
    rank: int = 0
    world_size: int = 1
    # Name -> ranks.
    process_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # File or model, for messages.
    source: str = ""
    # Process id of the recorded process, if any.
    pid: int | None = None
    # True if the model requests ``torch.compile``; the calls are those of eager code all the same.
    compiled: bool = False
    # Ranges of the step named by the script.
    ranges: NamedRanges = field(default_factory=NamedRanges)
    # For each backward pass, the lengths along the first dimension of the inputs and outputs of the whole module before
    # it; a step that accumulates gradients has several passes. Empty if the source does not give them.
    passes: tuple[frozenset[int], ...] = ()
    # Call -> compiled region of the program; None if the source does not say what is compiled.
    regions: Mapping[int, int] | None = None
    # Call -> CUDA graph of the program that replays it; each is launched once.
    graphs: Mapping[int, int] = field(default_factory=dict)
    # Pass of which only some are among the calls.
    repeated: RepeatedPass | None = None
    # Storage -> its bytes, where they are known: views may show parts of it only.
    storage_bytes: Mapping[int, int] = field(default_factory=dict, repr=False)

    def without_pass(self) -> OperatorTrace:
        """Return the trace with one fewer of the repeated passes, and without the note of them.

        The passes behind it wait for events of one pass earlier instead, where they wait for those of a pass before.
        """
        assert self.repeated is not None
        begin, end = self.repeated.begin, self.repeated.end
        first, second, removed = (self._events(begin - back * (end - begin), end - begin) for back in (2, 1, 0))
        earlier = {**dict(zip(removed, second, strict=False)), **dict(zip(second, first, strict=False))}
        calls = tuple(
            replace(call, attributes={**call.attributes, "event": event})
            if call.id >= end and (event := earlier.get(call.attributes.get("event"))) is not None
            else call
            for call in self.calls
            if not begin <= call.id < end
        )
        kept = {call.id for call in calls}
        regions = None if self.regions is None else {call: part for call, part in self.regions.items() if call in kept}
        graphs = {call: graph for call, graph in self.graphs.items() if call in kept}
        return replace(
            self, calls=calls, ranges=self.ranges.within(kept), passes=self.passes[1:], regions=regions, graphs=graphs,
            repeated=None,
        )  # fmt: skip

    def _events(self, begin: int, calls: int) -> list[Value]:
        """Return the events recorded by that number of calls from ``begin`` on."""
        found = (call for call in self.calls if begin <= call.id < begin + calls)
        return [call.attributes["event"] for call in found if call.name == "cudaEventRecord"]


def tensors(values: tuple[Value, ...]) -> Iterator[Tensor]:
    """Iterate over all tensors in ``values``, including nested ones, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors(value)


def shape_of(value: Value) -> Any:
    """Return shapes and types of the tensors in ``value``, and the types of what is no tensor."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, tuple):
        return tuple(map(shape_of, value))
    return type(value).__name__


# Phase of an undifferentiated call by the phase of the next call.
_BEFORE: Mapping[Phase, Phase] = {"backward": "forward", "optimizer": "optimizer"}


class PhasedCall(Protocol):
    """Operator call of a source, with the phase that the source marked."""

    @property
    def id(self) -> int:
        """Number of the call in its trace."""
        ...

    @property
    def phase(self) -> Phase:
        """Phase as marked by the source."""
        ...

    @property
    def sequence(self) -> int | None:
        """Sequence number shared by a forward call and its backward call, or None."""
        ...


@dataclass(frozen=True, slots=True)
class MarkedCall:
    """Fields of a call that decide its phase. ``sequence`` links a backward call with its forward call."""

    id: int
    phase: Phase
    sequence: int | None


def settled_phases(calls: Iterable[PhasedCall]) -> Mapping[int, Phase]:
    """Return call -> phase for the ``calls`` of one step, given in the order in which they began.

    A call marked as forward that comes after a backward pass or an optimizer step and is not differentiated gets the
    phase of the following work: ``optimizer`` before an optimizer step, ``forward`` before the next pass (of another
    micro-batch or another network), ``other`` at the end of the step.
    """
    ordered = list(calls)
    passes = [place for place, call in enumerate(ordered) if call.phase in ("backward", "optimizer")]
    first = passes[0] if passes else len(ordered)
    differentiated = {call.sequence for call in ordered if call.phase == "backward"} - {None}
    found: dict[int, Phase] = {}
    following: Phase = "other"
    for place in reversed(range(len(ordered))):
        call = ordered[place]
        if call.phase != "forward":
            found[call.id] = call.phase
            following = _BEFORE.get(call.phase, following)
        elif place < first or call.sequence in differentiated:
            found[call.id] = following = "forward"
        else:
            found[call.id] = following
    return found


BORDER_GAP = "annotation"
OPTIMIZER_STEP = "Optimizer.step"
PROFILER_STEP = "ProfilerStep"
MARKED_GAPS = frozenset({BORDER_GAP, OPTIMIZER_STEP, PROFILER_STEP})


def gap_names(ended: int, begun: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the equal parts of a gap in which ``ended`` marked ranges end and the ranges ``begun`` begin.

    Empty if the gap belongs to the following operator.
    """
    for mark in (PROFILER_STEP, OPTIMIZER_STEP):
        if any(name.startswith(f"{mark}#") for name in begun):
            return (mark,)
    return (BORDER_GAP,) * (ended + len(begun))


def crossed_ranges(before: Sequence[str], now: Sequence[str]) -> tuple[int, Sequence[str]]:
    """Return how many ranges ended and which began between the ranges ``before`` and ``now``, given outermost first."""
    common = 0
    for one, other in zip(before, now, strict=False):
        if one != other:
            break
        common += 1
    return len(before) - common, now[common:]


_PREFIXES = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad", "aten::_amp_foreach_")


def is_multi_tensor(name: str) -> bool:
    """True if the operator ``name`` updates lists of tensors."""
    return name.startswith(_PREFIXES)


def list_length(call: OperatorCall) -> int:
    """Return the length of the longest tensor list of a foreach or fused operator; 0 for other operators."""
    if not is_multi_tensor(call.name):
        return 0
    lists = [value for value in call.inputs if isinstance(value, tuple) and value and isinstance(value[0], Tensor)]
    return max(map(len, lists), default=0)


def gathering_calls(calls: Sequence[OperatorCall], phases: Sequence[str]) -> dict[int, int]:
    """Return id -> number of tensors for the first call with tensor lists of each parameter group, by list length, in
    each run of the optimizer.

    ``phases``: phases of ``calls``, in the same order.
    """
    found: dict[int, int] = {}
    gathered: set[int] = set()
    for call, phase in zip(calls, phases, strict=True):
        if phase != "optimizer":
            gathered.clear()
        elif (length := list_length(call)) and length not in gathered:
            gathered.add(length)
            found[call.id] = length
    return found


# Collectives over activations in a forward pass, which are never used on parameters (gathered, broadcast). Tokens sent
# to experts and lookups sent to their tables (all_to_all) still belong to one rank.
_SHARING = frozenset(("all_reduce", "reduce_scatter", "send", "recv"))
# Largest tensor, in elements, that counts as a figure for display: a loss, a norm.
_FIGURES = 4096


def has_own_samples(trace: OperatorTrace) -> bool:
    """True if no other rank works on the same samples: data parallelism, with or without sharded parameters.

    Ranks that split layers or sequences, or pass on activations, communicate in the forward pass: PyTorch's tensor
    parallelism by functional collectives, others by sums, scatters and messages.
    """
    phases = settled_phases(trace.calls)
    for call in trace.calls:
        kind = kind_of(call.name)
        if kind is None or phases[call.id] != "forward":
            continue
        size = max((prod(tensor.shape) for tensor in tensors(call.inputs)), default=0)
        if size > _FIGURES and (kind in _SHARING or call.name.startswith(FUNCTIONAL)):
            return False
    return True
