"""Execution traces of several ranks of one job, lowered together: who they are and which groups they form.

A recorded ``c10d`` call names its group only in ``record_param_comms`` inside it: by name and size in later schemas,
by an address that means nothing on other ranks in the first one. There, groups are told apart in the order of their
first use, and one that a call splits its data over as many ranks as there are traces is the whole job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from costmodel.errors import InputError
from e2e.collective_names import kind_of
from e2e.graph import ExecutionGraph
from e2e.lowering.lower import lower
from e2e.lowering.work import LoweringOptions
from e2e.operators import OperatorCall, OperatorTrace, Value

DETAILS = "record_param_comms"
# Places in its inputs: after tensors and sequence number the group; for a wait, the rank. Splits of uneven exchanges.
GROUP, WAITING_RANK, WAIT_NAME, SPLITS = 2, 2, 3, (5, 6)


def lower_ranks(traces: Sequence[OperatorTrace], options: LoweringOptions | None = None) -> ExecutionGraph:
    """Not priced, one entry per trace, collectives with the groups that the traces tell.

    ``InputError`` for no trace or two of one rank.
    """
    found = [with_groups(trace, len(traces)) for trace in traces]
    repeated = [rank for rank, count in Counter(trace.rank for trace in found).items() if count > 1]
    if repeated or not found:
        names = ", ".join(trace.source for trace in found if trace.rank in repeated)
        raise InputError(f"{names or 'no trace'}: give one trace of every rank")
    found.sort(key=lambda trace: trace.rank)
    source = f"{found[0].source} and {len(found) - 1} other ranks" if len(found) > 1 else found[0].source
    return ExecutionGraph(tuple(lower(trace, options) for trace in found), {}, source)


def with_groups(trace: OperatorTrace, ranks: int = 1) -> OperatorTrace:
    """``trace`` with its rank, its world size (at least ``ranks``) and the group of every collective."""
    reader = _Groups(trace)
    calls = tuple(reader.named(call) for call in trace.calls)
    world = max([ranks, trace.world_size, *reader.sizes.values()])
    groups = {
        name: trace.process_groups.get(name) or tuple(range(world))
        for name in reader.sizes
        if name in trace.process_groups or reader.sizes[name] in (0, world)
    }
    unknown = sorted(reader.sizes.keys() - groups.keys())
    if unknown:
        raise InputError(
            f"{trace.source}: group {unknown[0]!r} has {reader.sizes[unknown[0]]} of {world} ranks, but the trace does "
            "not tell which; record it with PyTorch 2.2 or newer"
        )
    rank = _rank(trace)
    return replace(trace, calls=calls, rank=rank, world_size=world, process_groups={**trace.process_groups, **groups})


@dataclass
class _Groups:
    """``sizes``: group -> ranks in it, 0 if no call tells."""

    trace: OperatorTrace
    sizes: dict[str, int] = field(default_factory=dict)
    _names: dict[Value, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._details = {call.parent: call for call in self.trace.calls if call.name == DETAILS}

    def named(self, call: OperatorCall) -> OperatorCall:
        """A collective with its group among the attributes; any other call as it is."""
        details = self._details.get(call.id)
        if details is None or kind_of(call.name) is None:
            return call
        name = self._name(details)
        self.sizes[name] = max(self.sizes.get(name, 0), _size(details))
        return replace(call, attributes={**call.attributes, "process_group": name})

    def _name(self, details: OperatorCall) -> str:
        told = details.attributes.get("pg_name")
        if isinstance(told, str) and told:
            return told
        key = details.inputs[GROUP] if len(details.inputs) > GROUP else None
        if isinstance(key, tuple) and key and isinstance(key[0], str):
            return key[0]
        return self._names.setdefault(key, f"group {len(self._names)}")


def _size(details: OperatorCall) -> int:
    told = details.attributes.get("pg_size")
    if isinstance(told, int):
        return told
    splits = [details.inputs[place] for place in SPLITS if place < len(details.inputs)]
    return max((len(split) for split in splits if isinstance(split, tuple)), default=0)


def _rank(trace: OperatorTrace) -> int:
    """A wait names the rank that waits; else what the devices of the tensors suggest."""
    told = Counter(_waiting(trace.calls))
    return told.most_common(1)[0][0] if told else trace.rank


def _waiting(calls: Iterable[OperatorCall]) -> Iterable[int]:
    for call in calls:
        if call.name == DETAILS and len(call.inputs) > WAIT_NAME and call.inputs[WAIT_NAME] == "wait":
            rank = call.inputs[WAITING_RANK]
            if isinstance(rank, int):
                yield rank
