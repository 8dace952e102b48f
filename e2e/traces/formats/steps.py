"""One training step of an execution trace that recorded several: by the profiler's steps, else by the optimizer's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import compress

from costmodel.base.units import whole_number
from e2e.step.operator_trace import OperatorCall, OperatorTrace

_PROFILER_STEP = "ProfilerStep#"
_OPTIMIZER_STEP = "Optimizer.step#"
# Of the calls up to an optimizer's step and of those up to an earlier one, by name, where both end a step.
_ALIKE = 0.9


def last_step(trace: OperatorTrace) -> OperatorTrace:
    """``trace`` without all steps but the last whole one; unchanged where it marks fewer than two.

    Profiler steps are marked around everything that happens in them. Without them a step ends with the optimizer's:
    what follows the last one belongs to a step that was not recorded to its end. Of several optimizers with other work
    between them (two networks that train each other) a step ends with the one after which the calls repeat.
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
    """Which calls (in the order they began) are of the last whole step; ``None`` where fewer than two are marked.

    ``steps``: number of the profiler's step around a call; ``optimizing``: an optimizer's step is around it; ``names``:
    of the calls, or what stands for these.
    """
    numbers = _by_profiler(threads, steps)
    if len(set(numbers) - {None}) < 2:
        numbers = _by_optimizer(optimizing, names)
    last = max((number for number in numbers if number is not None), default=None)
    return None if last is None else [number == last for number in numbers]


def step_mark(annotation: str) -> int | None:
    """The number of the profiler's step that ``annotation`` stands around."""
    number = annotation.removeprefix(_PROFILER_STEP)
    return whole_number(number) if number != annotation else None


def is_optimizer_step(annotation: str) -> bool:
    """Whether ``annotation`` is what PyTorch puts around an optimizer's step."""
    return annotation.startswith(_OPTIMIZER_STEP)


def _by_profiler(threads: Sequence[int], steps: Sequence[int | None]) -> list[int | None]:
    """Only the thread that steps the profiler is marked; calls of others are of the step then open."""
    marked = {thread for thread, step in zip(threads, steps, strict=True) if step is not None}
    numbers: list[int | None] = []
    current: int | None = None
    for thread, step in zip(threads, steps, strict=True):
        if thread in marked:
            current = step
        numbers.append(current)
    return numbers


def _by_optimizer(optimizing: Sequence[bool], names: Sequence[Hashable]) -> list[int | None]:
    """How many steps had ended before a call began; nothing with fewer than two of them."""
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
    """After how many of the ``whole`` parts, each up to an optimizer's step, the calls repeat."""
    parts: list[Counter[Hashable]] = [Counter() for _ in range(whole)]
    for place, name in zip(places, names, strict=True):
        if place < whole:
            parts[place][name] += 1
    return next((period for period in range(1, whole) if _alike(parts, whole - 1, whole - 1 - period)), None)


def _alike(parts: Sequence[Counter[Hashable]], later: int, earlier: int) -> bool:
    """The first part may have been recorded from its middle on, or make the optimizer's state besides."""
    first, second = parts[earlier].total(), parts[later].total()
    common = (parts[later] & parts[earlier]).total()
    lenient = earlier == 0 and second > first / 2
    return common >= _ALIKE * (min(first, second) if lenient else max(first, second))


def _annotations(call: OperatorCall) -> tuple[str, ...]:
    found = call.attributes.get("annotations")
    return tuple(str(name) for name in found) if isinstance(found, tuple) else ()
