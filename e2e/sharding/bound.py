"""A lower bound of the step that no plan can beat: the linear program in which tables may be cut at will.

Ranks are alike, so an even spread of every option is the best of fractional plans, and loads are means over the ranks.
Transfers are lines that are nowhere above the model's times.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from e2e.sharding.linear_step import Inequalities, Lines, Variables, step_rows
from e2e.sharding.option_costs import INDICES, LENGTHS, LOADS, MEMORY, OUTPUT
from e2e.sharding.state import Problem, State, all_ranks
from e2e.sharding.step_model import ROW_INDICES, ROW_LENGTHS, ROW_OUTPUT, TOTALS


def lower_bound(problem: Problem) -> float:
    """Seconds; 0 if the solver finds none."""
    options = problem.costs.options
    count = len(options)
    switches = (count, count + 1, count + 2)
    rows = Inequalities(count + 3)
    share = {at: (at, options[at].shards / problem.ranks) for at in range(count) if options[at].placed}
    nothing = np.zeros((1, LOADS))
    found = Variables({at: at for at in range(count)}, [share], *switches, nothing, np.zeros(TOTALS))
    end = step_rows(problem, rows, found, floor_lines(problem))
    solution = _solve(problem, rows, end, switches)
    copies = _all_copies(problem)
    return solution if copies is None else min(solution, copies)


def floor_lines(problem: Problem) -> Lines:
    """Lines below the times of transfers, up to the largest that a plan can have."""
    times, shard, totals = problem.times, problem.costs.shard, problem.totals
    whole = shard[[numbers[0] for numbers in problem.of_table]].sum(axis=0)

    def placed(load: int) -> tuple[float, float]:
        return times.floor_line("all_to_all", float(whole[load]))

    most = totals.sum(axis=0)
    return Lines(
        splits=float(times.of("all_to_all", 0.0)),
        lengths=placed(LENGTHS),
        indices=placed(INDICES),
        output=placed(OUTPUT),
        row_lengths=times.floor_line("all_to_all", float(most[ROW_LENGTHS])),
        row_indices=times.floor_line("all_to_all", float(most[ROW_INDICES])),
        row_output=times.floor_line("reduce_scatter", float(most[ROW_OUTPUT])),
        row_gradient=_per_whole(times.floor_line("all_gather", float(most[ROW_OUTPUT]) / problem.ranks), problem.ranks),
    )


def _per_whole(line: tuple[float, float], ranks: int) -> tuple[float, float]:
    """The line over what all ranks put into an all_gather together."""
    return line[0], line[1] / ranks


def _solve(problem: Problem, rows: Inequalities, end: int, switches: tuple[int, int, int]) -> float:
    """Variables: the yes-or-no ones (from 0 to 1), then times."""
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
        [option.shards / problem.ranks * costs.shard[at, MEMORY] + costs.everywhere[at] for at, option in enumerate(options)]
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
    return float(result.fun) / _SCALE if result.status == 0 else 0.0


# Of the objective only: seconds are small beside the solver's tolerances.
_SCALE = 1e3


def _switch(kind: str, switches: tuple[int, int, int]) -> int:
    return switches[{"row-wise": 1, "data-parallel": 2}.get(kind, 0)]


def _sparse(entries: list[tuple[int, int, float]], shape: tuple[int, int]) -> csr_array:
    row, column, value = zip(*entries, strict=True)
    return csr_array((value, (row, column)), shape=shape)


def _all_copies(problem: Problem) -> float | None:
    """Of the plan without any exchange, which the inequalities take for slower than it is."""
    state = State(problem)
    for table, numbers in enumerate(problem.of_table):
        copy = [number for number in numbers if problem.costs.options[number].kind == "data-parallel"]
        if not copy:
            return None
        state.put(table, (copy[0], all_ranks(problem)))
    return state.seconds() if state.fits() else None
