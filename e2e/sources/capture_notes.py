"""Notes on the assumptions of a captured step: data that a capture lacks, and kernels that a library would provide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from e2e.capture.selections import ASSUMED
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor

# Prefix of the call names of e2e/capture/scan_libraries.py.
_FUSED = "scan::"
# Parts of module paths in Transformers -> layer type, and the library that fuses it. Other models use some of these
# names, too; the intended ones have a learned decay rate, -exp(A_log).
_UNFUSED = {
    "mixer": ("the selective scan of a Mamba layer", "mamba_ssm and causal_conv1d"),
    "mamba": ("the selective scan of a Mamba layer", "mamba_ssm and causal_conv1d"),
    "linear_attn": ("linear attention (gated delta rule)", "flash-linear-attention"),
    "forget_gate": ("linear attention (Kimi's delta rule)", "flash-linear-attention"),
}


def assumptions(traces: Sequence[OperatorTrace]) -> list[str]:
    """Return a line for each assumption made in ``traces``."""
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
    """Warn if recurrent layers run as single operators, or as kernels whose gradients were never measured."""
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
    decaying = _decaying(calls)
    for part, (what, library) in _UNFUSED.items():
        named = {module for module in decaying if part in module.split(".")}
        launches = sum(modules[module] for module in modules if _within(module, named))
        line = f"{what} runs in single PyTorch operators ({{}} calls), as without {library}"
        found[line] = found.get(line, 0) + launches
    return [
        f"{line.format(count)}; --linear-attention fused is how it runs with these"
        for line, count in found.items()
        if count
    ]


def _decaying(calls: Sequence[OperatorCall]) -> set[str]:
    """Return the modules that negate an exponential that they computed: the decay of a recurrence."""
    found: set[str] = set()
    exponentials: set[tuple[str, int]] = set()
    for call in calls:
        if call.name == "aten::exp":
            exponentials.update((call.module, each.id) for each in call.outputs if isinstance(each, Tensor))
        elif call.name == "aten::neg" and isinstance(data := call.inputs[0], Tensor):
            found.update({call.module} if (call.module, data.id) in exponentials else ())
    return found


def _within(module: str, others: set[str]) -> bool:
    """True if ``module`` is one of ``others`` or a part of one."""
    parts = module.split(".")
    return any(".".join(parts[: end + 1]) in others for end in range(len(parts)))
