"""Explanation of a plan: the busiest ranks, waiting times, gain over the greedy plans."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from e2e.sharding.planner import Planning
from e2e.sharding.problem.option_costs import BACKWARD, FORWARD, INDICES, OUTPUT
from e2e.sharding.problem.state import State
from e2e.sharding.step_graph import options_of_rank, planned_graph
from e2e.simulate.simulator import simulate

NAMED_TABLES = 3


@dataclass(frozen=True)
class SlowestRank:
    """Rank with the most of one load."""

    # Name of the load.
    load: str
    rank: int
    # Time of the load on this rank; `ratio`: relative to the mean over ranks.
    seconds: float
    ratio: float
    # Tables of the rank with the largest part of the load.
    tables: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Explanation of a plan."""

    # Number of tables by kind of placement.
    kinds: dict[str, int]
    bottlenecks: tuple[SlowestRank, ...]
    # Greedy generator -> relative reduction of the step time against its plan; `None`: that does not fit.
    gains: dict[str, float | None]
    # Seconds of the step's pieces on the slowest rank; pieces overlap.
    parts: dict[str, float]
    # Rank -> seconds of waiting for others in exchanges.
    waiting: tuple[float, ...]


def explain(planning: Planning) -> Explanation:
    """Explain the best plan."""
    state, seconds = planning.best.state, planning.best.simulated
    options = planning.problem.costs.options
    gains = {
        name: None if candidate is None else 1 - seconds / candidate.simulated if candidate.simulated else 0.0
        for name, candidate in planning.greedy.items()
    }
    return Explanation(
        kinds=dict(Counter(options[number].kind for number, _ in state.choices)),
        bottlenecks=_bottlenecks(state),
        gains=gains,
        parts=_parts(state),
        waiting=_waiting(state),
    )


def _bottlenecks(state: State) -> tuple[SlowestRank, ...]:
    """Return the slowest rank of each load of placed tables, the most expensive load first."""
    weights = state.problem.model.weights(state.loads.max(axis=0))
    found = []
    for name, load in (
        ("forward lookup", FORWARD),
        ("backward lookup", BACKWARD),
        ("indices received", INDICES),
        ("lookups sent, and gradients received", OUTPUT),
    ):
        values = state.loads[:, load] * weights[load]
        if values.max() > 0:
            rank = int(values.argmax())
            ratio = float(values[rank] / values.mean())
            found.append(SlowestRank(name, rank, float(values[rank]), ratio, _largest(state, rank, load)))
    return tuple(sorted(found, key=lambda each: -each.seconds))


def _largest(state: State, rank: int, load: int) -> tuple[str, ...]:
    numbers = options_of_rank(state, rank)["placed"]
    costs, tables = state.problem.costs, state.problem.task.tables
    order = sorted(numbers, key=lambda number: -float(costs.shard[number, load]))
    return tuple(tables[costs.options[number].table].name for number in order[:NAMED_TABLES])


def _parts(state: State) -> dict[str, float]:
    graph = planned_graph(state)
    parts: dict[str, float] = {}
    for rank in graph.ranks:
        mine: dict[str, float] = {}
        for task in rank.tasks:
            if task.duration is not None and task.kind == "kernel":
                mine[task.name] = mine.get(task.name, 0.0) + task.duration.seconds
        for name, seconds in mine.items():
            parts[name] = max(parts.get(name, 0.0), seconds)
    used = {task.name: task.duration for task in graph.ranks[0].tasks if task.kind == "collective"}
    return parts | {name: duration.seconds for name, duration in used.items() if duration is not None}


def _waiting(state: State) -> tuple[float, ...]:
    """Waiting time of each rank in collectives, from its arrival to the last one's, in seconds."""
    graph = planned_graph(state)
    timeline = simulate(graph)
    waits = np.zeros(len(graph.ranks))
    for place, rank in enumerate(graph.ranks):
        for task in rank.tasks:
            if task.kind == "collective":
                span = timeline.task(rank.rank, task.id)
                waits[place] += max(span.ready - span.start, 0.0)
    return tuple(float(wait) for wait in waits)
