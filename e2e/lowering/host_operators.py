"""Operators that the optimizer runs on the host (offloading): seconds by the bytes they move.

Speed of the host: bytes moved, at the rate of one core. torchrun gives every process one thread (``OMP_NUM_THREADS=1``
of torch/distributed/run.py), and so does Ray.
"""

from __future__ import annotations

from e2e.lowering.families.work import size_bytes
from e2e.step.operator_trace import CPU_ADAM, OperatorCall, Tensor, Value, tensors

# Bytes of host memory traffic per parameter, all in FP32. Fused Adam reads gradient, weight and two moments, and writes
# the last three.
ADAM_BYTES = 4 * 4 + 3 * 4
# The returned 16-bit copy: cast from FP32 into new memory, since ``copy_`` casts on the source's device
# (aten/src/ATen/native/cuda/Copy.cu), and copied once more by the driver, since that memory is not pinned.
RETURNED_BYTES = (4 + 2 * 2) + (2 + 2 * 2)
# Bytes/s of one core: with its whole optimizer on the host a job of one GPU took 0.926 s longer for 596 million
# parameters (Qwen3-0.6B; NVIDIA-NeMo/RL, pull request 3628), which are cast and returned as above.
CORE_BANDWIDTH = 596.05e6 * (ADAM_BYTES + RETURNED_BYTES) / 0.926
# Smaller operators stay in the caches, and take what every operator takes.
_LARGE_BYTES = 1 << 20


def host_seconds(call: OperatorCall) -> float:
    """Return the seconds of a call on tensors of the host by the optimizer or in the backward pass, 0 if they are small
    or on the GPU.

    New outputs are read before they are written.
    """
    if call.phase not in ("backward", "optimizer") and not call.name.startswith("aten::_foreach_"):  # clipping
        return 0.0
    inputs, outputs = list(tensors(call.inputs)), list(tensors(call.outputs))
    if any(each.device != "cpu" for each in (*inputs, *outputs)):
        return 0.0
    if call.name.startswith("aten::_fused_adam") or call.name == CPU_ADAM:
        lists = _lists(call.inputs)
        moved = sum(map(size_bytes, lists)) * ADAM_BYTES // (4 * 4)
    else:
        known = {each.storage for each in inputs}
        if outputs and not call.name.endswith("_") and all(each.storage in known for each in outputs):
            return 0.0  # a view
        written = outputs or (_lists(call.inputs[:1]) if call.name.endswith("_") else [])
        moved = sum(map(size_bytes, inputs))
        moved += sum(size_bytes(each) * (1 if each.storage in known else 2) for each in written)
    return moved / CORE_BANDWIDTH if moved >= _LARGE_BYTES else 0.0


def _lists(inputs: tuple[Value, ...]) -> list[Tensor]:
    """Return weights, gradients and moments of fused Adam, without its single numbers."""
    return [each for each in tensors(inputs) if each.shape not in ((), (1,))]
