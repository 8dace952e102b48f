"""Diagnosis if nothing fits: the missing memory, and the number of GPUs that suffices."""

from __future__ import annotations

from dataclasses import dataclass

from e2e.sharding.problem.option_costs import MEMORY
from e2e.sharding.problem.placement import MOST_GPUS
from e2e.sharding.problem.state import Problem

GIB = 2**30


@dataclass(frozen=True)
class Shortage:
    """Memory shortage, in bytes of all GPUs together."""

    # Lower bound of the needed memory.
    needed: float
    available: float
    # A table without an option that fits on a rank, or empty; `table_bytes`: the least bytes of its shards.
    table: str
    table_bytes: float
    # The fewest GPUs for which the sum fits; 0: no number does.
    gpus: int


def shortage(problem: Problem) -> Shortage:
    """Compare the least memory that the tables can take with the available memory."""
    costs, ranks = problem.costs, problem.ranks
    needed, worst, name = 0.0, 0.0, ""
    for table, numbers in enumerate(problem.of_table):
        whole = [
            costs.options[number].shards * costs.shard[number, MEMORY] + ranks * costs.everywhere[number]
            for number in numbers
        ]
        needed += min(whole)
        least = min(float(costs.shard[number, MEMORY] + costs.everywhere[number]) for number in numbers)
        if least > max(problem.capacity, worst):
            worst, name = least, problem.task.tables[table].name
    return Shortage(needed, problem.capacity * ranks, name, worst, _enough(problem, needed))


def _enough(problem: Problem, needed: float) -> int:
    """Number of GPUs that suffices: weights are spread over more GPUs, buffers for a GPU's own samples are not."""
    task = problem.task
    weights = sum(table.weight_bytes + table.optimizer_bytes for table in task.tables)
    own = (needed - weights) / problem.ranks
    if own >= problem.capacity:
        return 0
    count = -(-weights // max(int(problem.capacity - own), 1))
    per_node = task.cluster.node_gpus
    if count > per_node:
        count = -(-count // per_node) * per_node
    return int(count) if count <= MOST_GPUS else 0


def shortage_message(problem: Problem, found: Shortage) -> str:
    """Return a one-line message: the shortage and a remedy."""
    task = problem.task
    where = f"{problem.ranks} x {task.cluster.machine.name}"
    room = f"{problem.capacity / GIB:.1f} GiB of each left for tables ({task.reserve:.0%} reserved)"
    if found.table:
        return (
            f"nothing fits on {where}: no part of table {found.table!r} takes less than "
            f"{found.table_bytes / GIB:.1f} GiB on a GPU, {room}; "
            "allow more kinds of placement, take more GPUs or a smaller batch"
        )
    more = f"{found.gpus} GPUs would hold them" if found.gpus else "no number of these GPUs holds a batch of this size"
    if found.needed > found.available:
        missing = (found.needed - found.available) / GIB
        return (
            f"nothing fits on {where}: tables and buffers need at least {found.needed / GIB:.1f} GiB in all, "
            f"{room}: {missing:.1f} GiB are missing; {more}, or use a smaller dtype or optimizer state"
        )
    return (
        f"no placement found that fits on {where}: tables and buffers need {found.needed / GIB:.1f} of "
        f"{found.available / GIB:.1f} GiB, {room}, but no way was found to pack them; lower --reserve or take more GPUs"
    )
