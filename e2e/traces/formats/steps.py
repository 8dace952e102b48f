"""Selection of one training step of an execution trace: by the profiler's steps, else by the optimizer's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import compress

from costmodel.base.units import whole_number
from e2e.step.operator_trace import OperatorCall, OperatorTrace

_PROFILER_STEP = "ProfilerStep#"
_OPTIMIZER_STEP = "Optimizer.step#"
# Least similarity, as a share of calls with equal names, of two parts between optimizer steps that both end a step.
_ALIKE = 0.9


def last_step(trace: OperatorTrace) -> OperatorTrace:
    """Return ``trace`` with only its last whole step; unchanged if fewer than two steps are marked.

    Profiler steps are marks around all work of a step. Without them a step ends with the optimizer's: what follows the
    last one belongs to an incomplete step. With several optimizers and other work between them (two networks that train
    each other) a step ends with the one after which the calls repeat.
    """
    calls = trace.calls
    marks = [[step_mark(name) for name in _annotations(call)] for call in calls]
    numbers = [next((number for number in each if number is not None), None) for each in marks]
    optimizing = [any(is_optimizer_step(name) for name in _annotations(call)) for call in calls]
    chosen = of_last_step([call.thread for call in calls], numbers, optimizing, [call.name for call in calls])
    if chosen is None:
        return trace
    kept = tuple(compress(calls, chosen))
    present = {call.id for call in kept}
    whole = tuple(call if call.parent in present else replace(call, parent=None) for call in kept)
    return replace(trace, calls=whole, ranges=trace.ranges.within(present))


def of_last_step(
    threads: Sequence[int], steps: Sequence[int | None], optimizing: Sequence[bool], names: Sequence[Hashable]
) -> Sequence[bool] | None:
    """Select the calls (in the order they began) of the last whole step; ``None`` if fewer than two are marked.

    ``steps``: number of the profiler's step around a call; ``optimizing``: an optimizer's step is around it; ``names``:
    names of the calls, or hashes of them.
    """
    numbers = _by_profiler(threads, steps)
    if len(set(numbers) - {None}) < 2:
        numbers = _by_optimizer(optimizing, names)
    last = max((number for number in numbers if number is not None), default=None)
    return None if last is None else [number == last for number in numbers]


def step_mark(annotation: str) -> int | None:
    """Return the step number of an annotation of a profiler step, ``None`` for others."""
    number = annotation.removeprefix(_PROFILER_STEP)
    return whole_number(number) if number != annotation else None


def is_optimizer_step(annotation: str) -> bool:
    """True if ``annotation`` is PyTorch's mark of an optimizer's step."""
    return annotation.startswith(_OPTIMIZER_STEP)


def _by_profiler(threads: Sequence[int], steps: Sequence[int | None]) -> list[int | None]:
    """Assign calls to profiler steps; calls of threads without marks belong to the step that is open."""
    marked = {thread for thread, step in zip(threads, steps, strict=True) if step is not None}
    numbers: list[int | None] = []
    current: int | None = None
    for thread, step in zip(threads, steps, strict=True):
        if thread in marked:
            current = step
        numbers.append(current)
    return numbers


def _by_optimizer(optimizing: Sequence[bool], names: Sequence[Hashable]) -> list[int | None]:
    """Number of steps that had ended before each call began; empty with fewer than two steps."""
    places: list[int] = []
    ended, before = 0, False
    for now in optimizing:
        if before and not now:
            ended += 1
        before = now
        places.append(ended)
    whole = ended + before
    period = _period(places, names, whole)
    if period is None:
        return [None] * len(places)
    # Counted from the end, so that the last steps are whole.
    return [(place - whole) // period if place < whole else None for place in places]


def _period(places: Sequence[int], names: Sequence[Hashable], whole: int) -> int | None:
    """Number of parts, each up to an optimizer's step, after which the calls repeat; ``None`` if they do not."""
    parts: list[Counter[Hashable]] = [Counter() for _ in range(whole)]
    for place, name in zip(places, names, strict=True):
        if place < whole:
            parts[place][name] += 1
    return next((period for period in range(1, whole) if _alike(parts, whole - 1, whole - 1 - period)), None)


def _alike(parts: Sequence[Counter[Hashable]], later: int, earlier: int) -> bool:
    """True if two parts have similar calls; the first one may be truncated, or also create the optimizer's state."""
    first, second = parts[earlier].total(), parts[later].total()
    common = (parts[later] & parts[earlier]).total()
    lenient = earlier == 0 and second > first / 2
    return common >= _ALIKE * (min(first, second) if lenient else max(first, second))


def _annotations(call: OperatorCall) -> tuple[str, ...]:
    found = call.attributes.get("annotations")
    return tuple(str(name) for name in found) if isinstance(found, tuple) else ()
