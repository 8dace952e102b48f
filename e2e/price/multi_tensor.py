"""Host time of foreach and fused operators, which grows with the lengths of their tensor lists.

Samples by name say little about it: the gap before the first call of an optimizer step contains the optimizer's Python,
once per step, and is not the call's own (four samples of ``_foreach_mul_``: 784 us); the time before a launch is that
of lists as long as those of the recorded model.

Both figures are from ``traces/resnet50_V100`` (PyTorch of 2023; SGD with momentum over 161 parameters, foreach): 784 us
before the first call of a step, and 72 to 78 us before the first launch of ``_foreach_add_`` and ``_foreach_mul_``, of
which the profiler's share (161 records) is known to within a half only.
"""

from __future__ import annotations

# Seconds per tensor before the first call of an optimizer step, in which the optimizer collects parameters, gradients
# and state, and groups them by device and type. The gap before an optimizer step in the tables already includes the
# tensors of the recorded model.
RECORDED_TENSORS = 161
GATHERING_SECONDS = 784e-6 / RECORDED_TENSORS
# Seconds per tensor of the first list before the first launch: arguments, checks, metadata of the kernel.
TENSOR_SECONDS = 0.5 * 75e-6 / RECORDED_TENSORS


def extra_seconds(kind: str, tensors: int, gathered: int) -> float:
    """Return the seconds a piece of ``kind`` takes in addition to its operator's, for ``tensors`` in lists and
    ``gathered`` before.
    """
    more = max(gathered - RECORDED_TENSORS, 0)
    return {"T1": more * GATHERING_SECONDS, "T2": tensors * TENSOR_SECONDS}.get(kind, 0.0)
