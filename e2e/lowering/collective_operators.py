"""Collectives and point-to-point calls: their operators, ranks, and input sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from e2e.lowering.families.work import on_gpu, size_bytes
from e2e.step.collective_names import EAGER, FUNCTIONAL, OUTPUT_FIRST, SCATTER
from e2e.step.execution_graph import Collective
from e2e.step.operator_trace import OperatorCall, Tensor, Value, tensors
from e2e.step.rank_writer import RankWriter

# First stream of collectives, which run concurrently with computation; larger than any stream id of a trace.
FIRST_STREAM = 1_000_000


def written(call: OperatorCall, kind: str) -> set[int]:
    """Return the storages that are complete only when the collective has ended."""
    if kind in ("send", "barrier"):
        return set()
    given = call.inputs[:1] if call.name.startswith(EAGER) and call.inputs else (*call.inputs, *call.outputs)
    return {tensor.storage for tensor in tensors(given) if on_gpu(tensor)}


@dataclass
class Communicators:
    """Process groups of a rank: ranks of a call, and the stream on which NCCL runs it.

    ``groups``: name -> ranks. Point-to-point calls between two ranks are numbered separately by direction, as NCCL
    matches them.
    """

    groups: Mapping[str, tuple[int, ...]]
    world_size: int
    writer: RankWriter
    _streams: dict[object, int] = field(default_factory=dict)

    def collective(self, call: OperatorCall, kind: str) -> Collective:
        """Return the collective of ``call``; all ranks take part if the trace does not give the group."""
        name, ranks = self.group(call)
        peer, rank = call.attributes.get("peer"), self.writer.rank
        if isinstance(peer, int):
            source, target = (rank, peer) if kind == "send" else (peer, rank)
            name, ranks = f"{name}: {source} to {target}", (source, target)
        sent = put_in(call)
        taken = sum(_sizes(call.inputs[:1] if call.name.startswith(EAGER) else call.outputs))
        uneven = kind == "all_to_all" and taken not in (0, sent)
        return Collective(kind, name, ranks, self.writer.next_in(name), sent, taken if uneven else None)

    def group(self, call: OperatorCall) -> tuple[str, tuple[int, ...]]:
        """Return name and ranks of the process group of ``call``."""
        name = str(call.attributes.get("process_group") or call.attributes.get("pg_name") or "")
        return name, self.groups.get(name) or tuple(range(self.world_size))

    def stream(self, call: OperatorCall) -> int:
        """Return the stream of the call's NCCL communicator: of the group, or of two ranks for a call outside a
        batch.
        """
        name = self.group(call)[0]
        alone = "peer" in call.attributes and "batch" not in call.attributes
        return self._number((name, call.attributes["peer"]) if alone else name)

    def lane(self, call: OperatorCall, place: int) -> int:
        """Return the separate stream of a part of a batch, since the parts run concurrently."""
        return self._number((self.group(call)[0], "batch", place))

    def _number(self, key: object) -> int:
        return self._streams.setdefault(key, FIRST_STREAM + len(self._streams))


def put_in(call: OperatorCall) -> int:
    """Return the input bytes of this rank: its shard of a gather, all data that it scatters or exchanges, or the
    received bytes.
    """
    place = 1 if call.name in OUTPUT_FIRST else 0
    given: tuple[Value, ...] = call.inputs[place : place + 1] if call.name.startswith((EAGER, FUNCTIONAL)) else ()
    found = [size_bytes(tensor) for tensor in tensors(given) if on_gpu(tensor)]
    if call.name == SCATTER and not found:
        group = call.attributes.get("group_size", 1)
        return sum(_sizes(call.inputs)) * (group if isinstance(group, int) else 1)
    return sum(found) if found else sum(_sizes(call.inputs) or _sizes(call.outputs))


def _sizes(values: tuple[Value, ...]) -> list[int]:
    return [size_bytes(tensor) for tensor in tensors(values) if isinstance(tensor, Tensor) and on_gpu(tensor)]
