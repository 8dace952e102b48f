"""Collectives of ``torch.distributed`` as they appear among operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from e2e.graph import Collective
from e2e.lowering.work import gpu_inputs, gpu_outputs, size_bytes
from e2e.operators import OperatorCall

# Below ``c10d::`` in eager mode, below ``_c10d_functional::`` in functional form -> kind of the simulator.
KINDS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
    "reduce_": "reduce",
}
NAMESPACES = ("c10d::", "_c10d_functional::", "nccl:")


def kind_of(name: str) -> str | None:
    """The collective that ``name`` starts, ``None`` for anything else."""
    for namespace in NAMESPACES:
        if name.startswith(namespace):
            return KINDS.get(name.removeprefix(namespace))
    return None


@dataclass
class Rendezvous:
    """Numbers the collectives of each group in program order."""

    groups: Mapping[str, tuple[int, ...]]
    world_size: int
    counts: dict[str, int] = field(default_factory=dict)

    def meet(self, call: OperatorCall, kind: str) -> Collective:
        """The collective that ``call`` takes part in; all ranks if the trace does not tell the group."""
        name = str(call.attributes.get("process_group") or "")
        ranks = self.groups.get(name) or tuple(range(self.world_size))
        sequence = self.counts[name] = self.counts.get(name, -1) + 1
        return Collective(kind, name, ranks, sequence, self._size(call, kind))

    @staticmethod
    def _size(call: OperatorCall, kind: str) -> int:
        """Bytes that this rank puts in: the smaller side where data is gathered, the larger where it is scattered."""
        sizes = [size_bytes(tensor) for tensor in gpu_inputs(call)]
        if not sizes:
            return sum(size_bytes(tensor) for tensor in gpu_outputs(call))
        if kind == "all_gather":
            return min(sizes)
        if kind == "reduce_scatter":
            return max(sizes)
        return sizes[0] if kind == "all_to_all" else sum(sizes)
