"""Rules for transposed convolutions: each phase of their stride is an ordinary convolution.

Row ``s q + y`` of the result (stride s, phase y) only reads every s-th row of the kernel (Shi et al. 2016, "Is the
deconvolution layer the same as a convolutional layer?"). The channels hold the phases, and depth-to-space puts them in
place. Subsequent operators per channel or per value are applied before that, where a kernel does them at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import Definitions, RuleTable

_UNARY = (
    *("relax.nn.relu", "relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu", "relax.nn.leakyrelu"),
    *("relax.sigmoid", "relax.tanh", "relax.clip"),
)
_PRELU = "relax.nn.prelu"
_WITH_CONSTANT = ("relax.add", "relax.multiply", _PRELU)
# Orders of the axes (batch, two factors and channels in some order, height, width) that put rows and columns in place:
# with the factors before the channels, as in our own rule, and after them, as in ONNX's DepthToSpace of mode CRD.
_ROWS_FIRST = (0, 3, 4, 1, 5, 2)
_CHANNELS_FIRST = (0, 1, 4, 2, 5, 3)


@dataclass(frozen=True)
class Phase:
    """Phase along one axis: ``taps`` of the kernel in the order in which a convolution reads them, and its pads."""

    taps: tuple[int, ...]
    before: int
    after: int


def split_into_phases(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``conv2d_transpose`` as one convolution per phase; as a single one if there is one phase, or if all
    phases of one group read the same pixels (a kernel as large as the stride).
    """
    weight, shape, result = graph.constant(call.args[1]), static_shape(call.args[0]), static_shape(call)
    attrs = call.attrs
    strides = (int(attrs.strides[0]), int(attrs.strides[1]))
    if weight is None or shape is None or result is None:
        return None
    plain = attrs.data_layout == "NCHW" and attrs.kernel_layout == "IOHW" and attrs.out_layout in ("NCHW", "")
    if not plain or any(int(step) != 1 for step in attrs.dilation) or str(call.ty.dtype) != "float32":
        return None
    padding = [int(width) for width in attrs.padding]
    # All phases get the same length, and the excess is cut off.
    whole = [-(-result[2 + axis] // strides[axis]) * strides[axis] for axis in (0, 1)]
    axes = [
        phases_along(int(weight.shape[2 + axis]), strides[axis], padding[axis], shape[2 + axis], whole[axis])
        for axis in (0, 1)
    ]
    if axes[0] is None or axes[1] is None:
        return None
    phases = [(row, column) for row in axes[0] for column in axes[1]]
    groups = int(attrs.groups)
    ordinary = outputs_first(weight, groups)
    weights = [ordinary[:, :, row.taps][:, :, :, column.taps] for row, column in phases]
    pads = [(row.before, column.before, row.after, column.after) for row, column in phases]
    taps = {each.shape[2:] for each in weights}
    if len(phases) == 1:
        return _convolution(call.args[0], weights[0], pads[0], groups)
    if len(set(pads)) == 1 and len(taps) == 1 and groups == 1:
        joined: relax.Expr = graph.named_here(_convolution(call.args[0], np.concatenate(weights), pads[0]))
    else:
        parts = [_convolution(call.args[0], each, pad, groups) for each, pad in zip(weights, pads, strict=True)]
        joined = relax.op.concat(relax.Tuple(parts), axis=1)
    image = _depth_to_space(joined, strides, (*result[:2], *whole))
    return image if tuple(whole) == result[2:] else relax.op.strided_slice(image, [2, 3], [0, 0], list(result[2:]))


def outputs_first(weight: np.ndarray, groups: int) -> np.ndarray:
    """Return the weight of a transposed convolution, (in, out of a group, ...), as the weight of an ordinary one."""
    inputs, outputs, *window = weight.shape
    apart = weight.reshape(groups, inputs // groups, outputs, *window).swapaxes(1, 2)
    return np.ascontiguousarray(apart.reshape(groups * outputs, inputs // groups, *window))


def phases_along(kernel: int, stride: int, padding: int, size: int, result: int) -> list[Phase] | None:
    """Return the phases along an axis of a ``result`` in whole strides; None if they are not convolutions of equal
    length.
    """
    length = result // stride
    if kernel < stride:
        return None
    phases = []
    for phase in range(stride):
        first = (phase + padding) % stride
        taps = tuple(range(first, kernel, stride))[::-1]
        before = len(taps) - 1 - (phase + padding - first) // stride
        after = length - size - before + len(taps) - 1
        if before < 0 or after < 0:
            return None
        phases.append(Phase(taps, before, after))
    return phases


def _convolution(data: relax.Expr, weight: np.ndarray, padding: Sequence[int], groups: int = 1) -> relax.Call:
    return relax.op.nn.conv2d(data, relax.const(np.ascontiguousarray(weight)), padding=tuple(padding), groups=groups)


def _depth_to_space(
    data: relax.Expr, strides: tuple[int, int], result: tuple[int, ...], order: Sequence[int] = _ROWS_FIRST
) -> relax.Expr:
    """Move channels to pixels: channels in the order (row, column, channel of ``result``), or (channel,
    row, column).
    """
    batch, channels, height, width = result
    small = (height // strides[0], width // strides[1])
    factors = (*strides, channels) if order == _ROWS_FIRST else (channels, *strides)
    apart = relax.op.reshape(data, (batch, *factors, *small))
    return relax.op.reshape(relax.op.permute_dims(apart, list(order)), result)


def _spread(expr: relax.Expr, graph: Definitions) -> tuple[relax.Expr, tuple[int, int], Sequence[int]] | None:
    """Return the input of the depth-to-space that computes ``expr``, its strides and order; None if it is something
    else or read twice.
    """
    merged = graph.call(expr, "relax.reshape") if graph.has_single_user(expr) else None
    permuted = None if merged is None else graph.call(merged.args[0], "relax.permute_dims")
    order = () if permuted is None else tuple(map(int, permuted.attrs.axes or ()))
    if permuted is None or order not in (_ROWS_FIRST, _CHANNELS_FIRST):
        return None
    apart = graph.call(permuted.args[0], "relax.reshape")
    shape, result = static_shape(permuted.args[0]), static_shape(expr)
    if apart is None or shape is None or result is None or len(result) != 4:
        return None
    batch, *factors, height, width = shape
    rows, columns, channels = factors if order == _ROWS_FIRST else (factors[1], factors[2], factors[0])
    spread = (batch, channels, height * rows, width * columns)
    before = static_shape(apart.args[0])
    whole = before == (batch, channels * rows * columns, height, width)
    return (apart.args[0], (rows, columns), order) if whole and spread == result else None


def apply_before_spreading(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``f(depth_to_space(x)) -> depth_to_space(f(x))`` for functions that do not depend on the position of a
    pixel.
    """
    found, result = _spread(call.args[0], graph), static_shape(call)
    if found is None or result is None or static_shape(call.args[0]) != result:
        return None
    data, strides, order = found
    phases = strides[0] * strides[1]
    constant = None
    if len(call.args) > 1 and call.op.name in _WITH_CONSTANT:
        constant = graph.constant(call.args[1])
        if constant is None or not _is_along_channels(call, constant, result[1]):
            return None
    joined = graph.call(data, "relax.concat")
    fields = None if joined is None else graph.value(joined.args[0])
    if isinstance(fields, relax.Tuple) and len(fields.fields) == phases and order == _ROWS_FIRST:
        parts = [_applied(call, field, constant, 1, order) for field in fields.fields]
        return _depth_to_space(relax.op.concat(relax.Tuple(parts), axis=1), strides, result)
    return _depth_to_space(_applied(call, data, constant, phases, order), strides, result, order)


def _is_along_channels(call: relax.Call, constant: np.ndarray, channels: int) -> bool:
    """True if the constant operand is one value, or one per channel."""
    if constant.size == 1:
        return True
    if call.op.name == _PRELU:
        return constant.shape == (channels,) and int(call.attrs.axis) % 4 == 1
    return constant.ndim <= 4 and (1,) * (4 - constant.ndim) + constant.shape == (1, channels, 1, 1)


def _applied(
    call: relax.Call, data: relax.Expr, constant: np.ndarray | None, copies: int, order: Sequence[int]
) -> relax.Call:
    """Return ``call`` on ``data``, which has ``copies`` times as many channels."""
    rest = list(call.args[1:])
    if constant is not None and constant.size > 1:
        copy = np.tile if order == _ROWS_FIRST else np.repeat
        vector = copy(constant.reshape(-1), copies)
        rest = [relax.const(vector if call.op.name == _PRELU else vector.reshape(1, -1, 1, 1))]
    return relax.Call(call.op, [data, *rest], call.attrs)


TRANSPOSED_RULES: RuleTable = {
    "relax.nn.conv2d_transpose": (split_into_phases,),
    "relax.add": (apply_before_spreading,),
    "relax.multiply": (apply_before_spreading,),
    _PRELU: (apply_before_spreading,),
    **dict.fromkeys(_UNARY, (apply_before_spreading,)),
}
