"""Explanation in words of a fusion decision, from the terms of the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.cpu.roofline import RooflineReport

# Do not mention a term that changes the time by less than this fraction.
NEGLIGIBLE = 0.02
NOT_TUNED = "not tuned, since nothing is saved even if memory and arithmetic do not overlap"


@dataclass(frozen=True)
class LayerCost:
    """Time of the kernels of one arm (fused or unfused) as a sum of terms in seconds."""

    core_seconds: float
    # Memory time not hidden by arithmetic.
    memory_seconds: float
    region_seconds: float
    recomputation: float
    # Memory level and size of the tensor between the convolutions.
    intermediate_level: str
    intermediate_bytes: float
    # True if one of the convolutions uses Winograd's algorithm.
    winograd: bool = False
    # True if the tile of a fused kernel and its weights exceed every core-private cache.
    spills: bool = False

    @classmethod
    def of(cls, reports: Sequence[RooflineReport]) -> LayerCost:
        """Sum of the reports of one fused kernel, or of the kernels it would replace."""
        fused = len(reports) == 1
        between = "intermediate" if fused else "output"
        inside = [traffic for traffic in reports[0].traffic if traffic.tensor == between]
        return cls(
            core_seconds=sum(report.core_seconds for report in reports),
            memory_seconds=sum(max(report.memory_seconds - report.core_seconds, 0.0) for report in reports),
            region_seconds=sum(report.region_seconds for report in reports),
            recomputation=reports[0].recomputation if fused else 1.0,
            intermediate_level=inside[0].level,
            intermediate_bytes=sum(traffic.size_bytes for traffic in inside),
            winograd=any(report.winograd_outputs for report in reports),
            spills=fused and reports[0].spills,
        )


def explain_decision(
    unfused: LayerCost, fused: LayerCost, unfused_seconds: float, fused_seconds: float, chosen: bool, rival: str | None
) -> str:
    """One sentence: time saved or lost by fusing, the terms responsible, and the site chosen instead, if any."""
    change = fused_seconds / unfused_seconds - 1.0
    gains, losses = _terms(unfused, fused, unfused_seconds)
    if change >= 0:
        verdict = "no gain" if change < NEGLIGIBLE else f"{change:.0%} slower fused"
        return f"{verdict}: {'; '.join(losses or ['memory is not what limits these kernels'])}"
    share = f"{-change:.0%}" if -change >= NEGLIGIBLE else f"less than {NEGLIGIBLE:.0%}"
    text = f"{share} faster fused: {'; '.join(gains or ['arithmetic and memory overlap better in one kernel'])}"
    if losses:
        text += f"; against it, {'; '.join(losses)}"
    if not chosen and rival is not None:
        text += f"; but it overlaps {rival}, which saves more over the whole chain"
    return text


def _terms(unfused: LayerCost, fused: LayerCost, scale: float) -> tuple[list[str], list[str]]:
    """Descriptions of the terms that decrease and of those that increase, largest first."""
    named = [
        (unfused.memory_seconds - fused.memory_seconds, _memory_text(unfused, fused)),
        (unfused.core_seconds - fused.core_seconds, _core_text(unfused, fused)),
        (unfused.region_seconds - fused.region_seconds, _region_text(unfused, fused)),
    ]
    named.sort(key=lambda term: -abs(term[0]))
    gains = [text for saved, text in named if saved > NEGLIGIBLE * scale]
    losses = [text for saved, text in named if saved < -NEGLIGIBLE * scale]
    return gains, losses


def _memory_text(unfused: LayerCost, fused: LayerCost) -> str:
    size = format_bytes(unfused.intermediate_bytes)
    where = f"the {size} intermediate stays in {fused.intermediate_level}"
    if fused.intermediate_level != unfused.intermediate_level:
        where += f" instead of {unfused.intermediate_level}"
    return f"{where} (time waiting for memory {_change(unfused.memory_seconds, fused.memory_seconds)})"


def _core_text(unfused: LayerCost, fused: LayerCost) -> str:
    times = _change(unfused.core_seconds, fused.core_seconds)
    if fused.winograd and fused.spills and fused.core_seconds > unfused.core_seconds:
        return f"tiles and weights fit no core's own cache, which Winograd's transforms go through ({times})"
    if unfused.winograd and not fused.winograd and fused.core_seconds > unfused.core_seconds:
        return f"apart, Winograd's algorithm saves multiplications, one kernel for both computes direct sums ({times})"
    if fused.core_seconds > unfused.core_seconds and fused.recomputation > 1.0 + NEGLIGIBLE:
        return f"the halo of the tiles re-computes {fused.recomputation - 1:.0%} of the arithmetic ({times})"
    return f"threads share the work {'worse' if fused.core_seconds > unfused.core_seconds else 'better'} ({times})"


def _region_text(unfused: LayerCost, fused: LayerCost) -> str:
    return f"fewer parallel regions ({_change(unfused.region_seconds, fused.region_seconds)})"


def _change(before: float, after: float) -> str:
    return f"{before * 1e6:.1f} to {after * 1e6:.1f} us"


def format_bytes(size: float) -> str:
    """Format a size with one decimal in the largest unit that fits, e.g. ``1.5 MiB``."""
    for unit, scale in (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"
