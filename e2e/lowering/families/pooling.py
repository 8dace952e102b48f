"""Window and adaptive pooling, forward and backward."""

from __future__ import annotations

from costmodel.operators.device_work import Pooling
from e2e.lowering.families.strides import is_channels_last
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    argument,
    dtype_of,
    gpu_outputs,
    memset,
    pair,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor


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
        dtype=dtype_of(data),
        direction="forward" if direction == "forward" else "backward",
        channels_last=is_channels_last(data.shape, context.stride(data)),
    )


TABLE: dict[str, Lowering] = {
    "aten::max_pool2d_with_indices": _pool("max"),
    "aten::max_pool2d": _pool("max"),
    "aten::avg_pool2d": _pool("average"),
    "aten::max_pool2d_with_indices_backward": _pool_backward("max"),
    "aten::avg_pool2d_backward": _pool_backward("average"),
    "aten::_adaptive_avg_pool2d": _adaptive_pool,
    "aten::adaptive_avg_pool2d": _adaptive_pool,
    "aten::_adaptive_avg_pool2d_backward": _adaptive_pool_backward,
}
