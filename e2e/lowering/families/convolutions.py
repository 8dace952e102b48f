"""Operators with windows over images: convolutions with their data and weight gradients; window and adaptive pooling,
forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from costmodel.operators.device_work import ConvolutionBackward, Pooling
from costmodel.operators.layers import DTYPE_BYTES, Conv2d
from e2e.lowering.families.products import product_dtype
from e2e.lowering.families.reductions import reduction
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    UnforeseenCall,
    argument,
    elementwise,
    gpu_outputs,
    integers,
    is_channels_last,
    lies_dense,
    memset,
    pair,
    priced_dtype,
    rearrangement,
    size_bytes,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor, Value, tensors


def conv2d(
    data: tuple[int, ...],
    weight: tuple[int, ...],
    stride: Value,
    padding: Value,
    dilation: Value,
    groups: int,
    dtype: str,
    channels_last: bool = False,
) -> Conv2d:
    """Return the record of a convolution with ``data`` (N, C, spatial...) and ``weight`` (K, C / groups, spatial...).

    A 1-d convolution is one over an image of height 1. A 3-d convolution does the products of a 2-d convolution over
    the last two dimensions, with the kernel's depth folded into the channels, over planes that several windows share
    (``Conv2d.depth``).
    """
    rank = len(data) - 2
    steps, pads, spreads = _each(stride, 1, rank), _each(padding, 0, rank), _each(dilation, 1, rank)
    batch, channels, depth = data[0], data[1], None
    if rank == 3:
        depth = (weight[2], data[0] * data[2])
        batch *= (data[2] + 2 * pads[0] - spreads[0] * (weight[2] - 1) - 1) // steps[0] + 1
        channels *= weight[2]
    (height, width), window = _plane(data[2:]), _plane(weight[2:])
    (row_step, column_step), (row_spread, column_spread) = _plane(steps), _plane(spreads)
    rows, columns = _plane(pads) if rank > 1 else (0, pads[0])
    return Conv2d(
        batch=batch,
        in_channels=channels,
        height=height,
        width=width,
        out_channels=weight[0],
        kernel=window,
        stride=(row_step, column_step),
        padding=(rows, columns, rows, columns),
        dilation=(row_spread, column_spread),
        groups=groups,
        dtype=dtype,
        channels_last=channels_last,
        depth=depth,
    )


def takes_channels_last(context: Context, data: Tensor, weight: Tensor) -> bool:
    """True if the data or the weights are in NHWC (``cudnn_conv_suggest_memory_format`` in ConvUtils.h)."""
    return any(is_channels_last(each.shape, context.stride(each)) for each in (data, weight))


def _brought(context: Context, channels_last: bool, *operands: Tensor) -> list[DeviceWork]:
    """Return copies of operands whose layout differs from the convolution's (``contiguous``)."""
    return [
        rearrangement("transpose", each, name="aten::copy_")
        for each in operands
        if context.stride(each) and not lies_dense(each.shape, context.stride(each), channels_last)
    ]


_VECTOR_BYTES = 16  # loaded at once by a product
_HOPPER = 9  # compute capability
_NARROW = 64  # products of an output below which no tensor cores are used
_TensorPass = Literal["forward", "data", "weight"]
# Launches of a convolution in NCHW, as traces of cuDNN 9.19 on an H200 show most of them: copies of both operands to
# NHWC, the products (for weights with a clear or a start), the copy of the result back.
_COPYING: Mapping[_TensorPass, int] = {"forward": 4, "data": 4, "weight": 5}
# Windows of one pixel: weights have no layout.
_PIXEL: Mapping[_TensorPass, int] = {"forward": 3, "data": 3, "weight": 4}
# The same as matrix products of whole images; those of the weights are split and summed.
_PRODUCT: Mapping[_TensorPass, int] = {"forward": 1, "data": 1, "weight": 2}


def _work(call: OperatorCall, record: Conv2d, what: _TensorPass, context: Context) -> DeviceWork:
    """Return the kernels of a pass of the convolution ``record``, with one time."""
    operator = record if what == "forward" else ConvolutionBackward(record, what)
    launches = 1 if context.is_compiled(call) else _launches(record, what, context)
    return DeviceWork(call.name, (operator,), launches=launches)


def _launches(conv: Conv2d, what: _TensorPass, context: Context) -> int:
    """Return the number of launches: Hopper's tensor cores take NHWC only."""
    if context.options.seen_gpu.capability[0] != _HOPPER or conv.channels_last or conv.dtype == "float32":
        return 1
    if conv.groups > 1 or conv.depth is not None:
        return 1
    if conv.kernel == (1, 1):
        vector = _VECTOR_BYTES // DTYPE_BYTES[conv.dtype]
        whole = conv.height * conv.width % vector == 0 and conv.stride == (1, 1)
        return (_PRODUCT if whole else _PIXEL)[what]
    if conv.in_channels * conv.kernel[0] * conv.kernel[1] < _NARROW:
        return 2 if what == "weight" else 1
    return _COPYING[what]


