"""Operators of FSDP2: copies of parameters into and out of the flat buffers of its collectives.

They are built on ``_foreach_copy_``, ``split_with_sizes_copy`` and ``_chunk_cat``
(``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``), each one kernel over all parameters of a group.
"""

from __future__ import annotations

from costmodel.operators.device_work import Rearrangement
from e2e.lowering.families.work import Context, DeviceWork, Lowering, UnforeseenCall, dtype_of, numel, tensor_argument
from e2e.step.operator_trace import OperatorCall, Tensor, tensors


def _copy_in(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the copy of shards into this rank's part of the all-gather buffer."""
    shards = list(tensors(call.inputs[:1]))
    return _moved(call, "concat", sum(map(numel, shards)), shards, dtype_of(tensor_argument(call, 1)))


def _copy_out(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the copy of the gathered buffer into whole parameters, a piece of each from every rank's part."""
    gathered = tensor_argument(call, 0)
    targets = list(tensors((call.attributes.get("out"),)))
    return _moved(call, "split", numel(gathered), targets or [gathered], dtype_of(gathered))


def _gradients_in(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the split of gradients into one piece per rank, including padding; the dtype may change."""
    target = next(iter(tensors((call.attributes.get("out"),))), None)
    gradients = list(tensors(call.inputs[:1]))
    if target is None:
        raise UnforeseenCall(f"{call.name}: no output")
    return _moved(call, "concat", numel(target), gradients, dtype_of(target))


def _moved(call: OperatorCall, kind: str, elements: int, pieces: list[Tensor], dtype: str) -> list[DeviceWork]:
    """Return the rearrangement kernel; ``inner`` is the mean size of a piece."""
    inner = max(elements // max(len(pieces), 1), 1)
    return [DeviceWork(call.name, (Rearrangement(kind, elements, inner, dtype, len(pieces)),))]


TABLE: dict[str, Lowering] = {
    "fsdp::all_gather_copy_in": _copy_in,
    "fsdp::split_with_sizes_copy": _copy_out,
    "fsdp::chunk_cat": _gradients_in,
}
