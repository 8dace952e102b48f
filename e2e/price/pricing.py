"""Durations for a graph that has none: device work from a cost model, host work from a table of overheads.

This is the one place where tasks of operators (one or several in a kernel) and host work get their durations. The
numbers of host work come from a table (:mod:`e2e.price.overheads`; which one: :mod:`e2e.price.shared_overheads`);
collectives are priced by :mod:`e2e.price.collective_pricing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from costmodel.gpu.power import drawn_power
from costmodel.model.cost_model import CostModel, Estimate, PriceSource
from costmodel.operators.any_operator import AnyOperator
from e2e.price.multi_tensor import extra_seconds
from e2e.step.execution_graph import (
    Action,
    CallInfo,
    Duration,
    ExecutionGraph,
    HostWork,
    Kernel,
    Launch,
    RankGraph,
    Synchronize,
    Task,
    TaskKind,
)

# The runtime call that launches each kind of task, by which tables of overheads know it.
LAUNCH_CALLS: Mapping[TaskKind, str] = {
    "kernel": "cudaLaunchKernel",
    "collective": "cudaLaunchKernel",
    "copy": "cudaMemcpyAsync",
    "memset": "cudaMemsetAsync",
    "graph": "cudaGraphLaunch",
}
SYNCHRONISING_CALL = "cudaStreamSynchronize"
_LEAST_KNOWN_FIRST: tuple[PriceSource, ...] = ("analytic", "fitted", "measured")
Prices = Mapping[AnyOperator, Estimate]


class HostOverheads(Protocol):
    """What a prediction asks of :class:`e2e.price.overheads.OverheadTable`.

    ``factor``: by how much the host's times may be shorter or longer; one for a host that was measured. ``level``: its
    times over those of the hosts of the shared table.
    """

    @property
    def level(self) -> float:
        """The host's times over those of the hosts of the shared table."""
        ...

    @property
    def factor(self) -> float:
        """By how much the host's times may be shorter or longer."""
        ...

    def seconds(self, kind: Any, name: str, records: float | None = None) -> float:
        """Seconds of one piece of host work of ``kind`` for the operator or call ``name``; ``records``: of operators
        inside the piece, where they are told.
        """
        ...


def price(graph: ExecutionGraph, cost_model: CostModel, overheads: HostOverheads) -> ExecutionGraph:
    """``graph`` with every missing duration filled in; those that are there stay.

    A task of several operators takes the sum of theirs, one of several kernels that of the kernels. A task without any
    stays unpriced (the simulator names it).
    """
    prices = operator_prices([_counts(rank.tasks) for rank in graph.ranks], cost_model)
    host = HostPrices(overheads)
    ranks = (_price_rank(rank, of_rank, host) for rank, of_rank in zip(graph.ranks, prices, strict=True))
    return replace(graph, ranks=tuple(ranks))


def operator_prices(ranks: Sequence[Mapping[AnyOperator, int]], cost_model: CostModel) -> list[Prices]:
    """Prices on each rank, of which ``ranks`` says how often every operator runs there.

    Each distinct operator is estimated once: a model repeats few shapes many times. Then the estimates settle on each
    rank for its own mixture: every GPU has a clock of its own.
    """
    operators = list(dict.fromkeys(operator for counts in ranks for operator in counts))
    estimates = dict(zip(operators, cost_model.estimate(operators), strict=True))
    return [
        dict(zip(counts, cost_model.settle([estimates[each] for each in counts], list(counts.values())), strict=True))
        for counts in ranks
    ]


def total(parts: Sequence[Estimate | Duration]) -> Duration:
    """All ``parts`` (one or more) after one another: limited by what limits the longest, as sure as the least sure."""
    longest = max(parts, key=lambda part: part.seconds)
    return Duration(
        seconds=sum(part.seconds for part in parts),
        lower=sum(part.lower for part in parts),
        upper=sum(part.upper for part in parts),
        bound=longest.bound,
        source=min((part.source for part in parts), key=_LEAST_KNOWN_FIRST.index),
        power=_mean_power(parts),
    )


def _mean_power(parts: Sequence[Estimate | Duration]) -> float | None:
    """Over the seconds of ``parts``; ``None`` where it is not known of all."""
    drawn = [part.power if isinstance(part, Duration) else drawn_power(part) for part in parts]
    known = [each for each in drawn if each is not None]
    seconds = sum(part.seconds for part in parts)
    if len(known) < len(drawn) or not seconds:
        return None
    return sum(each * part.seconds for each, part in zip(known, parts, strict=True)) / seconds


