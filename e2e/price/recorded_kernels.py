"""Kernel times of recorded steps: as measured, and on another GPU.

Measured times are put into the graph of an execution trace, from the profile linked with it. For another GPU each
measured time is scaled by the ratio of the models' estimates for the two GPUs. A kernel of an operator that lowering
describes is scaled by the ratio of its own estimates (of the operator's, if lowering has another number of kernels than
the recording); any other kernel by the ratio of an element-wise kernel of the same time. Host times stay. Collectives
lose their durations: a model of the other cluster prices them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from costmodel.cost_model import CostModel, Estimate
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import Elementwise
from e2e.step.execution_graph import CallInfo, Duration, ExecutionGraph, RankGraph, Task
from e2e.step.operator_trace import OperatorCall
from e2e.traces.kineto import DeviceSpan
from e2e.traces.linked_trace import LinkedTrace


@dataclass(frozen=True)
class MeasuredRank:
    """``graph`` with measured durations of ``tasks`` tasks."""

    graph: RankGraph
    tasks: int


def with_measured(graph: RankGraph, linked: LinkedTrace) -> MeasuredRank:
    """Return ``graph`` (lowered from the trace of ``linked``) with the measured times of each operator's device work.

    Times are assigned by operator and kind (kernels, copies, memsets): in order where the numbers of tasks and spans
    agree, otherwise the tasks share the recorded sum evenly. Collectives are left out, since their kernels also wait.
    """
    launched = _launched(graph, linked)
    durations: dict[int, Duration] = {}
    tasks: dict[tuple[int, str], list[Task]] = {}
    for task in graph.tasks:
        if task.call is not None and task.collective is None:
            tasks.setdefault((task.call, task.kind), []).append(task)
    for key, spans in launched.items():
        mine = tasks.get(key, [])
        if len(mine) == len(spans):
            durations |= {task.id: Duration.measured(span.seconds) for task, span in zip(mine, spans, strict=True)}
        elif mine:
            share = Duration.measured(sum(span.seconds for span in spans) / len(mine))
            durations |= {task.id: share for task in mine}
    measured = tuple(replace(task, duration=durations.get(task.id, task.duration)) for task in graph.tasks)
    return MeasuredRank(replace(graph, tasks=measured), len(durations))


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


_ELEMENT_BYTES = 8  # a float32 read and one written


@dataclass(frozen=True)
class Scaling:
    """Machine and model of the recorded GPU, and model of the target GPU."""

    recorded: Machine
    recorded_model: CostModel
    target_model: CostModel


@dataclass(frozen=True)
class Retargeted:
    """Retargeted graph. ``described_fraction``: fraction of the recorded kernel time with operators known to the
    models.
    """

    graph: ExecutionGraph
    described_fraction: float


def retarget(graph: ExecutionGraph, lowered: Mapping[int, RankGraph], scaling: Scaling) -> Retargeted:
    """Scale the measured durations of ``graph`` to another GPU.

    ``lowered``: rank -> operators of its execution trace, with the same call ids as the recorded tasks.
    """
    pairs = {rank.rank: _pairs(rank, lowered.get(rank.rank)) for rank in graph.ranks}
    operators = dict.fromkeys(record for each in pairs.values() for records in each.values() for record in records)
    whole = described = 0.0
    for rank in graph.ranks:
        for task in rank.tasks:
            if task.collective is None and task.duration is not None and task.kind == "kernel":
                whole += task.duration.seconds
                described += task.duration.seconds if task.id in pairs[rank.rank] else 0.0
                operators |= dict.fromkeys(_like(task.duration.seconds, scaling.recorded))
    ratios = _Ratios(list(operators), scaling)

    def scaled(rank: RankGraph) -> RankGraph:
        tasks = tuple(_scaled(task, pairs[rank.rank].get(task.id), ratios) for task in rank.tasks)
        return replace(rank, tasks=tasks)

    moved = replace(graph, ranks=tuple(scaled(rank) for rank in graph.ranks))
    return Retargeted(moved, described / whole if whole else 1.0)


def _pairs(rank: RankGraph, lowered: RankGraph | None) -> dict[int, tuple[AnyOperator, ...]]:
    """Return recorded task -> records of its kernel, or of its whole operator, whose ratio scales it."""
    if lowered is None:
        return {}
    return {
        task: tuple(record for each in behind for record in each.operators)
        for task, behind in tasks_behind(rank, lowered).items()
    }


def tasks_behind(rank: RankGraph, lowered: RankGraph) -> dict[int, tuple[Task, ...]]:
    """Return recorded task -> matching launch of ``lowered``, or all launches of its kind and operator if their numbers
    differ.
    """
    described: dict[int, list[Task]] = {}
    for task in lowered.tasks:
        if task.call is not None and task.operators:
            described.setdefault(task.call, []).append(task)
    recorded: dict[int, list[Task]] = {}
    for task in rank.tasks:
        call = described_call(task.call, rank.calls, described)
        if call is not None and task.collective is None:
            recorded.setdefault(call, []).append(task)
    found: dict[int, tuple[Task, ...]] = {}
    for call, tasks in recorded.items():
        known = described[call]
        if [task.kind for task in tasks] == [task.kind for task in known]:
            found |= {task.id: (other,) for task, other in zip(tasks, known, strict=True)}
        else:
            for task in tasks:
                alike = tuple(other for other in known if other.kind == task.kind)
                if alike:
                    found[task.id] = alike
    return found


def described_call(call: int | None, calls: Mapping[int, CallInfo], described: Container[int]) -> int | None:
    """Return ``call`` or its nearest enclosing call in ``described``, or None."""
    while call is not None and call not in described:
        call = calls[call].parent if call in calls else None
    return call


def _like(seconds: float, machine: Machine) -> tuple[Elementwise, ...]:
    """Return an element-wise kernel that takes about ``seconds`` on ``machine``; empty for zero time."""
    elements = int(seconds * machine.memory[-1].bandwidth.at(1) / _ELEMENT_BYTES)
    return (Elementwise("add", elements),) if elements else ()


class _Ratios:
    """Ratios between the estimates of records on both GPUs."""

    def __init__(self, operators: Sequence[AnyOperator], scaling: Scaling) -> None:
        self._machine = scaling.recorded
        self._recorded = dict(zip(operators, scaling.recorded_model.estimate(operators), strict=True))
        self._target: dict[AnyOperator, Estimate] = dict(
            zip(operators, scaling.target_model.estimate(operators), strict=True)
        )

    def of(self, records: Sequence[AnyOperator]) -> tuple[float, float, float]:
        """Return the ratio with its interval, from the target's estimate."""
        before = sum(self._recorded[record].seconds for record in records)
        after = [self._target[record] for record in records]
        if not before:
            return 1.0, 1.0, 1.0
        return (
            sum(each.seconds for each in after) / before,
            sum(each.lower for each in after) / before,
            sum(each.upper for each in after) / before,
        )

    def unknown(self, seconds: float) -> tuple[float, float, float]:
        """Return the ratio for a kernel of which only the time is known."""
        return self.of(_like(seconds, self._machine))


def _scaled(task: Task, records: tuple[AnyOperator, ...] | None, ratios: _Ratios) -> Task:
    if task.collective is not None:
        return replace(task, duration=None)
    if task.duration is None or (records is None and task.kind != "kernel"):
        return task
    seconds = task.duration.seconds
    ratio, lower, upper = ratios.of(records) if records else ratios.unknown(seconds)
    bound = "scaled by its operator" if records else "scaled as element-wise"
    return replace(task, duration=Duration(seconds * ratio, seconds * lower, seconds * upper, bound, "fitted"))
