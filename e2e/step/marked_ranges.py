"""Ranges that a script or a library marked (``record_function``) as what a gap between operators is made of.

Where a marked range begins or ends, Python enters or leaves a part of the script: such a gap takes ten to a hundred
times as long as one between two operators of the same part, whichever operator follows. So these gaps have names of
their own among the host overheads, one for each border, but for two that are longer than all others: before the first
operator of an optimizer's step, and where the profiler itself counts a step.
"""

from __future__ import annotations

from collections.abc import Sequence

BORDER = "annotation"
OPTIMIZER_STEP = "Optimizer.step"
PROFILER_STEP = "ProfilerStep"
MARKED = frozenset({BORDER, OPTIMIZER_STEP, PROFILER_STEP})


def gap_names(ended: int, begun: Sequence[str]) -> tuple[str, ...]:
    """Names of the equal parts of a gap in which ``ended`` marked ranges end and those named ``begun`` begin; none for
    a gap that is the following operator's.
    """
    for mark in (PROFILER_STEP, OPTIMIZER_STEP):
        if any(name.startswith(f"{mark}#") for name in begun):
            return (mark,)
    return (BORDER,) * (ended + len(begun))


def crossed(before: Sequence[str], now: Sequence[str]) -> tuple[int, Sequence[str]]:
    """From inside the ranges ``before`` to inside ``now``, outermost first: how many ended, and which began."""
    common = 0
    for one, other in zip(before, now, strict=False):
        if one != other:
            break
        common += 1
    return len(before) - common, now[common:]
