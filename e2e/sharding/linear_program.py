"""Lower bound of the step time of any plan, by linear programming.

The step of :mod:`e2e.sharding.step_model` as linear inequalities between times and the shares of options: a maximum
becomes "at least each argument", a transfer a straight line that bounds the model's times from below. Tables may be
split arbitrarily. Ranks are identical, so an even spread of every option is the best fractional plan, and loads are
means over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from e2e.sharding import step_model as step
from e2e.sharding.step_model import Problem, State, all_ranks
from e2e.sharding.task import BACKWARD, FORWARD, INDICES, LENGTHS, MEMORY, OUTPUT
from e2e.step.arrays import Floats

# (intercept, slope) of lines; a transfer takes at least the value of each.
Line = tuple[tuple[float, float], ...]
# Variable -> seconds that it adds.
Terms = Mapping[int, float]


@dataclass(frozen=True)
class Lines:
    """Lines of each transfer, by its bytes."""

    splits: float
    exchange: Line
    row_output: Line
    row_gradient: Line


@dataclass
class Inequalities:
    """Rows ``time >= sum of earlier times + sum of terms + constant``; ``shares``: number of variables in 0 to 1."""

    shares: int
    times: int = 0
    rows: list[tuple[int, tuple[int, ...], Terms, float]] = field(default_factory=list)

    def time(self) -> int:
        """Add and return a new time variable, at least 0."""
        self.times += 1
        return self.times - 1

    def at_least(self, time: int, times: Iterable[int] = (), terms: Terms | None = None, constant: float = 0.0) -> None:
        """Add a row."""
        self.rows.append((time, tuple(times), terms or {}, constant))

    def latest(self, *ways: tuple[Sequence[int], float]) -> int:
        """Return a time that is at least each of ``ways``: earlier times plus a constant."""
        found = self.time()
        for times, constant in ways:
            self.at_least(found, times, constant=constant)
        return found


@dataclass(frozen=True)
class Variables:
    """Variables of the program: the share of each option, by its number, then whether a kind of placement is used."""

    # Placed option -> its shards on the mean rank.
    shards: Mapping[int, float]
    any_placed: int
    any_rows: int
    any_copies: int


def _step_rows(problem: Problem, rows: Inequalities, found: Variables, lines: Lines) -> int:
    """Add the step to ``rows``; return the time variable of its end."""
    dense = problem.task.dense
    forward, backward = problem.model.launch
    placed = {
        name: _placed(problem, rows, found, load, line)
        for name, load, line in (
            ("forward", FORWARD, ((forward, 1.0),)),
            ("backward", BACKWARD, ((backward, 1.0),)),
            ("lengths", LENGTHS, lines.exchange),
            ("indices", INDICES, lines.exchange),
            ("output", OUTPUT, lines.exchange),
        )
    }
    _longest_alone(problem, rows, found, placed["forward"], placed["backward"])

    def total(column: int, line: Line, switch: int) -> int:
        return _total(problem, rows, column, line, switch)

    row, copy = found.any_rows, found.any_copies
    row_input = (
        total(step.ROW_LENGTHS, lines.exchange, row),
        total(step.ROW_INDICES, lines.exchange, row),
    )
    row_forward = total(step.ROW_FORWARD, ((forward, 1.0),), row)
    row_backward = total(step.ROW_BACKWARD, ((backward, 1.0),), row)
    row_output = total(step.ROW_OUTPUT, lines.row_output, row)
    row_gradient = total(step.ROW_OUTPUT, lines.row_gradient, row)
    copy_forward = total(step.COPY_FORWARD, ((forward, 1.0),), copy)
    copy_backward = total(step.COPY_BACKWARD, ((backward, 1.0),), copy)
    copy_reduce = total(step.COPY_REDUCE, ((0.0, 1.0),), copy)

    inputs = (placed["lengths"], placed["indices"], *row_input)
    looked_up = rows.latest(((placed["forward"],), dense.bottom_forward))
    rows_done = rows.latest(((looked_up, row_forward), 0.0))
    exchanged = rows.latest(((looked_up, placed["output"], row_output), 0.0), ((rows_done, row_output), 0.0))
    both = dense.top_forward + dense.top_backward
    top = rows.latest(((exchanged,), both), ((rows_done, copy_forward), both))
    begin = rows.latest(((top,), dense.interaction_backward))
    bucket = dense.top_all_reduce
    after_top = [((top,), bucket)] if bucket > 0 else []
    queue = rows.latest(((exchanged, *inputs), lines.splits + bucket), *after_top)
    gathered = rows.latest(((begin, row_gradient), 0.0), ((queue, row_gradient), 0.0))
    arrived = rows.latest(((gathered, placed["output"]), 0.0))
    copies_done = rows.latest(((begin, copy_backward), 0.0))
    rows_back = rows.latest(((copies_done, row_backward), 0.0), ((gathered, row_backward), 0.0))
    placed_back = rows.latest(((rows_back, placed["backward"]), 0.0), ((arrived, placed["backward"]), 0.0))
    bottom = rows.latest(((placed_back,), dense.bottom_backward))
    reduced = rows.latest(((arrived, copy_reduce), 0.0), ((copies_done, copy_reduce), 0.0))
    bucket = dense.bottom_all_reduce
    return rows.latest(((reduced,), dense.optimizer + bucket), ((bottom,), dense.optimizer + bucket))


def _placed(problem: Problem, rows: Inequalities, found: Variables, load: int, line: Line) -> int:
    """Add a time that is at least the mean rank's time for its placed shards."""
    time = rows.time()
    shard = problem.costs.shard[:, load]
    for start, slope in line:
        terms = {option: slope * count * float(shard[option]) for option, count in found.shards.items()}
        rows.at_least(time, terms=terms | {found.any_placed: max(start, 0.0)}, constant=min(start, 0.0))
    return time


