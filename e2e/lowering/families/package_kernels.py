"""Kernels of CUDA packages (:mod:`e2e.capture.cuda_packages`): attention, norms, single passes; weights and
optimizers in 4 and 8 bits.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import cast

from costmodel.operators.attention import Attention, AttentionKernel
from costmodel.operators.device_work import Elementwise, Gemm, Normalization, Reduction, ScaledGemm
from costmodel.operators.layers import DTYPE_BYTES
from costmodel.operators.lookups import Direction
from e2e.lowering.families.products import attention_record, gemm
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    UnforeseenCall,
    gpu_inputs,
    gpu_outputs,
    integers,
    numel,
    priced_dtype,
    size_bytes,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor, tensors


def _attention(direction: Direction) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        first = 1 if direction == "backward" else 0
        query, key, value = (_heads_first(tensor_argument(call, first + place)) for place in range(3))
        bias, causal, window, dropout, packed, kernel = call.inputs[first + 3 : first + 9]
        record: Attention = attention_record(call, context, (query, key, value), causal is True, direction)
        lengths = tuple(each for each in packed if isinstance(each, int)) if isinstance(packed, tuple) else ()
        record = replace(
            record,
            kernel=cast(AttentionKernel, kernel),
            window=window if isinstance(window, int) else 0,
            dropout=dropout not in (0, 0.0, None),
            mask=isinstance(bias, Tensor),
            placed="end",
            packed=lengths if len(lengths) > 1 else (),
        )
        return [DeviceWork(call.name, (record,))]

    return lower


def _heads_first(tensor: Tensor) -> Tensor:
    """Return (batch, heads, length, width) of (batch, length, heads, width)."""
    batch, length, heads, width = tensor.shape
    return replace(tensor, shape=(batch, heads, length, width), stride=None)


def _kind(call: OperatorCall) -> str:
    return next(value for value in call.inputs if value in ("layer_norm", "rms_norm"))  # type: ignore[return-value]


def _norm(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a norm; with a residual one kernel reads both addends and writes sum and norm."""
    data = tensor_argument(call, 0)
    columns = data.shape[-1]
    if isinstance(call.inputs[1], Tensor):
        residual = call.inputs[1]
        width = size_bytes(data) // max(numel(data), 1)
        others = 2 * size_bytes(residual) // width
        record: Elementwise | Normalization = Elementwise("norm", numel(data), 1, 1, others, priced_dtype(data))
    else:
        record = Normalization(_kind(call), numel(data) // columns, columns, priced_dtype(data))
    return [DeviceWork(f"package::{_kind(call)}", (record,))]


def _norm_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the gradient: that of the data, read with the sum's if there is one, and the parameters' sums over rows."""
    data = tensor_argument(call, 2)
    columns = data.shape[-1]
    name = f"package::{_kind(call)}_backward"
    if isinstance(call.inputs[1], Tensor):
        record: Elementwise | Normalization = Elementwise("norm", numel(data), 3, 1, 0, priced_dtype(data))
    else:
        record = Normalization(_kind(call), numel(data) // columns, columns, priced_dtype(data), "backward")
    parameters = [each for value in call.inputs[3:] if isinstance(value, tuple) for each in tensors(value)]
    work = [DeviceWork(name, (record,))]
    if parameters:
        count = len(parameters) * columns
        sums = Reduction("norm_parameters", 2 * numel(data), count, priced_dtype(data), False)
        work.append(DeviceWork(name, (sums,)))
    return work


def _one_pass(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a kernel that reads its tensors once and writes its outputs once."""
    read, written = list(tensors(call.inputs[1:2])), gpu_outputs(call)
    if not written:
        raise UnforeseenCall("nothing is written")
    return [_moved(f"package::{call.inputs[0]}", written[0], read, written)]


def _filtered(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a kernel that reads and writes its tensors once and issues a given number of instructions."""
    read, written = list(tensors(call.inputs[1:2])), gpu_outputs(call)
    work = _moved(f"package::{call.inputs[0]}", written[0], read, written)
    (record,) = work.operators
    (count,) = (value for value in call.inputs[-1:] if isinstance(value, int))
    instructions = round(count / max(numel(written[0]), 1))
    return [replace(work, operators=(replace(cast(Elementwise, record), instructions=instructions),))]


def _moved(name: str, main: Tensor, read: list[Tensor], written: list[Tensor], kind: str = "fused") -> DeviceWork:
    """Return a kernel over the elements of ``main`` that moves all tensors once."""
    width = max(size_bytes(main) // max(numel(main), 1), 1)
    total = sum(size_bytes(each) for each in (*read, *written)) - size_bytes(main)
    return DeviceWork(name, (Elementwise(kind, numel(main), 0, 1, total // width, priced_dtype(main)),))


def _passed(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a kernel that reads all inputs and writes all outputs once: the expansion of stored weights, of which codes
    and scales are read and 16 bits written; pooling of regions.
    """
    written = gpu_outputs(call) or list(tensors((call.attributes.get("out"),)))
    read = [each for each in gpu_inputs(call) if each.id not in {e.id for e in written}]
    return [_moved(call.name, written[0], read, written)]


def _update(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower an optimizer's kernel over one parameter: the gradient is read, all others are read and written; or one
    of a library before bitsandbytes 0.46 that only writes its last tensor, to 4-bit codes or from them by branches.
    """
    gradient, written = tensor_argument(call, 1), list(tensors(call.inputs[2:3]))
    name = str(call.inputs[0])
    if "quantize" not in name:
        return [_moved(f"package::{name}", written[0], [gradient, *written], written)]
    expands = "dequantize" in name and name.endswith("4")
    return [_moved(f"package::{name}", written[0], [gradient], written, "branches" if expands else "fused")]


def _updated(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower an optimizer's kernel over one parameter: all tensors are read; all but the gradient, which comes first,
    are written.
    """
    gradient, *others = gpu_inputs(call)
    large = [each for each in others if numel(each) == numel(gradient)]
    return [_moved(call.name, large[0], [gradient, *others], large)]


def _added_product(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a product of 16- or 8-bit operands that is added to existing values."""
    first, second, sums = (tensor_argument(call, place) for place in range(3))
    (m, k), n, scaling, kept = first.shape, second.shape[1], str(call.inputs[3]), priced_dtype(sums)
    if scaling:
        record: ScaledGemm | Gemm = ScaledGemm(m, n, k, "float8", scaling, accumulates=kept, split_sums=True)
    else:
        (product,) = gemm(context, first, second, call.name).operators
        record = replace(cast(Gemm, product), accumulates=kept)
    return [DeviceWork(call.name, (record,))]


def triton_product(call: OperatorCall) -> Gemm | None:
    """Return the product that a kernel with products in its source computes, if three of its tensors fit one: the
    largest, of (m, k), (k, n) and (m, n), each of them transposed or not; None otherwise.
    """
    once = list({tensor.id: tensor for tensor in gpu_inputs(call)}.values())
    matrices = [each for each in once if len(each.shape) >= 2 and _is_float(each)][:_MOST_MATRICES]
    found: list[Gemm] = []
    for result in reversed(matrices):  # results come last
        m, n = result.shape[-2:]
        others = [each for each in matrices if each is not result and each.shape[:-2] == result.shape[:-2]]
        for first in others:
            for k in _rest(first, m):
                if any(n in second.shape[-2:] and k in _rest(second, n) for second in others):
                    found.append(Gemm(prod(result.shape[:-2]), m, n, k, priced_dtype(first)))
    return max(found, key=lambda each: each.flops, default=None)


_MOST_MATRICES = 8


def _is_float(tensor: Tensor) -> bool:
    return "float" in tensor.dtype


def _rest(tensor: Tensor, extent: int) -> list[int]:
    """Return the other extent of a matrix one of whose extents is ``extent``; both if they are equal."""
    rows, columns = tensor.shape[-2:]
    return [other for one, other in ((rows, columns), (columns, rows)) if one == extent]


def _int8_product(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``int8_scaled_mm``: the product in integers, then its scaling to 16 bits."""
    first, second, written = tensor_argument(call, 0), tensor_argument(call, 1), gpu_outputs(call)[0]
    m, (n, k) = numel(first) // first.shape[-1], second.shape
    scaled = Elementwise("dequant", m * n, 2, 1, 0, priced_dtype(written))  # sums of 32 bits are two of 16
    return [
        DeviceWork(call.name, (ScaledGemm(m, n, k, "int8", "tensor", "int32"),)),
        DeviceWork(call.name, (scaled,)),
    ]


def _product_4bit(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``gemm_4bit`` of many rows: the weight is expanded to 16 bits, then multiplied."""
    first, codes, written = tensor_argument(call, 0), tensor_argument(call, 1), gpu_outputs(call)[0]
    n, k = integers(call.inputs[2])
    m, dtype = numel(first) // k, priced_dtype(written)
    read = size_bytes(codes) + sum(size_bytes(each) for each in gpu_inputs(call)[2:])
    expanded = Elementwise("fused", n * k, 0, 1, read // DTYPE_BYTES[dtype], dtype)
    return [DeviceWork(call.name, (expanded,)), DeviceWork(call.name, (Gemm(1, m, n, k, dtype, transpose_b=True),))]


TABLE: dict[str, Lowering] = {
    "bitsandbytes::gemm_4bit": _product_4bit,
    "bitsandbytes::int8_scaled_mm": _int8_product,
    "bitsandbytes::int8_vectorwise_quant": _passed,
    "package::attention": _attention("forward"),
    "package::attention_backward": _attention("backward"),
    "package::norm": _norm,
    "package::norm_backward": _norm_backward,
    "package::one_pass": _one_pass,
    "package::filtered": _filtered,
    "package::update_": _update,
    "package::add_mm_": _added_product,
    "bitsandbytes::dequantize_4bit": _passed,
    "bitsandbytes::dequantize_blockwise": _passed,
    "bitsandbytes::quantize_4bit": _passed,
    "bitsandbytes::quantize_blockwise": _passed,
    "bitsandbytes::optimizer_update_8bit_blockwise": _updated,
    "bitsandbytes::optimizer_update_32bit": _updated,
    **{
        f"torchvision::{name}": _passed
        for pooling in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")
        for name in (pooling, f"_{pooling}_backward")
    },
}
