"""Kernels of CUDA packages (:mod:`e2e.capture.cuda_packages`): attention, norms, single passes; weights and
optimizers in 4 and 8 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from costmodel.operators.attention import Attention, AttentionKernel
from costmodel.operators.device_work import Elementwise, Normalization, Reduction
from costmodel.operators.lookups import Direction
from e2e.lowering.families.products import attention_record
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    UnforeseenCall,
    gpu_inputs,
    gpu_outputs,
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


def _moved(name: str, main: Tensor, read: list[Tensor], written: list[Tensor]) -> DeviceWork:
    """Return a kernel over the elements of ``main`` that moves all tensors once."""
    width = max(size_bytes(main) // max(numel(main), 1), 1)
    total = sum(size_bytes(each) for each in (*read, *written)) - size_bytes(main)
    return DeviceWork(name, (Elementwise("fused", numel(main), 0, 1, total // width, priced_dtype(main)),))


def _dequantized(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the expansion of stored weights: codes and scales are read, 16 bits written."""
    written = gpu_outputs(call) or list(tensors((call.attributes.get("out"),)))
    read = [each for each in gpu_inputs(call) if each.id not in {e.id for e in written}]
    return [_moved(call.name, written[0], read, written)]


def _update(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower an optimizer's kernel over one parameter: the gradient is read, all others are read and written."""
    gradient, written = tensor_argument(call, 1), list(tensors(call.inputs[2:3]))
    return [_moved(f"package::{call.inputs[0]}", written[0], [gradient, *written], written)]


def _updated(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower an optimizer's kernel over one parameter: all tensors are read; all but the gradient, which comes first,
    are written.
    """
    gradient, *others = gpu_inputs(call)
    large = [each for each in others if numel(each) == numel(gradient)]
    return [_moved(call.name, large[0], [gradient, *others], large)]


TABLE: dict[str, Lowering] = {
    "package::attention": _attention("forward"),
    "package::attention_backward": _attention("backward"),
    "package::norm": _norm,
    "package::norm_backward": _norm_backward,
    "package::one_pass": _one_pass,
    "package::update_": _update,
    "bitsandbytes::dequantize_4bit": _dequantized,
    "bitsandbytes::dequantize_blockwise": _dequantized,
    "bitsandbytes::quantize_4bit": _dequantized,
    "bitsandbytes::quantize_blockwise": _dequantized,
    "bitsandbytes::optimizer_update_8bit_blockwise": _updated,
    "bitsandbytes::optimizer_update_32bit": _updated,
}
