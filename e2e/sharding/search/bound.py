"""Lower bound of the step time of any plan: the linear program in which tables may be split arbitrarily.

Ranks are identical, so an even spread of every option is the best fractional plan, and loads are means over the ranks.
Transfers are lines that bound the model's times from below.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from e2e.sharding.problem.option_costs import LOADS, MEMORY
from e2e.sharding.problem.state import Problem, State, all_ranks
from e2e.sharding.problem.step_model import TOTALS
from e2e.sharding.search.linear_step import Inequalities, Lines, Variables, step_rows
from e2e.step.arrays import Floats


@dataclass(frozen=True)
class Relaxation:
    """Solution of the relaxation."""

    # Lower bound of any plan's step.
    seconds: float
    # Option of each table with the largest share in the fractional plan.
    options: tuple[int, ...]


def relax(problem: Problem, seconds: float) -> Relaxation | None:
    """Solve over plans that take at most ``seconds`` (the time of a known plan); ``None`` if none fits in memory."""
    options = problem.costs.options
    count = len(options)
    switches = (count, count + 1, count + 2)
    rows = Inequalities(count + 3)
    share = {at: (at, options[at].shards / problem.ranks) for at in range(count) if options[at].placed}
    nothing = np.zeros((1, LOADS))
    found = Variables({at: at for at in range(count)}, [share], *switches, nothing, np.zeros(TOTALS))
    end = step_rows(problem, rows, found, floor_lines(problem, seconds))
    solution = _solve(problem, rows, end, switches)
    if solution is None:
        return None
    bound = float(solution[count + 3 + end])
    copies = _all_copies(problem)
    chosen = tuple(max(numbers, key=lambda number: float(solution[number])) for numbers in problem.of_table)
    return Relaxation(bound if copies is None else min(bound, copies), chosen)


def floor_lines(problem: Problem, seconds: float) -> Lines:
    """Lines that bound transfer times up to ``seconds`` from below; no plan of that time has longer transfers."""
    times = problem.times
    exchange = times.floor_lines("all_to_all", seconds)
    gather = times.floor_lines("all_gather", seconds)
    return Lines(
        splits=float(times.of("all_to_all", 0.0)),
        lengths=exchange,
        indices=exchange,
        output=exchange,
        row_lengths=exchange,
        row_indices=exchange,
        row_output=times.floor_lines("reduce_scatter", seconds),
        # A rank contributes its share of the whole output to the all_gather.
        row_gradient=tuple((start, slope / problem.ranks) for start, slope in gather),
    )


def _solve(problem: Problem, rows: Inequalities, end: int, switches: tuple[int, int, int]) -> Floats | None:
    """Return the values of the relaxed binary variables (0 to 1), then of times; ``None`` if infeasible."""
    matrix: list[tuple[int, int, float]] = []
    limits: list[float] = []

    def add(terms: dict[int, float], limit: float) -> None:
        matrix.extend((len(limits), column, value) for column, value in terms.items())
        limits.append(limit)

    for time, times, terms, constant in rows.rows:
        line = {rows.yes + time: -1.0, **{rows.yes + other: 1.0 for other in times}}
        add(line | {column: value for column, value in terms.items() if value}, -constant)
    options, costs = problem.costs.options, problem.costs
    for at, option in enumerate(options):
        add({at: 1.0, _switch(option.kind, switches): -1.0}, 0.0)
    memory = np.array(
        [
            option.shards / problem.ranks * costs.shard[at, MEMORY] + costs.everywhere[at]
            for at, option in enumerate(options)
        ]
    )
    add(dict(enumerate((memory / problem.capacity).tolist())), 1.0)
    shape = (len(limits), rows.yes + rows.times)
    once = [(options[at].table, at, 1.0) for at in range(len(options))]
    cost = np.zeros(shape[1])
    cost[rows.yes + end] = 1.0
    bounds = [(0, 1)] * rows.yes + [(0, None)] * rows.times
    result = linprog(
        cost * _SCALE,
        A_ub=_sparse(matrix, shape),
        b_ub=np.array(limits),
        A_eq=_sparse(once, (len(problem.of_table), shape[1])),
        b_eq=np.ones(len(problem.of_table)),
        bounds=bounds,
        method="highs",
    )
    return np.asarray(result.x) if result.status == 0 else None


# Scale of the objective only: seconds are small compared with the solver's tolerances.
_SCALE = 1e3


def _switch(kind: str, switches: tuple[int, int, int]) -> int:
    return switches[{"row-wise": 1, "data-parallel": 2}.get(kind, 0)]


def _sparse(entries: list[tuple[int, int, float]], shape: tuple[int, int]) -> csr_array:
    row, column, value = zip(*entries, strict=True)
    return csr_array((value, (row, column)), shape=shape)


def _all_copies(problem: Problem) -> float | None:
    """Time of the plan without exchanges, which the inequalities overestimate; ``None`` if it is not possible."""
    state = State(problem)
    for table, numbers in enumerate(problem.of_table):
        copy = [number for number in numbers if problem.costs.options[number].kind == "data-parallel"]
        if not copy:
            return None
        state.put(table, (copy[0], all_ranks(problem)))
    return state.seconds() if state.fits() else None
