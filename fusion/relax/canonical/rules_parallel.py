"""Rules for parallel convolutions whose results are concatenated: mixed depthwise windows, separate groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import Definitions, RuleTable
from fusion.relax.canonical.rules_affine import Affine, match_affine
from fusion.relax.canonical.rules_branches import Branch, convolution_of, embedded_weight, split_convolution

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
