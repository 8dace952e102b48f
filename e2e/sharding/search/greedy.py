"""Greedy generators of table-wise plans, as in the published comparison.

Tables in the order of decreasing cost, each to the rank with the least cost so far that has memory for it (longest
processing time first; AutoShard, KDD 2022, DreamShard, NeurIPS 2022 and Lin et al., TPDS 2024 use the same):

  size               rows x dim
  lookup             pooling x dim: values read per sample
  size-lookup        pooling x dim x log10(rows) (as in the code of DreamShard: large tables miss caches more)
  normalised-lookup  distinct rows of the step's batch x dim: lookups divided by the mean reuse of a row. (The
                      published generator of this name is not defined in print; this is our reading of it.)
  random             tables in random order, each on a random rank with memory for it
  round-robin        table i on rank i modulo the ranks, or the next one with memory

A table too large for any single rank is row-wise in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from costmodel.embedding.embedding_tables import EmbeddingTable
from e2e.sharding.problem.option_costs import MEMORY
from e2e.sharding.problem.state import Problem, State, all_ranks

GREEDY = ("size", "lookup", "size-lookup", "normalised-lookup", "random", "round-robin")


def greedy_plans(problem: Problem, seed: int = 0) -> dict[str, State | None]:
    """Map each generator to its plan, ``None`` if that does not fit in memory."""
    return {name: greedy_plan(problem, name, seed) for name in GREEDY}


def greedy_plan(problem: Problem, name: str, seed: int = 0) -> State | None:
    """Return the plan of the generator ``name``, ``None`` if it finds no memory for a table."""
    state = State(problem)
    whole = _place_oversized(state)
    if whole is None:
        return None
    if name == "random":
        generator = np.random.default_rng(seed)
        order = [whole[place] for place in generator.permutation(len(whole))]
        return _fill(state, order, lambda place, table: list(generator.permutation(problem.ranks)))
    if name == "round-robin":
        return _fill(
            state, whole, lambda place, table: [(place + step) % problem.ranks for step in range(problem.ranks)]
        )
    return _least_loaded(state, whole, costs_of(problem, name))


def costs_of(problem: Problem, name: str) -> list[float]:
    """Return the generator's cost of every table."""
    return [_COSTS[name](table, problem.task.samples) for table in problem.task.tables]


_COSTS: dict[str, Callable[[EmbeddingTable, int], float]] = {
    "size": lambda table, samples: float(table.rows * table.dim),
    "lookup": lambda table, samples: table.pooling * table.dim,
    "size-lookup": lambda table, samples: table.pooling * table.dim * math.log10(max(table.rows, 2)),
    "normalised-lookup": lambda table, samples: table.popularity().unique_rows(table.indices(samples)) * table.dim,
}


def _place_oversized(state: State) -> list[int] | None:
    """Make tables that no rank can hold row-wise; return the others.

    ``None`` if row-wise placement is not allowed or does not fit.
    """
    problem = state.problem
    options, shard, everywhere = problem.costs.options, problem.costs.shard, problem.costs.everywhere
    others = []
    for table, numbers in enumerate(problem.of_table):
        kinds = {options[number].kind: number for number in numbers}
        whole = kinds.get("table-wise")
        if whole is not None and shard[whole, MEMORY] + everywhere[whole] <= problem.capacity:
            others.append(table)
        elif "row-wise" in kinds:
            state.put(table, (kinds["row-wise"], all_ranks(problem)))
        else:
            return None
    return others if float(state.memory().max()) <= problem.capacity else None


def _least_loaded(state: State, tables: Sequence[int], costs: Sequence[float]) -> State | None:
    sums = np.zeros(state.problem.ranks)

    def by_sum(place: int, table: int) -> list[int]:
        return list(np.argsort(sums, kind="stable"))

    order = sorted(tables, key=lambda table: -costs[table])
    for place, table in enumerate(order):
        rank = _first_with_memory(state, table, by_sum(place, table))
        if rank is None:
            return None
        sums[rank] += costs[table]
    return state


def _fill(state: State, order: Sequence[int], preference: Callable[[int, int], Sequence[int]]) -> State | None:
    for place, table in enumerate(order):
        if _first_with_memory(state, table, preference(place, table)) is None:
            return None
    return state


def _first_with_memory(state: State, table: int, ranks: Sequence[int]) -> int | None:
    """Place the whole ``table`` on the first of ``ranks`` that can hold it; return the rank or ``None``."""
    problem = state.problem
    whole = next(at for at in problem.of_table[table] if problem.costs.options[at].kind == "table-wise")
    free = problem.capacity - state.memory() - problem.costs.everywhere[whole]
    for rank in ranks:
        if free[rank] >= problem.costs.shard[whole, MEMORY] and free.min() >= 0:
            state.put(table, (whole, (int(rank),)))
            return int(rank)
    return None
