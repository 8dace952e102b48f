"""One training step of an execution trace that recorded several: by the profiler's steps, else by the optimizer's."""

from __future__ import annotations

from dataclasses import replace

from e2e.operators import OperatorCall, OperatorTrace

_PROFILER_STEP = "ProfilerStep#"
_OPTIMIZER_STEP = "Optimizer.step#"


def last_step(trace: OperatorTrace) -> OperatorTrace:
    """``trace`` without all steps but the last whole one; unchanged where it marks fewer than two.

    Profiler steps are marked around everything that happens in them. Without them a step ends with the optimizer's:
    what follows the last one belongs to a step that was not recorded to its end.
    """
    numbers = _by_profiler(trace)
    if len(set(numbers.values())) < 2:
        numbers = _by_optimizer(trace)
    if not numbers:
        return trace
    last = max(numbers.values())
    kept = tuple(call for call in trace.calls if numbers.get(call.id) == last)
    present = {call.id for call in kept}
    whole = tuple(call if call.parent in present else replace(call, parent=None) for call in kept)
    return replace(trace, calls=whole)


def _marked(call: OperatorCall) -> int | None:
    """The number of the profiler's step around ``call``."""
    for name in _annotations(call):
        if name.startswith(_PROFILER_STEP):
            number = name.removeprefix(_PROFILER_STEP)
            return int(number) if number.isdigit() else None
    return None


def _by_profiler(trace: OperatorTrace) -> dict[int, int]:
    """Call -> step. Only the thread that steps the profiler is marked; calls of others are of the step then open."""
    marks = {call.id: _marked(call) for call in trace.calls}
    threads = {call.thread for call in trace.calls if marks[call.id] is not None}
    numbers: dict[int, int] = {}
    current: int | None = None
    for call in trace.calls:
        if call.thread in threads:
            current = marks[call.id]
        if current is not None:
            numbers[call.id] = current
    return numbers


def _by_optimizer(trace: OperatorTrace) -> dict[int, int]:
    """Call -> how many optimizer steps had ended before it began; empty with fewer than two of them."""
    numbers: dict[int, int] = {}
    ended, inside = 0, False
    for call in trace.calls:
        optimizing = any(name.startswith(_OPTIMIZER_STEP) for name in _annotations(call))
        if inside and not optimizing:
            ended += 1
        inside = optimizing
        numbers[call.id] = ended
    if ended + inside < 2:
        return {}
    return {call: number for call, number in numbers.items() if number < ended + inside}


def _annotations(call: OperatorCall) -> tuple[str, ...]:
    found = call.attributes.get("annotations")
    return tuple(str(name) for name in found) if isinstance(found, tuple) else ()
