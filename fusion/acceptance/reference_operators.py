"""ONNX operators in NumPy, in the precision of their operands.

ONNX's own reference computes windows pixel by pixel in Python, and supports only one direction of LSTM and GRU; here
each window tap is one array operation. The code is independent of our kernels and importer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_resize import Resize as SlowResize
from onnx.reference.ops.op_resize import _interpolate_nd, _linear_coeffs, _nearest_coeffs

# Largest number of bytes of gathered convolution taps for one matrix product.
GATHERED_BYTES = 64 * 2**20

Windows = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]  # kernel, strides, dilations, pads
# (inputs to the gates, hidden state, cell state) -> (hidden state, cell state)
Step = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class Conv(OpRun):
    """Convolution of any rank: sum over taps of weights times shifted images."""

    def _run(
        self,
        data: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[np.ndarray]:
        kernel, groups = weight.shape[2:], group or 1
        windows = resolve_windows(data.shape[2:], kernel, strides, dilations, pads, auto_pad)
        padded = pad(data, windows[3], 0.0)
        sizes = window_counts(padded.shape[2:], windows)
        views = taps(padded, windows, sizes)
        if weight.shape[:2] == (groups, 1):
            result = _depthwise(views, weight.reshape(groups, -1))
        else:
            result = _grouped(views, weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1))
        return (result if bias is None else result + bias.reshape(-1, *(1,) * len(sizes)),)


def _depthwise(views: Iterator[np.ndarray], weight: np.ndarray) -> np.ndarray:
    """Depthwise convolution from tap views; ``weight``: (channels, taps)."""
    total: Any = 0.0
    for view, factors in zip(views, weight.T, strict=True):
        total = total + view * factors.reshape(-1, *(1,) * (view.ndim - 2))
    return total


def _grouped(views: Iterator[np.ndarray], weight: np.ndarray) -> np.ndarray:
    """Grouped convolution from tap views; ``weight``: (groups, outputs per group, inputs per group, taps)."""
    groups, outputs, inputs, _ = weight.shape
    result: Any = 0.0
    done = 0
    for first in views:
        at_once = max(1, GATHERED_BYTES // max(1, first.size * first.itemsize))
        gathered = [first, *itertools.islice(views, at_once - 1)]
        part = weight[..., done : done + len(gathered)].transpose(0, 1, 3, 2).reshape(groups, outputs, -1)
        shaped = [view.reshape(view.shape[0], groups, inputs, -1) for view in gathered]
        stacked = shaped[0] if len(shaped) == 1 else np.stack(shaped, axis=2)
        result = result + np.matmul(part, stacked.reshape(first.shape[0], groups, len(gathered) * inputs, -1))
        done += len(gathered)
    return result.reshape(first.shape[0], groups * outputs, *first.shape[2:])


class ConvTranspose(OpRun):
    """Transposed convolution: every tap adds its product to a strided view of the output."""

    def _run(
        self,
        data: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int | None = None,
        kernel_shape: Sequence[int] | None = None,
        output_padding: Sequence[int] | None = None,
        output_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[np.ndarray]:
        image, kernel, groups = data.shape[2:], weight.shape[2:], group or 1
        ones, axes = (1,) * len(image), range(len(image))
        steps, spread = strides or ones, dilations or ones
        added = output_padding or (0,) * len(image)
        full = [steps[a] * (image[a] - 1) + spread[a] * (kernel[a] - 1) + 1 + added[a] for a in axes]
        before, sizes = _transposed_window(full, image, steps, pads, auto_pad, output_shape)
        batch, channels = data.shape[:2]
        grouped = data.reshape(batch, groups, channels // groups, -1)
        out_channels = groups * weight.shape[1]
        extents = [max(full[a], before[a] + sizes[a]) for a in axes]
        canvas = np.zeros((batch, out_channels, *extents), data.dtype)
        for tap in itertools.product(*map(range, kernel)):
            of_tap: tuple[Any, ...] = (slice(None), slice(None), *tap)
            part = weight[of_tap].reshape(groups, channels // groups, -1)
            product = np.matmul(part.transpose(0, 2, 1), grouped).reshape(batch, out_channels, *image)
            starts = [tap[a] * spread[a] for a in axes]
            place = tuple(
                slice(s, s + (n - 1) * step + 1, step) for s, n, step in zip(starts, image, steps, strict=True)
            )
            canvas[(slice(None), slice(None), *place)] += product
        inside = tuple(slice(before[a], before[a] + sizes[a]) for a in axes)
        result = canvas[(slice(None), slice(None), *inside)]
        return (result if bias is None else result + bias.reshape(-1, *ones),)


class MaxPool(OpRun):
    """Maximum over windows; the optional second output (indices) is not supported."""

    def _run(
        self,
        data: np.ndarray,
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        storage_order: int | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[np.ndarray]:
        if len(self.onnx_node.output) > 1:
            raise NotImplementedError("MaxPool with indices")
        assert kernel_shape is not None  # a required attribute
        windows = resolve_windows(data.shape[2:], kernel_shape, strides, dilations, pads, auto_pad)
        lowest = -np.inf if data.dtype.kind == "f" else np.iinfo(data.dtype).min
        padded, sizes = _padded_for_pool(data, windows, ceil_mode, lowest)
        result = np.full((*data.shape[:2], *sizes), lowest, data.dtype)
        for view in taps(padded, windows, sizes):
            np.maximum(result, view, out=result)
        return (result,)


class AveragePool(OpRun):
    """Mean over windows, with or without padding."""

    def _run(
        self,
        data: np.ndarray,
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        count_include_pad: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[np.ndarray]:
        assert kernel_shape is not None  # a required attribute
        windows = resolve_windows(data.shape[2:], kernel_shape, strides, dilations, pads, auto_pad)
        padded, sizes = _padded_for_pool(data, windows, ceil_mode, 0.0)
        counted = pad(np.ones((1, 1, *data.shape[2:])), windows[3], 1.0 if count_include_pad else 0.0)
        counted = _grow(counted, padded.shape[2:], 0.0)
        total: Any = sum(taps(padded, windows, sizes))
        count: Any = sum(taps(counted, windows, sizes))
        return ((total / count).astype(data.dtype),)


class Resize(SlowResize):
    """Nearest and linear resizing per axis; source positions from ONNX's reference."""

    def _run(  # the order and names of the operator's inputs and attributes
        self,
        X: np.ndarray,
        roi: np.ndarray | None = None,
        scales: np.ndarray | None = None,
        sizes: np.ndarray | None = None,
        **attributes: Any,
    ) -> tuple[np.ndarray]:
        mode, transformation = attributes.get("mode"), attributes.get("coordinate_transformation_mode")
        simple = mode in ("nearest", "linear") and transformation != "tf_crop_and_resize"
        if (
            not simple
            or attributes.get("antialias")
            or attributes.get("keep_aspect_ratio_policy") not in (None, "stretch")
        ):
            return super()._run(X, roi, scales, sizes, **attributes)
        axes = attributes.get("axes") or range(X.ndim)
        for index, axis in enumerate(axes):
            by_size = sizes is not None and len(sizes)
            wanted = {"output_size": [sizes[index]]} if by_size else {"scale_factors": [scales[index]]}  # type: ignore[index]
            X = _resize_axis(X, axis, mode, attributes.get("nearest_mode"), transformation, wanted)
        return (X,)


