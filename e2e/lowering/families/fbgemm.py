"""FBGEMM's table-batched embeddings, as recorded in execution traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from costmodel.operators.lookups import EmbeddingLookup
from e2e.lowering.families.embedding_operators import update_work
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    UnforeseenCall,
    dtype_of,
    elementwise,
    fill,
    numel,
    rearrangement,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor, tensors

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


def _forward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``fbgemm::split_embedding_codegen_lookup_<optimizer>_function``, and the lookup without a fused
    optimizer.
    """
    return [DeviceWork(call.name, (_record(call, "forward"),))]


def _backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
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
        dtype=dtype_of(weights),
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


TABLE: dict[str, Lowering] = {
    **dict.fromkeys(FORWARD, _forward),
    **dict.fromkeys(BACKWARD, _backward),
    "fbgemm::bounds_check_indices": _bounds_check,
    "fbgemm::asynchronous_complete_cumsum": _cumulative_sum,
    "fbgemm::permute_2D_sparse_data": _permute,
}
