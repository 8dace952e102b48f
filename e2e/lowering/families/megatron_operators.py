"""Fused kernels of Megatron-LM, see :mod:`e2e.parallelism.layers.megatron_kernels`: one launch each."""

from __future__ import annotations

from costmodel.operators.device_work import OptimizerStep, Softmax
from e2e.lowering.families.optimizer_operators import MAX_TENSORS, launches
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    dtype_of,
    elementwise,
    gpu_outputs,
    numel,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, tensors


def _softmax(backward: bool) -> Lowering:
    """Lower the softmax: one warp per row of scores; the masked half is not read, and zeros are written (forward) or
    read (backward).
    """

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        scores = tensor_argument(call, 0)
        columns = scores.shape[-1]
        direction = "backward" if backward else "forward"
        record = Softmax(numel(scores) // columns, columns, dtype_of(scores), direction)  # type: ignore[arg-type]
        return [DeviceWork(call.name, (record,))]

    return lower


def _pointwise(kind: str) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        outputs = gpu_outputs(call)
        return [elementwise(context, kind, outputs[0], tensors(call.inputs), len(outputs), call.name)]

    return lower


def _fused_adam(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower FusedAdam: gradients and 16-bit parameters, FP32 moments; 12 bytes read and 10 written per element, here in
    2-byte units.
    """
    gradients = list(tensors((call.inputs[0],)))
    return [
        DeviceWork(call.name, (OptimizerStep("adam", elements, count, 6, 5, "float16"),))
        for elements, count in launches(gradients, MAX_TENSORS[4])
    ]


TABLE: dict[str, Lowering] = {
    "megatron::masked_softmax": _softmax(False),
    "megatron::masked_softmax_backward": _softmax(True),
    "megatron::fused_adam": _fused_adam,
    "megatron::bias_gelu": _pointwise("gelu"),
    "megatron::bias_gelu_backward": _pointwise("gelu_backward"),
    "megatron::bias_dropout_add": _pointwise("bias_dropout_add"),
    "megatron::bias_dropout_add_backward": _pointwise("bias_dropout_add_backward"),
}
