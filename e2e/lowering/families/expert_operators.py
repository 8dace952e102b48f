"""Fused kernels of mixtures of experts, see :mod:`e2e.capture.models.expert_layers`: one launch each.

A token is read once for all its experts (its copies are written from registers), and its outputs are summed in
registers; only the bytes of the rows remain.
"""

from __future__ import annotations

from costmodel.operators.device_work import Elementwise, MemoryCopy
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    dtype_of,
    gpu_outputs,
    numel,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, tensors


def _row_map(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the row map: counts and prefix sums over the routing map (tokens x experts, one byte each), then the map of
    rows.
    """
    selected = tensor_argument(call, 0)
    experts = next(value for value in call.inputs[1:] if isinstance(value, int))
    table = Elementwise("row_map", selected.shape[0] * experts, 1, 1, 0, "bool", "int32")
    return [DeviceWork(call.name, (table,)), DeviceWork(call.name, (table,))]


def _counts(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the copy of the counts, four bytes per expert, for which the host waits.

    Sources: ``tokens_per_expert.to("cpu")`` of Megatron-LM's dispatchers, ``tolist`` of torchtitan's.
    """
    experts = next(value for value in call.inputs[1:] if isinstance(value, int))
    record = MemoryCopy(4 * experts, "device_to_host")
    return [DeviceWork("Memcpy DtoH", (record,), "copy", synchronizes=True)]


def _permute(call: OperatorCall, context: Context) -> list[DeviceWork]:
    states, output = tensor_argument(call, 0), gpu_outputs(call)[0]
    return [DeviceWork(call.name, (Elementwise("permute", numel(output), 0, 1, numel(states), dtype_of(output)),))]


def _unpermute(call: OperatorCall, context: Context) -> list[DeviceWork]:
    states, output = tensor_argument(call, 0), gpu_outputs(call)[0]
    return [DeviceWork(call.name, (Elementwise("unpermute", numel(output), 0, 1, numel(states), dtype_of(output)),))]


def _pointwise(kind: str) -> Lowering:
    """Return the lowering of a kernel that reads its inputs once and writes its outputs once."""

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        largest = max(gpu_outputs(call), key=numel)
        read = sum(numel(tensor) for tensor in tensors(call.inputs))
        return [DeviceWork(call.name, (Elementwise(kind, numel(largest), 0, 1, read, dtype_of(largest)),))]

    return lower


TABLE: dict[str, Lowering] = {
    "moe::row_map": _row_map,
    "moe::counts_to_host": _counts,
    "moe::permute": _permute,
    "moe::unpermute": _unpermute,
    "moe::gate": _pointwise("swiglu"),
    "moe::gate_backward": _pointwise("swiglu_backward"),
    "moe::activation": _pointwise("activation"),
    "moe::activation_backward": _pointwise("activation_backward"),
}