def _resize_axis(
    data: np.ndarray, axis: int, mode: Any, nearest_mode: Any, transformation: Any, wanted: dict[str, Any]
) -> np.ndarray:
    def nearest(ratio: Any, scale: Any) -> Any:
        return _nearest_coeffs(ratio, mode=nearest_mode or "round_prefer_floor")

    source = _interpolate_nd(
        np.arange(data.shape[axis], dtype=np.float64),
        nearest if mode == "nearest" else _linear_coeffs,
        coordinate_transformation_mode=transformation or "half_pixel",
        **wanted,
    )
    low = np.floor(source).astype(np.int64)
    if mode == "nearest":
        return data.take(low, axis)
    fraction = (source - low).reshape(-1, *(1,) * (data.ndim - axis - 1))
    high = np.minimum(low + 1, data.shape[axis] - 1)
    return data.take(low, axis) * (1 - fraction) + data.take(high, axis) * fraction


def resolve_windows(
    image: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
    auto_pad: str | None,
) -> Windows:
    """Window attributes with defaults resolved; ``pads``: begins of all axes, then ends of all axes."""
    ones = (1,) * len(kernel)
    strides, dilations = strides or ones, dilations or ones
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max((-(-size // step) - 1) * step + spread * (extent - 1) + 1 - size, 0)
            for size, step, spread, extent in zip(image, strides, dilations, kernel, strict=True)
        ]
        small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
        pads = [*small, *large] if auto_pad == "SAME_UPPER" else [*large, *small]
    elif auto_pad == "VALID" or not pads:
        pads = [0] * 2 * len(kernel)
    return kernel, strides, dilations, pads


def pad(data: np.ndarray, pads: Sequence[int], value: float) -> np.ndarray:
    """Pad the image axes of ``data`` with ``value``."""
    half = len(pads) // 2
    return np.pad(data, [(0, 0), (0, 0), *zip(pads[:half], pads[half:], strict=True)], constant_values=value)


def window_counts(image: Sequence[int], windows: Windows, ceil: bool = False) -> list[int]:
    """Number of windows along every axis of a padded image."""
    kernel, strides, dilations, _ = windows
    rests = [size - spread * (k - 1) - 1 for size, k, spread in zip(image, kernel, dilations, strict=True)]
    return [(-(-rest // step) if ceil else rest // step) + 1 for rest, step in zip(rests, strides, strict=True)]


def taps(padded: np.ndarray, windows: Windows, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the elements under each window tap over all windows, in the order of the weights."""
    kernel, strides, dilations, _ = windows
    for tap in itertools.product(*map(range, kernel)):
        starts = [index * spread for index, spread in zip(tap, dilations, strict=True)]
        places = (slice(s, s + (n - 1) * step + 1, step) for s, n, step in zip(starts, sizes, strides, strict=True))
        yield padded[(slice(None), slice(None), *places)]


def _padded_for_pool(
    data: np.ndarray, windows: Windows, ceil_mode: int | None, value: float
) -> tuple[np.ndarray, list[int]]:
    """Return the padded image, extended for ``ceil_mode`` windows that overhang, and the number of windows per axis."""
    kernel, strides, dilations, pads = windows
    padded = pad(data, pads, value)
    sizes = window_counts(padded.shape[2:], windows, bool(ceil_mode))
    if ceil_mode:  # no window begins in the end padding
        real = zip(sizes, strides, data.shape[2:], pads, strict=False)
        sizes = [count - 1 if (count - 1) * step >= size + before else count for count, step, size, before in real]
    needed = [
        (count - 1) * step + spread * (k - 1) + 1
        for count, step, spread, k in zip(sizes, strides, dilations, kernel, strict=True)
    ]
    return _grow(padded, needed, value), sizes


def _grow(data: np.ndarray, image: Sequence[int], value: float) -> np.ndarray:
    behind = [max(0, wanted - size) for wanted, size in zip(image, data.shape[2:], strict=True)]
    return pad(data, [*(0,) * len(behind), *behind], value)


def _transposed_window(
    full: Sequence[int],
    image: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int] | None,
    auto_pad: str | None,
    output_shape: Sequence[int] | None,
) -> tuple[list[int], list[int]]:
    """Return begin and size of the output inside the ``full`` output of a transposed convolution."""
    axes = range(len(full))
    same = auto_pad in ("SAME_UPPER", "SAME_LOWER")
    if output_shape is None and not same:
        widths = pads if pads and auto_pad != "VALID" else [0] * 2 * len(full)
        return list(widths[: len(full)]), [full[a] - widths[a] - widths[a + len(full)] for a in axes]
    sizes = list(output_shape)[-len(full) :] if output_shape else [image[a] * strides[a] for a in axes]
    cut = [max(0, full[a] - sizes[a]) for a in axes]
    return [total // 2 if auto_pad == "SAME_UPPER" else total - total // 2 for total in cut], sizes


class Erf(OpRun):
    """Error function in any precision; ONNX's own is limited to float32."""

    def _run(self, data: np.ndarray) -> tuple[np.ndarray]:
        from scipy.special import erf

        return (erf(data).astype(data.dtype),)


class BatchNormalization(OpRun):
    """Inference with any momentum; ONNX's own reference reads a momentum before opset 14 as training."""

    def _run(
        self,
        data: np.ndarray,
        scale: np.ndarray,
        shift: np.ndarray,
        mean: np.ndarray,
        variance: np.ndarray,
        epsilon: float | None = None,
        **attributes: Any,
    ) -> tuple[np.ndarray]:
        if attributes.get("training_mode"):
            raise NotImplementedError("batch normalisation in training mode")
        channels = (-1, *(1,) * (data.ndim - 2))
        factor = scale / np.sqrt(variance + (1e-5 if epsilon is None else epsilon))
        return ((data - mean.reshape(channels)) * factor.reshape(channels) + shift.reshape(channels),)


class LRN(OpRun):
    """Local response normalisation; ONNX's own reference sums over as many channel windows as the batch has images."""

    def _run(
        self,
        data: np.ndarray,
        alpha: float | None = None,
        beta: float | None = None,
        bias: float | None = None,
        size: int = 1,
    ) -> tuple[np.ndarray]:
        channels, squares = data.shape[1], data**2
        sums = np.zeros_like(data)
        for offset in range(-((size - 1) // 2), size // 2 + 1):
            first, last = max(0, -offset), min(channels, channels - offset)
            sums[:, first:last] += squares[:, first + offset : last + offset]
        scale = (1e-4 if alpha is None else alpha) / size
        return (data / ((1.0 if bias is None else bias) + scale * sums) ** (0.75 if beta is None else beta),)


class DequantizeLinear(OpRun):
    """Dequantisation of every opset, in integers and then in the precision of the scale.

    The reference of the ``onnx`` package lacks opsets before 19, and computes in float32, which cannot hold 32-bit
    biases.
    """

    def _run(
        self,
        data: np.ndarray,
        scale: np.ndarray,
        zero: np.ndarray | None = None,
        axis: int | None = None,
        block_size: int | None = None,
        output_dtype: int | None = None,
    ) -> tuple[np.ndarray]:
        along = 1 if axis is None else axis
        centred = data.astype(np.int64)
        if zero is not None:
            centred = centred - _along(zero.astype(np.int64), data.shape, along, block_size)
        return (centred.astype(scale.dtype) * _along(scale, data.shape, along, block_size),)


def _along(values: np.ndarray, shape: Sequence[int], axis: int, block_size: int | None) -> np.ndarray:
    """Broadcast ``values`` (per tensor, per index along ``axis``, or per block) to a tensor of ``shape``."""
    if block_size:
        return np.repeat(values, block_size, axis).take(range(shape[axis]), axis)
    if values.size == 1:
        return values.reshape(())
    return values.reshape([-1 if place == axis % len(shape) else 1 for place in range(len(shape))])


class LSTM(OpRun):
    """LSTM; gates in the order input, output, forget, cell."""

    def _run(  # the order and names of the operator's inputs and attributes
        self,
        data: np.ndarray,
        weight: np.ndarray,
        recurrent: np.ndarray,
        bias: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        state: np.ndarray | None = None,
        cell: np.ndarray | None = None,
        peepholes: np.ndarray | None = None,
        direction: str | None = None,
        layout: int | None = None,
        **others: Any,
    ) -> tuple[np.ndarray, ...]:
        _require_plain(others, lengths, peepholes, ("sigmoid", "tanh", "tanh"))

        def step_of(index: int) -> Step:
            own = recurrent[index]
            added = 0.0 if bias is None else bias[index].reshape(2, -1)[1]

            def step(inputs: np.ndarray, hidden: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
                opened, shown, kept, value = np.split(inputs + hidden @ own.T + added, 4, axis=-1)
                after = _sigmoid(kept) * before + _sigmoid(opened) * np.tanh(value)
                return _sigmoid(shown) * np.tanh(after), after

            return step

        return _run_directions(data, weight, bias, (state, cell), recurrent.shape[2], step_of, direction, layout)


class GRU(OpRun):
    """GRU; gates in the order update, reset, hidden."""

    def _run(  # as above
        self,
        data: np.ndarray,
        weight: np.ndarray,
        recurrent: np.ndarray,
        bias: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        state: np.ndarray | None = None,
        direction: str | None = None,
        layout: int | None = None,
        linear_before_reset: int | None = None,
        **others: Any,
    ) -> tuple[np.ndarray, ...]:
        _require_plain(others, lengths, None, ("sigmoid", "tanh"))

        def step_of(index: int) -> Step:
            update_weight, reset_weight, hidden_weight = np.split(recurrent[index], 3)
            added = np.zeros((3, 1)) if bias is None else bias[index].reshape(2, 3, -1)[1]

            def step(inputs: np.ndarray, hidden: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
                to_update, to_reset, to_hidden = np.split(inputs, 3, axis=-1)
                update = _sigmoid(to_update + hidden @ update_weight.T + added[0])
                reset = _sigmoid(to_reset + hidden @ reset_weight.T + added[1])
                if linear_before_reset:
                    inner = reset * (hidden @ hidden_weight.T + added[2])
                else:
                    inner = (reset * hidden) @ hidden_weight.T + added[2]
                return (1.0 - update) * np.tanh(to_hidden + inner) + update * hidden, before

            return step

        return _run_directions(data, weight, bias, (state, None), recurrent.shape[2], step_of, direction, layout)[:2]


def _require_plain(
    others: dict[str, Any], lengths: np.ndarray | None, peepholes: np.ndarray | None, activations: tuple[str, ...]
) -> None:
    given = tuple(each.lower() for each in others.get("activations") or ())
    plain = not given or given in (activations, activations * 2)
    if lengths is not None or peepholes is not None or not plain or others.get("clip") or others.get("input_forget"):
        raise NotImplementedError("a recurrent layer of another form")


def _run_directions(
    data: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    states: tuple[np.ndarray | None, np.ndarray | None],
    size: int,
    step_of: Callable[[int], Step],
    direction: str | None,
    layout: int | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states of every step, last hidden and last cell state, in ONNX layout; ``size`` is the number of units."""
    steps_first = data.swapaxes(0, 1) if layout else data
    steps, batch = steps_first.shape[:2]
    every, last, last_cells = [], [], []
    for index in range(weight.shape[0]):
        hidden, cell = (
            np.zeros((batch, size), data.dtype) if given is None else (given.swapaxes(0, 1) if layout else given)[index]
            for given in states
        )
        inputs = steps_first @ weight[index].T
        if bias is not None:
            inputs = inputs + bias[index].reshape(2, -1)[0]
        step, found = step_of(index), np.empty((steps, batch, size), data.dtype)
        backwards = direction == "reverse" or index == 1
        for at in range(steps)[::-1] if backwards else range(steps):
            hidden, cell = step(inputs[at], hidden, cell)
            found[at] = hidden
        every.append(found)
        last.append(hidden)
        last_cells.append(cell)
    results = np.stack(every, axis=1), np.stack(last), np.stack(last_cells)
    if not layout:
        return results
    return results[0].transpose(2, 0, 1, 3), results[1].swapaxes(0, 1), results[2].swapaxes(0, 1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


OPERATORS = (
    Conv,
    ConvTranspose,
    MaxPool,
    AveragePool,
    Resize,
    Erf,
    BatchNormalization,
    LRN,
    LSTM,
    GRU,
    DequantizeLinear,
)
