"""Rules for branches that start at one tensor and are summed, concatenated or stacked.

Sums: re-parameterised convolutions and gates with a bypass. Concatenations: mixed depthwise windows, separate groups.
Tensors that are stacked along a new axis, then weighted and summed along it (split attention, selective kernels,
weighted pyramids), are summed directly, and no stack is written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.affine import Affine, match_affine, match_scaled
from fusion.relax.canonical.rewriter import Definitions, RuleTable, constant_of


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


# Limit of the multiply-adds of a merged depthwise convolution relative to those of its parts (small windows are filled
# up with zeros to the largest). A depthwise layer is bound by memory, and its parts wait for each other: MixNet's worst
# layer has 2.2 times the multiply-adds.
MOST_DEPTHWISE_WORK = 2.5
MOST_DENSE_WORK = 1.0
ELEMENT_WISE = ("relax.nn.relu", "relax.nn.silu", "relax.sigmoid", "relax.nn.gelu", "relax.nn.gelu_tanh", "relax.clip")


def merge_parts(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``concat(conv(x_1, w_1), ..., conv(x_n, w_n))`` as one convolution, if one computes the same.

    Either the ``x_i`` are all parts of one split along the channels, in their order: the convolutions are the groups of
    the result (MixConv, ResNeXt as branches); or they are one tensor, read with one window: the convolutions give its
    output channels.
    """
    fields = _fields(call, graph)
    if fields is None or len(fields) < 2:
        return None
    activation, inner = _common_activation(fields, graph)
    affines = [convolution_of(expr, graph) for expr in inner]
    convolutions = [affine for affine in affines if affine is not None]
    if len(convolutions) < len(fields):
        return None
    branches = [split_convolution(affine) for affine in convolutions]
    merged = _grouped(branches, graph) or _widened(branches, graph)
    if merged is None:
        return None
    large = max(convolutions, key=lambda affine: affine.weight.shape[2] * affine.weight.shape[3])
    total = _convolution(merged, large, graph)
    return total if activation is None else activation(total)


def _fields(call: relax.Call, graph: Definitions) -> list[relax.Expr] | None:
    """Return the tensors that are concatenated along the channels of images, each with a single user; else None."""
    parts = graph.value(call.args[0])
    shape = static_shape(call)
    if not isinstance(parts, relax.Tuple) or shape is None or len(shape) != 4 or int(call.attrs.axis) % 4 != 1:
        return None
    return list(parts.fields) if all(graph.has_single_user(part) for part in parts.fields) else None


def _common_activation(
    fields: Sequence[relax.Expr], graph: Definitions
) -> tuple[Callable[[relax.Expr], relax.Expr] | None, list[relax.Expr]]:
    """Return the element-wise operator that ends every part, if it is the same for all, and the parts without it."""
    calls = [graph.call(part, *ELEMENT_WISE) for part in fields]
    first = calls[0]
    if first is None:
        return None, list(fields)
    bounds = [graph.scalar(arg) for arg in first.args[1:]]
    for call in calls:
        if call is None or call.op != first.op or [graph.scalar(arg) for arg in call.args[1:]] != bounds:
            return None, list(fields)
    return lambda data: relax.Call(first.op, [data, *first.args[1:]], first.attrs), [
        call.args[0] for call in calls if call is not None
    ]


