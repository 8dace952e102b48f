"""FSDP2's own operators: parameters into and out of the flat buffers that its collectives take.

They are ``_foreach_copy_``, ``split_with_sizes_copy`` and ``_chunk_cat`` underneath
(``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``), each one kernel over all parameters of a group.
"""

from __future__ import annotations

from costmodel.operators.device_work import Rearrangement
from e2e.lowering.families.work import Context, DeviceWork, Lowering, UnforeseenCall, dtype_of, numel, tensor_argument
from e2e.step.operator_trace import OperatorCall, Tensor, tensors


def _copy_in(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Shards side by side into the part of the all-gather's buffer that belongs to this rank."""
    shards = list(tensors(call.inputs[:1]))
    return _moved(call, "concat", sum(map(numel, shards)), shards, dtype_of(tensor_argument(call, 1)))


def _copy_out(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """The gathered buffer into whole parameters: from every rank's part a piece of each."""
    gathered = tensor_argument(call, 0)
    targets = list(tensors((call.attributes.get("out"),)))
    return _moved(call, "split", numel(gathered), targets or [gathered], dtype_of(gathered))


def _gradients_in(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Gradients cut into one piece per rank; padding is written too, and the dtype may change on the way."""
    target = next(iter(tensors((call.attributes.get("out"),))), None)
    gradients = list(tensors(call.inputs[:1]))
    if target is None:
        raise UnforeseenCall(f"{call.name}: no output")
    return _moved(call, "concat", numel(target), gradients, dtype_of(target))


def _moved(call: OperatorCall, kind: str, elements: int, pieces: list[Tensor], dtype: str) -> list[DeviceWork]:
    """``inner``: the mean piece moves as one run."""
    inner = max(elements // max(len(pieces), 1), 1)
    return [DeviceWork(call.name, (Rearrangement(kind, elements, inner, dtype, len(pieces)),))]


TABLE: dict[str, Lowering] = {
    "fsdp::all_gather_copy_in": _copy_in,
    "fsdp::split_with_sizes_copy": _copy_out,
    "fsdp::chunk_cat": _gradients_in,
}
