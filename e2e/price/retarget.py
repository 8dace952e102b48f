"""Recorded kernels on another GPU: each measured time scaled by what the models say of the two GPUs.

A kernel of an operator that lowering describes is scaled by the ratio of its own estimates (of the operator's, where
lowering has another number of kernels than were recorded); any other kernel by that of an element-wise one as long.
Host times stay. Collectives lose their durations: a model of the other cluster prices them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from costmodel.machines.machine_records import Machine
from costmodel.model.cost_model import CostModel, Estimate
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import Elementwise
from e2e.step.execution_graph import CallInfo, Duration, ExecutionGraph, RankGraph, Task

_ELEMENT_BYTES = 8  # a float32 read and one written


@dataclass(frozen=True)
class Scaling:
    """The machine and the model of the GPU that was recorded, and of the one that is asked for."""

    recorded: Machine
    recorded_model: CostModel
    target_model: CostModel


@dataclass(frozen=True)
class Retargeted:
    """``described_fraction``: share of the recorded kernel time whose operators the models know."""

    graph: ExecutionGraph
    described_fraction: float


def retarget(graph: ExecutionGraph, lowered: Mapping[int, RankGraph], scaling: Scaling) -> Retargeted:
    """``graph`` with measured durations on another GPU. ``lowered``: rank -> the operators of its execution trace,
    with the same call ids as the recorded tasks have.
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
    """Recorded task -> records that price it, or those of its whole operator, whose ratio it then takes."""
    if lowered is None:
        return {}
    return {
        task: tuple(record for each in behind for record in each.operators)
        for task, behind in tasks_behind(rank, lowered).items()
    }


def tasks_behind(rank: RankGraph, lowered: RankGraph) -> dict[int, tuple[Task, ...]]:
    """Recorded task -> the launch of ``lowered`` that it is, or all of its kind of the same operator, where lowering
    has another number of them.
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
    """``call``, or the nearest around it, that is one of those ``described``; ``None`` if none is."""
    while call is not None and call not in described:
        call = calls[call].parent if call in calls else None
    return call


def _like(seconds: float, machine: Machine) -> tuple[Elementwise, ...]:
    """An element-wise kernel that takes about ``seconds`` on ``machine``; nothing for no time."""
    elements = int(seconds * machine.memory[-1].bandwidth.at(1) / _ELEMENT_BYTES)
    return (Elementwise("add", elements),) if elements else ()


class _Ratios:
    """Estimates of every record on both GPUs."""

    def __init__(self, operators: Sequence[AnyOperator], scaling: Scaling) -> None:
        self._machine = scaling.recorded
        self._recorded = dict(zip(operators, scaling.recorded_model.estimate(operators), strict=True))
        self._target: dict[AnyOperator, Estimate] = dict(
            zip(operators, scaling.target_model.estimate(operators), strict=True)
        )

    def of(self, records: Sequence[AnyOperator]) -> tuple[float, float, float]:
        """Ratio with its interval; that of the target's estimate."""
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
        """For a kernel of which only the time is known."""
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
