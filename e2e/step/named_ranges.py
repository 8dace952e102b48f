"""Ranges of a step named by a script (``record_function``), and the operator calls in each of them.

A call is in the ranges that were open for its thread when it was made: those entered by the script, and in the backward
pass also those around ``backward()``. A backward call is also in the ranges of its forward call, found by autograd's
sequence numbers. A name may be entered often, and inside itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

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
