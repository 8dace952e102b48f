"""Operators in NumPy with framework layouts: the specification for checking every kernel.

The table of activation functions also serves to recognise activations in a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

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
)
from schedules.contract.template import Parameters, Requantisation, numpy_dtype


def sigmoid(x: np.ndarray) -> np.ndarray:
    """``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + np.exp(-x))


def error_function(x: np.ndarray) -> np.ndarray:
    """``erf(x)``, in FP64."""
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x))


def _elu(x: np.ndarray, slope: float = 1.0) -> np.ndarray:
    return np.where(x > 0, x, slope * np.expm1(np.minimum(x, 0.0)))


def _hard_sigmoid(x: np.ndarray, slope: float = 1.0 / 6.0) -> np.ndarray:
    return np.clip(x * slope + 0.5, 0.0, 1.0)


# Functions of ``costmodel.operators.layers.ACTIVATIONS`` without a parameter.
ACTIVATION_FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "relu6": lambda x: np.clip(x, 0.0, 6.0),
    "relu1": lambda x: np.clip(x, 0.0, 1.0),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": lambda x: x * _hard_sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + error_function(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "tanh": np.tanh,
    "elu": _elu,
    "mish": lambda x: x * np.tanh(np.logaddexp(0.0, x)),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "selu": lambda x: SELU_SCALE * _elu(x, SELU_SLOPE),
    "softplus": lambda x: np.logaddexp(0.0, x),
}
# Functions of an ``Epilogue`` with a slope.
SLOPED_FUNCTIONS: Mapping[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "leaky_relu": lambda x, slope: np.maximum(x, x * slope),
    "elu": _elu,
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": lambda x, slope: x * _hard_sigmoid(x, slope),
}


# Maximum size of the window matrix made at a time: for a whole megapixel image it has gigabytes.
_COLUMNS = 2**24


def reference(
    operator: Operator,
    data: np.ndarray,
    parameters: Sequence[Parameters],
    residual: np.ndarray | None = None,
    gate: np.ndarray | None = None,
    rounded: bool = True,
) -> np.ndarray:
    """Compute ``operator`` on ``data`` of ``operator.input_shape``; one ``Parameters`` per layer, none for pooling.

    ``gate``: factors of a gated convolution, of its ``gate_shape``. The result is FP32 with values of the dtype of
    ``operator``, or unrounded ones if ``rounded`` is false.

    For a narrow dtype, data, gate, residual, weights of convolutions and dense layers, and all inputs of dense
    convolutions are rounded: after a gate or a prologue, or inside a chain, they are rounded again (kernels that
    multiply in FP32, like Winograd's, may omit this). All arithmetic is FP32, and per-channel constants stay FP32.

    For ``int8`` everything is exact: bytes, their 32-bit sums, and the requantised bytes as rounded by ONNX Runtime's
    QLinearConv and QLinearAdd (:class:`schedules.contract.template.Requantisation`); except an activation between sums
    and bytes, which kernels approximate as in FP32.
    """
    dtype = operator.dtype
    data = rounded_to(data, dtype)
    residual = None if residual is None else rounded_to(residual, dtype)
    result = _computed(operator, data if gate is None else data * rounded_to(gate, dtype), parameters, residual)
    return rounded_to(result, dtype) if rounded else result


def rounded_to(array: np.ndarray, dtype: str) -> np.ndarray:
    """``array`` in FP32, with values rounded to ``dtype``; bytes are integers already."""
    return array if dtype in ("float32", "int8") else array.astype(numpy_dtype(dtype)).astype(np.float32)


def _computed(
    operator: Operator, data: np.ndarray, parameters: Sequence[Parameters], residual: np.ndarray | None
) -> np.ndarray:
    if isinstance(operator, FusedConvs):
        for conv, parameter in zip(operator.convs[:-1], parameters[:-1], strict=True):
            data = _layer(conv, data, parameter, None)
        return _layer(operator.convs[-1], data, parameters[-1], residual)
    if isinstance(operator, Pool2d):
        return _pool2d(operator, data).astype(np.float32)
    if isinstance(operator, ChannelNorm):
        return _channel_norm(operator, data, parameters[0])
    return _layer(operator, data, parameters[0], residual)