def _longest_alone(problem: Problem, rows: Inequalities, found: Variables, forward: int, backward: int) -> None:
    """Add rows by which no rank is faster than each of its shards alone."""
    costs = problem.costs
    for column, time, load in ((0, forward, FORWARD), (1, backward, BACKWARD)):
        tables: dict[int, dict[int, float]] = {}
        for option in found.shards:
            least = max(costs.alone[option, column], costs.shard[option, load] + problem.model.launch[column])
            tables.setdefault(costs.options[option].table, {})[option] = float(least)
        for terms in tables.values():
            rows.at_least(time, terms=terms)


def _total(problem: Problem, rows: Inequalities, column: int, line: Line, switch: int) -> int:
    used = {option: float(value) for option, value in enumerate(problem.totals[:, column]) if value > 0}
    time = rows.time()
    for start, slope in line:
        terms = {option: slope * value for option, value in used.items()} | {switch: max(start, 0.0)}
        rows.at_least(time, terms=terms, constant=min(start, 0.0))
    return time


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
    shards = {at: options[at].shards / problem.ranks for at in range(count) if options[at].placed}
    found = Variables(shards, *switches)
    end = _step_rows(problem, rows, found, _floor_lines(problem, seconds))
    solution = _solve(problem, rows, end, switches)
    if solution is None:
        return None
    bound = float(solution[count + 3 + end])
    copies = _all_copies(problem)
    chosen = tuple(max(numbers, key=lambda number: float(solution[number])) for numbers in problem.of_table)
    return Relaxation(bound if copies is None else min(bound, copies), chosen)


def _floor_lines(problem: Problem, seconds: float) -> Lines:
    """Lines that bound transfer times up to ``seconds`` from below; no plan of that time has longer transfers."""
    times = problem.times
    gather = times.floor_lines("all_gather", seconds)
    return Lines(
        splits=float(times.of("all_to_all", 0.0)),
        exchange=times.floor_lines("all_to_all", seconds),
        row_output=times.floor_lines("reduce_scatter", seconds),
        # A rank contributes its share of the whole output to the all_gather.
        row_gradient=tuple((start, slope / problem.ranks) for start, slope in gather),
    )


def _solve(problem: Problem, rows: Inequalities, end: int, switches: tuple[int, int, int]) -> Floats | None:
    """Return the values of the shares (0 to 1), then of the times; ``None`` if infeasible."""
    matrix: list[tuple[int, int, float]] = []
    limits: list[float] = []

    def add(terms: dict[int, float], limit: float) -> None:
        matrix.extend((len(limits), column, value) for column, value in terms.items())
        limits.append(limit)

    for time, times, terms, constant in rows.rows:
        line = {rows.shares + time: -1.0, **{rows.shares + other: 1.0 for other in times}}
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
    shape = (len(limits), rows.shares + rows.times)
    once = [(options[at].table, at, 1.0) for at in range(len(options))]
    cost = np.zeros(shape[1])
    cost[rows.shares + end] = 1.0
    bounds = [(0, 1)] * rows.shares + [(0, None)] * rows.times
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
