"""Rules for sums of branches that start at one tensor: re-parameterised convolutions and gates with a bypass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import Definitions, RuleTable, constant_of
from fusion.relax.canonical.rules_affine import Affine, match_affine
from fusion.relax.canonical.rules_preceding import match_scaled


@dataclass(frozen=True, eq=False)
class Branch:
    """Convolution, NCHW x OIHW, in double precision."""

    source: relax.Expr
    weight: np.ndarray
    bias: np.ndarray
    # Strides, dilation and groups.
    window: tuple[tuple[int, ...], tuple[int, ...], int]
    # Padding above and left of the image.
    top_left: tuple[int, int]


def merge_convolutions(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``conv(x, v) + conv(x, w) -> conv(x, v + w)``, the smaller window inside the larger one (RepVGG,
    MobileOne).
    """
    affines = [convolution_of(arg, graph) for arg in call.args]
    if affines[0] is None or affines[1] is None:
        return None
    first, second = (split_convolution(affine) for affine in affines if affine is not None)
    if not graph.same(first.source, second.source):
        return None
    for affine, large, small in ((affines[0], first, second), (affines[1], second, first)):
        weight = embedded_weight(small, large)
        if weight is not None:
            return _summed(affine, large, weight, small.bias, graph)
    return None


def merge_identity(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``conv(x, w) + (x s + t)``, whose scale and shift come from a batch norm, as one convolution."""
    for branch, rest in (call.args, reversed(call.args)):
        affine = convolution_of(branch, graph)
        scaled = None if affine is None else match_scaled(rest, 1, graph)
        if affine is None or scaled is None:
            continue
        large = split_convolution(affine)
        shape = static_shape(call)
        if graph.same(large.source, scaled.source) and shape == static_shape(scaled.source):
            small = _identity(large, scaled.scale, scaled.shift)
            weight = embedded_weight(small, large)
            if weight is not None:
                return _summed(affine, large, weight, small.bias, graph)
    return None


def convolution_of(expr: relax.Expr, graph: Definitions) -> Affine | None:
    """Return ``expr`` as a convolution, NCHW x OIHW, with a single user, and its bias; else None."""
    affine = match_affine(expr, graph)
    if affine is None or affine.call.op.name != "relax.nn.conv2d" or len(affine.call.attrs.padding) != 4:
        return None
    return affine if affine.call.attrs.data_layout == "NCHW" and affine.call.attrs.kernel_layout == "OIHW" else None


def split_convolution(affine: Affine) -> Branch:
    """Return the arrays and the window of a convolution."""
    attrs = affine.call.attrs
    window = tuple(map(int, attrs.strides)), tuple(map(int, attrs.dilation)), int(attrs.groups)
    bias = np.zeros(affine.channels) if affine.bias is None else affine.bias
    top, left = (int(width) for width in attrs.padding[:2])
    return Branch(affine.call.args[0], affine.weight.astype(np.float64), bias, window, (top, left))


def _identity(like: Branch, scale: np.ndarray, shift: np.ndarray) -> Branch:
    """Return ``x scale + shift`` as a 1x1 convolution with the groups of ``like``."""
    inputs = like.weight.shape[1]
    weight = np.zeros((len(scale), inputs, 1, 1))
    weight[np.arange(len(scale)), np.arange(len(scale)) % inputs, 0, 0] = scale
    return Branch(like.source, weight, shift, ((1, 1), (1, 1), like.window[2]), (0, 0))


def embedded_weight(small: Branch, large: Branch) -> np.ndarray | None:
    """Return the weight of ``small`` in the window of ``large``; None if that does not read the same pixels."""
    (strides, dilation, groups), (own_strides, own_dilation, own_groups) = large.window, small.window
    taps, sizes = small.weight.shape[2:], large.weight.shape[2:]
    if (strides, groups) != (own_strides, own_groups):
        return None
    starts = []
    for axis in (0, 1):
        distance = large.top_left[axis] - small.top_left[axis]
        start, rest = divmod(distance, dilation[axis])
        same_step = dilation[axis] == own_dilation[axis] or taps[axis] == 1
        if rest or start < 0 or start + taps[axis] > sizes[axis] or not same_step:
            return None
        starts.append(start)
    weight = np.zeros((*small.weight.shape[:2], *sizes))
    weight[:, :, starts[0] : starts[0] + taps[0], starts[1] : starts[1] + taps[1]] = small.weight
    return weight


def _summed(affine: Affine, large: Branch, weight: np.ndarray, bias: np.ndarray, graph: Definitions) -> relax.Expr:
    """Return the convolution ``large``, under its own name, with ``weight`` and ``bias`` added."""
    total, dtype = large.bias + bias, affine.weight.dtype
    args = [large.source, constant_of((large.weight + weight).astype(dtype))]
    call = graph.named_as(relax.Call(affine.call.op, args, affine.call.attrs), affine.call_source)
    return relax.op.add(call, constant_of(total.astype(dtype).reshape(affine.bias_shape()))) if total.any() else call


def factor_gate(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``x + x g -> x (g + 1)`` if the gate ``g`` is smaller than ``x``: this saves one pass over ``x``. A
    constant summand stays after it: ``x + (x g + c)`` as in ConvNeXt V2.
    """
    for data, rest in (call.args, reversed(call.args)):
        total = graph.call(rest, "relax.add") if graph.has_single_user(rest) else None
        shift = None if total is None or graph.constant(total.args[1]) is None else total.args[1]
        inner = rest if total is None or shift is None else total.args[0]
        product = graph.call(inner, "relax.multiply")
        if product is None or not graph.has_single_user(inner) or graph.same(data, inner):
            continue
        for factor, gate in (product.args, reversed(product.args)):
            if graph.same(factor, data) and _is_smaller_gate(gate, data, graph):
                one = relax.const(np.ones((), str(gate.ty.dtype)))
                gated = relax.op.multiply(data, relax.op.add(gate, one))
                return gated if shift is None else relax.op.add(gated, shift)
    return None


def scale_gate(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``(x g) c -> x (g c)`` if the gate ``g`` is smaller than ``x`` and the constant not larger than ``g``."""
    product = graph.call(call.args[0], "relax.multiply") if graph.has_single_user(call.args[0]) else None
    constant = graph.constant(call.args[1])
    if product is None or constant is None:
        return None
    for data, gate in (product.args, reversed(product.args)):
        shape = static_shape(gate)
        if not _is_smaller_gate(gate, data, graph) or shape is None or constant.ndim > len(shape):
            continue
        aligned = (1,) * (len(shape) - constant.ndim) + constant.shape
        if all(size in (1, own) for size, own in zip(aligned, shape, strict=True)):
            return relax.op.multiply(data, relax.op.multiply(gate, call.args[1]))
    return None


def _is_smaller_gate(gate: relax.Expr, data: relax.Expr, graph: Definitions) -> bool:
    shape, own = static_shape(data), static_shape(gate)
    if shape is None or own is None or graph.constant(gate) is not None or str(gate.ty.dtype) != str(data.ty.dtype):
        return False
    return "float" in str(gate.ty.dtype) and len(own) == len(shape) and math.prod(own) < math.prod(shape)


BRANCH_RULES: RuleTable = {
    "relax.add": (merge_convolutions, merge_identity, factor_gate),
    "relax.multiply": (scale_gate,),
}
