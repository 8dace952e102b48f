"""Durations for a graph that has none: device work from a cost model, host work from a table of overheads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from costmodel.interface import CostModel, Estimate
from e2e.graph import (
    Action,
    Duration,
    ExecutionGraph,
    HostWork,
    Launch,
    RankGraph,
    Source,
    Synchronize,
    Task,
)

# The runtime call that launches each kind of task, by which tables of overheads know it.
LAUNCH_CALLS = {
    "kernel": "cudaLaunchKernel",
    "collective": "cudaLaunchKernel",
    "copy": "cudaMemcpyAsync",
    "memset": "cudaMemsetAsync",
    "graph": "cudaGraphLaunch",
}
SYNCHRONISING_CALL = "cudaStreamSynchronize"
_LEAST_KNOWN_FIRST: tuple[Source, ...] = ("analytic", "fitted", "measured")


class Overheads(Protocol):
    """What a prediction asks of :class:`e2e.overheads.OverheadTable`.

    ``factor``: by how much the host's times may be shorter or longer; one for a host that was measured.
    """

    @property
    def factor(self) -> float: ...

    def seconds(self, kind: Any, name: str) -> float: ...


def price(graph: ExecutionGraph, cost_model: CostModel, overheads: Overheads) -> ExecutionGraph:
    """``graph`` with every missing duration filled in; those that are there stay.

    A task of several operators takes the sum of theirs. A task without any stays unpriced (the simulator names it).
    """
    estimates = _estimates(graph, cost_model)
    return replace(graph, ranks=tuple(_price_rank(rank, estimates, overheads) for rank in graph.ranks))


def _estimates(graph: ExecutionGraph, cost_model: CostModel) -> Mapping[Any, Estimate]:
    """Each distinct operator once: a model repeats few shapes many times. Settled for their mixture."""
    counts = Counter(
        operator for rank in graph.ranks for task in rank.tasks if task.duration is None for operator in task.operators
    )
    estimates = cost_model.settle(cost_model.estimate(list(counts)), list(counts.values()))
    return dict(zip(counts, estimates, strict=True))


def _price_rank(rank: RankGraph, estimates: Mapping[Any, Estimate], overheads: Overheads) -> RankGraph:
    tasks = tuple(_price_task(task, estimates) for task in rank.tasks)
    launching = {action.call for action in rank.actions() if isinstance(action, HostWork) and action.kind == "T2"}
    prices: dict[tuple[str, str], Duration] = {}

    def price_of(kind: str, name: str) -> Duration:
        if (kind, name) not in prices:
            prices[kind, name] = _fitted(overheads.seconds(kind, name))
        return prices[kind, name]

    def priced(action: Action) -> Action:
        if isinstance(action, HostWork) and action.duration is None:
            whole = action.kind == "T5" and action.call not in launching
            name = "" if action.call is None or action.call not in rank.calls else rank.calls[action.call].name
            return replace(action, duration=price_of("whole" if whole else action.kind, name))
        if isinstance(action, Launch) and action.duration is None:
            return replace(action, duration=price_of("T4", LAUNCH_CALLS[tasks[action.task].kind]))
        if isinstance(action, Synchronize) and action.duration is None:
            return replace(action, duration=price_of("T4", SYNCHRONISING_CALL))
        return action

    threads = {name: tuple(priced(action) for action in actions) for name, actions in rank.threads.items()}
    return replace(rank, threads=threads, tasks=tasks)


def _price_task(task: Task, estimates: Mapping[Any, Estimate]) -> Task:
    if task.duration is not None or not task.operators:
        return task
    parts = [estimates[operator] for operator in task.operators]
    longest = max(parts, key=lambda part: part.seconds)
    duration = Duration(
        seconds=sum(part.seconds for part in parts),
        lower=sum(part.lower for part in parts),
        upper=sum(part.upper for part in parts),
        bound=longest.bound,
        source=_least_known(part.source for part in parts),
    )
    return replace(task, duration=duration)


def _least_known(sources: Iterable[Source]) -> Source:
    return min(sources, key=_LEAST_KNOWN_FIRST.index)


def _fitted(seconds: float) -> Duration:
    return Duration(seconds, seconds, seconds, "host", "fitted")


def as_cuda_graph(graph: ExecutionGraph, launch_seconds: float) -> ExecutionGraph:
    """``graph`` replayed as one CUDA graph: the host launches once, in ``launch_seconds``; tasks follow by themselves.

    Waits of the host inside a captured region are not possible and left out.
    """
    return replace(graph, ranks=tuple(_captured(rank, launch_seconds) for rank in graph.ranks))


def _captured(rank: RankGraph, launch_seconds: float) -> RankGraph:
    threads = {}
    for name, actions in rank.threads.items():
        kept = list(_without_host(actions))
        threads[name] = tuple(kept)
    first = next(iter(threads))
    start = HostWork("T4", None, _fitted(launch_seconds))
    threads[first] = (start, *threads[first])
    return replace(rank, threads=threads)


def _without_host(actions: Iterable[Action]) -> Iterator[Action]:
    nothing = _fitted(0.0)
    for action in actions:
        if isinstance(action, HostWork | Synchronize):
            continue
        yield replace(action, duration=nothing) if isinstance(action, Launch) else action
