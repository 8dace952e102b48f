"""Embedding tables: lookups, bags, tables batched into one operator; dense and fused gradients; FBGEMM's table-batched
embeddings, as recorded in execution traces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from costmodel.operators.device_work import RadixSort
from costmodel.operators.layers import element_bytes
from costmodel.operators.lookups import EmbeddingLookup
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    UnforeseenCall,
    argument,
    elementwise,
    fill,
    gpu_outputs,
    integers,
    numel,
    priced_dtype,
    rearrangement,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor, tensors

# Up to this many indices one kernel works without sorting (`embedding_dense_backward_cuda` in Embedding.cu), before and
# from compute capability 9 on; more are sorted by cub in a few passes.
_UNSORTED_INDICES = 3072, 4096
# Launches (traces of PyTorch 2.11): positions, histogram and its sums, eight digits, each with a memset, or positions
# and the sort of few by one block; then the segments of equal rows, counted, cut into parts and summed.
_SORTING, _SORTING_FEW, _SUMMING = 21, 2, 9
_FEW_INDICES = 2304
_MAXIMUM = 2  # torch.nn.functional.embedding_bag: 0 sum, 1 mean, 2 max


def _embedding(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``embedding(weight, indices)``: one row per index."""
    table, indices = tensor_argument(call, 0), tensor_argument(call, 1)
    count = numel(indices)
    record = EmbeddingLookup(table.shape[0], table.shape[1], count, count, dtype=priced_dtype(table))
    return [DeviceWork(call.name, (record,))]


