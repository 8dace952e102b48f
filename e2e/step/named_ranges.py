"""Parts of a step that a script gave a name (``record_function``), and which operator calls are in which of them.

A call is in the ranges that were open on its thread's behalf when it was made: those that the script had entered, and
in the backward pass also those around ``backward()``. A backward call is besides in the ranges of its forward call,
which autograd's sequence numbers tell. A name may be entered often, and inside of itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

# What PyTorch itself marks: its own steps and hooks, modules of a recorder.
_OF_PYTORCH = (
    "Optimizer.", "ProfilerStep#", "enumerate(DataLoader)", "[pytorch|", "nn.Module: ", "DistributedDataParallel.",
    "torch.distributed.", "FSDP::", "FullyShardedDataParallel.", "nccl:", "gloo:", "ncclx:", "## process_group",
    "Torch-Compiled", "TorchDynamo", "AOTDispatcher", "CompiledFunction", "Inductor", "Pregraph",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NamedRange:
    """One entry of a part that is called ``name``; ``parent``: the number of the entry that it is inside of."""

    id: int
    name: str
    parent: int | None = None


@dataclass(frozen=True)
class NamedRanges:
    """``entered``: number -> entry. ``of_call``: operator call -> the innermost entry in which it was made;
    ``of_forward``: backward call -> the innermost entry in which its forward call was made. Calls inside a call of
    either table are where that one is.
    """

    entered: Mapping[int, NamedRange] = field(default_factory=dict)
    of_call: Mapping[int, int] = field(default_factory=dict)
    of_forward: Mapping[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.entered)

    def within(self, calls: Collection[int]) -> NamedRanges:
        """Of these calls alone, and the entries that they are in."""
        of_call = {call: entry for call, entry in self.of_call.items() if call in calls}
        of_forward = {call: entry for call, entry in self.of_forward.items() if call in calls}
        kept = {each.id for entry in {*of_call.values(), *of_forward.values()} for each in self.chain(entry)}
        return NamedRanges({entry: each for entry, each in self.entered.items() if entry in kept}, of_call, of_forward)

    def chain(self, entry: int | None) -> tuple[NamedRange, ...]:
        """``entry`` and those around it, the outermost first."""
        found: list[NamedRange] = []
        while entry is not None:
            found.append(self.entered[entry])
            entry = self.entered[entry].parent
        return tuple(reversed(found))


def of_forward_calls(calls: Iterable[tuple[int, int | None, bool]], of_call: Mapping[int, int]) -> dict[int, int]:
    """Backward call -> the entry in which its forward call was made: the last one with its number, which made the node
    of autograd. ``calls``: number, autograd's sequence number and whether it is backward, in the order of the calls.
    """
    numbered = [(call, sequence, backward) for call, sequence, backward in calls if sequence is not None]
    made = {sequence: of_call.get(call) for call, sequence, backward in numbered if not backward}
    found = {call: made.get(sequence) for call, sequence, backward in numbered if backward}
    return {call: entry for call, entry in found.items() if entry is not None}


class NestedCall(Protocol):
    """An operator call that knows the one around it."""

    @property
    def parent(self) -> int | None:
        """Number of the call around it."""
        ...


def around(ranges: NamedRanges, calls: Mapping[int, NestedCall], call: int | None) -> tuple[NamedRange, ...]:
    """The entries in which ``call`` was made, the outermost first."""
    return ranges.chain(_looked_up(ranges.of_call, calls, call))


def around_forward(ranges: NamedRanges, calls: Mapping[int, NestedCall], call: int | None) -> tuple[NamedRange, ...]:
    """Of a backward call, the entries in which its forward call was made, the outermost first."""
    return ranges.chain(_looked_up(ranges.of_forward, calls, call))


def names_around(ranges: NamedRanges, calls: Mapping[int, NestedCall], call: int | None) -> Iterator[str]:
    """Every name that ``call`` belongs to, once."""
    entries = (*around(ranges, calls, call), *around_forward(ranges, calls, call))
    yield from dict.fromkeys(each.name for each in entries)


def is_named_by_script(name: str) -> bool:
    """Whether a person gave that name, not PyTorch."""
    return not name.startswith(_OF_PYTORCH)


def _looked_up(table: Mapping[int, int], calls: Mapping[int, NestedCall], call: int | None) -> int | None:
    """What ``table`` has of ``call``, or of the next call around it."""
    while call is not None:
        if call in table:
            return table[call]
        info = calls.get(call)
        call = None if info is None else info.parent
    return None