def _layer(
    operator: Conv2d | Dense, data: np.ndarray, parameters: Parameters, residual: np.ndarray | None
) -> np.ndarray:
    if operator.dtype == "int8":
        return _quantised_layer(operator, data, parameters, residual)
    weight = rounded_to(parameters.weight, operator.dtype)
    if isinstance(operator, Dense):
        sums = data @ weight.T
        bias_shape: tuple[int, ...] = (1, -1)
    else:
        prepared = _prepared(operator, data, parameters)
        sums = _conv2d(operator, prepared if operator.is_depthwise else rounded_to(prepared, operator.dtype), weight)
        bias_shape = (1, -1, 1, 1)
    if operator.epilogue.bias:
        assert parameters.bias is not None
        sums = sums + parameters.bias.reshape(bias_shape)
    affine = None
    if operator.epilogue.affine:
        assert parameters.scale is not None and parameters.shift is not None
        affine = parameters.scale.reshape(bias_shape), parameters.shift.reshape(bias_shape)
    slopes = None if parameters.slopes is None else parameters.slopes.reshape(bias_shape)
    return _epilogue(operator.epilogue, sums, affine, slopes, residual).astype(np.float32)


def _quantised_layer(
    operator: Conv2d | Dense, data: np.ndarray, parameters: Parameters, residual: np.ndarray | None
) -> np.ndarray:
    """Compute an int8 layer: exact integer sums in FP64, then FP32 multiplication as in ONNX Runtime."""
    requantisation = parameters.requantisation
    assert requantisation is not None
    centred, weight = data.astype(np.float64) - requantisation.input_zero, parameters.weight.astype(np.float64)
    per_output = (1, -1) if isinstance(operator, Dense) else (1, -1, 1, 1)
    sums = centred @ weight.T if isinstance(operator, Dense) else _conv2d(operator, centred, weight)
    bias, activation = parameters.bias, operator.epilogue.activation
    if bias is not None and activation is None:
        sums = sums + bias.reshape(per_output)
    scaled = sums.astype(np.float32) * requantisation.multiplier.astype(np.float32).reshape(per_output)
    if activation is not None:
        scaled = scaled if bias is None else scaled + bias.astype(np.float32).reshape(per_output)
        wide = scaled.astype(np.float64)
        if parameters.slopes is not None:
            activated = _leaking(wide, parameters.slopes.reshape(per_output))
        else:
            activated = _activated(wide, activation, operator.epilogue.slope)
        scaled = (activated / np.float32(requantisation.step)).astype(np.float32)
    return requantise(scaled, requantisation, residual)


