"""Fused kernels of training libraries, one launch each: of stacks (:mod:`e2e.capture.models.stacks`), Megatron-LM
(:mod:`lab.steps.megatron_gpt`), mixtures of experts (:mod:`e2e.capture.models.expert_layers`) and
FSDP2.

Experts: a token is read once for all its experts (its copies are written from registers), and its outputs are summed in
registers; only the bytes of the rows remain.

FSDP2 copies parameters into and out of the flat buffers of its collectives, by ``_foreach_copy_``,
``split_with_sizes_copy`` and ``_chunk_cat`` (``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``), each one
kernel over all parameters of a group.
"""

from __future__ import annotations

from costmodel.operators.device_work import Elementwise, MemoryCopy, OptimizerStep, Rearrangement, Softmax
from e2e.lowering.families.optimizer_operators import MAX_TENSORS, list_launches
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    UnforeseenCall,
    elementwise,
    gpu_outputs,
    numel,
    priced_dtype,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor, tensors


def _one_pass(kind: str) -> Lowering:
    """Return the lowering of a kernel that reads all inputs and writes all outputs once."""

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        outputs = gpu_outputs(call)
        return [elementwise(context, kind, outputs[0], tensors(call.inputs), len(outputs), call.name)]

    return lower


def _halves(reads: int, writes: int, place: int) -> Lowering:
    """Return the lowering of a gated activation; ``reads`` and ``writes`` count tensors half as large as argument
    ``place``.
    """

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        both = tensor_argument(call, place)
        record = Elementwise("silu_mul", numel(both) // 2, reads, writes, 0, priced_dtype(both))
        return [DeviceWork(call.name, (record,))]

    return lower


def _over_scores(reads: int, writes: int) -> Lowering:
    """Return the lowering of passes over the scores; the one number per token is neglected."""

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        scores = tensor_argument(call, 0)
        record = Elementwise("cross_entropy", numel(scores), reads, writes, 0, priced_dtype(scores))
        return [DeviceWork(call.name, (record,))]

    return lower


STACK_TABLE: dict[str, Lowering] = {
    "stack::squared_relu": _one_pass("squared_relu"),
    "stack::squared_relu_backward": _one_pass("squared_relu_backward"),
    "stack::rotary": _one_pass("rotary"),
    "stack::rotary_backward": _one_pass("rotary_backward"),
    "stack::gated": _one_pass("silu_mul"),
    "stack::gated_backward": _one_pass("silu_mul_backward"),
    "stack::packed_gated": _halves(2, 1, 0),
    "stack::packed_gated_backward": _halves(3, 2, 1),
    "stack::cross_entropy": _over_scores(1, 0),
    "stack::cross_entropy_backward_": _over_scores(1, 1),
}


def _softmax(backward: bool) -> Lowering:
    """Lower the softmax: one warp per row of scores; the masked half is not read, and zeros are written (forward) or
    read (backward).
    """

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        scores = tensor_argument(call, 0)
        columns = scores.shape[-1]
        direction = "backward" if backward else "forward"
        record = Softmax(numel(scores) // columns, columns, priced_dtype(scores), direction)  # type: ignore[arg-type]
        return [DeviceWork(call.name, (record,))]

    return lower


def _fused_adam(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower FusedAdam: gradients and 16-bit parameters, FP32 moments; 12 bytes read and 10 written per element, here in
    2-byte units.
    """
    gradients = list(tensors((call.inputs[0],)))
    return [
        DeviceWork(call.name, (OptimizerStep("adam", elements, count, 6, 5, "float16"),))
        for elements, count in list_launches(gradients, MAX_TENSORS[4])
    ]


MEGATRON_TABLE: dict[str, Lowering] = {
    "megatron::masked_softmax": _softmax(False),
    "megatron::masked_softmax_backward": _softmax(True),
    "megatron::fused_adam": _fused_adam,
    "megatron::bias_gelu": _one_pass("gelu"),
    "megatron::bias_gelu_backward": _one_pass("gelu_backward"),
    "megatron::bias_dropout_add": _one_pass("bias_dropout_add"),
    "megatron::bias_dropout_add_backward": _one_pass("bias_dropout_add_backward"),
}


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
    return [DeviceWork(call.name, (Elementwise("permute", numel(output), 0, 1, numel(states), priced_dtype(output)),))]


def _unpermute(call: OperatorCall, context: Context) -> list[DeviceWork]:
    states, output = tensor_argument(call, 0), gpu_outputs(call)[0]
    return [
        DeviceWork(call.name, (Elementwise("unpermute", numel(output), 0, 1, numel(states), priced_dtype(output)),))
    ]


def _expert_kernel(kind: str) -> Lowering:
    """Return the lowering of a kernel that reads its inputs once and writes its outputs once."""

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        largest = max(gpu_outputs(call), key=numel)
        read = sum(numel(tensor) for tensor in tensors(call.inputs))
        return [DeviceWork(call.name, (Elementwise(kind, numel(largest), 0, 1, read, priced_dtype(largest)),))]

    return lower


EXPERT_TABLE: dict[str, Lowering] = {
    "moe::row_map": _row_map,
    "moe::counts_to_host": _counts,
    "moe::permute": _permute,
    "moe::unpermute": _unpermute,
    "moe::gate": _expert_kernel("swiglu"),
    "moe::gate_backward": _expert_kernel("swiglu_backward"),
    "moe::activation": _expert_kernel("activation"),
    "moe::activation_backward": _expert_kernel("activation_backward"),
}


def _copy_in(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the copy of shards into this rank's part of the all-gather buffer."""
    shards = list(tensors(call.inputs[:1]))
    return _moved(call, "concat", sum(map(numel, shards)), shards, priced_dtype(tensor_argument(call, 1)))


def _copy_out(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the copy of the gathered buffer into whole parameters, a piece of each from every rank's part."""
    gathered = tensor_argument(call, 0)
    targets = list(tensors((call.attributes.get("out"),)))
    return _moved(call, "split", numel(gathered), targets or [gathered], priced_dtype(gathered))


def _gradients_in(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the split of gradients into one piece per rank, including padding; the dtype may change."""
    target = next(iter(tensors((call.attributes.get("out"),))), None)
    gradients = list(tensors(call.inputs[:1]))
    if target is None:
        raise UnforeseenCall(f"{call.name}: no output")
    return _moved(call, "concat", numel(target), gradients, priced_dtype(target))


def _moved(call: OperatorCall, kind: str, elements: int, pieces: list[Tensor], dtype: str) -> list[DeviceWork]:
    """Return the rearrangement kernel; ``inner`` is the mean size of a piece."""
    inner = max(elements // max(len(pieces), 1), 1)
    return [DeviceWork(call.name, (Rearrangement(kind, elements, inner, dtype, len(pieces)),))]


FSDP_TABLE: dict[str, Lowering] = {
    "fsdp::all_gather_copy_in": _copy_in,
    "fsdp::split_with_sizes_copy": _copy_out,
    "fsdp::chunk_cat": _gradients_in,
}
