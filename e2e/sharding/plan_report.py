"""Text report of a plan, with its explanation: the busiest ranks, waiting times, gain over the greedy plans."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from e2e.report.text_report import plain_console
from e2e.sharding.plan import TablePlan
from e2e.sharding.planner import Planning
from e2e.sharding.step_graph import options_of_rank, planned_graph
from e2e.sharding.step_model import State
from e2e.sharding.task import BACKWARD, FORWARD, INDICES, OUTPUT
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


def explain_plan(planning: Planning) -> Explanation:
    """Explain the best plan."""
    state, seconds = planning.best.state, planning.best.simulated
    options = planning.problem.costs.options
    gains = {
        name: None if candidate is None else 1 - seconds / candidate.simulated if candidate.simulated else 0.0
        for name, candidate in planning.greedy.items()
    }
    return Explanation(
        kinds=dict(Counter(options[number].kind for number, _ in state.choices)),
        bottlenecks=_slowest_ranks(state),
        gains=gains,
        parts=_parts(state),
        waiting=_waiting(state),
    )


def _slowest_ranks(state: State) -> tuple[SlowestRank, ...]:
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


ROWS = 16
GIB = 2**30


def render_plan(planning: Planning, plan: TablePlan, path: Path, console: Console | None = None) -> None:
    """Print the step, the ranks, the bottlenecks, and the gain over the greedy plans."""
    out = console or plain_console()
    found = explain_plan(planning)
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.kinds.items())
    out.print(f"{len(plan.tables)} tables on {plan.gpus} x {plan.machine}, {plan.batch_size} samples per GPU")
    out.print(f"placed      {kinds} (by {plan.generator}); written to {path}")
    dense = f", of it {_ms(plan.dense_seconds)} dense kernels" if plan.dense_seconds else ", without a dense part"
    out.print(f"step        {_ms(plan.step_seconds)} by simulation without host time{dense}")
    if planning.gap is not None:
        out.print(
            f"bound       no plan takes less than {_ms(planning.bound)} (closed form; this one "
            f"{_ms(planning.best.seconds)}, {planning.gap:.1%} above)"
        )
    _uncertainty(out, planning)
    out.print(f"search      {planning.search_seconds:.1f} s")
    _gains(out, found)
    _ranks(out, plan, found)
    _bottlenecks(out, found)


def _uncertainty(out: Console, planning: Planning) -> None:
    best, fastest = planning.best, planning.fastest
    if planning.confidence is None:
        return
    out.print(
        f"uncertain   {_ms(best.expected)} on average where the models are wrong as they may be; faster than every "
        f"greedy plan in {planning.confidence:.0%} of the cases"
    )
    if best is not fastest:
        out.print(
            f"            where the models are right, the plan by {fastest.generator} takes {_ms(fastest.simulated)} "
            f"({_ms(fastest.expected)} on average)"
        )


def _gains(out: Console, found: Explanation) -> None:
    table = Table("greedy generator", "step is shorter by", box=None)
    for name, gain in found.gains.items():
        table.add_row(name, "does not fit" if gain is None else f"{gain:.1%}")
    out.print(table)


def _ranks(out: Console, plan: TablePlan, found: Explanation) -> None:
    table = Table("rank", "tables", "forward ms", "backward ms", "sent MB", "waits ms", "memory GiB", box=None)
    order = sorted(plan.ranks, key=lambda rank: -(rank.forward_seconds + rank.backward_seconds))
    for load in order[:ROWS]:
        table.add_row(
            str(load.rank),
            str(load.tables),
            f"{load.forward_seconds * 1e3:.3f}",
            f"{load.backward_seconds * 1e3:.3f}",
            f"{load.sent_output_bytes / 1e6:.1f}",
            f"{found.waiting[load.rank] * 1e3:.3f}",
            f"{load.memory_bytes / GIB:.2f}",
        )
    out.print(table)
    if len(order) > ROWS:
        out.print(f"... and {len(order) - ROWS} ranks with less; all are in the plan")
    fullest = max(load.memory_bytes for load in plan.ranks) / GIB
    room = f"{plan.memory_limit_bytes / GIB:.1f} GiB of each are for tables and buffers"
    out.print(f"memory      {fullest:.1f} GiB on the fullest GPU; {room}")


def _bottlenecks(out: Console, found: Explanation) -> None:
    for each in found.bottlenecks:
        tables = f", most of it from {', '.join(each.tables)}" if each.tables else ""
        out.print(
            f"{each.load}: rank {each.rank} has the most, {_ms(each.seconds)}, {each.ratio:.2f} times the mean{tables}"
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
