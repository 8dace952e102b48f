"""Gaps between operators at the borders of ranges marked by a script or a library (``record_function``).

Where a marked range begins or ends, Python enters or leaves a part of the script: such a gap takes ten to a hundred
times as long as a gap between two operators of the same part, whichever operator follows. These gaps therefore have
separate names among the host overheads, one per border, except two that are longer than all others: the gap before the
first operator of an optimizer step, and the gap where the profiler itself counts a step.
"""

from __future__ import annotations

from collections.abc import Sequence

BORDER = "annotation"
OPTIMIZER_STEP = "Optimizer.step"
PROFILER_STEP = "ProfilerStep"
MARKED = frozenset({BORDER, OPTIMIZER_STEP, PROFILER_STEP})


def gap_names(ended: int, begun: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the equal parts of a gap in which ``ended`` marked ranges end and the ranges ``begun`` begin.

    Empty if the gap belongs to the following operator.
    """
    for mark in (PROFILER_STEP, OPTIMIZER_STEP):
        if any(name.startswith(f"{mark}#") for name in begun):
            return (mark,)
    return (BORDER,) * (ended + len(begun))


def crossed(before: Sequence[str], now: Sequence[str]) -> tuple[int, Sequence[str]]:
    """Return how many ranges ended and which began between the ranges ``before`` and ``now``, given outermost first."""
    common = 0
    for one, other in zip(before, now, strict=False):
        if one != other:
            break
        common += 1
    return len(before) - common, now[common:]