def _grouped(branches: Sequence[Branch], graph: Definitions) -> Branch | None:
    """Return convolutions of the parts of a split as one grouped convolution, or None."""
    source = _split_source(branches, graph)
    if source is None or len({branch.weight.shape[1] for branch in branches}) > 1:
        return None
    per_group = {branch.weight.shape[0] // branch.window[2] for branch in branches}
    groups = sum(branch.window[2] for branch in branches)
    is_depthwise = per_group == {1} and branches[0].weight.shape[1] == 1
    most = MOST_DEPTHWISE_WORK if is_depthwise else MOST_DENSE_WORK
    return None if len(per_group) > 1 else _stacked(branches, source, groups, most)


def _split_source(branches: Sequence[Branch], graph: Definitions) -> relax.Expr | None:
    """Return the tensor whose parts the branches read, all of them and in their order; else None."""
    items = [graph.value(branch.source) for branch in branches]
    if not all(isinstance(item, relax.TupleGetItem) for item in items):
        return None
    splits = [graph.call(item.tuple_value, "relax.split") for item in items]
    first = splits[0]
    if first is None or any(split is None or not graph.same(split.args[0], first.args[0]) for split in splits):
        return None
    if int(first.attrs.axis) % 4 != 1 or not all(graph.same(i.tuple_value, items[0].tuple_value) for i in items):
        return None
    shape = static_shape(first.args[0])
    read = sum(branch.weight.shape[1] * branch.window[2] for branch in branches)
    in_order = [int(item.index) for item in items] == list(range(len(items)))
    return first.args[0] if in_order and shape is not None and shape[1] == read else None


def _widened(branches: Sequence[Branch], graph: Definitions) -> Branch | None:
    """Return convolutions of one tensor with one window as one with more output channels, or None."""
    first = branches[0]
    if any(branch.window[2] != 1 or not graph.same(branch.source, first.source) for branch in branches):
        return None
    return _stacked(branches, first.source, 1, MOST_DENSE_WORK)


def _stacked(branches: Sequence[Branch], source: relax.Expr, groups: int, most: float) -> Branch | None:
    """Return the weights stacked, small windows inside the largest; None if this takes more than ``most`` times the
    work.
    """
    large = max(branches, key=lambda branch: branch.weight.shape[2] * branch.weight.shape[3])
    weights = []
    for branch in branches:
        # Groups differ from part to part, and do not belong to the window.
        window = (*branch.window[:2], large.window[2])
        alike = Branch(branch.source, branch.weight, branch.bias, window, branch.top_left)
        weight = embedded_weight(alike, large)
        if weight is None:
            return None
        weights.append(weight)
    stacked = np.concatenate(weights)
    if stacked.size > most * sum(branch.weight.size for branch in branches):
        return None
    bias = np.concatenate([branch.bias for branch in branches])
    return Branch(source, stacked, bias, (*large.window[:2], groups), large.top_left)


def _convolution(merged: Branch, large: Affine, graph: Definitions) -> relax.Expr:
    """Return ``merged`` as Relax, with the padding of its largest window and the name of the concatenation."""
    dtype, attrs = large.weight.dtype, large.call.attrs
    strides, dilation, groups = merged.window
    call = relax.op.nn.conv2d(
        merged.source,
        relax.const(merged.weight.astype(dtype)),
        strides=strides,
        padding=tuple(map(int, attrs.padding)),
        dilation=dilation,
        groups=groups,
        data_layout="NCHW",
        kernel_layout="OIHW",
        out_dtype=attrs.out_dtype,
    )
    if not merged.bias.any():
        return graph.named_here(call)
    return graph.with_bias(call, relax.const(merged.bias.astype(dtype).reshape(1, -1, 1, 1)))


def scale_parts(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``concat(parts) * c`` and ``concat(parts) + c`` as operators on the parts if all are convolutions, which
    absorb them.
    """
    fields = _affine_fields(call.args[0], graph)
    constant, shape = graph.constant(call.args[1]), static_shape(call)
    if fields is None or constant is None or shape is None or constant.ndim > 4:
        return None
    sizes = (1,) * (4 - constant.ndim) + constant.shape
    if sizes[1] not in (1, shape[1]) or sizes[0] * sizes[2] * sizes[3] != 1:
        return None
    values = np.broadcast_to(constant.reshape(sizes), (1, shape[1], 1, 1))
    starts = np.cumsum([static_shape(field)[1] for field in fields])[:-1]  # type: ignore[index]
    parts = np.split(values, starts, axis=1)
    moved = [
        relax.Call(call.op, [field, relax.const(np.ascontiguousarray(part))], call.attrs)
        for field, part in zip(fields, parts, strict=True)
    ]
    return relax.op.concat(moved, axis=1)


def activate_parts(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``f(concat(parts))`` as ``concat(f(parts))`` if all parts are convolutions, whose kernels apply ``f`` at
    the end.
    """
    fields = _affine_fields(call.args[0], graph)
    if fields is None:
        return None
    return relax.op.concat([relax.Call(call.op, [field, *call.args[1:]], call.attrs) for field in fields], axis=1)


def _affine_fields(expr: relax.Expr, graph: Definitions) -> list[relax.Expr] | None:
    """Return the parts of a concatenation of convolutions with a single user, else None."""
    concat = graph.call(expr, "relax.concat")
    if concat is None or not graph.has_single_user(expr):
        return None
    fields = _fields(concat, graph)
    if fields is None or any(match_affine(field, graph) is None or static_shape(field) is None for field in fields):
        return None
    return fields


PARALLEL_RULES: RuleTable = {
    "relax.concat": (merge_parts,),
    "relax.add": (scale_parts,),
    "relax.multiply": (scale_parts,),
    **dict.fromkeys(ELEMENT_WISE, (activate_parts,)),
}


# A chain of more additions than this is not simpler.
MOST_PARTS = 8
_BINARY = ("relax.multiply", "relax.add")


def sum_of_parts(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``sum(stack(x_i) [* w], axis) -> x_1 [* w_1] + x_2 [* w_2] + ...``, and means likewise."""
    shape, result, axes = static_shape(call.args[0]), static_shape(call), call.attrs.axis
    if shape is None or result is None or axes is None or len(axes) != 1 or str(call.ty.dtype) != "float32":
        return None
    axis = int(axes[0]) % len(shape)
    parts = _parts(call.args[0], axis, graph) if 2 <= shape[axis] <= MOST_PARTS else None
    if parts is None:
        return None
    total = functools.reduce(relax.op.add, parts)
    if call.op.name == "relax.mean":
        total = relax.op.multiply(total, relax.const(np.float32(1.0 / len(parts))))
    return relax.op.reshape(total, result) if call.attrs.keepdims else total


def _parts(expr: relax.Expr, axis: int, graph: Definitions) -> list[relax.Expr] | None:
    """Return the parts that are stacked along ``axis``, without that axis; None if they would have to be cut out."""
    shape = static_shape(expr)
    if shape is None:
        return None
    stacked = graph.call(expr, "relax.concat")
    fields = None if stacked is None else graph.value(stacked.args[0])
    if stacked is not None and isinstance(fields, relax.Tuple) and stacked.attrs.axis is not None:
        alone = all(int(field.ty.shape[axis]) == 1 for field in fields.fields)
        if int(stacked.attrs.axis) % len(shape) != axis or not alone:
            return None
        return [relax.op.reshape(field, _without(shape, axis)) for field in fields.fields]
    apart = graph.call(expr, "relax.reshape")
    if apart is not None and axis == 1 and len(shape) == 5:
        return _channels(apart.args[0], shape)
    product = graph.call(expr, *_BINARY) if graph.has_single_user(expr) else None
    return None if product is None else _products(product, shape, axis, graph)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _channels(image: relax.Expr, shape: tuple[int, ...]) -> list[relax.Expr] | None:
    """Return the parts of the channels of an image that was reshaped to ``shape``, or None."""
    batch, parts, channels, height, width = shape
    if static_shape(image) != (batch, parts * channels, height, width):
        return None
    starts = range(0, parts * channels, channels)
    return [relax.op.strided_slice(image, [1], [start], [start + channels]) for start in starts]


def _products(call: relax.Call, shape: tuple[int, ...], axis: int, graph: Definitions) -> list[relax.Expr] | None:
    """Return the parts of a product or sum with weights per part, or None."""
    for data, weights in (call.args, reversed(call.args)):
        own = static_shape(weights)
        parts = _parts(data, axis, graph) if static_shape(data) == shape else None
        if parts is None or own is None or len(own) != len(shape) or own[axis] not in (1, shape[axis]):
            continue
        each = []
        for index, part in enumerate(parts):
            weight = weights
            if own[axis] > 1:
                weight = relax.op.strided_slice(weights, [axis], [index], [index + 1])
            each.append(relax.Call(call.op, [part, relax.op.reshape(weight, _without((*own,), axis))], call.attrs))
        return each
    return None


STACK_RULES: RuleTable = {"relax.sum": (sum_of_parts,), "relax.mean": (sum_of_parts,)}
