"""Collectives and point-to-point calls: which operator starts one, which ranks meet, what this rank puts in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from e2e.graph import Collective
from e2e.lowering.work import on_gpu, size_bytes
from e2e.operators import OperatorCall, Tensor, Value, tensors

# Below ``c10d::`` in eager mode, below ``_c10d_functional::`` in functional form -> kind of the simulator, and which
# argument this rank puts in. NCCL composes ``gather`` and ``scatter`` of sends and receives: the root's links carry as
# much as in an all-gather of the parts and in a broadcast of the whole.
KINDS: dict[str, tuple[str, int]] = {
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "gather_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "scatter_": ("broadcast", 1),
    "barrier": ("barrier", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "reduce_": ("reduce", 0),
}
NAMESPACES = ("c10d::", "_c10d_functional::", "nccl:")
WAIT_TENSOR = "_c10d_functional::wait_tensor"
# Names that profilers give inside ``nccl:`` annotations.
_ANNOTATED = {"all_to_all": "all_to_all", "reduce_scatter": "reduce_scatter", "all_gather": "all_gather"}
# Collectives run beside computation; numbers only have to differ from every stream of a trace.
FIRST_STREAM = 1_000_000


def kind_of(name: str) -> str | None:
    """The collective that ``name`` starts, ``None`` for anything else."""
    for namespace in NAMESPACES:
        if name.startswith(namespace):
            short = name.removeprefix(namespace)
            return KINDS[short][0] if short in KINDS else _ANNOTATED.get(short)
    return None


def written(call: OperatorCall, kind: str) -> set[int]:
    """Storages that are complete only when the collective has ended."""
    if kind in ("send", "barrier"):
        return set()
    given = call.inputs[:1] if call.name.startswith("c10d::") and call.inputs else (*call.inputs, *call.outputs)
    return {tensor.storage for tensor in tensors(given) if on_gpu(tensor)}


@dataclass
class Rendezvous:
    """Numbers the collectives of each group in program order, and gives each communicator its stream.

    ``groups``: name -> ranks. Point-to-point calls of one direction between two ranks are numbered by themselves, as
    NCCL matches them.
    """

    groups: Mapping[str, tuple[int, ...]]
    world_size: int
    rank: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    _streams: dict[object, int] = field(default_factory=dict)

    def meet(self, call: OperatorCall, kind: str) -> Collective:
        """The collective that ``call`` takes part in; all ranks if the trace does not tell the group."""
        name, ranks = self.group(call)
        peer = call.attributes.get("peer")
        if isinstance(peer, int):
            source, target = (self.rank, peer) if kind == "send" else (peer, self.rank)
            name, ranks = f"{name}: {source} to {target}", (source, target)
        sequence = self.counts[name] = self.counts.get(name, -1) + 1
        sent = put_in(call)
        taken = sum(_sizes(call.inputs[:1] if call.name.startswith("c10d::") else call.outputs))
        uneven = kind == "all_to_all" and taken not in (0, sent)
        return Collective(kind, name, ranks, sequence, sent, taken if uneven else None)

    def group(self, call: OperatorCall) -> tuple[str, tuple[int, ...]]:
        """Name and ranks of the process group that ``call`` names."""
        name = str(call.attributes.get("process_group") or call.attributes.get("pg_name") or "")
        return name, self.groups.get(name) or tuple(range(self.world_size))

    def stream(self, call: OperatorCall) -> int:
        """NCCL has one stream per communicator: of the group, or of two ranks for a call outside a batch."""
        name = self.group(call)[0]
        alone = "peer" in call.attributes and "batch" not in call.attributes
        return self._number((name, call.attributes["peer"]) if alone else name)

    def lane(self, call: OperatorCall, place: int) -> int:
        """The parts of a batch make progress side by side: each has a stream for itself."""
        return self._number((self.group(call)[0], "batch", place))

    def _number(self, key: object) -> int:
        return self._streams.setdefault(key, FIRST_STREAM + len(self._streams))


def put_in(call: OperatorCall) -> int:
    """Bytes that this rank puts in: its shard of a gather, all that it scatters or exchanges, what it receives."""
    short = call.name.partition("::")[2]
    place = KINDS[short][1] if short in KINDS else 0
    given: tuple[Value, ...] = call.inputs[place : place + 1] if call.name.startswith(("c10d::", "_c10d")) else ()
    found = [size_bytes(tensor) for tensor in tensors(given) if on_gpu(tensor)]
    if short == "scatter_" and not found:
        group = call.attributes.get("group_size", 1)
        return sum(_sizes(call.inputs)) * (group if isinstance(group, int) else 1)
    return sum(found) if found else sum(_sizes(call.inputs) or _sizes(call.outputs))


def _sizes(values: tuple[Value, ...]) -> list[int]:
    return [size_bytes(tensor) for tensor in tensors(values) if isinstance(tensor, Tensor) and on_gpu(tensor)]
