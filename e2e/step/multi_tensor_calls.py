"""Operators that take lists of tensors (foreach and fused optimizers), and the lengths of their lists."""

from __future__ import annotations

from collections.abc import Sequence

from e2e.step.operator_trace import OperatorCall, Tensor

_PREFIXES = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad", "aten::_amp_foreach_")


def is_multi_tensor(name: str) -> bool:
    """True if the operator ``name`` updates lists of tensors."""
    return name.startswith(_PREFIXES)


def list_length(call: OperatorCall) -> int:
    """Return the length of the longest tensor list of a foreach or fused operator; 0 for other operators."""
    if not is_multi_tensor(call.name):
        return 0
    lists = [value for value in call.inputs if isinstance(value, tuple) and value and isinstance(value[0], Tensor)]
    return max(map(len, lists), default=0)


def gathering_calls(calls: Sequence[OperatorCall], phases: Sequence[str]) -> dict[int, int]:
    """Return id -> number of tensors for the first call with tensor lists in each run of the optimizer.

    ``phases``: phases of ``calls``, in the same order.
    """
    found: dict[int, int] = {}
    gathered = False
    for call, phase in zip(calls, phases, strict=True):
        if phase != "optimizer":
            gathered = False
        elif not gathered and (length := list_length(call)):
            found[call.id], gathered = length, True
    return found
