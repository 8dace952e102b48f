"""Calls that run an operator's kernel on a device, on random data (on zeros, chips draw less power and run faster).

A backward call keeps its graph and runs only the backward pass: gradients are returned, never accumulated, so that
only the kernels of the operator are launched. ``None`` for records without a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, singledispatch
from typing import Any

import torch
import torch.nn.functional as F

from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import (
    ConvolutionBackward,
    Elementwise,
    Gemm,
    Loss,
    MemoryCopy,
    Normalization,
    OptimizerStep,
    Pooling,
    Rearrangement,
    Reduction,
    Softmax,
)
from costmodel.operators.layers import Conv2d
from costmodel.operators.lookups import EmbeddingLookup, TableLookup, uniform

TORCH = True
DeviceCall = Callable[[], Any]
DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def random(shape: Sequence[int], dtype: str, device: Any) -> torch.Tensor:
    """Normally distributed values of shape ``shape``."""
    return torch.randn(tuple(shape), dtype=DTYPES[dtype], device=device)


def indices(rows: int, count: int, device: Any) -> torch.Tensor:
    """``count`` uniformly distributed row numbers below ``rows``, int64."""
    return torch.randint(rows, (count,), device=device)


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 units for float32 products and convolutions."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@singledispatch
def make_movement_call(operator: AnyOperator, device: Any) -> DeviceCall | None:
    """Call of ``operator`` on ``device``, or ``None`` if not supported."""
    return None


@make_movement_call.register
def _copy(operator: MemoryCopy, device: Any) -> DeviceCall | None:
    elements = max(operator.size_bytes // 4, 1)
    here = random((elements,), "float32", device)
    if operator.kind == "memset":
        return lambda: here.zero_()
    if operator.kind == "device_to_device":
        other = torch.empty_like(here)
        return lambda: other.copy_(here)
    host = random((elements,), "float32", "cpu")
    if operator.pinned and here.is_cuda:
        host = host.pin_memory()
    if operator.kind == "host_to_device":
        return lambda: here.copy_(host, non_blocking=operator.pinned)
    if operator.kind == "device_to_host":
        return lambda: host.copy_(here, non_blocking=operator.pinned)
    return None


@make_movement_call.register
def _rearrangement(operator: Rearrangement, device: Any) -> DeviceCall | None:
    outer = max(operator.elements // operator.inner, 1)
    if operator.kind == "transpose":
        rows = _divisor(operator.elements)
        x = random((rows, operator.elements // rows), operator.dtype, device)
        return lambda: x.t().contiguous()
    if operator.kind == "concat":
        parts = [
            random((outer // operator.inputs, operator.inner), operator.dtype, device) for _ in range(operator.inputs)
        ]
        return lambda: torch.cat(parts, dim=1)
    x = random((outer, operator.inner), operator.dtype, device)
    if operator.kind in ("tril", "triu"):
        return lambda: getattr(torch, operator.kind)(x)
    if operator.kind == "index":
        rows_wanted = indices(outer, outer, device)
        return lambda: x.index_select(0, rows_wanted)
    if operator.kind == "gather":
        places = indices(operator.inner, operator.elements, device).view(outer, operator.inner)
        return lambda: torch.gather(x, 1, places)
    return None


def _divisor(elements: int) -> int:
    """Largest divisor of ``elements`` up to its square root: rows of the squarest matrix."""
    return next(rows for rows in range(int(elements**0.5), 0, -1) if elements % rows == 0)


@make_movement_call.register
def _optimizer(operator: OptimizerStep, device: Any) -> DeviceCall | None:
    each = operator.elements // operator.tensors

    def tensors() -> list[torch.Tensor]:
        return [random((each,), operator.dtype, device) for _ in range(operator.tensors)]

    if operator.kind in OPTIMIZERS:
        return _fused(OPTIMIZERS[operator.kind], tensors(), tensors())
    one = tensors()
    if operator.kind == "foreach_add":
        other = tensors()
        return lambda: torch._foreach_add_(one, other, alpha=1e-6)
    if operator.kind == "foreach_mul":
        return lambda: torch._foreach_mul_(one, 0.999999)
    if operator.kind == "foreach_addcmul":
        left, right = tensors(), tensors()
        return lambda: torch._foreach_addcmul_(one, left, right, value=1e-6)
    if operator.kind == "foreach_sqrt":
        positive = [value.abs() for value in one]
        return lambda: torch._foreach_sqrt(positive)
    return None


def _fused(optimizer_class: Any, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> DeviceCall:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(True)
        parameter.grad = gradient
    settings = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    step: DeviceCall = optimizer_class(parameters, lr=1e-6, fused=True, **settings).step
    return step


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
    return make_movement_call(operator, device)


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
        broadcast = operator.broadcast_elements
        other = random((broadcast or operator.elements,), operator.dtype, device)
        x = x.view(-1, broadcast) if broadcast else x
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
    if operator.implementation == "table_batched":
        return None
    (table, _), learned = operator.parts[0], operator.direction == "backward"
    weight = random((table.rows, table.dim), table.dtype, device).requires_grad_(learned)
    rows, sparse = draw_indices(table, device), operator.gradient == "sparse"
    if operator.implementation == "embedding":
        forward: DeviceCall = partial(F.embedding, rows, weight, sparse=sparse)
    else:
        offsets = (torch.arange(table.bags, device=device) * table.indices) // table.bags
        forward = partial(F.embedding_bag, rows, weight, offsets, mode=operator.mode, sparse=sparse)
    return backward(forward(), (weight,)) if learned else forward


def draw_indices(table: TableLookup, device: Any) -> torch.Tensor:
    """Draw ``table.indices`` independent row numbers, int64, with the probabilities of ``table.statistics``.

    Popular rows are spread over the table: neighbours in popularity are not neighbours in memory.
    """
    statistics = table.statistics or uniform(table.rows)
    sizes = torch.tensor(statistics.group_rows, dtype=torch.float64, device=device)
    shares = torch.tensor(statistics.group_shares, dtype=torch.float64, device=device)
    ends = shares.cumsum(0)
    group = torch.searchsorted(ends, torch.rand(table.indices, dtype=torch.float64, device=device) * ends[-1])
    group = group.clamp(max=len(sizes) - 1)
    within = torch.rand(table.indices, dtype=torch.float64, device=device) * sizes[group]
    rank = ((sizes.cumsum(0) - sizes)[group] + within).long().clamp(max=table.rows - 1)
    return (rank * _stride(table.rows)) % table.rows


def _stride(rows: int) -> int:
    """Step near the golden section of ``rows`` that visits every row once."""
    step = max(int(rows * 0.6180339887), 1)
    while math.gcd(step, rows) != 1:
        step += 1
    return step


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
