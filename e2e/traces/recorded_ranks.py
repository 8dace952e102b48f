"""Execution traces of all ranks of one job: their ranks and groups.

A recorded ``c10d`` call names its group only in ``record_param_comms`` inside it: by name and size in later schemas, by
an address without meaning on other ranks in the first one. There, groups are identified by the order of their first
use, and a group is the whole job if a call splits its data over as many ranks as there are traces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from costmodel.base.errors import InputError
from e2e.step.collective_names import kind_of, kind_of_short
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Value

DETAILS = "record_param_comms"
# Positions in its inputs: after tensors and sequence number the group, the rank in it and the collective; splits of
# uneven exchanges. A wait has no tensors, so all are one position earlier.
GROUP, RANK, NAME, SPLITS = 2, 3, 4, (5, 6)
# In other collectives the rank's position holds the root, or the peer.
SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def ranks_of_job(traces: Sequence[OperatorTrace]) -> tuple[OperatorTrace, ...]:
    """Return ``traces`` in the order of their ranks, each with the groups of its collectives.

    Raises ``InputError`` for two traces of one rank, and if a rank has none.
    """
    found = sorted((with_groups(trace, len(traces)) for trace in traces), key=lambda trace: trace.rank)
    repeated = [rank for rank, count in Counter(trace.rank for trace in found).items() if count > 1]
    if repeated:
        names = ", ".join(trace.source for trace in found if trace.rank in repeated)
        raise InputError(f"{names}: give one trace of every rank")
    world = max(trace.world_size for trace in found)
    missing = sorted(set(range(world)) - {trace.rank for trace in found})
    if missing:
        ranks = ", ".join(str(rank) for rank in missing[:8])
        raise InputError(
            f"{found[0].source}: the job has {world} ranks, but there is no trace of rank {ranks}; give them all"
        )
    return tuple(found)


def with_groups(trace: OperatorTrace, ranks: int = 1) -> OperatorTrace:
    """Return ``trace`` with its rank, its world size (at least ``ranks``) and the group of every collective."""
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
    """Names of the process groups. ``sizes``: group -> number of ranks, 0 if unknown."""

    trace: OperatorTrace
    sizes: dict[str, int] = field(default_factory=dict)
    _names: dict[Value, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._details = {call.parent: call for call in self.trace.calls if call.name == DETAILS}

    def named(self, call: OperatorCall) -> OperatorCall:
        """Return a collective with its group among the attributes; other calls are unchanged."""
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
    """Rank of a trace: its place in groups of known ranks.

    Else named by a wait; else inferred from the tensors' devices.
    """
    details = [call.inputs for call in trace.calls if call.name == DETAILS]
    told = Counter(_places(details, trace)) or Counter(_waiting(details))
    return told.most_common(1)[0][0] if told else trace.rank


def _places(details: Iterable[tuple[Value, ...]], trace: OperatorTrace) -> Iterable[int]:
    for inputs in details:
        if len(inputs) <= NAME or kind_of_short(str(inputs[NAME])) not in SYMMETRIC:
            continue
        group, place = inputs[GROUP], inputs[RANK]
        ranks = trace.process_groups.get(str(group[0]), ()) if isinstance(group, tuple) and group else ()
        if isinstance(place, int) and 0 <= place < len(ranks):
            yield ranks[place]


def _waiting(details: Iterable[tuple[Value, ...]]) -> Iterable[int]:
    for inputs in details:
        if len(inputs) > RANK and inputs[NAME - 1] == "wait":
            rank = inputs[RANK - 1]
            if isinstance(rank, int):
                yield rank
