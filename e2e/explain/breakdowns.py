"""Composition of the time of one rank: device and host, phases, ranges named by the script.

Device time and host time count regardless of overlap. A task that represents several kernels counts as these kernels. A
range has its device time, its host time and its part of the critical path.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from e2e.explain.critical_path import CriticalPath, task_family
from e2e.simulate.timeline import Timeline
from e2e.step.execution_graph import AUTOGRAD, Duration, ExecutionGraph, HostWork, Kernel, Launch, RankGraph, Task
from e2e.step.operator_trace import MARKED_GAPS, Phase, around, around_forward, names_around

KeyT = TypeVar("KeyT", bound=Hashable)


def coverage_of(graph: ExecutionGraph) -> dict[str, float]:
    """Share of the device time of all ranks by source of its price."""
    total: dict[str, float] = defaultdict(float)
    for rank in graph.ranks:
        for _, duration, seconds in _kernels(rank.tasks):
            total[duration.source] += seconds * graph.multiplicity.get(rank.rank, 1)
    whole = sum(total.values())
    return {source: value / whole for source, value in total.items()} if whole else {}


def breakdown_of(rank: RankGraph) -> dict[str, dict[str, float]]:
    """Device time in seconds by operator, by limiting resource, by kind of kernel, and by line of a program.

    Backward work counts for the line of its forward operator.
    """
    found = {
        "by_operator": device_seconds(rank, lambda task, _: _operator(rank, task)),
        "by_bound": device_seconds(rank, lambda task, duration: duration.bound or task.kind),
        "by_kind": device_seconds(rank, lambda task, _: task_family(task)),
    }
    if any(call.line for call in rank.calls.values()):
        found["by_line"] = device_seconds(rank, lambda task, _: _line(rank, task))
    return found


def overheads_of(rank: RankGraph) -> dict[str, float]:
    """Host time in seconds by kind of overhead, T1 to T5."""
    sums: dict[str, float] = defaultdict(float)
    for action in rank.actions():
        if isinstance(action, HostWork | Launch) and action.duration is not None:
            sums["T4" if isinstance(action, Launch) else action.kind] += action.duration.seconds
    return dict(sorted(sums.items()))


def kernel_count(rank: RankGraph) -> int:
    """Number of kernels, copies and fills that the rank launches in one iteration."""
    return sum(len(task.kernels) or 1 for task in rank.tasks)


def operator_count(rank: RankGraph) -> int:
    """Number of operators that the host calls in one iteration, nested ones included."""
    if rank.operator_calls is not None:
        return rank.operator_calls
    return sum(info.name not in MARKED_GAPS for info in rank.calls.values())


def device_seconds(rank: RankGraph, key: Callable[[Task | Kernel, Duration], KeyT]) -> dict[KeyT, float]:
    """Sum the device time of every kernel by ``key``, in descending order."""
    sums: dict[KeyT, float] = defaultdict(float)
    for task, duration, seconds in _kernels(rank.tasks):
        sums[key(task, duration)] += seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _kernels(tasks: Iterable[Task]) -> Iterator[tuple[Task | Kernel, Duration, float]]:
    """Iterate over priced kernels and their seconds. Tasks may share kernels, which then come once, with the sum."""
    runs: dict[int, tuple[tuple[Kernel, ...], float]] = {}
    for task in tasks:
        if task.duration is not None and task.kernels:
            before = runs.get(id(task.kernels), ((), 0.0))[1]
            runs[id(task.kernels)] = task.kernels, before + task.duration.seconds
        elif task.duration is not None:
            yield task, task.duration, task.duration.seconds
    for kernels, seconds in runs.values():
        # Kernels are priced for a nominal GPU; their tasks may belong to a slower one.
        times = seconds / (sum(each.duration.seconds for each in kernels if each.duration is not None) or 1.0)
        for kernel in kernels:
            if kernel.duration is not None:
                yield kernel, kernel.duration, kernel.duration.seconds * times


def _operator(rank: RankGraph, task: Task | Kernel) -> str:
    return task.name if task.call is None or task.call not in rank.calls else rank.calls[task.call].name


def _line(rank: RankGraph, task: Task | Kernel) -> str:
    call = None if task.call is None else rank.calls.get(task.call)
    return call.line if call is not None and call.line else "no line of the program"


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


_PASSES = ("forward", "backward")


@dataclass(frozen=True)
class RangeFigures:
    """Figures of all ranges called ``name`` within one step.

    Backward work also belongs to the ranges of its forward operators, and work inside several names to each of them:
    rows do not sum to the step. Device time counts regardless of overlap.
    """

    name: str
    # Number of times that the script entered the range.
    entered: int
    # Number of launched kernels, copies and fills.
    launches: int
    forward_seconds: float
    backward_seconds: float
    # Optimizer, data, or no pass.
    other_seconds: float
    host_seconds: float
    # Part of the critical path.
    path_seconds: float

    @property
    def device_seconds(self) -> float:
        """Device seconds of all passes."""
        return self.forward_seconds + self.backward_seconds + self.other_seconds


def range_figures(rank: RankGraph, path: CriticalPath) -> tuple[RangeFigures, ...]:
    """Figures of each name, most device time first; empty if the script names nothing.

    ``path``: path of the only rank, or that of this rank alone.
    """
    if not rank.ranges:
        return ()
    device: Mapping[tuple[int | None, str], float] = device_seconds(
        rank, lambda task, _: (task.call, _pass(rank, task.call))
    )
    passes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    launches: Counter[str] = Counter()
    host: dict[str, float] = defaultdict(float)
    on_path: dict[str, float] = defaultdict(float)
    names = {call: tuple(names_around(rank.ranges, rank.calls, call)) for call in rank.calls}

    def named(call: int | None) -> tuple[str, ...]:
        return () if call is None else names.get(call, ())

    for (call, direction), seconds in device.items():
        for name in named(call):
            passes[name][direction] += seconds
    for task in rank.tasks:
        for each in task.kernels or (task,):
            launches.update(named(each.call))
    for call, seconds in _host_seconds(rank):
        for name in named(call):
            host[name] += seconds
    for segment in path.segments:
        if segment.rank == rank.rank:
            for name in named(segment.call):
                on_path[name] += segment.seconds
    entered = _entered(rank)
    figures = [
        RangeFigures(
            name, count, launches[name], passes[name]["forward"], passes[name]["backward"], passes[name]["other"],
            host[name], on_path[name],
        )
        for name, count in entered.items()
    ]  # fmt: skip
    return tuple(sorted(figures, key=lambda each: (-each.device_seconds, -each.host_seconds)))


def _entered(rank: RankGraph) -> Counter[str]:
    """Number of times that the script enters each name in this step; a recording may have more steps."""
    used: dict[int, str] = {}
    for call in rank.calls:
        for each in (*around(rank.ranges, rank.calls, call), *around_forward(rank.ranges, rank.calls, call)):
            used[each.id] = each.name
    return Counter(used.values())


def _pass(rank: RankGraph, call: int | None) -> str:
    info = None if call is None else rank.calls.get(call)
    return info.phase if info is not None and info.phase in _PASSES else "other"


def _host_seconds(rank: RankGraph) -> Iterator[tuple[int | None, float]]:
    for action in rank.actions():
        if isinstance(action, HostWork | Launch) and action.duration is not None:
            call = rank.tasks[action.task].call if isinstance(action, Launch) else action.call
            yield call, action.duration.seconds
