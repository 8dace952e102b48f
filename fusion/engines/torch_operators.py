"""PyTorch's call for each ONNX operator: a table of small functions. Add a line for one more operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper

from fusion.engines.base import Unavailable
from fusion.engines.onnx_to_torch import Call, Converter, Value, split_results

_CONVOLUTIONS: dict[int, Callable[..., Any]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_MAX_POOLS: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS: dict[int, Callable[..., Any]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _data(call: Call) -> Value:
    value = call[0]
    if value is None:
        raise Unavailable(f"ONNX operator {call.operator} without its first operand")
    return value


def _unary(function: Callable[..., Any]) -> Converter:
    return lambda call: call.builder.call(function, _data(call))


def _binary(function: Callable[..., Any]) -> Converter:
    return lambda call: call.builder.call(function, _data(call), call[1])


def _fold(function: Callable[..., Any]) -> Converter:
    """Variadic ONNX operators (Sum, Max) as a chain of binary calls."""

    def converter(call: Call) -> Value:
        result = _data(call)
        for other in call.inputs[1:]:
            result = call.builder.call(function, result, other)
        return result

    return converter


def _padding(call: Call, spatial: Sequence[int], kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """Padding before and after each spatial axis, from ``pads`` or ``auto_pad``."""
    rank = len(kernel)
    strides = call.attributes.get("strides", [1] * rank)
    dilations = call.attributes.get("dilations", [1] * rank)
    mode = call.attributes.get("auto_pad", "NOTSET")
    if mode == "VALID":
        return [0] * rank, [0] * rank
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max((math.ceil(size / stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
            for size, stride, width, dilation in zip(spatial, strides, kernel, dilations, strict=True)
        ]
        small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
        return (small, large) if mode == "SAME_UPPER" else (large, small)
    pads = list(call.attributes.get("pads", [0] * (2 * rank)))
    return pads[:rank], pads[rank:]


def _pad(call: Call, data: Value, before: Sequence[int], after: Sequence[int], value: float) -> Value:
    """Explicit padding; PyTorch lists the last axis first."""
    widths = [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair]
    return call.builder.call(F.pad, data, widths, value=value) if any(widths) else data


def _conv(call: Call) -> Value:
    data, weight = _data(call), call[1]
    assert weight is not None  # ONNX requires it
    kernel = weight.example.shape[2:]
    before, after = _padding(call, data.example.shape[2:], kernel)
    if before != after:
        data, before = _pad(call, data, before, after, 0.0), [0] * len(kernel)
    return call.builder.call(
        _CONVOLUTIONS[len(kernel)],
        data,
        weight,
        call[2],
        stride=tuple(call.attributes.get("strides", [1] * len(kernel))),
        padding=tuple(before),
        dilation=tuple(call.attributes.get("dilations", [1] * len(kernel))),
        groups=call.attributes.get("group", 1),
    )


def _max_pool(call: Call) -> Value:
    data, kernel = _data(call), call.attributes["kernel_shape"]
    if call.outputs > 1:
        raise Unavailable("MaxPool with indices has no conversion to PyTorch")
    before, after = _padding(call, data.example.shape[2:], kernel)
    if before != after or any(2 * width > extent for width, extent in zip(before, kernel, strict=True)):
        data, before = _pad(call, data, before, after, -math.inf), [0] * len(kernel)
    return call.builder.call(
        _MAX_POOLS[len(kernel)],
        data,
        tuple(kernel),
        stride=tuple(call.attributes.get("strides", [1] * len(kernel))),
        padding=tuple(before),
        dilation=tuple(call.attributes.get("dilations", [1] * len(kernel))),
        ceil_mode=bool(call.attributes.get("ceil_mode", 0)),
    )


def _average_pool(call: Call) -> Value:
    data, kernel = _data(call), call.attributes["kernel_shape"]
    before, after = _padding(call, data.example.shape[2:], kernel)
    counted = bool(call.attributes.get("count_include_pad", 0))
    settings = {
        "stride": tuple(call.attributes.get("strides", [1] * len(kernel))),
        "ceil_mode": bool(call.attributes.get("ceil_mode", 0)),
    }
    pool, kernel = _AVERAGE_POOLS[len(kernel)], tuple(kernel)
    if before == after and all(2 * width <= extent for width, extent in zip(before, kernel, strict=True)):
        return call.builder.call(pool, data, kernel, padding=tuple(before), count_include_pad=counted, **settings)
    padded = call.builder.call(pool, _pad(call, data, before, after, 0.0), kernel, **settings)
    if counted:
        return padded
    # PyTorch pads both sides alike: average the zero-padded data, then undo the share that padding had in each window.
    ones = Value(torch.ones_like(data.example[:1, :1]))
    present = pool(_pad(call, ones, before, after, 0.0).example, kernel, **settings)
    return call.builder.call(torch.div, padded, Value(present))


def _global_pool(function: Callable[..., Any]) -> Converter:
    def converter(call: Call) -> Value:
        axes = tuple(range(2, _data(call).example.dim()))
        return call.builder.call(function, _data(call), axes, keepdim=True)

    return converter


def _batch_norm(call: Call) -> Value:
    _, scale, bias, mean, variance = call.inputs[:5]
    epsilon = call.attributes.get("epsilon", 1e-5)
    return call.builder.call(F.batch_norm, _data(call), mean, variance, scale, bias, training=False, eps=epsilon)


def _clip(call: Call) -> Value:
    lower, upper = call.number(1, "min", -math.inf), call.number(2, "max", math.inf)
    if (lower, upper) == (0.0, 6.0):
        return call.builder.call(F.relu6, _data(call))
    return call.builder.call(torch.clamp, _data(call), lower, upper)


def _hard_sigmoid(call: Call) -> Value:
    alpha, beta = call.attributes.get("alpha", 0.2), call.attributes.get("beta", 0.5)
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return call.builder.call(F.hardsigmoid, _data(call))
    scaled = call.builder.call(torch.add, call.builder.call(torch.mul, _data(call), alpha), beta)
    return call.builder.call(torch.clamp, scaled, 0.0, 1.0)


def _gelu(call: Call) -> Value:
    return call.builder.call(F.gelu, _data(call), approximate=call.attributes.get("approximate", "none"))


def _gemm(call: Call) -> Value:
    left, right, addend = _data(call), call[1], call[2]
    alpha, beta = call.attributes.get("alpha", 1.0), call.attributes.get("beta", 1.0)
    if call.attributes.get("transA", 0):
        left = call.builder.call(torch.t, left)
    vector = addend is not None and addend.example.dim() == 1
    if call.attributes.get("transB", 0) and alpha == beta == 1.0 and (addend is None or vector):
        return call.builder.call(F.linear, left, right, addend)
    if call.attributes.get("transB", 0):
        right = call.builder.call(torch.t, right)
    if addend is None:
        return call.builder.call(torch.mul, call.builder.call(torch.mm, left, right), alpha)
    return call.builder.call(torch.addmm, addend, left, right, beta=beta, alpha=alpha)


def _flatten(call: Call) -> Value:
    shape, axis = _data(call).example.shape, call.attributes.get("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return call.builder.call(torch.reshape, _data(call), (math.prod(shape[:axis]), math.prod(shape[axis:])))


def _reshape(call: Call) -> Value:
    shape = call.ints(1, "shape") or []
    if not call.attributes.get("allowzero", 0):
        shape = [_data(call).example.shape[axis] if extent == 0 else extent for axis, extent in enumerate(shape)]
    return call.builder.call(torch.reshape, _data(call), tuple(shape))


def _squeeze(call: Call) -> Value:
    axes = call.ints(1, "axes")
    return call.builder.call(torch.squeeze, _data(call), *([] if axes is None else [tuple(axes)]))


def _unsqueeze(call: Call) -> Value:
    axes = call.ints(1, "axes") or []
    result, rank = _data(call), _data(call).example.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        result = call.builder.call(torch.unsqueeze, result, axis)
    return result


def _transpose(call: Call) -> Value:
    default = list(reversed(range(_data(call).example.dim())))
    return call.builder.call(torch.permute, _data(call), tuple(call.attributes.get("perm", default)))


def _concat(call: Call) -> Value:
    return call.builder.call(torch.cat, list(call.inputs), dim=call.attributes["axis"])


def _split(call: Call) -> list[Value]:
    axis, sizes = call.attributes.get("axis", 0), call.ints(1, "split")
    extent = _data(call).example.shape[axis]
    parts = call.attributes.get("num_outputs", call.outputs)
    chunk = math.ceil(extent / parts)
    sizes = sizes or [min(chunk, extent - start) for start in range(0, extent, chunk)]
    return split_results(call.builder, call.builder.call(torch.split, _data(call), sizes, dim=axis), len(sizes))


def _slice(call: Call) -> Value:
    starts, ends = call.ints(1, "starts") or [], call.ints(2, "ends") or []
    axes, steps = call.ints(3, "axes"), call.ints(4, "steps") or [1] * len(starts)
    shape = _data(call).example.shape
    index = [slice(None)] * len(shape)
    flipped = []
    for axis, start, end, step in zip(axes or range(len(starts)), starts, ends, steps, strict=True):
        picked = range(*slice(start, None if step < 0 and end < -shape[axis] else end, step).indices(shape[axis]))
        ordered = picked if step > 0 else picked[::-1]
        flipped += [] if step > 0 else [axis]
        index[axis] = slice(ordered.start, ordered.stop, ordered.step)
    result = call.builder.call(_take_slices, _data(call), [(item.start, item.stop, item.step) for item in index])
    return call.builder.call(torch.flip, result, tuple(flipped)) if flipped else result


def _take_slices(tensor: torch.Tensor, slices: Sequence[Sequence[int | None]]) -> torch.Tensor:
    return tensor[tuple(slice(*item) for item in slices)]


def _pad_operator(call: Call) -> Value:
    pads, shape = call.ints(1, "pads") or [], _data(call).example.shape
    mode = call.attributes.get("mode", "constant")
    axes = call.ints(3, "axes") or list(range(len(shape)))
    if mode not in ("constant", "reflect", "edge"):
        raise Unavailable(f"Pad mode {mode} has no conversion to PyTorch")
    before, after = [0] * len(shape), [0] * len(shape)
    for place, axis in enumerate(axes):
        before[axis], after[axis] = pads[place], pads[place + len(axes)]
    if mode == "constant":
        return _pad(call, _data(call), before, after, call.number(2, "value", 0.0))
    widths = [width for pair in zip(reversed(before[2:]), reversed(after[2:]), strict=True) for width in pair]
    return call.builder.call(F.pad, _data(call), widths, mode={"edge": "replicate"}.get(mode, mode))


def _reduce(function: Callable[..., Any]) -> Converter:
    def converter(call: Call) -> Value:
        axes = call.ints(1, "axes")
        if not axes and call.attributes.get("noop_with_empty_axes", 0):
            return _data(call)
        chosen = tuple(axes) if axes else tuple(range(_data(call).example.dim()))
        return call.builder.call(function, _data(call), chosen, keepdim=bool(call.attributes.get("keepdims", 1)))

    return converter


def _softmax(call: Call) -> Value:
    data, shape = _data(call), tuple(_data(call).example.shape)
    if call.opset >= 13:
        return call.builder.call(torch.softmax, data, call.attributes.get("axis", -1))
    axis = call.attributes.get("axis", 1) % len(shape)  # before opset 13: over all axes from this one on
    rows = call.builder.call(torch.reshape, data, (math.prod(shape[:axis]), math.prod(shape[axis:])))
    return call.builder.call(torch.reshape, call.builder.call(torch.softmax, rows, 1), shape)


def _div(call: Call) -> Value:
    """ONNX truncates quotients of integers."""
    rounding = None if _data(call).example.is_floating_point() else "trunc"
    return call.builder.call(torch.div, _data(call), call[1], rounding_mode=rounding)


def _prelu(call: Call) -> Value:
    positive = call.builder.call(torch.ge, _data(call), 0)
    return call.builder.call(torch.where, positive, _data(call), call.builder.call(torch.mul, _data(call), call[1]))


def _gather(call: Call) -> Value:
    indices = call[1]
    assert indices is not None  # ONNX requires it
    axis, chosen = call.attributes.get("axis", 0), call.constant(indices)
    extent = _data(call).example.shape[axis]
    flat = Value(torch.remainder(chosen.reshape(-1), extent))
    picked = call.builder.call(torch.index_select, _data(call), axis, flat)
    shape = _data(call).example.shape
    return call.builder.call(torch.reshape, picked, (*shape[:axis], *chosen.shape, *shape[axis + 1 :]))


def _cast(call: Call) -> Value:
    empty = np.empty(0, dtype=helper.tensor_dtype_to_np_dtype(call.attributes["to"]))
    return call.builder.call(torch.Tensor.to, _data(call), torch.from_numpy(empty).dtype)


def _constant(call: Call) -> Value:
    if "value" in call.attributes:
        return Value(torch.from_numpy(numpy_helper.to_array(call.attributes["value"]).copy()))
    for name in ("value_float", "value_int", "value_floats", "value_ints"):
        if name in call.attributes:
            return Value(torch.tensor(call.attributes[name]))
    raise Unavailable("a Constant without a numeric value has no conversion to PyTorch")


def _constant_of_shape(call: Call) -> Value:
    fill = torch.from_numpy(numpy_helper.to_array(call.attributes["value"]).copy()) if call.attributes else None
    shape = [int(extent) for extent in call.constant(_data(call)).tolist()]
    return Value(torch.zeros(shape) if fill is None else torch.full(shape, fill.item(), dtype=fill.dtype))


def _local_response_norm(call: Call) -> Value:
    names = {"alpha": 1e-4, "beta": 0.75}
    settings = {name: call.attributes.get(name, default) for name, default in names.items()}
    return call.builder.call(
        F.local_response_norm, _data(call), call.attributes["size"], k=call.attributes.get("bias", 1.0), **settings
    )


CONVERTERS: dict[str, Converter] = {
    "Abs": _unary(torch.abs),
    "Add": _binary(torch.add),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "Div": _div,
    "Dropout": _data,
    "Elu": lambda call: call.builder.call(F.elu, _data(call), call.attributes.get("alpha", 1.0)),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp),
    "Flatten": _flatten,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool(torch.mean),
    "GlobalMaxPool": _global_pool(torch.amax),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _unary(F.hardswish),
    "Identity": _data,
    "LRN": _local_response_norm,
    "LeakyRelu": lambda call: call.builder.call(F.leaky_relu, _data(call), call.attributes.get("alpha", 0.01)),
    "MatMul": _binary(torch.matmul),
    "Max": _fold(torch.maximum),
    "MaxPool": _max_pool,
    "Min": _fold(torch.minimum),
    "Mul": _binary(torch.mul),
    "Neg": _unary(torch.neg),
    "PRelu": _prelu,
    "Pad": _pad_operator,
    "Pow": _binary(torch.pow),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "Relu": _unary(torch.relu),
    "Reshape": _reshape,
    "Shape": lambda call: Value(torch.tensor(_data(call).example.shape)),
    "Sigmoid": _unary(torch.sigmoid),
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Sqrt": _unary(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _binary(torch.sub),
    "Sum": _fold(torch.add),
    "Tanh": _unary(torch.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
