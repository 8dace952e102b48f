"""Matrix products, fused attention, and products in 8 bits with casts and scales: PyTorch's operators and those of
:mod:`e2e.capture.models.layer_forms`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Literal

from costmodel.operators.attention import Attention, AttentionKernel
from costmodel.operators.device_work import SCALINGS, Elementwise, Gemm, ScaledCast, ScaledGemm
from costmodel.operators.experts import GroupedGemm
from costmodel.operators.lookups import Direction
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    UnforeseenCall,
    argument,
    elementwise,
    gpu_outputs,
    numel,
    priced_dtype,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor


def product_dtype(tensor: Tensor, context: Context, allowed: bool = False) -> str:
    """Return the type of products; ``tf32`` for float32 operands if allowed in all products or by ``allowed``."""
    dtype = priced_dtype(tensor)
    return "tf32" if dtype == "float32" and (allowed or context.options.switches.products) else dtype


def is_transposed(tensor: Tensor, context: Context) -> bool:
    """True if the last two dimensions are column-major in memory; cuBLAS takes them without a copy."""
    *_, row, column = context.stride(tensor)
    return row == 1 and column != 1 and tensor.shape[-2] != 1


def gemm(context: Context, first: Tensor, second: Tensor, name: str, bias: bool = False) -> DeviceWork:
    """Return the product (..., m, k) x (..., k, n)."""
    m, k = first.shape[-2:]
    record = Gemm(
        batch=prod(first.shape[:-2]),
        m=m,
        n=second.shape[-1],
        k=k,
        dtype=product_dtype(first, context),
        transpose_a=is_transposed(first, context),
        transpose_b=is_transposed(second, context),
        bias=bias,
    )
    return DeviceWork(name, (record,))


def _plain(call: OperatorCall, context: Context) -> list[DeviceWork]:
    return [gemm(context, tensor_argument(call, 0), tensor_argument(call, 1), call.name)]


def _with_addend(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``addmm``: cuBLASLt adds a bias vector in its epilogue; a full matrix is copied to the output before."""
    addend, first, second = (tensor_argument(call, place) for place in range(3))
    bias = len(addend.shape) <= 1
    work = [gemm(context, first, second, call.name, bias)]
    if not bias and argument(call, 3, "beta", 1) not in (0, 0.0):
        work.insert(0, elementwise(context, "copy", gpu_outputs(call)[0], [addend], name="copy_"))
    return work


