"""Measured kernel times for the graph of an execution trace, from the profile linked with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from e2e.step.execution_graph import Duration, RankGraph, Task
from e2e.step.operator_trace import OperatorCall
from e2e.traces.formats.profile import DeviceSpan
from e2e.traces.linking.link import LinkedTrace


@dataclass(frozen=True)
class MeasuredRank:
    """``graph`` with measured durations of ``tasks`` tasks; ``unmatched``: recorded spans without a task."""

    graph: RankGraph
    tasks: int
    unmatched: int


def with_measured(graph: RankGraph, linked: LinkedTrace) -> MeasuredRank:
    """Return ``graph`` (lowered from the trace of ``linked``) with the measured times of each operator's device work.

    Times are assigned by operator and kind (kernels, copies, memsets): in order where the numbers of tasks and spans
    agree, otherwise the tasks share the recorded sum evenly. Collectives are left out, since their kernels also wait.
    """
    launched = _launched(graph, linked)
    durations: dict[int, Duration] = {}
    unmatched = 0
    tasks: dict[tuple[int, str], list[Task]] = {}
    for task in graph.tasks:
        if task.call is not None and task.collective is None:
            tasks.setdefault((task.call, task.kind), []).append(task)
    for key, spans in launched.items():
        mine = tasks.get(key, [])
        if not mine:
            unmatched += len(spans)
        elif len(mine) == len(spans):
            durations |= {task.id: Duration.measured(span.seconds) for task, span in zip(mine, spans, strict=True)}
        else:
            share = Duration.measured(sum(span.seconds for span in spans) / len(mine))
            durations |= {task.id: share for task in mine}
    measured = tuple(replace(task, duration=durations.get(task.id, task.duration)) for task in graph.tasks)
    return MeasuredRank(replace(graph, tasks=measured), len(durations), unmatched)


def _launched(graph: RankGraph, linked: LinkedTrace) -> Mapping[tuple[int, str], list[DeviceSpan]]:
    """Return (call, kind) -> device spans of the call and its nested calls, for the nearest enclosing call with
    tasks.
    """
    parents: dict[int, OperatorCall] = {call.id: call for call in linked.trace.calls}
    spans = {span.id: span for span in linked.kineto.device}
    own = {task.call for task in graph.tasks if task.call is not None}
    collective = {task.call for task in graph.tasks if task.collective is not None}
    found: dict[tuple[int, str], list[DeviceSpan]] = {}
    for call, works in linked.device.items():
        nearest: int | None = call
        while nearest is not None and nearest not in own:
            nearest = parents[nearest].parent
        if nearest in collective:
            continue
        for work in works:
            span = spans[work]
            found.setdefault((call if nearest is None else nearest, span.kind), []).append(span)
    for works_of_call in found.values():
        works_of_call.sort(key=lambda span: span.start)
    return found
