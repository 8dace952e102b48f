"""Fused kernels of training stacks, see :mod:`e2e.capture.models.stack_kernels`: one launch each."""

from __future__ import annotations

from costmodel.operators.device_work import Elementwise
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    dtype_of,
    elementwise,
    gpu_outputs,
    numel,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, tensors


def _pointwise(kind: str) -> Lowering:
    """Return the lowering of a kernel that reads all inputs and writes all outputs once."""

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        outputs = gpu_outputs(call)
        return [elementwise(context, kind, outputs[0], tensors(call.inputs), len(outputs), call.name)]

    return lower


def _halves(reads: int, writes: int, place: int) -> Lowering:
    """Return the lowering of a gated activation; ``reads`` and ``writes`` count tensors half as large as argument
    ``place``.
    """

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        both = tensor_argument(call, place)
        record = Elementwise("silu_mul", numel(both) // 2, reads, writes, 0, dtype_of(both))
        return [DeviceWork(call.name, (record,))]

    return lower


def _over_scores(reads: int, writes: int) -> Lowering:
    """Return the lowering of passes over the scores; the one number per token is neglected."""

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        scores = tensor_argument(call, 0)
        record = Elementwise("cross_entropy", numel(scores), reads, writes, 0, dtype_of(scores))
        return [DeviceWork(call.name, (record,))]

    return lower


TABLE: dict[str, Lowering] = {
    "stack::squared_relu": _pointwise("squared_relu"),
    "stack::squared_relu_backward": _pointwise("squared_relu_backward"),
    "stack::rotary": _pointwise("rotary"),
    "stack::rotary_backward": _pointwise("rotary_backward"),
    "stack::gated": _pointwise("silu_mul"),
    "stack::gated_backward": _pointwise("silu_mul_backward"),
    "stack::packed_gated": _halves(2, 1, 0),
    "stack::packed_gated_backward": _halves(3, 2, 1),
    "stack::cross_entropy": _over_scores(1, 0),
    "stack::cross_entropy_backward_": _over_scores(1, 1),
}