def _linear(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``linear`` without recorded nested calls: rows of the input times the transposed weight."""
    data, weight = tensor_argument(call, 0), tensor_argument(call, 1)
    rows = prod(data.shape[:-1])
    bias = isinstance(argument(call, 2, "bias"), Tensor)
    dtype = product_dtype(data, context)
    record = Gemm(1, rows, weight.shape[0], weight.shape[1], dtype, transpose_b=True, bias=bias)
    return [DeviceWork(call.name, (record,))]


def _linear_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    data, gradient, weight = (tensor_argument(call, place) for place in range(3))
    rows, out = prod(gradient.shape[:-1]), gradient.shape[-1]
    dtype = product_dtype(data, context)
    return [
        DeviceWork(call.name, (Gemm(1, rows, weight.shape[1], out, dtype),)),
        DeviceWork(call.name, (Gemm(1, out, weight.shape[1], rows, dtype, transpose_a=True),)),
    ]


def _grouped(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a grouped product over rows, columns or summands, with bounds ``offs`` on the device.

    The group sizes follow the options' routing. If both operands are 3-d, it is an ordinary batched product.
    """
    first, second = tensor_argument(call, 0), tensor_argument(call, 1)
    if len(first.shape) == len(second.shape) == 3:
        return [gemm(context, first, second, call.name)]
    groups = next(each.shape[0] for each in (second, first, gpu_outputs(call)[0]) if len(each.shape) == 3)
    return [DeviceWork(call.name, (grouped(first, second, groups, product_dtype(first, context), context),))]


def grouped(first: Tensor, second: Tensor, groups: int, dtype: str, context: Context, scaling: str = "") -> GroupedGemm:
    """Return the record of ``groups`` products: (rows, k) x (groups, k, n), its mirror image, or the matrix gradients
    (k, rows) x (rows, n).
    """
    share = context.options.routing.counts
    (m, k), n = first.shape[-2:], second.shape[-1]
    if len(second.shape) == 3:
        return GroupedGemm(share(m, groups), n, k, dtype, scaling=scaling)
    if len(first.shape) == 3:
        return GroupedGemm(share(n, groups), m, k, dtype, scaling=scaling)
    return GroupedGemm(share(k, groups), n, m, dtype, "weight", scaling)


def by_expert(work: GroupedGemm) -> list[tuple[int, int, int]]:
    """Return (m, n, k) of the product of each expert with rows."""
    counts = [each for each in work.counts if each]
    if work.wrt == "weight":
        return [(work.k, work.n, each) for each in counts]
    return [(each, work.n, work.k) for each in counts]


def experts_product(call: OperatorCall, context: Context, dtype: str, scaling: str = "") -> GroupedGemm:
    """Return the record of a call (first, second, ends): rows (all, k) times (experts, k, n), or the matrix gradients
    from rows (all, k) and their gradients (all, n).
    """
    first, second, ends = (tensor_argument(call, place) for place in range(3))
    counts = context.options.routing.counts(first.shape[0], ends.shape[0])
    wrt: Literal["rows", "weight"] = "rows" if len(second.shape) == 3 else "weight"
    return GroupedGemm(counts, second.shape[-1], first.shape[-1], dtype, wrt, scaling)


def _each(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``moe::each_mm`` and ``moe::each_gradient``: one kernel per expert.

    In gradients of matrices the rows are turned: those of an odd number are as aligned as others.
    """
    dtype = product_dtype(tensor_argument(call, 0), context)
    work = experts_product(call, context, dtype)
    turned = work.wrt == "weight"
    return [DeviceWork(call.name, (Gemm(1, m, n, k, dtype, transpose_a=turned),)) for m, n, k in by_expert(work)]


def _matrix_vector(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``mv`` and ``addmv``: a product with one column."""
    place = 1 if call.name.endswith("addmv") else 0
    matrix = tensor_argument(call, place)
    record = Gemm(1, matrix.shape[0], 1, matrix.shape[1], product_dtype(matrix, context))
    return [DeviceWork(call.name, (record,))]


def _dot(call: OperatorCall, context: Context) -> list[DeviceWork]:
    vector = tensor_argument(call, 0)
    return [DeviceWork(call.name, (Gemm(1, 1, 1, vector.shape[0], product_dtype(vector, context)),))]


def _matmul(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``matmul`` without recorded nested calls; a matrix shared by all products is folded into the rows."""
    first, second = tensor_argument(call, 0), tensor_argument(call, 1)
    if len(first.shape) < 2 or len(second.shape) < 2:
        raise UnforeseenCall("a product with a vector")
    if len(second.shape) == 2:
        rows = prod(first.shape[:-1])
        record = Gemm(1, rows, second.shape[-1], second.shape[-2], product_dtype(first, context))
        return [DeviceWork(call.name, (record,))]
    return [gemm(context, first, second, call.name)]


def attention_record(
    call: OperatorCall, context: Context, operands: tuple[Tensor, Tensor, Tensor], causal: bool, direction: Direction
) -> Attention:
    """Return the record of an attention call with operands of shape (batch, heads, length, head_dim).

    More keys than queries under a causal mask: a rank of context parallelism, with an even share of the work; a single
    query: the new token of a cached sequence.
    """
    query, key, value = operands
    biased = isinstance(argument(call, _BIAS_PLACE.get(call.name, len(call.inputs)), "attn_bias"), Tensor)
    return Attention(
        batch=query.shape[0],
        heads=query.shape[1],
        query_length=query.shape[2],
        key_length=key.shape[2],
        head_dim=query.shape[3],
        kv_heads=key.shape[1],
        causal=causal,
        dtype=priced_dtype(query),
        direction=direction,
        kernel=_kernel(call.name, context, priced_dtype(query), biased),
        value_dim=value.shape[3] if value.shape[3] != query.shape[3] else 0,
        mask=biased,
        dropout=argument(call, _DROPOUT_PLACE.get(call.name, len(call.inputs)), "dropout_p", 0.0) not in (0, 0.0, None),
        placed="spread" if causal and key.shape[2] > query.shape[2] > 1 else "end",
    )


# Index of the additive mask among the arguments.
_BIAS_PLACE = {
    "aten::scaled_dot_product_attention": 3,
    "aten::_scaled_dot_product_efficient_attention": 3,
    "aten::_scaled_dot_product_cudnn_attention": 3,
    "aten::_scaled_dot_product_efficient_attention_backward": 4,
    "aten::_scaled_dot_product_cudnn_attention_backward": 8,
}


_DROPOUT_PLACE = {
    "aten::scaled_dot_product_attention": 4,
    "aten::_scaled_dot_product_flash_attention": 3,
    "aten::_scaled_dot_product_efficient_attention": 5,
    "aten::_scaled_dot_product_cudnn_attention": 5,
    "aten::_scaled_dot_product_flash_attention_backward": 10,
    "aten::_scaled_dot_product_efficient_attention_backward": 9,
    "aten::_scaled_dot_product_cudnn_attention_backward": 13,
}


def _kernel(name: str, context: Context, dtype: str, biased: bool) -> AttentionKernel:
    """Return the kernel named by the options if it supports the call, otherwise the kernel of the operator ``name``."""
    if name.startswith("attention::flex"):
        return "flash2"  # generated kernel, closest in speed to it (PyTorch's own figures: 0.85 to 0.9 of it on A100)
    asked = context.options.kernel
    if asked == "mla" or (asked == "flash3-fp8" and name != "attention::fused"):
        return "sdpa"  # kernels of serving engines, used only where those call them
    if asked is not None:
        able = asked in ("sdpa", "efficient", "math") or (dtype in ("float16", "bfloat16") and not biased)
        return asked if able else "sdpa"
    kinds: tuple[AttentionKernel, ...] = ("flash", "efficient", "cudnn")
    return next((kind for kind in kinds if f"_{kind}_" in name), "sdpa")


def _operands(call: OperatorCall, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value, from argument ``first`` on."""
    return tensor_argument(call, first), tensor_argument(call, first + 1), tensor_argument(call, first + 2)


def _fused(causal_place: int) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        causal = argument(call, causal_place, "is_causal", False) is True
        record = attention_record(call, context, _operands(call), causal, "forward")
        return [DeviceWork(call.name, (record,), launches=_LAUNCHES.get(call.name, 1))]

    return lower


def _fused_backward(causal_place: int) -> Lowering:
    """Return the lowering of all gradients with one time: published backward times, which kernels are fitted to,
    include the sums of output x gradient before and the conversion of the query gradient after.
    """

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        causal = argument(call, causal_place, "is_causal", False) is True
        record = attention_record(call, context, _operands(call, 1), causal, "backward")
        return [DeviceWork(call.name, (record,), launches=_LAUNCHES.get(call.name, 1))]

    return lower


# Launches of attention as traces show them, of PyTorch 2.11 on an H200: sums, gradients, conversion; cuDNN also clears.
_LAUNCHES = {
    "aten::_scaled_dot_product_flash_attention_backward": 3,
    "aten::_scaled_dot_product_cudnn_attention": 2,
    "aten::_scaled_dot_product_cudnn_attention_backward": 4,
}


def _library_attention(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a call of an attention library (:mod:`e2e.capture.attention`), with its window, sinks and
    documents.
    """
    backward = call.name.endswith("_backward")
    first = 1 if backward else 0
    sinks, causal, window, dropout = (argument(call, first + 3 + place) for place in range(4))
    operands = _operands(call, first)
    record = attention_record(call, context, operands, bool(causal), "backward" if backward else "forward")
    width = window if isinstance(window, int) else 0
    document = argument(call, first + 7, "document", 0)
    record = replace(
        record,
        dtype="float8" if record.kernel == "flash3-fp8" else record.dtype,
        window=width,
        sinks=isinstance(sinks, Tensor),
        dropout=dropout not in (0, 0.0, None),
        packed=_documents(record.query_length, document) if isinstance(document, int) else (),
    )
    if not backward:
        return [*_casts(call, operands, record), DeviceWork(call.name, (record,))]
    return [DeviceWork(call.name, (record,))]


def _latent_attention(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``attention::latent`` (:mod:`e2e.capture.attention`): queries of all heads, one latent per cached
    token.
    """
    query, latents, rotated = _operands(call)
    record = Attention(
        batch=query.shape[0],
        heads=query.shape[1],
        query_length=query.shape[2],
        key_length=latents.shape[2],
        head_dim=latents.shape[3] + rotated.shape[3],
        kv_heads=1,
        causal=query.shape[2] > 1,
        dtype=priced_dtype(query),
        kernel="mla",
        value_dim=latents.shape[3],
        paged=True,
    )
    return [DeviceWork(call.name, (record,))]


def _casts(call: OperatorCall, operands: tuple[Tensor, ...], record: Attention) -> list[DeviceWork]:
    """Return the casts to 8 bits of operands that are not in 8 bits already (a cache is)."""
    if record.dtype != "float8":
        return []
    wide = [each for each in operands if priced_dtype(each) != "float8"]
    records = [ScaledCast(prod(each.shape[:-1]), each.shape[-1], priced_dtype(each)) for each in wide]
    return [DeviceWork(call.name, (each,)) for each in records]


def _documents(tokens: int, length: int) -> tuple[int, ...]:
    """Return the lengths of the packed documents in ``tokens``; empty if one document of ``length`` covers all."""
    if not 0 < length < tokens:
        return ()
    rest = tokens % length
    return (length,) * (tokens // length) + ((rest,) if rest else ())


def _baddbmm(call: OperatorCall, context: Context) -> list[DeviceWork]:
    addend, first, second = (tensor_argument(call, place) for place in range(3))
    work = [gemm(context, first, second, call.name)]
    if argument(call, 3, "beta", 1) in (0, 0.0):
        return work
    if addend.shape == gpu_outputs(call)[0].shape and call.name.endswith("_"):
        return work
    return [elementwise(context, "copy", gpu_outputs(call)[0], [addend], name="copy_"), *work]


def _triangular(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the triangular solve: half of a product's work, since cuBLAS uses half of the matrix
    (``linalg_solve_triangular``).
    """
    matrix, right = tensor_argument(call, 0), tensor_argument(call, 1)
    rows, columns = right.shape[-2:]
    record = Gemm(prod(right.shape[:-2]), rows, columns, max(matrix.shape[-1] // 2, 1), product_dtype(right, context))
    return [DeviceWork(call.name, (record,))]


TABLE: dict[str, Lowering] = {
    "aten::linalg_solve_triangular": _triangular,
    "attention::fused": _library_attention,
    "attention::fused_backward": _library_attention,
    "attention::flex": _library_attention,
    "attention::flex_backward": _library_attention,
    "attention::latent": _latent_attention,
    "aten::mm": _plain,
    "aten::bmm": _plain,
    "aten::addmm": _with_addend,
    "aten::addmm_": _with_addend,
    "aten::_addmm_activation": _with_addend,
    "aten::baddbmm": _baddbmm,
    "aten::baddbmm_": _baddbmm,
    "aten::linear": _linear,
    "aten::linear_backward": _linear_backward,
    "aten::matmul": _matmul,
    "aten::_grouped_mm": _grouped,
    "moe::each_mm": _each,
    "moe::each_gradient": _each,
    "aten::mv": _matrix_vector,
    "aten::addmv": _matrix_vector,
    "aten::dot": _dot,
    "aten::vdot": _dot,
    "aten::scaled_dot_product_attention": _fused(5),
    "aten::_scaled_dot_product_flash_attention": _fused(4),
    "aten::_scaled_dot_product_efficient_attention": _fused(6),
    "aten::_scaled_dot_product_cudnn_attention": _fused(6),
    "aten::_scaled_dot_product_flash_attention_backward": _fused_backward(11),
    "aten::_scaled_dot_product_efficient_attention_backward": _fused_backward(11),
    "aten::_scaled_dot_product_cudnn_attention_backward": _fused_backward(14),
}


def _scaling_of(scale: Tensor, operand: Tensor) -> str:
    """Return the granularity of scaling from the number of scales of the operand (rows, k)."""
    scales, elements, rows = numel(scale), numel(operand), operand.shape[-2]
    if scales <= 1:
        return "tensor"
    if scales in (rows, operand.shape[-1]):
        return "row"
    return "mx" if elements // scales <= 32 else "block"


# Index of ``use_fast_accum`` in the arguments of ``_scaled_mm``; PyTorch's default is False.
_FAST_ACCUM = 7


def _scaled(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``_scaled_mm(a, b, scale_a, scale_b, ...)``."""
    first, second, scale = (tensor_argument(call, place) for place in range(3))
    record = ScaledGemm(
        first.shape[-2],
        second.shape[-1],
        first.shape[-1],
        priced_dtype(first),
        _scaling_of(scale, first),
        priced_dtype(gpu_outputs(call)[0]),
        split_sums=call.inputs[_FAST_ACCUM : _FAST_ACCUM + 1] != (True,),
    )
    return [DeviceWork(call.name, (record,))]


def _integers(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``_int_mm(a, b)``, with sums in int32."""
    first, second = tensor_argument(call, 0), tensor_argument(call, 1)
    record = ScaledGemm(first.shape[-2], second.shape[-1], first.shape[-1], "int8", "tensor", "int32")
    return [DeviceWork(call.name, (record,))]


def _scaled_groups(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``_scaled_grouped_mm(a, b, scale_a, scale_b, offs, ...)``."""
    first, second, scale = (tensor_argument(call, place) for place in range(3))
    groups = next((each.shape[0] for each in (second, first, gpu_outputs(call)[0]) if len(each.shape) == 3), 0)
    if not groups:
        raise UnforeseenCall("the number of groups is not known")
    scaling = _scaling_of(scale, first)
    record: GroupedGemm = grouped(first, second, groups, priced_dtype(first), context, scaling)
    return [DeviceWork(call.name, (record,))]


def _cast(dynamic: bool, outputs: int | None = None) -> Lowering:
    """Return the lowering of ``float8::cast(given, scaling, ...)``; rows are along the last dimension."""

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        given = tensor_argument(call, 0)
        count = len(gpu_outputs(call)) if outputs is None else outputs
        scaling = _named(call)
        columns = given.shape[-1]
        share = next((value for value in call.inputs[1:] if isinstance(value, int)), 1)
        rows = max(prod(given.shape) // columns // share, 1)
        found = dynamic and scaling != "tensor"
        record = ScaledCast(rows, columns, priced_dtype(given), scaling, count, found)
        return [DeviceWork(call.name, (record,))]

    return lower


def _product(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``float8::mm``, which names its scaling."""
    first, second = tensor_argument(call, 0), tensor_argument(call, 1)
    output = gpu_outputs(call)[0]
    (m, k), n = first.shape, second.shape[1]
    record = ScaledGemm(m, n, k, "float8", _named(call), priced_dtype(output), split_sums=_splits_sums(call))
    return [DeviceWork(call.name, (record,))]


def _amax(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``float8::amax``: the maximum, and the scale from it, on the GPU (``nvte_compute_amax``,
    ``nvte_compute_scale_from_amax``; torchao divides in separate kernels too).
    """
    return [*_cast(False, 0)(call, context), DeviceWork(call.name, (_SCALE,))]


_SCALE = Elementwise("scale", 1, 1, 1, 0, "float32")


def _each_cast(searched: bool) -> Lowering:
    """Return the lowering of ``float8::each_amax`` or ``float8::each_cast``: the kernels of :func:`_amax` or of a cast,
    per expert.
    """

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        given, ends = tensor_argument(call, 0), tensor_argument(call, 1)
        counts = context.options.routing.counts(given.shape[0], ends.shape[0])
        scaling = _named(call)
        outputs = 0 if searched else len(gpu_outputs(call))
        works: list[DeviceWork] = []
        for rows in counts:
            dynamic = not searched and scaling != "tensor"
            record = ScaledCast(rows, given.shape[-1], priced_dtype(given), scaling, outputs, dynamic)
            works.append(DeviceWork(call.name, (record,)))
            if searched:
                works.append(DeviceWork(call.name, (_SCALE,)))
        return works

    return lower


def _experts(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``float8::grouped_mm`` and ``float8::grouped_gradient``."""
    return [DeviceWork(call.name, (experts_product(call, context, "float8", _named(call)),))]


def _each_expert(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``float8::each_mm`` and ``float8::each_gradient``: one kernel per expert."""
    work = experts_product(call, context, "float8", _named(call))
    dtype = priced_dtype(gpu_outputs(call)[0])
    split_sums = work.wrt == "weight" or _splits_sums(call)
    products = [
        ScaledGemm(m, n, k, "float8", work.scaling, dtype, split_sums=split_sums) for m, n, k in by_expert(work)
    ]
    return [DeviceWork(call.name, (product,)) for product in products]


def _splits_sums(call: OperatorCall) -> bool:
    return any(value is True for value in call.inputs)


def _named(call: OperatorCall) -> str:
    return next((str(value) for value in call.inputs if value in SCALINGS), "tensor")


SCALED_TABLE: dict[str, Lowering] = {
    "aten::_scaled_mm": _scaled,
    "aten::_int_mm": _integers,
    "aten::_scaled_grouped_mm": _scaled_groups,
    "float8::amax": _amax,
    "float8::each_amax": _each_cast(True),
    "float8::each_cast": _each_cast(False),
    "float8::each_cast_both": _each_cast(False),
    "float8::each_mm": _each_expert,
    "float8::each_gradient": _each_expert,
    "float8::cast": _cast(True),
    "float8::cast_both": _cast(True),
    "float8::mm": _product,
    "float8::grouped_mm": _experts,
    "float8::grouped_gradient": _experts,
}
