"""What a captured step assumes: data that a capture does not have, and kernels that a library would bring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from e2e.capture.selections import ASSUMED
from e2e.step.operator_trace import OperatorCall, OperatorTrace

# In front of the names of calls of e2e/capture/scan_libraries.py.
_FUSED = "scan::"
# Parts of modules' paths in Transformers -> what it is, and which library fuses it.
_UNFUSED = {
    "mixer": ("the selective scan of a Mamba layer", "mamba_ssm and causal_conv1d"),
    "mamba": ("the selective scan of a Mamba layer", "mamba_ssm and causal_conv1d"),
    "linear_attn": ("linear attention (gated delta rule)", "flash-linear-attention"),
    "forget_gate": ("linear attention (Kimi's delta rule)", "flash-linear-attention"),
}


def assumptions(traces: Sequence[OperatorTrace]) -> list[str]:
    """A line for each thing that ``traces`` assume."""
    calls = [call for trace in traces for call in trace.calls]
    found: list[str] = []
    selections = sum(call.name == ASSUMED and call.attributes.get("assumed") is True for call in calls)
    if selections:
        found.append(
            f"{selections} selections by data (boolean masks, nonzero, unique) are taken to select everything; where "
            "fewer are usual, write x[:k] with a usual k"
        )
    return [*found, *_linear_attention(calls)]


def _linear_attention(calls: Sequence[OperatorCall]) -> list[str]:
    """Whether layers with a recurrence run by single operators, or by kernels whose gradients nobody has measured."""
    fused = [call.name for call in calls if call.name.startswith(_FUSED)]
    if fused:
        backward = sum(name.endswith("_backward") for name in fused)
        if not backward:
            return []
        return [
            f"{backward} gradients of linear attention and its convolutions have no table: those of the gated delta "
            "rule are priced as published, others from their forward kernels"
        ]
    found: dict[str, int] = {}
    modules = Counter(call.module for call in calls)
    for part, (what, library) in _UNFUSED.items():
        launches = sum(count for module, count in modules.items() if part in module.split("."))
        line = f"{what} runs in single PyTorch operators ({{}} calls), as without {library}"
        found[line] = found.get(line, 0) + launches
    return [
        f"{line.format(count)}; --linear-attention fused is how it runs with these"
        for line, count in found.items()
        if count
    ]