def _each(value: Value, default: int, rank: int) -> tuple[int, ...]:
    """Return one number per spatial dimension; a single one applies to all."""
    numbers = integers(value) or (default,)
    return numbers * rank if len(numbers) == 1 else numbers


def _plane(extents: tuple[int, ...]) -> tuple[int, int]:
    """Return the last two of ``extents``; height 1 for a 1-d shape."""
    return (1, extents[0]) if len(extents) == 1 else (extents[-2], extents[-1])


def _groups(value: Value) -> int:
    return int(value) if isinstance(value, int) and value > 0 else 1


def _cudnn(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``cudnn_convolution(input, weight, padding, stride, dilation, groups, ...)``."""
    data, weight = tensor_argument(call, 0), tensor_argument(call, 1)
    padding, stride, dilation, groups = (argument(call, place) for place in range(2, 6))
    dtype = product_dtype(data, context, context.options.switches.convolutions)
    last = takes_channels_last(context, data, weight)
    record = conv2d(data.shape, weight.shape, stride, padding, dilation, _groups(groups), dtype, last)
    return [*_brought(context, last, data), _work(call, record, "forward", context)]


def _cudnn_transpose(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a transposed convolution: the data gradient of the convolution from its output to its input."""
    data, weight = tensor_argument(call, 0), tensor_argument(call, 1)
    padding, _, stride, dilation, groups = (argument(call, place) for place in range(2, 7))
    image = gpu_outputs(call)[0].shape
    dtype = product_dtype(data, context, context.options.switches.convolutions)
    last = takes_channels_last(context, data, weight)
    forward = conv2d(image, weight.shape, stride, padding, dilation, _groups(groups), dtype, last)
    return [_work(call, forward, "data", context)]


def _convolution(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)``."""
    data, weight = tensor_argument(call, 0), tensor_argument(call, 1)
    bias, stride, padding, dilation, transposed, _, groups = (argument(call, place) for place in range(2, 9))
    dtype = product_dtype(data, context, context.options.switches.convolutions)
    output = gpu_outputs(call)[0]
    image = output.shape if transposed else data.shape
    last = takes_channels_last(context, data, weight)
    record = conv2d(image, weight.shape, stride, padding, dilation, _groups(groups), dtype, last)
    work = [DeviceWork(call.name, (ConvolutionBackward(record, "data") if transposed else record,))]
    if isinstance(bias, Tensor):
        work.append(elementwise(context, "add", output, [output, bias], name="add_"))
    return work


def _conv2d(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``conv2d(input, weight, bias, stride, padding, dilation, groups)`` without recorded nested calls."""
    data, weight = tensor_argument(call, 0), tensor_argument(call, 1)
    bias = argument(call, 2, "bias")
    stride, padding = argument(call, 3, "stride", 1), argument(call, 4, "padding", 0)
    dilation, groups = argument(call, 5, "dilation", 1), argument(call, 6, "groups", 1)
    dtype = product_dtype(data, context, context.options.switches.convolutions)
    last = takes_channels_last(context, data, weight)
    record = conv2d(data.shape, weight.shape, stride, padding, dilation, _groups(groups), dtype, last)
    work = [DeviceWork(call.name, (record,))]
    if isinstance(bias, Tensor):
        output = gpu_outputs(call)[0]
        work.append(elementwise(context, "add", output, [output, bias], name="add_"))
    return work


def _convolution_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``convolution_backward(grad, input, weight, bias_sizes, stride, padding, dilation, transposed, ...)``.

    Gradients by the output mask: of the data, of the weights, and of the bias, a sum over all dimensions but channels.
    """
    gradient, data, weight = (tensor_argument(call, place) for place in range(3))
    stride, padding, dilation, transposed = (argument(call, place) for place in range(4, 8))
    groups = _groups(argument(call, 9))
    dtype = product_dtype(data, context, context.options.switches.convolutions)
    image = gradient.shape if transposed else data.shape
    last = takes_channels_last(context, data, weight)
    forward = conv2d(image, weight.shape, stride, padding, dilation, groups, dtype, last)
    mask = argument(call, 10, "output_mask", (True, True, True))
    wanted = mask if isinstance(mask, tuple) and len(mask) == 3 else (True, True, True)
    has_bias = any(isinstance(size, int) and size > 0 for size in integers(argument(call, 3)))
    work = _brought(context, last, gradient)
    if wanted[0]:
        work.append(_work(call, forward, "forward" if transposed else "data", context))
    if wanted[1]:
        work.append(_work(call, forward, "weight", context))
    if wanted[2] and has_bias:
        sums = Tensor(-1, -1, (gradient.shape[1],), gradient.dtype, gradient.device)
        others = tuple(each for each in range(len(gradient.shape)) if each != 1)
        summed = reduction("sum", gradient, sums, context, "aten::sum", others, context.is_compiled(call))
        work.append(replace(summed, auxiliary=True))
    return work


TABLE: dict[str, Lowering] = {
    "aten::cudnn_convolution": _cudnn,
    "aten::cudnn_convolution_transpose": _cudnn_transpose,
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::conv1d": _conv2d,
    "aten::conv2d": _conv2d,
    "aten::conv3d": _conv2d,
    "aten::convolution_backward": _convolution_backward,
}


def copied_bytes(call: OperatorCall, context: Context) -> int:
    """Return the bytes of the copies in NHWC that a convolution makes of its operands and its result, 0 if none."""
    lowering = TABLE.get(call.name)
    if lowering is None or context.is_compiled(call):
        return 0
    try:
        launches = max(each.launches for each in lowering(call, context))
    except (UnforeseenCall, IndexError, ValueError):
        return 0  # treated as an unknown operator
    if launches < min(_PIXEL.values()):
        return 0
    # A backward pass has the same three for either gradient, one after the other.
    backward = call.name == "aten::convolution_backward"
    operands = call.inputs[:3] if backward else (*call.inputs[:2], *call.outputs[:1])
    return sum(size_bytes(each) for each in tensors(operands))


def _image(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return (N, C, H, W) of a 1-d, 2-d or 3-d image; depth is folded into the height."""
    if len(shape) == 3:
        return shape[0], shape[1], 1, shape[2]
    if len(shape) == 5:
        return shape[0], shape[1], shape[2] * shape[3], shape[4]
    return shape[0], shape[1], shape[2], shape[3]


def _pool(kind: str) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        data, output = tensor_argument(call, 0), gpu_outputs(call)[0]
        window = pair(argument(call, 1), 1)
        return [DeviceWork(call.name, (_pooling(context, kind, data, output, window, "forward"),))]

    return lower


def _pool_backward(kind: str) -> Lowering:
    """Return the lowering of ``(grad_output, input, kernel, ...)``; the scattering form adds to a gradient that is
    cleared first.
    """

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        gradient, data = tensor_argument(call, 0), tensor_argument(call, 1)
        work = [
            DeviceWork(call.name, (_pooling(context, kind, data, gradient, pair(argument(call, 2), 1), "backward"),))
        ]
        return [memset(data, "zero_"), *work] if kind == "max" else work

    return lower


def _adaptive_pool(call: OperatorCall, context: Context) -> list[DeviceWork]:
    data, output = tensor_argument(call, 0), gpu_outputs(call)[0]
    return [DeviceWork(call.name, (_pooling(context, "average", data, output, _ratio(data, output), "forward"),))]


def _adaptive_pool_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    gradient, data = tensor_argument(call, 0), tensor_argument(call, 1)
    return [DeviceWork(call.name, (_pooling(context, "average", data, gradient, _ratio(data, gradient), "backward"),))]


def _ratio(data: Tensor, output: Tensor) -> tuple[int, int]:
    return max(data.shape[-2] // output.shape[-2], 1), max(data.shape[-1] // output.shape[-1], 1)


def _pooling(
    context: Context, kind: str, data: Tensor, output: Tensor, window: tuple[int, int], direction: str
) -> Pooling:
    batch, channels, height, width = _image(data.shape if len(data.shape) > 2 else (1, *data.shape))
    out = _image(output.shape if len(output.shape) > 2 else (1, *output.shape))
    return Pooling(
        kind="max" if kind == "max" else "average",
        batch=batch,
        channels=channels,
        height=height,
        width=width,
        out_height=out[2],
        out_width=out[3],
        kernel=window,
        dtype=priced_dtype(data),
        direction="forward" if direction == "forward" else "backward",
        channels_last=is_channels_last(data.shape, context.stride(data)),
    )


POOLING_TABLE: dict[str, Lowering] = {
    "aten::max_pool2d_with_indices": _pool("max"),
    "aten::max_pool2d": _pool("max"),
    "aten::avg_pool2d": _pool("average"),
    "aten::max_pool2d_with_indices_backward": _pool_backward("max"),
    "aten::avg_pool2d_backward": _pool_backward("average"),
    "aten::_adaptive_avg_pool2d": _adaptive_pool,
    "aten::adaptive_avg_pool2d": _adaptive_pool,
    "aten::_adaptive_avg_pool2d_backward": _adaptive_pool_backward,
}
