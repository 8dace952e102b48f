"""Operators as tensor expressions in framework layout: the workloads of tuning records.

Our templates emit their loops directly and do not schedule these; :mod:`schedules.contract.operator_reference`
specifies the values, this module is the specification for TVM's own tools.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import IRModule, te, tirx

from costmodel.operators.layers import (
    SELU_SCALE,
    SELU_SLOPE,
    ChannelNorm,
    Conv2d,
    Dense,
    Epilogue,
    FusedConvs,
    Operator,
    Pool2d,
    Prologue,
)
from schedules.contract.template import QuantisedAddition, Requantisation, tensor_dtype


def workload(operator: Operator) -> IRModule:
    """Create the module of ``operator``, with one function in S-TIR and framework layouts.

    Its signature is ``main(data, [gate], [input scale, input shift], weight, [bias], [slopes], [scale, shift], ...,
    [residual], output)``. Arithmetic and per-channel constants are FP32, whatever the dtype of the tensors.

    For ``int8``: ``main(data, weight, bias, multiplier, integers, factors, ..., [residual], output)``, the last two of
    each layer from :func:`requantisation_arrays`; weights are int8, biases int32, or float32 before an activation.
    """
    arguments: list[Any] = []
    if operator.dtype == "int8" and not isinstance(operator, Pool2d):
        data = te.placeholder(operator.input_shape, "uint8", name="data")
        arguments.append(data)
    else:
        data = _stored(operator.input_shape, operator.dtype, "data", arguments)
    if isinstance(operator, Pool2d):
        return _module([*arguments, _narrowed(_pool2d(operator, data), operator.dtype)])
    if isinstance(operator, ChannelNorm):
        result = _channel_norm(operator, data, arguments)
        return _module([*arguments, _narrowed(result, operator.dtype)])
    layers = operator.convs if isinstance(operator, FusedConvs) else (operator,)
    result = data
    if isinstance(operator, Conv2d) and operator.gated:
        gate = _stored(operator.gate_shape, operator.dtype, "gate", arguments)
        result = te.compute(operator.input_shape, lambda n, c, y, x: data[n, c, y, x] * gate[n, c, 0, 0], name="gated")
    if isinstance(operator, Conv2d) and operator.prologue is not None:
        result = _prologue(operator, operator.prologue, result, arguments)
    for index, layer in enumerate(layers):
        result = _layer(layer, result, arguments, str(index) if len(layers) > 1 else "")
    return _module([*arguments, result if operator.dtype == "int8" else _narrowed(result, operator.dtype)])


def _arithmetic(dtype: str) -> str:
    """Dtype of the arithmetic on values stored as ``dtype``."""
    return "float32" if dtype in ("bfloat16", "int8") else dtype


def _stored(shape: tuple[int, ...], dtype: str, name: str, arguments: list[Any]) -> Any:
    """Append a placeholder of ``dtype`` to ``arguments``; return its values for arithmetic."""
    tensor = te.placeholder(shape, tensor_dtype(dtype), name=name)
    arguments.append(tensor)
    if _arithmetic(dtype) == dtype:
        return tensor
    return te.compute(shape, lambda *at: tensor[at].astype(_arithmetic(dtype)), name=f"{name}_values")


def _narrowed(result: Any, dtype: str) -> Any:
    """``result`` in the dtype of stored values."""
    if _arithmetic(dtype) == dtype:
        return result
    return te.compute(result.shape, lambda *at: result[at].astype(tensor_dtype(dtype)), name="stored")


def _prologue(conv: Conv2d, prologue: Prologue, data: Any, arguments: list[Any]) -> Any:
    """Input of the convolution after the prologue; appends its placeholders to ``arguments``."""
    affine: list[Any] = []
    if prologue.affine:
        names = ("input_scale", "input_shift")
        affine = [te.placeholder((conv.in_channels,), _arithmetic(conv.dtype), name=name) for name in names]
        arguments.extend(affine)

    def element(n: Any, c: Any, y: Any, x: Any) -> Any:
        value = data[n, c, y, x] * affine[0][c] + affine[1][c] if affine else data[n, c, y, x]
        return _activated(value, prologue.activation, prologue.slope)

    return te.compute(conv.input_shape, element, name="prepared")


def _activated(x: Any, activation: str | None, slope: float) -> Any:
    if activation is None:
        return x
    return _SLOPED[activation](x, slope) if slope else _ACTIVATIONS[activation](x)


def _module(arguments: list[Any]) -> IRModule:
    return IRModule({"main": te.create_prim_func(arguments).with_attr("global_symbol", "main")})


def requantisation_arrays(requantisation: Requantisation) -> tuple[np.ndarray, np.ndarray]:
    """Integers and factors of a requantisation as arrays.

    Integers: zero point of the data; bounds and zero point of the result; bounds, zero point and offset of the own
    summand of an addition. Factors: ratios and fixed part of the addition, and the scale of the result after an
    activation.
    """
    given, addition = requantisation, requantisation.addition or QuantisedAddition(0, 0, 0, 0.0, 0.0, 0.0)
    own = (addition.low, addition.high, addition.zero, addition.offset)
    whole = (given.input_zero, given.low, given.high, given.zero, *own)
    first, last = addition.own_ratios
    step = (given.step,) if given.step else ()
    factors = (first, addition.residual_ratio, addition.fixed, last, *step)
    return np.array(whole, np.int32), np.array(factors, np.float32)


def requantisation_of(
    multiplier: np.ndarray, integers: np.ndarray, factors: np.ndarray, residual: bool
) -> Requantisation:
    """Inverse of :func:`requantisation_arrays`."""
    input_zero, low, high, zero, own_low, own_high, own_zero, offset = (int(value) for value in integers)
    first, other, fixed, last, *step = (float(value) for value in factors)
    addition = QuantisedAddition(own_low, own_high, own_zero, first or last, other, fixed, offset, bool(last))
    return Requantisation(multiplier, input_zero, low, high, zero, addition if residual else None, *step)


def _quantised_layer(layer: Conv2d | Dense, data: Any, arguments: list[Any], suffix: str) -> Any:
    """The layer on 8-bit ``data``; appends its placeholders to ``arguments``."""
    outputs = layer.weight_shape[0]
    weight = te.placeholder(layer.weight_shape, "int8", name=f"weight{suffix}")
    activation = layer.epilogue.activation
    bias = te.placeholder((outputs,), "int32" if activation is None else "float32", name=f"bias{suffix}")
    multiplier = te.placeholder((outputs,), "float32", name=f"multiplier{suffix}")
    integers = te.placeholder((8,), "int32", name=f"integers{suffix}")
    factors = te.placeholder((4 if activation is None else 5,), "float32", name=f"factors{suffix}")
    arguments += [weight, bias, multiplier, integers, factors]
    residual = slopes = None
    if activation == "prelu":
        slopes = te.placeholder((outputs,), "float32", name=f"slopes{suffix}")
        arguments.append(slopes)
    if layer.epilogue.residual:
        residual = te.placeholder(layer.output_shape, "uint8", name="residual")
        arguments.append(residual)
    centred = te.compute(layer.input_shape, lambda *at: data[at].astype("int32") - integers[0], name=f"centred{suffix}")
    wide = te.compute(layer.weight_shape, lambda *at: weight[at].astype("int32"), name=f"weight_values{suffix}")
    sums = _conv2d(layer, centred, wide, suffix) if isinstance(layer, Conv2d) else _dense(layer, centred, wide)

    def element(*at: Any) -> Any:
        if activation is None:
            value = (sums[at] + bias[at[1]]).astype("float32") * multiplier[at[1]]
        else:
            value = sums[at].astype("float32") * multiplier[at[1]] + bias[at[1]]
            if slopes is not None:
                value = _leaking(value, slopes[at[1]])
            else:
                value = _activated(value, activation, layer.epilogue.slope)
            value = value / factors[4]
        if residual is not None:
            own = _clip(tirx.nearbyint(value).astype("int32") + integers[6], integers[4], integers[5])
            own = (own - integers[7]).astype("float32")
            value = own * factors[0] + factors[2]
            value = (residual[at].astype("int32") - integers[7]).astype("float32") * factors[1] + value
            value = own * factors[3] + value
        return _clip(tirx.nearbyint(value).astype("int32") + integers[3], integers[1], integers[2]).astype("uint8")

    return te.compute(sums.shape, element, name=f"requantised{suffix}")


def _layer(layer: Conv2d | Dense, data: Any, arguments: list[Any], suffix: str) -> Any:
    """The layer on ``data``; appends its placeholders to ``arguments``."""
    if layer.dtype == "int8":
        return _quantised_layer(layer, data, arguments, suffix)
    dtype = _arithmetic(layer.dtype)
    weight = _stored(layer.weight_shape, layer.dtype, f"weight{suffix}", arguments)
    sums = _conv2d(layer, data, weight, suffix) if isinstance(layer, Conv2d) else _dense(layer, data, weight)
    bias = slopes = affine = residual = None
    if layer.epilogue.bias:
        bias = te.placeholder((layer.weight_shape[0],), dtype, name=f"bias{suffix}")
        arguments.append(bias)
    if layer.epilogue.activation == "prelu":
        slopes = te.placeholder((layer.weight_shape[0],), dtype, name=f"slopes{suffix}")
        arguments.append(slopes)
    if layer.epilogue.affine:
        affine = [
            te.placeholder((layer.weight_shape[0],), dtype, name=f"{name}{suffix}") for name in ("scale", "shift")
        ]
        arguments.extend(affine)
    if layer.epilogue.residual:
        residual = _stored(layer.output_shape, layer.dtype, "residual", arguments)
    return _epilogue(layer.epilogue, sums, bias, slopes, affine, residual, suffix)


def _conv2d(conv: Conv2d, data: Any, weight: Any, suffix: str) -> Any:
    (stride_y, stride_x), (dilation_y, dilation_x) = conv.stride, conv.dilation
    ins, outs = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    padded = _pad(data, conv.padding, 0, suffix)
    c = te.reduce_axis((0, ins), name="c")
    ky = te.reduce_axis((0, conv.kernel[0]), name="ky")
    kx = te.reduce_axis((0, conv.kernel[1]), name="kx")

    def element(n: Any, o: Any, y: Any, x: Any) -> Any:
        channel = c if conv.groups == 1 else o // outs * ins + c
        pixel = padded[n, channel, y * stride_y + ky * dilation_y, x * stride_x + kx * dilation_x]
        return te.sum(pixel * weight[o, c, ky, kx], axis=[c, ky, kx])

    return te.compute(conv.output_shape, element, name=f"conv2d{suffix}")


def _dense(dense: Dense, data: Any, weight: Any) -> Any:
    k = te.reduce_axis((0, dense.in_features), name="k")
    return te.compute(dense.output_shape, lambda m, n: te.sum(data[m, k] * weight[n, k], axis=k), name="dense")


def _pad(data: Any, padding: tuple[int, int, int, int], fill: float, suffix: str = "") -> Any:
    top, left, bottom, right = padding
    if not any(padding):
        return data
    batch, channels, height, width = (int(extent) for extent in data.shape)

    def element(n: Any, c: Any, y: Any, x: Any) -> Any:
        inside = tirx.all(y >= top, y < top + height, x >= left, x < left + width)
        return tirx.if_then_else(inside, data[n, c, y - top, x - left], tirx.const(fill, data.dtype))

    shape = (batch, channels, height + top + bottom, width + left + right)
    return te.compute(shape, element, name=f"padded{suffix}")


def _pool2d(pool: Pool2d, data: Any) -> Any:
    average = pool.kind == "average"
    padded = _pad(data, pool.padding, 0.0 if average else float("-inf"))
    ky = te.reduce_axis((0, pool.kernel[0]), name="ky")
    kx = te.reduce_axis((0, pool.kernel[1]), name="kx")
    reduce = te.sum if average else te.max

    def element(n: Any, c: Any, y: Any, x: Any) -> Any:
        return reduce(padded[n, c, y * pool.stride[0] + ky, x * pool.stride[1] + kx], axis=[ky, kx])

    pooled = te.compute(pool.output_shape, element, name="pool2d")
    if not average:
        return pooled
    return te.compute(
        pool.output_shape,
        lambda n, c, y, x: pooled[n, c, y, x] / window_count(pool, y, x).astype(pooled.dtype),
        name="average",
    )


def _channel_norm(norm: ChannelNorm, data: Any, arguments: list[Any]) -> Any:
    """Normalisation of ``data``; appends weight and bias to ``arguments``."""
    dtype = _arithmetic(norm.dtype)
    weight, bias = (te.placeholder((norm.channels,), dtype, name=name) for name in ("weight", "bias"))
    arguments += [weight, bias]

    def mean(values: Any, name: str) -> Any:
        c = te.reduce_axis((0, norm.channels), name="c")
        shape = (norm.batch, norm.height, norm.width)
        total = te.compute(shape, lambda n, y, x: te.sum(values[n, c, y, x], axis=c), name=f"{name}_sum")
        return te.compute(shape, lambda n, y, x: total[n, y, x] / float(norm.channels), name=name)

    centre = mean(data, "mean")
    shape = norm.output_shape
    square = te.compute(
        shape, lambda n, c, y, x: (data[n, c, y, x] - centre[n, y, x]) * (data[n, c, y, x] - centre[n, y, x]), "square"
    )
    variance = mean(square, "variance")

    def element(n: Any, c: Any, y: Any, x: Any) -> Any:
        unit = (data[n, c, y, x] - centre[n, y, x]) / tirx.sqrt(variance[n, y, x] + norm.epsilon)
        return unit * weight[c] + bias[c]

    return te.compute(shape, element, name="norm")


def window_count(pool: Pool2d, y: Any, x: Any) -> Any:
    """Number of elements averaged by the window at output (y, x)."""
    if pool.count_include_pad:
        return tirx.const(pool.kernel[0] * pool.kernel[1], "int32")
    counts = []
    for axis, position, extent in ((0, y, pool.height), (1, x, pool.width)):
        start = position * pool.stride[axis] - pool.padding[axis]
        stop = tirx.min(start + pool.kernel[axis], extent)
        counts.append(stop - tirx.max(start, 0))
    return counts[0] * counts[1]


def _epilogue(
    epilogue: Epilogue, sums: Any, bias: Any, slopes: Any, affine: Any, residual: Any, suffix: str
) -> Any:  # fmt: skip
    if bias is None and affine is None and residual is None and epilogue.activation is None:
        return sums

    def element(*indices: Any) -> Any:
        x = sums[indices]
        if bias is not None:
            x = x + bias[indices[1]]
        if epilogue.residual == "before_activation":
            x = x + residual[indices]
        if slopes is not None:
            x = _leaking(x, slopes[indices[1]])
        else:
            x = _activated(x, epilogue.activation, epilogue.slope)
        if affine is not None:
            x = x * affine[0][indices[1]] + affine[1][indices[1]]
        if epilogue.residual == "after_activation":
            x = x + residual[indices]
        return x

    return te.compute(sums.shape, element, name=f"epilogue{suffix}")


def _leaking(x: Any, slope: Any) -> Any:
    return tirx.max(x, 0.0) + slope * tirx.min(x, 0.0)


def _clip(x: Any, low: float, high: float) -> Any:
    return tirx.min(tirx.max(x, low), high)


def _hard_sigmoid(x: Any, slope: float = 1.0 / 6.0) -> Any:
    return _clip(x * slope + 0.5, 0.0, 1.0)


def _elu(x: Any, slope: float = 1.0) -> Any:
    return tirx.max(x, 0.0) + (tirx.exp(tirx.min(x, 0.0)) - 1.0) * slope


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + tirx.exp(-x))


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: tirx.max(x, 0.0),
    "relu6": lambda x: _clip(x, 0.0, 6.0),
    "relu1": lambda x: _clip(x, 0.0, 1.0),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": lambda x: x * _hard_sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + tirx.erf(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: x * _sigmoid(math.sqrt(8.0 / math.pi) * (x + 0.044715 * x * x * x)),
    "tanh": lambda x: 2.0 * _sigmoid(2.0 * x) - 1.0,
    "elu": _elu,
    "mish": lambda x: x * (1.0 - 2.0 / (tirx.power(1.0 + tirx.exp(tirx.min(x, 20.0)), 2.0) + 1.0)),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "selu": lambda x: SELU_SCALE * _elu(x, SELU_SLOPE),
    "softplus": lambda x: tirx.max(x, 0.0) + tirx.log(1.0 + tirx.exp(-tirx.abs(x))),
}
_SLOPED: dict[str, Callable[[Any, float], Any]] = {
    "leaky_relu": lambda x, slope: tirx.max(x, x * slope),
    "elu": _elu,
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": lambda x, slope: x * _hard_sigmoid(x, slope),
}