def _embedding_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``embedding_dense_backward(grad, indices, rows, ...)``: a dense gradient, cleared first; many indices are
    sorted.
    """
    gradient, indices, output = tensor_argument(call, 0), tensor_argument(call, 1), gpu_outputs(call)[0]
    count = numel(indices)
    work = [fill(output, "aten::zero_")]
    many = count > _UNSORTED_INDICES[context.options.seen_gpu.capability >= (9, 0)]
    if many:
        work.append(_sort_all_bits(indices))
    record = EmbeddingLookup(
        output.shape[0], output.shape[1], count, count, dtype=priced_dtype(gradient), direction="backward"
    )
    return [*work, DeviceWork(call.name, (record,), launches=_SUMMING if many else 1)]


def _embedding_bag(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``_embedding_bag(weight, indices, offsets, ...)``: one output row per bag."""
    table, indices, output = tensor_argument(call, 0), tensor_argument(call, 1), gpu_outputs(call)[0]
    record = EmbeddingLookup(
        table.shape[0],
        table.shape[1],
        numel(indices),
        output.shape[0],
        dtype=priced_dtype(table),
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
        dtype=priced_dtype(gradient),
        direction="backward",
        kernel=_bag_kernel(count, bags),
    )
    return [
        fill(output, "aten::zero_"),
        _sort_all_bits(indices),
        DeviceWork(call.name, (record,), launches=_SUMMING),
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
    rows = values // max(record.dim, 1)
    return [
        elementwise(context, "linearize", indices, [indices, counts], name="linearize_index"),
        DeviceWork("DeviceRadixSort", (RadixSort(numel(indices), max((rows - 1).bit_length(), 1), 12),)),
        elementwise(context, "fill", one, (), name="DeviceCompactInit"),
        elementwise(context, "scan", counts, [indices], name="DeviceReduceByKey"),
        elementwise(context, "fill", one, (), name="DeviceScanInit"),
        elementwise(context, "scan", counts, [counts], name="DeviceScan"),
        DeviceWork(call.name, (record,)),
    ]


def _sort_all_bits(indices: Tensor) -> DeviceWork:
    """Return PyTorch's radix sort of row numbers with their positions: over all bits, however few rows there are."""
    size = element_bytes(indices.dtype)
    launches = _SORTING_FEW if numel(indices) <= _FEW_INDICES else _SORTING
    return DeviceWork("cub::DeviceRadixSort", (RadixSort(numel(indices), 8 * size, 2 * size),), launches=launches)


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
        dtype=priced_dtype(weights),
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


# Optimizer in FBGEMM's operator names, which runs inside the backward kernels -> name in this package.
OPTIMIZERS: Mapping[str, str] = {
    "rowwise_adagrad": "rowwise_adagrad",
    "approx_rowwise_adagrad": "rowwise_adagrad",
    "adagrad": "adagrad",
    "sgd": "sgd",
    "approx_sgd": "sgd",
    "adam": "adam",
    "dense": "",
}
FORWARD = (
    *(f"fbgemm::split_embedding_codegen_lookup_{name}_function" for name in OPTIMIZERS if name != "dense"),
    "fbgemm::dense_embedding_codegen_lookup_function",
)
BACKWARD = (
    *(f"torch::autograd::CppNode<SplitLookupFunction_{name}_Op>" for name in OPTIMIZERS if name != "dense"),
    "torch::autograd::CppNode<SplitLookupFunction_Dense_Op>",
)


def _fbgemm_forward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``fbgemm::split_embedding_codegen_lookup_<optimizer>_function``, and the lookup without a fused
    optimizer.
    """
    return [DeviceWork(call.name, (_record(call, "forward"),))]


def _fbgemm_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the autograd node of a lookup; a trace gives only its gradient, the rest is in the forward call.

    If the trace has no such forward call, the node is an operator of unknown work over its gradient.
    """
    gradient, optimizer = tensor_argument(call, 0), _optimizer_of(call.name)
    forward = _forward_of(gradient, optimizer, context)
    if forward is None:
        return [elementwise(context, "unknown", gradient, [gradient], name=call.name)]
    record = replace(_record(forward, "backward"), fused_optimizer=OPTIMIZERS[optimizer])
    values = _table_values(forward)
    work = update_work(call, context, record, batch_arguments(forward)[1], values)
    if record.fused_optimizer:
        return work
    return [fill(Tensor(-1, -1, (values,), gradient.dtype, gradient.device), "aten::zeros"), *work]


def _forward_of(gradient: Tensor, optimizer: str, context: Context) -> OperatorCall | None:
    for call in context.lookups:
        if _optimizer_of(call.name) == optimizer and [each.shape for each in tensors(call.outputs)] == [gradient.shape]:
            return call
    return None


def _optimizer_of(name: str) -> str:
    """Return the key of :data:`OPTIMIZERS` in ``..._lookup_adagrad_function`` or
    ``...SplitLookupFunction_adagrad_Op>``.
    """
    words = name.lower().removesuffix("_function").removesuffix("_op>")
    return next((each for each in OPTIMIZERS if words.endswith(("lookup_" + each, "function_" + each))), "dense")


def batch_arguments(call: OperatorCall) -> tuple[int, Tensor, Tensor, int]:
    """Return the sum of the widths, indices, offsets and number of tables.

    They are found as adjacent arguments (sum, widest, ends of the tables, bits of a row, indices, offsets): the other
    arguments differ between versions.
    """
    for place in range(len(call.inputs) - 5):
        width, widest, ends, bits, indices, offsets = call.inputs[place : place + 6]
        lists = [each for each in (ends, indices, offsets) if isinstance(each, Tensor) and len(each.shape) == 1]
        numbers = [each for each in (width, widest, bits) if type(each) is int]
        if len(lists) == 3 and len(numbers) == 3:
            return numbers[0], lists[1], lists[2], max(numel(lists[0]) - 1, 1)
    raise UnforeseenCall(f"{call.name}: indices and offsets not found")


def _table_values(call: OperatorCall) -> int:
    """Return the number of elements of all tables: the largest float tensor before the offsets."""
    return max(numel(each) for each in tensors(call.inputs) if each.dtype.startswith(("float", "bfloat", "uint8")))


def _record(call: OperatorCall, direction: Literal["forward", "backward"]) -> EmbeddingLookup:
    """Return the record of equal tables of mean size: a trace gives their number and the sums of widths and
    elements.
    """
    width, indices, offsets, tables = batch_arguments(call)
    dim = max(round(width / tables), 1)
    weights = next(each for each in tensors(call.inputs) if numel(each) == _table_values(call))
    return EmbeddingLookup(
        rows=max(numel(weights) // max(width, 1), 1),
        dim=dim,
        indices=max(round(numel(indices) / tables), 1),
        bags=max((numel(offsets) - 1) // tables, 1),
        tables=tables,
        dtype=priced_dtype(weights),
        direction=direction,
        kernel="table_batched",
    )


def _bounds_check(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``bounds_check_indices(rows per table, indices, offsets, ...)``: one warp per bag reads its indices."""
    indices = tensor_argument(call, 1)
    return [elementwise(context, "bounds_check", indices, [indices], name="bounds_check_indices_kernel")]


def _cumulative_sum(call: OperatorCall, context: Context) -> list[DeviceWork]:
    return _scan(tensor_argument(call, 0), context)


def _scan(values: Tensor, context: Context) -> list[DeviceWork]:
    """Return cub's scan: initialisation of its state, then one pass."""
    state = Tensor(-1, -1, (1,), "int32", values.device)
    return [
        elementwise(context, "fill", state, (), name="DeviceScanInit"),
        elementwise(context, "scan", values, [values], name="DeviceScan"),
    ]


def _permute(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``permute_2D_sparse_data(permutation, lengths, values, ...)``: lengths moved, two scans, values moved."""
    lengths, values = tensor_argument(call, 1), tensor_argument(call, 2)
    sums = [*_scan(lengths, context), *_scan(lengths, context)]
    first = rearrangement("gather", lengths, inner=lengths.shape[-1], name="permute_2D_lengths_kernel")
    return [first, *sums, rearrangement("gather", values, name="permute_2D_data_kernel")]


FBGEMM_TABLE: dict[str, Lowering] = {
    **dict.fromkeys(FORWARD, _fbgemm_forward),
    **dict.fromkeys(BACKWARD, _fbgemm_backward),
    "fbgemm::bounds_check_indices": _bounds_check,
    "fbgemm::asynchronous_complete_cumsum": _cumulative_sum,
    "fbgemm::permute_2D_sparse_data": _permute,
}
