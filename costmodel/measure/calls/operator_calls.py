"""Calls that run an operator's kernel on a device, on random data.

A backward call keeps its graph and runs only the backward pass: gradients are returned, never accumulated, so that only
the kernels of the operator are launched. ``None`` for records without a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F

from costmodel.measure.calls import movement_calls
from costmodel.measure.calls.sample_tensors import DTYPES, DeviceCall, indices, random
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import (
    ConvolutionBackward,
    Elementwise,
    Gemm,
    Loss,
    Normalization,
    Pooling,
    Reduction,
    Softmax,
)
from costmodel.operators.layers import Conv2d
from costmodel.operators.lookups import EmbeddingLookup

TORCH = True
UNARY = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "exp": torch.exp,
}
BINARY = {"add": torch.add, "mul": torch.mul, "div": torch.div}
REDUCTIONS = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "norm": torch.linalg.vector_norm}


@singledispatch
def make_call(operator: AnyOperator, device: Any) -> DeviceCall | None:
    """Call of ``operator`` on ``device``. Errors of torch (out of memory, not implemented) propagate."""
    return movement_calls.make_call(operator, device)


def backward(output: Any, inputs: Sequence[Any]) -> DeviceCall:
    """Call of the backward pass from ``output`` to ``inputs``, with a random gradient."""
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


@make_call.register
def _gemm(operator: Gemm, device: Any) -> DeviceCall | None:
    batch = (operator.batch,) if operator.batch > 1 else ()
    a = _stored(batch, operator.m, operator.k, operator.transpose_a, operator.dtype, device)
    b = _stored(batch, operator.k, operator.n, operator.transpose_b, operator.dtype, device)
    if operator.bias:
        bias = random((operator.n,), operator.dtype, device)
        return lambda: torch.addmm(bias, a, b)
    return (lambda: torch.bmm(a, b)) if batch else (lambda: torch.mm(a, b))


def _stored(batch: tuple[int, ...], rows: int, columns: int, transposed: bool, dtype: str, device: Any) -> Any:
    if transposed:
        return random((*batch, columns, rows), dtype, device).transpose(-1, -2)
    return random((*batch, rows, columns), dtype, device)


@make_call.register
def _convolution(operator: Conv2d, device: Any) -> DeviceCall:
    data = _laid_out(random(operator.input_shape, operator.dtype, device), operator.channels_last)
    weight = _laid_out(random(operator.weight_shape, operator.dtype, device), operator.channels_last)
    return lambda: F.conv2d(
        data, weight, None, operator.stride, operator.padding[:2], operator.dilation, operator.groups
    )


@make_call.register
def _convolution_backward(operator: ConvolutionBackward, device: Any) -> DeviceCall:
    forward = operator.forward
    shape = (forward.batch, forward.out_channels, forward.out_height, forward.out_width)
    data, weight, gradient = (
        _laid_out(random(each, forward.dtype, device), forward.channels_last)
        for each in (forward.input_shape, forward.weight_shape, shape)
    )
    wanted = [operator.wrt == "data", operator.wrt == "weight", False]
    stride, padding, dilation = list(forward.stride), list(forward.padding[:2]), list(forward.dilation)
    return lambda: torch.ops.aten.convolution_backward(
        gradient, data, weight, None, stride, padding, dilation, False, [0, 0], forward.groups, wanted
    )


@make_call.register
def _attention(operator: Attention, device: Any) -> DeviceCall:
    learned = operator.direction == "backward"
    heads = (operator.heads, operator.kv_heads, operator.kv_heads)
    lengths = (operator.query_length, operator.key_length, operator.key_length)
    q, k, v = (
        random((operator.batch, count, length, operator.head_dim), operator.dtype, device).requires_grad_(learned)
        for count, length in zip(heads, lengths, strict=True)
    )
    grouped = {"enable_gqa": True} if operator.kv_heads != operator.heads else {}

    def forward() -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=operator.causal, **grouped)

    return backward(forward(), (q, k, v)) if learned else forward


@make_call.register
def _softmax(operator: Softmax, device: Any) -> DeviceCall:
    function = F.softmax if operator.kind == "softmax" else F.log_softmax
    learned = operator.direction == "backward"
    x = random((operator.rows, operator.columns), operator.dtype, device).requires_grad_(learned)
    return backward(function(x, -1), (x,)) if learned else lambda: function(x, -1)


@make_call.register
def _normalization(operator: Normalization, device: Any) -> DeviceCall | None:
    if operator.kind == "rms_norm":
        return None
    learned, columns = operator.direction == "backward", operator.columns
    weight, bias = (random((columns,), operator.dtype, device).requires_grad_(learned) for _ in range(2))
    if operator.kind == "layer_norm":
        x = random((operator.rows, columns), operator.dtype, device).requires_grad_(learned)
        forward: DeviceCall = lambda: F.layer_norm(x, (columns,), weight, bias)  # noqa: E731
    else:
        pictures = random(_pictures(operator.rows, columns), operator.dtype, device)
        x = _laid_out(pictures, operator.channels_last).requires_grad_(learned)
        forward = lambda: F.batch_norm(x, None, None, weight, bias, operator.training)  # noqa: E731
    return backward(forward(), (x, weight, bias)) if learned else forward


def _laid_out(tensor: Any, channels_last: bool) -> Any:
    """``tensor`` in NHWC if ``channels_last``, else unchanged."""
    return tensor.contiguous(memory_format=torch.channels_last) if channels_last else tensor


def _pictures(rows: int, channels: int) -> tuple[int, int, int, int]:
    """(N, C, H, W) with N x H x W = ``rows``, as square as the factors allow up to 16 pictures."""
    batch = next(count for count in (16, 8, 4, 2, 1) if rows % count == 0)
    return (batch, channels, rows // batch, 1)


@make_call.register
def _elementwise(operator: Elementwise, device: Any) -> DeviceCall | None:
    x = random((operator.elements,), operator.dtype, device)
    if operator.kind in BINARY:
        other = random((operator.elements,), operator.dtype, device)
        return lambda: BINARY[operator.kind](x, other)
    if operator.kind == "cast":
        return lambda: x.to(DTYPES[operator.output_dtype])
    if operator.kind == "dropout":
        return lambda: F.dropout(x, 0.1, training=True)
    function = UNARY.get(operator.kind)
    return None if function is None else lambda: function(x)


@make_call.register
def _reduction(operator: Reduction, device: Any) -> DeviceCall | None:
    reduced = operator.elements // operator.outputs
    shape = (operator.outputs, reduced) if operator.contiguous else (reduced, operator.outputs)
    x, dim = random(shape, operator.dtype, device), 1 if operator.contiguous else 0
    function = REDUCTIONS.get(operator.kind)
    return None if function is None else lambda: function(x, dim=dim)


@make_call.register
def _embedding(operator: EmbeddingLookup, device: Any) -> DeviceCall | None:
    if operator.tables != 1 or operator.fused_optimizer:
        return None
    learned = operator.direction == "backward"
    weight = random((operator.rows, operator.dim), operator.dtype, device).requires_grad_(learned)
    rows = indices(operator.rows, operator.indices, device)
    if operator.bags == operator.indices:
        forward: DeviceCall = lambda: F.embedding(rows, weight)  # noqa: E731
    else:
        offsets = torch.arange(0, operator.indices, operator.indices // operator.bags, device=device)
        forward = lambda: F.embedding_bag(rows, weight, offsets, mode="sum")  # noqa: E731
    return backward(forward(), (weight,)) if learned else forward


@make_call.register
def _pooling(operator: Pooling, device: Any) -> DeviceCall:
    shape = (operator.batch, operator.channels, operator.height, operator.width)
    learned = operator.direction == "backward"
    x = _laid_out(random(shape, operator.dtype, device), operator.channels_last).requires_grad_(learned)
    function = F.max_pool2d if operator.kind == "max" else F.avg_pool2d
    forward: DeviceCall = lambda: function(x, operator.kernel, 2)  # noqa: E731
    return backward(forward(), (x,)) if learned else forward


@make_call.register
def _loss(operator: Loss, device: Any) -> DeviceCall | None:
    learned, wide = operator.direction == "backward", operator.kind in ("nll", "cross_entropy")
    shape = (operator.rows, operator.columns) if wide else (operator.rows,)
    scores = random(shape, operator.dtype, device)
    if operator.kind == "bce":
        scores = torch.sigmoid(scores)
    elif operator.kind == "nll":
        scores = F.log_softmax(scores, -1)
    scores.requires_grad_(learned)
    target = indices(operator.columns, operator.rows, device) if wide else torch.rand(shape, device=device)
    functions: dict[str, Any] = {
        "nll": F.nll_loss,
        "cross_entropy": F.cross_entropy,
        "bce": F.binary_cross_entropy,
        "mse": F.mse_loss,
    }
    function = functions.get(operator.kind)
    if function is None:
        return None
    return backward(function(scores, target), (scores,)) if learned else lambda: function(scores, target)