def _counts(tasks: Iterable[Task]) -> Counter[AnyOperator]:
    """How often each operator runs that has no price yet. Tasks that repeat share their tuples: each is read once."""
    repeated: dict[int, tuple[tuple[Kernel, ...] | tuple[AnyOperator, ...], int]] = {}
    for task in tasks:
        if task.duration is None:
            content = task.kernels or task.operators
            repeated[id(content)] = (content, repeated.get(id(content), (content, 0))[1] + 1)
    counts: Counter[AnyOperator] = Counter()
    for content, times in repeated.values():
        for part in content:
            for operator in part.operators if isinstance(part, Kernel) else (part,):
                counts[operator] += times
    return counts


@dataclass
class HostPrices:
    """What the host spends, by a table that is asked once for each kind and name."""

    overheads: HostOverheads
    _known: dict[tuple[str, str, float | None], Duration] = field(default_factory=dict)

    def work(self, item: HostWork, calls: Mapping[int, CallInfo], launching: set[int | None]) -> Duration:
        """Of host work for one of ``calls``; T5 of one that is not among those ``launching`` is the whole of it."""
        whole = item.kind == "T5" and item.call not in launching
        info = None if item.call is None else calls.get(item.call)
        known = self._of("whole" if whole else item.kind, "" if info is None else info.name, item.records)
        if info is None or not (info.tensors or info.gathered):
            return known
        extra = extra_seconds(item.kind, info.tensors, info.gathered) * self.overheads.level
        return fitted(known.seconds + extra) if extra else known

    def launch(self, kind: TaskKind) -> Duration:
        """Of the call that launches a task of ``kind``."""
        return self._of("T4", LAUNCH_CALLS[kind])

    def synchronize(self) -> Duration:
        """Of a call that waits for the device, without the waiting."""
        return self._of("T4", SYNCHRONISING_CALL)

    def _of(self, kind: str, name: str, records: float | None = None) -> Duration:
        key = (kind, name, records)
        if key not in self._known:
            self._known[key] = fitted(self.overheads.seconds(kind, name, records))
        return self._known[key]


def launching_calls(actions: Iterable[object]) -> set[int | None]:
    """The operator calls among ``actions`` that launch something: those with a time before their first launch."""
    return {action.call for action in actions if isinstance(action, HostWork) and action.kind == "T2"}


def _price_rank(rank: RankGraph, prices: Prices, host: HostPrices) -> RankGraph:
    tasks = tuple(_priced_tasks(rank.tasks, prices))
    launching = launching_calls(rank.actions())

    def priced(action: Action) -> Action:
        if isinstance(action, HostWork) and action.duration is None:
            return replace(action, duration=host.work(action, rank.calls, launching))
        if isinstance(action, Launch) and action.duration is None:
            return replace(action, duration=host.launch(tasks[action.task].kind))
        if isinstance(action, Synchronize) and action.duration is None:
            return replace(action, duration=host.synchronize())
        return action

    threads = {name: tuple(priced(action) for action in actions) for name, actions in rank.threads.items()}
    return replace(rank, threads=threads, tasks=tasks)


def _priced_tasks(tasks: Iterable[Task], prices: Prices) -> Iterator[Task]:
    runs: dict[int, tuple[tuple[Kernel, ...], Duration]] = {}
    for task in tasks:
        if task.duration is not None or not all(each.operators for each in task.kernels or (task,)):
            yield task
        elif task.kernels:
            if id(task.kernels) not in runs:
                durations = [duration_of(each, prices) for each in task.kernels]
                kernels = tuple(replace(each, duration=d) for each, d in zip(task.kernels, durations, strict=True))
                runs[id(task.kernels)] = kernels, total(durations)
            kernels, duration = runs[id(task.kernels)]
            yield replace(task, kernels=kernels, duration=duration)
        else:
            yield replace(task, duration=duration_of(task, prices))


class Priceable(Protocol):
    """A kernel, by whatever name."""

    @property
    def operators(self) -> tuple[AnyOperator, ...]:
        """What the kernels compute; empty: nothing that a model prices."""
        ...


def duration_of(kernel: Priceable, prices: Prices) -> Duration:
    """The price of a kernel of one or more operators."""
    return total([prices[operator] for operator in kernel.operators])


def fitted(seconds: float) -> Duration:
    """Host time by a table."""
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
    start = HostWork("T4", None, fitted(launch_seconds))
    threads[first] = (start, *threads[first])
    return replace(rank, threads=threads)


def _without_host(actions: Iterable[Action]) -> Iterator[Action]:
    nothing = fitted(0.0)
    for action in actions:
        if isinstance(action, HostWork | Synchronize):
            continue
        yield replace(action, duration=nothing) if isinstance(action, Launch) else action
