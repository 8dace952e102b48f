"""Fused kernels of linear attention, see :mod:`e2e.capture.scan_libraries`: one launch each.

The kernels of one call follow each other without a gap; the host time of the later launches is not counted separately.
"""

from __future__ import annotations

from typing import cast

from costmodel.operators.device_work import Elementwise
from costmodel.operators.linear_attention import CausalConvolution, LinearAttention, LinearKind
from costmodel.operators.lookups import Direction
from e2e.lowering.families.work import Context, DeviceWork, Lowering, argument, dtype_of, numel, tensor_argument
from e2e.step.operator_trace import OperatorCall, Tensor

_CHUNK = 64  # of Mamba 1's kernel, which has no visible chunks


def _convolution(direction: Direction, update: bool = False) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        first = 1 if direction == "backward" else 0
        data, weight = tensor_argument(call, first), tensor_argument(call, first + 1)
        batch, channels = data.shape[:2]
        length = data.shape[2] if len(data.shape) > 2 else 1
        record = CausalConvolution(
            batch, channels, length, weight.shape[-1], dtype_of(data), direction, update and length == 1
        )
        return [DeviceWork(call.name, (record,))]

    return lower


def _linear(direction: Direction) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        first = 1 if direction == "backward" else 0
        key, value = tensor_argument(call, first + 1), tensor_argument(call, first + 2)
        how = first + (5 if direction == "forward" else 4)
        kind, chunk, keeps = (argument(call, how + place) for place in range(3))
        batch, length, heads, width = value.shape
        states = argument(call, 4) if direction == "forward" else None
        record = LinearAttention(
            cast(LinearKind, kind), batch, length, key.shape[-2], key.shape[-1], heads, width,
            int(chunk) if isinstance(chunk, int) else _CHUNK, dtype_of(value), direction, bool(keeps),
            dtype_of(states) if isinstance(states, Tensor) else "float32",
        )  # fmt: skip
        return [DeviceWork(call.name, (record,))]

    return lower


def _selective(direction: Direction) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        first = 1 if direction == "backward" else 0
        data, decay = tensor_argument(call, first), tensor_argument(call, first + 2)
        batch, channels, length = data.shape
        record = LinearAttention(
            "selective", batch, length, 1, decay.shape[-1], channels, 1, _CHUNK, dtype_of(data), direction
        )
        return [DeviceWork(call.name, (record,))]

    return lower


def _update(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a state update: states (batch, channels, states) for Mamba 1, (batch, heads, width, states) for Mamba 2."""
    data, states = tensor_argument(call, 0), tensor_argument(call, 1)
    heads, width = states.shape[1], states.shape[2] if len(states.shape) > 3 else 1
    record = LinearAttention(
        "ssd", states.shape[0], 1, 1, states.shape[-1], heads, width, _CHUNK, dtype_of(data), "forward", True,
        dtype_of(states),
    )  # fmt: skip
    return [DeviceWork(call.name, (record,))]


def _norm(reads: int, writes: int) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        data = tensor_argument(call, 0)
        record = Elementwise("gated_norm", numel(data), reads, writes, data.shape[-1], dtype_of(data))
        return [DeviceWork(call.name, (record,))]

    return lower


TABLE: dict[str, Lowering] = {
    "scan::causal_conv": _convolution("forward"),
    "scan::causal_conv_backward": _convolution("backward"),
    "scan::causal_conv_update": _convolution("forward", update=True),
    "scan::linear_attention": _linear("forward"),
    "scan::linear_attention_backward": _linear("backward"),
    "scan::selective": _selective("forward"),
    "scan::selective_backward": _selective("backward"),
    "scan::selective_update": _update,
    "scan::gated_norm": _norm(2, 1),
    "scan::gated_norm_backward": _norm(3, 2),
}
