"""One training step of an execution trace that recorded several: by the profiler's steps, else by the optimizer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from e2e.operators import OperatorCall, OperatorTrace

_PROFILER_STEP = "ProfilerStep#"
_OPTIMIZER_STEP = "Optimizer.step#"


def last_step(trace: OperatorTrace) -> OperatorTrace:
    """``trace`` without all steps but the last whole one; unchanged where it marks fewer than two.

    Profiler steps are marked around everything that happens in them. Without them a step ends with the optimizer's:
    what follows the last one belongs to a step that was not recorded to its end.
    """
    calls = trace.calls
    marks = [[step_mark(name) for name in _annotations(call)] for call in calls]
    numbers = [next((number for number in each if number is not None), None) for each in marks]
    optimizing = [any(is_optimizer_step(name) for name in _annotations(call)) for call in calls]
    chosen = of_last_step([call.thread for call in calls], numbers, optimizing)
    if chosen is None:
        return trace
    kept = tuple(compress(calls, chosen))
    present = {call.id for call in kept}
    whole = tuple(call if call.parent in present else replace(call, parent=None) for call in kept)
    return replace(trace, calls=whole)


def of_last_step(
    threads: Sequence[int], steps: Sequence[int | None], optimizing: Sequence[bool]
) -> Sequence[bool] | None:
    """Which calls (in the order they began) are of the last whole step; ``None`` where fewer than two are marked.

    ``steps``: number of the profiler's step around a call; ``optimizing``: an optimizer's step is around it.
    """
    numbers = _by_profiler(threads, steps)
    if len(set(numbers) - {None}) < 2:
        numbers = _by_optimizer(optimizing)
    last = max((number for number in numbers if number is not None), default=None)
    return None if last is None else [number == last for number in numbers]


def step_mark(annotation: str) -> int | None:
    """The number of the profiler's step that ``annotation`` stands around."""
    number = annotation.removeprefix(_PROFILER_STEP)
    return int(number) if number != annotation and number.isdigit() else None


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


def _by_optimizer(optimizing: Sequence[bool]) -> list[int | None]:
    """How many optimizer steps had ended before a call began; nothing with fewer than two of them."""
    numbers: list[int] = []
    ended, before = 0, False
    for now in optimizing:
        if before and not now:
            ended += 1
        before = now
        numbers.append(ended)
    whole = ended + before
    if whole < 2:
        return [None] * len(numbers)
    return [number if number < whole else None for number in numbers]


def _annotations(call: OperatorCall) -> tuple[str, ...]:
    found = call.attributes.get("annotations")
    return tuple(str(name) for name in found) if isinstance(found, tuple) else ()
