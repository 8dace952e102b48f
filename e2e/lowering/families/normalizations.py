"""Batch, layer, RMS and group normalisation, forward and backward."""

from __future__ import annotations

from math import prod

from costmodel.operators.device_work import Elementwise, Normalization, Reduction
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    argument,
    gpu_outputs,
    integers,
    is_channels_last,
    numel,
    priced_dtype,
    rearrangement,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor


def _batch_norm(place: int, training_place: int) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        data = tensor_argument(call, place)
        training = argument(call, training_place, "training", True) is True
        return [DeviceWork(call.name, (_batch_norm_record(context, data, "forward", training),))]

    return lower


def _batch_norm_backward(place: int) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        record = _batch_norm_record(context, tensor_argument(call, place), "backward", True)
        return [DeviceWork(call.name, (record,))]

    return lower


def _batch_norm_record(context: Context, data: Tensor, direction: str, training: bool) -> Normalization:
    channels = data.shape[1]
    rows = numel(data) // max(channels, 1)
    forward = direction == "forward"
    dtype = priced_dtype(data)
    last = is_channels_last(data.shape, context.stride(data))
    apart = data.shape[0] == 1 or len(data.shape) == 5
    return Normalization(
        "batch_norm", rows, channels, dtype, "forward" if forward else "backward", training, last, apart
    )


def _row_norm(kind: str) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        data = tensor_argument(call, 0)
        columns = max(prod(integers(argument(call, 1))), 1)
        record = Normalization(kind, numel(data) // columns, columns, priced_dtype(data))
        return [DeviceWork(call.name, (record,))]

    return lower


def _row_norm_backward(kind: str) -> Lowering:
    """Return the lowering of a gradient: one kernel for the data, one that sums the gradients of the affine parameters
    over the rows.
    """

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        data = tensor_argument(call, 1)
        columns = max(prod(integers(argument(call, 2))), 1)
        rows = numel(data) // columns
        dtype = priced_dtype(data)
        work = [DeviceWork(call.name, (Normalization(kind, rows, columns, dtype, "backward"),))]
        parameters = len(gpu_outputs(call)) - 1
        if parameters > 0:
            name = "norm_parameters" if parameters > 1 else "norm_weight"
            record = Reduction(name, 2 * numel(data), parameters * columns, dtype, contiguous=False)
            work.append(DeviceWork(call.name, (record,)))
        return work

    return lower


def _group_norm(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``native_group_norm(input, weight, bias, N, C, HxW, group, eps)`` (group_norm_kernel.cu).

    Moments, with one block of threads per group and image; factors of each channel; the output. NHWC images are copied
    to NCHW first.
    """
    data = tensor_argument(call, 0)
    batch, groups = (integers(argument(call, place)) or (1,) for place in (3, 6))
    moments = Reduction("moments", numel(data), 2 * batch[0] * groups[0], priced_dtype(data))
    return [
        *_in_nchw(context, data),
        *(DeviceWork(call.name, (work,)) for work in (moments, *_scaled(data, 1))),
    ]


def _group_norm_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the gradient of a group norm.

    Sums over each channel of each image, which also give the gradients of weights and bias; factors; the gradient of
    the data.
    """
    gradient, data = tensor_argument(call, 0), tensor_argument(call, 1)
    channels = data.shape[0] * data.shape[1]
    sums = Reduction("moments", 2 * numel(data), 2 * channels, priced_dtype(data))
    parameters = Reduction("norm_parameters", 2 * channels, 2 * data.shape[1], contiguous=False)
    return [
        *_in_nchw(context, gradient, data),
        *(DeviceWork(call.name, (work,)) for work in (sums, *_scaled(data, 2), parameters)),
    ]


def _scaled(data: Tensor, inputs: int) -> tuple[Elementwise, Elementwise]:
    """Return the kernels for two factors per channel and image, and for scaling ``inputs`` tensors like ``data``."""
    channels = data.shape[0] * data.shape[1]
    factors = Elementwise("group_norm", channels, 2, 2)
    return factors, Elementwise("group_norm", numel(data), inputs, 1, 2 * channels, priced_dtype(data))


def _in_nchw(context: Context, *operands: Tensor) -> list[DeviceWork]:
    return [
        rearrangement("transpose", each, name="aten::copy_")
        for each in operands
        if is_channels_last(each.shape, context.stride(each))
    ]


def _shared_batch_norm(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the parts of ``SyncBatchNorm`` (SyncBatchNorm in Normalization.cuh): moments of a rank, those of all ranks
    together, the output; sums of gradients, the gradient of the data.
    """
    data = tensor_argument(call, 0)
    channels = data.shape[1]
    work: Reduction | Elementwise
    if call.name == "aten::batch_norm_stats":
        work = Reduction("moments", numel(data), 2 * channels, priced_dtype(data))
    elif call.name == "aten::batch_norm_backward_reduce":
        work = Reduction("moments", 2 * numel(data), 2 * channels, priced_dtype(data))
    elif call.name == "aten::batch_norm_gather_stats_with_counts":
        work = Elementwise("batch_norm", numel(tensor_argument(call, 1)), 2, 0, 4 * channels)
    else:
        inputs = 2 if "backward" in call.name else 1
        work = Elementwise("batch_norm", numel(data), inputs, 1, 4 * channels, priced_dtype(data))
    return [DeviceWork(call.name, (work,))]


def _weight_norm(reads: int, writes: int) -> Lowering:
    """Return the lowering of weights scaled to a length per row: norms first, then the scaled weights
    (WeightNorm.cu).
    """

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        weight = tensor_argument(call, 0)
        return [
            DeviceWork(call.name, (Elementwise("weight_norm", numel(weight), reads, writes, 0, priced_dtype(weight)),))
        ]

    return lower


TABLE: dict[str, Lowering] = {
    "aten::_weight_norm_interface": _weight_norm(2, 1),
    "aten::_weight_norm_interface_backward": _weight_norm(4, 1),
    "aten::cudnn_batch_norm": _batch_norm(0, 5),
    "aten::native_batch_norm": _batch_norm(0, 5),
    "aten::_native_batch_norm_legit": _batch_norm(0, 5),
    "aten::batch_norm": _batch_norm(0, 5),
    "aten::cudnn_batch_norm_backward": _batch_norm_backward(0),
    "aten::native_batch_norm_backward": _batch_norm_backward(1),
    "aten::batch_norm_stats": _shared_batch_norm,
    "aten::batch_norm_gather_stats_with_counts": _shared_batch_norm,
    "aten::batch_norm_elemt": _shared_batch_norm,
    "aten::batch_norm_backward_reduce": _shared_batch_norm,
    "aten::batch_norm_backward_elemt": _shared_batch_norm,
    "aten::native_layer_norm": _row_norm("layer_norm"),
    "aten::layer_norm": _row_norm("layer_norm"),
    "aten::_fused_rms_norm": _row_norm("rms_norm"),
    "aten::native_layer_norm_backward": _row_norm_backward("layer_norm"),
    "aten::_fused_rms_norm_backward": _row_norm_backward("rms_norm"),
    "aten::native_group_norm": _group_norm,
    "aten::native_group_norm_backward": _group_norm_backward,
}
