"""Embedding tables: lookups, bags, tables batched into one operator; dense and fused gradients."""

from __future__ import annotations

from typing import Literal

from costmodel.operators.device_work import RadixSort
from costmodel.operators.lookups import EmbeddingLookup
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    argument,
    dtype_of,
    elementwise,
    fill,
    gpu_outputs,
    integers,
    numel,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor

# Up to this many indices one kernel works without sorting (`embedding_dense_backward_cuda` in Embedding.cu); more are
# sorted by cub in a few passes.
UNSORTED_INDICES = 3072
_MAXIMUM = 2  # torch.nn.functional.embedding_bag: 0 sum, 1 mean, 2 max


def _embedding(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``embedding(weight, indices)``: one row per index."""
    table, indices = tensor_argument(call, 0), tensor_argument(call, 1)
    count = numel(indices)
    record = EmbeddingLookup(table.shape[0], table.shape[1], count, count, dtype=dtype_of(table))
    return [DeviceWork(call.name, (record,))]


def _embedding_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``embedding_dense_backward(grad, indices, rows, ...)``: a dense gradient, cleared first; many indices are
    sorted.
    """
    gradient, indices, output = tensor_argument(call, 0), tensor_argument(call, 1), gpu_outputs(call)[0]
    count = numel(indices)
    work = [fill(output, "aten::zero_")]
    if count > UNSORTED_INDICES:
        work.append(_sort(indices, output.shape[0]))
    record = EmbeddingLookup(
        output.shape[0], output.shape[1], count, count, dtype=dtype_of(gradient), direction="backward"
    )
    return [*work, DeviceWork(call.name, (record,))]


def _embedding_bag(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``_embedding_bag(weight, indices, offsets, ...)``: one output row per bag."""
    table, indices, output = tensor_argument(call, 0), tensor_argument(call, 1), gpu_outputs(call)[0]
    record = EmbeddingLookup(
        table.shape[0],
        table.shape[1],
        numel(indices),
        output.shape[0],
        dtype=dtype_of(table),
        kernel=_bag_kernel(numel(indices), output.shape[0]),
        mode="max" if argument(call, 4) == _MAXIMUM else "sum",
    )
    return [DeviceWork(call.name, (record,))]


def _bag_kernel(lookups: int, bags: int) -> Literal["auto", "embedding_bag"]:
    """Return the kernel for bags; bags of one lookup each would otherwise count as plain lookups."""
    return "embedding_bag" if lookups == bags else "auto"


def _embedding_bag_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the gradient: sorted by row, then summed per row into a dense gradient
    (``embedding_bag_backward_cuda_sum_avg``).
    """
    gradient, indices, output = tensor_argument(call, 0), tensor_argument(call, 1), gpu_outputs(call)[0]
    count, bags = numel(indices), gradient.shape[0]
    record = EmbeddingLookup(
        output.shape[0],
        output.shape[1],
        count,
        bags,
        dtype=dtype_of(gradient),
        direction="backward",
        kernel=_bag_kernel(count, bags),
    )
    return [
        fill(output, "aten::zero_"),
        _sort(indices, output.shape[0]),
        DeviceWork(call.name, (record,)),
    ]


def _tables_forward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``e2e::table_batched_embedding(weights, indices, rows, tables, batch, optimizer)``: all tables in one
    kernel.
    """
    return [DeviceWork(call.name, (_tables_record(call, tensor_argument(call, 0), tensor_argument(call, 1), False),))]


def _tables_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    record = _tables_record(_shifted(call), tensor_argument(call, 1), tensor_argument(call, 2), True)
    return update_work(call, context, record, tensor_argument(call, 2), numel(tensor_argument(call, 1)))


def update_work(
    call: OperatorCall, context: Context, record: EmbeddingLookup, indices: Tensor, values: int
) -> list[DeviceWork]:
    """Return FBGEMM's nine launches: rows made global, sorted, counted and found (scans), then summed and updated.

    ``values``: elements of all tables. The search for rows with many lookups and their kernel are part of the last
    piece.
    """
    counts = Tensor(-1, -1, indices.shape, "int32", indices.device)
    one = Tensor(-1, -1, (1,), "int32", indices.device)
    return [
        elementwise(context, "linearize", indices, [indices, counts], name="linearize_index"),
        _sort(indices, values // max(record.dim, 1), pair_bytes=12, name="DeviceRadixSort"),
        elementwise(context, "fill", one, (), name="DeviceCompactInit"),
        elementwise(context, "scan", counts, [indices], name="DeviceReduceByKey"),
        elementwise(context, "fill", one, (), name="DeviceScanInit"),
        elementwise(context, "scan", counts, [counts], name="DeviceScan"),
        DeviceWork(call.name, (record,)),
    ]


def _sort(indices: Tensor, rows: int, pair_bytes: int = 16, name: str = "cub::DeviceRadixSort") -> DeviceWork:
    """Return the radix sort of row numbers below ``rows`` with their positions, over the bits of the largest number."""
    return DeviceWork(name, (RadixSort(numel(indices), max((rows - 1).bit_length(), 1), pair_bytes),))


def _shifted(call: OperatorCall) -> OperatorCall:
    """Return the call without its first argument: the backward operator has the gradient before the forward
    arguments.
    """
    return OperatorCall(call.id, call.name, call.parent, call.thread, call.inputs[1:], call.outputs)


def _tables_record(call: OperatorCall, weights: Tensor, indices: Tensor, backward: bool) -> EmbeddingLookup:
    rows, tables, batch = (integers(argument(call, place))[0] for place in (2, 3, 4))
    optimizer = argument(call, 5)
    return EmbeddingLookup(
        rows=rows,
        dim=weights.shape[1],
        indices=numel(indices) // max(tables, 1),
        bags=batch,
        tables=tables,
        dtype=dtype_of(weights),
        direction="backward" if backward else "forward",
        fused_optimizer=optimizer if backward and isinstance(optimizer, str) else "",
    )


TABLE: dict[str, Lowering] = {
    "aten::embedding": _embedding,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_embedding_bag": _embedding_bag,
    "aten::_embedding_bag_forward_only": _embedding_bag,
    "aten::_embedding_bag_dense_backward": _embedding_bag_backward,
    "aten::_embedding_bag_backward": _embedding_bag_backward,
    "e2e::table_batched_embedding": _tables_forward,
    "e2e::table_batched_embedding_backward": _tables_backward,
}
