"""Time of a rank in each phase of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from e2e.simulate.timeline import Timeline
from e2e.step.execution_graph import Launch, RankGraph, Task
from e2e.step.operator_trace import Phase
from e2e.step.rank_writer import AUTOGRAD


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of each phase of one step; they sum to its length."""

    forward: float
    backward: float
    optimizer: float
    # Work outside the passes, such as reading the loss.
    other: float


def phase_seconds(rank: RankGraph, timeline: Timeline, iteration: int) -> PhaseSeconds:
    """Sum :func:`phase_spans` by phase."""
    found: dict[Phase, float] = dict.fromkeys(("forward", "backward", "optimizer", "other"), 0.0)
    for phase, begin, end in phase_spans(rank, timeline, iteration):
        found[phase] += end - begin
    return PhaseSeconds(found["forward"], found["backward"], found["optimizer"], found["other"])


def phase_spans(rank: RankGraph, timeline: Timeline, iteration: int) -> list[tuple[Phase, float, float]]:
    """Return (phase, begin, end) in seconds, without gaps over the window of the step; neighbours differ in phase.

    Time between the ends of two tasks belongs to the phase of the later one; host time after the last task to the phase
    of that task. So phases may alternate, as in a pipeline and with gradient accumulation. A task outside the passes
    takes no time from a concurrent one of a pass, as when the inputs of the next step are loaded.
    """
    begin, end = timeline.window(iteration)
    spans: list[tuple[Phase, float, float]] = []

    def add(phase: Phase, start: float, stop: float) -> None:
        if spans and spans[-1][0] == phase:
            spans[-1] = (phase, spans[-1][1], stop)
        elif stop > start:
            spans.append((phase, start, stop))

    before: float = begin
    for moment, phase in _ends(rank, timeline, iteration):
        if moment > before:
            add(phase, before, min(moment, end))
            before = min(moment, end)
    add(spans[-1][0] if spans else "other", before, end)
    return spans


def _ends(rank: RankGraph, timeline: Timeline, iteration: int) -> list[tuple[float, Phase]]:
    """Sorted (end, phase) of the tasks, without tasks outside the passes at whose end a task of a pass is running."""
    back = autograd_tasks(rank)
    spans = (
        (timeline.task(rank.rank, task.id, iteration), task_phase(rank, task, task.id in back)) for task in rank.tasks
    )
    kept: list[tuple[float, Phase]] = []
    under_way = math.inf
    for moment, ready, phase in sorted(((span.end, span.ready, phase) for span, phase in spans), reverse=True):
        if phase != "other":
            under_way = min(under_way, ready)
        elif under_way < moment:
            continue
        kept.append((moment, phase))
    return kept[::-1]


def autograd_tasks(rank: RankGraph) -> frozenset[int]:
    """Return the tasks launched by autograd's thread: the backward pass, recomputation of the forward one included."""
    return frozenset(each.task for each in rank.threads.get(AUTOGRAD, ()) if isinstance(each, Launch))


def task_phase(rank: RankGraph, task: Task, on_autograd: bool) -> Phase:
    """Return the phase of the call that issued ``task``; recomputed layers are backward, data loading is ``other``.

    ``on_autograd``: autograd's thread launches it.
    """
    call = None if task.call is None else rank.calls.get(task.call)
    if call is None or call.phase == "data":
        return "other"
    return "backward" if on_autograd and call.phase == "forward" else call.phase
