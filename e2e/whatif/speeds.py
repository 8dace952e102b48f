"""Faster kernels and hosts: a priced graph with changed durations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from costmodel.base.errors import InputError
from e2e.explain.critical_path import task_family
from e2e.step.execution_graph import (
    Action,
    Duration,
    ExecutionGraph,
    HostWork,
    Kernel,
    Launch,
    RankGraph,
    Synchronize,
    Task,
)
from e2e.whatif.questions import FasterHost, FasterKernels
from e2e.whatif.traced_rank import TracedRank

_LISTED = 12


@dataclass(frozen=True)
class SpeedChange:
    """Speed changes of kernels and host. ``traced``: rank -> its operators, where known."""

    changes: tuple[FasterKernels | FasterHost, ...]
    traced: Mapping[int, TracedRank]

    def check(self, graph: ExecutionGraph) -> None:
        """Raise ``InputError`` for kernels that the graph, priced or not, does not have.

        Lists the existing families.
        """
        for change in self.changes:
            if isinstance(change, FasterKernels) and not any(
                self._of(change, rank) for rank in graph.ranks
            ):  # fmt: skip
                raise InputError(
                    f"--what-if kernels:{change.pattern}: no kernel of the step is of that family or matches that "
                    f"pattern; families: {', '.join(self._families(graph)[:_LISTED])}"
                )

    def applied(self, graph: ExecutionGraph) -> ExecutionGraph:
        """Return the priced ``graph`` with these speeds."""
        return replace(graph, ranks=tuple(self._faster(rank) for rank in graph.ranks))

    def _faster(self, rank: RankGraph) -> RankGraph:
        for change in self.changes:
            if isinstance(change, FasterHost):
                threads = {
                    name: tuple(_faster_action(action, change.factor) for action in actions)
                    for name, actions in rank.threads.items()
                }
                rank = replace(rank, threads=threads)
            else:
                rank = self._faster_kernels(rank, change)
        return rank

    def _faster_kernels(self, rank: RankGraph, change: FasterKernels) -> RankGraph:
        chosen = self._of(change, rank)
        runs: dict[int, tuple[tuple[Kernel, ...], float]] = {}
        tasks = []
        for task in rank.tasks:
            parts = chosen.get(task.id)
            if parts is None or task.duration is None:
                tasks.append(task)
            elif not task.kernels:
                tasks.append(replace(task, duration=_times(task.duration, 1 / change.factor)))
            else:
                # Repeated tasks share their kernels, which stay shared.
                if id(task.kernels) not in runs:
                    runs[id(task.kernels)] = _faster_run(task.kernels, parts, change.factor)
                kernels, ratio = runs[id(task.kernels)]
                tasks.append(replace(task, kernels=kernels, duration=_times(task.duration, ratio)))
        return replace(rank, tasks=tuple(tasks))

    def _of(self, change: FasterKernels, rank: RankGraph) -> dict[int, frozenset[int]]:
        """Map tasks to the places of their selected kernels (place 0 for a task that is a single kernel)."""
        wanted = change.pattern.lower()
        by_family: dict[int, frozenset[int]] = {}
        by_name: dict[int, frozenset[int]] = {}
        search = re.compile(change.pattern, re.IGNORECASE).search
        traced = self.traced.get(rank.rank)
        homes = {} if traced is None else traced.homes(rank)
        seen: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        for task in rank.tasks:
            parts: Sequence[Task | Kernel] = task.kernels or (task,)
            if not task.kernels or id(task.kernels) not in seen:
                of = [self._family(each, homes, traced).lower() for each in parts]
                families = frozenset(place for place, each in enumerate(of) if _is_of(each, wanted))
                names = frozenset(
                    place for place, each in enumerate(parts) if any(search(name) for name in _names(each, rank))
                )
                if task.kernels:
                    seen[id(task.kernels)] = families, names
            else:
                families, names = seen[id(task.kernels)]
            if families:
                by_family[task.id] = families
            if names:
                by_name[task.id] = names
        return by_family or by_name

    def _family(self, part: Task | Kernel, homes: Mapping[int, int], traced: TracedRank | None) -> str:
        """Family as in the report; for a recorded kernel that of the operator that launched it."""
        if not part.operators and traced is not None and isinstance(part, Task) and part.id in homes:
            for task in traced.work[homes[part.id]]:
                if task.kind == part.kind and task.operators:
                    return task_family(task)
        return task_family(part)

    def _families(self, graph: ExecutionGraph) -> list[str]:
        found: dict[str, None] = {}
        for rank in graph.ranks:
            traced = self.traced.get(rank.rank)
            homes = {} if traced is None else traced.homes(rank)
            for task in rank.tasks:
                for part in task.kernels or (task,):
                    found[self._family(part, homes, traced)] = None
        return sorted(found)


def _is_of(family: str, wanted: str) -> bool:
    """True if ``family`` is selected by ``wanted``.

    ``gemm`` includes products of all number types and of experts, ``gemm in float32`` only those.
    """
    return family == wanted or family.startswith((f"{wanted} in ", f"{wanted} of "))


def _names(part: Task | Kernel, rank: RankGraph) -> list[str]:
    """Names of the kernel, of the operators around its launch, and of their module."""
    found = [part.name]
    call = part.call
    while call is not None and call in rank.calls:
        info = rank.calls[call]
        found += [info.name, info.module] if info.module else [info.name]
        call = info.parent
    return found


def _faster_run(kernels: tuple[Kernel, ...], chosen: frozenset[int], factor: float) -> tuple[tuple[Kernel, ...], float]:
    """Return the kernels of a run, the chosen ones faster, and the ratio of the new total time to the old one."""
    made = tuple(
        replace(each, duration=_times(each.duration, 1 / factor)) if place in chosen and each.duration else each
        for place, each in enumerate(kernels)
    )
    before, after = (sum(each.duration.seconds for each in some if each.duration) for some in (kernels, made))
    return made, after / before if before else 1.0


def _faster_action(action: Action, factor: float) -> Action:
    if isinstance(action, HostWork | Launch | Synchronize) and action.duration is not None:
        return replace(action, duration=_times(action.duration, 1 / factor))
    return action


def _times(duration: Duration, ratio: float) -> Duration:
    return replace(
        duration,
        seconds=duration.seconds * ratio,
        lower=duration.lower * ratio,
        upper=duration.upper * ratio,
    )