def _leaking(x: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    return np.where(x < 0, x * slopes, x)


def requantise(scaled: np.ndarray, requantisation: Requantisation, residual: np.ndarray | None = None) -> np.ndarray:
    """Bytes, as FP32, of FP32 sums that are already multiplied."""
    if (addition := requantisation.addition) is not None:
        assert residual is not None
        own = np.clip(np.rint(scaled) + addition.zero, addition.low, addition.high) - addition.offset
        first, last = addition.own_ratios
        scaled = _multiply_add(own, first, np.float32(addition.fixed))
        scaled = _multiply_add(residual - addition.offset, addition.residual_ratio, scaled)
        scaled = _multiply_add(own, last, scaled)
    result = np.rint(scaled) + requantisation.zero
    return np.clip(result, requantisation.low, requantisation.high).astype(np.float32)


def _multiply_add(factor: np.ndarray, other: float, summand: np.ndarray | np.float32) -> np.ndarray:
    """FP32 multiply-add with one rounding: the product is exact in FP64."""
    return (factor.astype(np.float64) * np.float64(np.float32(other)) + np.float64(summand)).astype(np.float32)


def _prepared(conv: Conv2d, x: np.ndarray, parameters: Parameters) -> np.ndarray:
    """Input of ``conv`` after its prologue."""
    if conv.prologue is None:
        return x
    if conv.prologue.affine:
        assert parameters.input_scale is not None and parameters.input_shift is not None
        x = x * parameters.input_scale.reshape(1, -1, 1, 1) + parameters.input_shift.reshape(1, -1, 1, 1)
    return _activated(x, conv.prologue.activation, conv.prologue.slope).astype(np.float32)


def _activated(x: np.ndarray, activation: str | None, slope: float) -> np.ndarray:
    if activation is None:
        return x
    return SLOPED_FUNCTIONS[activation](x, slope) if slope else ACTIVATION_FUNCTIONS[activation](x)


def _epilogue(
    epilogue: Epilogue,
    x: np.ndarray,
    affine: tuple[np.ndarray, np.ndarray] | None,
    slopes: np.ndarray | None,
    residual: np.ndarray | None,
) -> np.ndarray:
    if epilogue.residual == "before_activation":
        x = x + residual
    if epilogue.activation == "prelu":
        assert slopes is not None
        x = _leaking(x, slopes)
    else:
        x = _activated(x, epilogue.activation, epilogue.slope)
    if affine is not None:
        x = x * affine[0] + affine[1]
    if epilogue.residual == "after_activation":
        x = x + residual
    return x


def _conv2d(conv: Conv2d, data: np.ndarray, weight: np.ndarray) -> np.ndarray:
    windows = _windows(data, conv, 0.0)  # (N, C, OH, OW, KH, KW)
    batch, channels = data.shape[:2]
    out_height, out_width = windows.shape[2:4]
    if conv.is_depthwise:
        return np.einsum("nchwyx,cyx->nchw", windows, weight[:, 0], optimize=True)
    result = np.empty((batch, out_height, out_width, conv.out_channels), np.result_type(data, weight))
    for group in range(conv.groups):
        ins = slice(group * channels // conv.groups, (group + 1) * channels // conv.groups)
        outs = slice(group * conv.out_channels // conv.groups, (group + 1) * conv.out_channels // conv.groups)
        matrix = weight[outs].reshape(weight[outs].shape[0], -1).T
        rows = max(1, _COLUMNS // (batch * out_width * matrix.shape[0]))
        for start in range(0, out_height, rows):
            columns = windows[:, ins, start : start + rows].transpose(0, 2, 3, 1, 4, 5).reshape(-1, matrix.shape[0])
            result[:, start : start + rows, :, outs] = (columns @ matrix).reshape(batch, -1, out_width, matrix.shape[1])
    return result.transpose(0, 3, 1, 2)


def _pool2d(pool: Pool2d, data: np.ndarray) -> np.ndarray:
    if pool.kind == "max":
        return _windows(data, pool, -np.inf).max(axis=(-2, -1))
    sums = _windows(data, pool, 0.0).sum(axis=(-2, -1), dtype=np.float64)
    if pool.count_include_pad:
        counts: np.ndarray | int = pool.kernel[0] * pool.kernel[1]
    else:
        counts = _windows(np.ones_like(data[:1, :1]), pool, 0.0).sum(axis=(-2, -1))
    return (sums / counts).astype(np.float32)


def _channel_norm(norm: ChannelNorm, data: np.ndarray, parameters: Parameters) -> np.ndarray:
    assert parameters.bias is not None
    x = data.astype(np.float64)
    centred = x - x.mean(axis=1, keepdims=True)
    unit = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + norm.epsilon)
    weight, bias = (vector.reshape(1, -1, 1, 1) for vector in (parameters.weight, parameters.bias))
    return (unit * weight + bias).astype(np.float32)


def _windows(data: np.ndarray, operator: Conv2d | Pool2d, fill: float) -> np.ndarray:
    """Sliding windows (N, C, OH, OW, KH, KW) of the padded input, as a view."""
    top, left, bottom, right = operator.padding
    padded = np.pad(data, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=fill)
    dilation = operator.dilation if isinstance(operator, Conv2d) else (1, 1)
    extents = tuple(d * (k - 1) + 1 for d, k in zip(dilation, operator.kernel, strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(padded, extents, axis=(2, 3))
    stride_y, stride_x = operator.stride
    return windows[:, :, ::stride_y, ::stride_x, :: dilation[0], :: dilation[1]]
