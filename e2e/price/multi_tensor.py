"""Host time of foreach and fused operators, which take lists of tensors: it grows with their number.

Samples say little of it by name: the gap before the first call of an optimizer step holds the optimizer's Python, once
a step, and not the call's (four samples of ``_foreach_mul_``: 784 us); the time before a launch is that of lists as
long as those of the recorded model.

Both figures are from ``traces/resnet50_V100`` (PyTorch of 2023; SGD with momentum over 161 parameters, foreach): 784 us
before the first call of a step, and 72 to 78 us before the first launch of ``_foreach_add_`` and ``_foreach_mul_``, of
which the profiler's share (161 records) is not known to better than half.
"""

from __future__ import annotations

# Before the first call of an optimizer step, for each tensor of its lists: the optimizer collects parameters, gradients
# and state, and groups them by device and type. As many tensors as those of the recorded model are in what tables know
# of the gap where a step of the optimizer begins.
RECORDED_TENSORS = 161
GATHERING_SECONDS = 784e-6 / RECORDED_TENSORS
# Before the first launch, for each tensor of the first list: arguments, checks, metadata of the kernel.
TENSOR_SECONDS = 0.5 * 75e-6 / RECORDED_TENSORS


def extra_seconds(kind: str, tensors: int, gathered: int) -> float:
    """Seconds that a piece of ``kind`` takes beyond its operator's: of ``tensors`` in lists, ``gathered`` before."""
    more = max(gathered - RECORDED_TENSORS, 0)
    return {"T1": more * GATHERING_SECONDS, "T2": tensors * TENSOR_SECONDS}.get(kind, 0.0)
