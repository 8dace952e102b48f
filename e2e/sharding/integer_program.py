"""Exact search: OR-tools' CP-SAT over the free tables, min-max of lookups and exchanges under memory limits.

Transfers are their convex lower hulls, so that the solver's bound holds for every plan of the free tables. With a fixed
seed, interleaved workers and deterministic time the result is reproducible on every machine that does not reach the
wall-clock limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from e2e.sharding.linear_program import Inequalities, Variables, floor_lines, step_rows
from e2e.sharding.step_model import COPIES, NOWHERE, PLACED, ROWS, State, all_ranks
from e2e.sharding.task import MEMORY

# Resolution of time and memory in the program: parts of the start plan's time, and of a rank's memory.
TIME_STEPS = 10_000_000
MEMORY_STEPS = 10_000_000
# Upper limit of the time variables, and value to which longer durations are clipped.
_LONGEST, _NEVER = 4 * TIME_STEPS, 5 * TIME_STEPS
# Poll interval for Ctrl-C: the system may deliver the signal to another thread, which does not wake this one.
_PATIENCE_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """Limits of a search."""

    # Work limit in CP-SAT's own measure, about seconds of one core.
    deterministic: float = 4.0
    # Wall-clock limit.
    seconds: float = 20.0
    seed: int = 0


@dataclass(frozen=True)
class Solution:
    """Result of a search."""

    # The better of the given plan and the one found, by the closed form.
    state: State
    # Lower bound of plans of the free tables; 0: unknown.
    bound: float
    # The solver's status.
    status: str


def solve(
    state: State, tables: Sequence[int] | None = None, ranks: Sequence[int] | None = None, limits: Limits | None = None
) -> Solution:
    """Search from ``state``, which fits. Tables that are not free keep their places.

    ``tables``: the free ones (default all); ``ranks``: ranks for them (default all); free tables must already be on
    these.
    """
    limits = limits or Limits()
    free = list(range(len(state.choices))) if tables is None else list(tables)
    where = list(all_ranks(state.problem)) if ranks is None else list(ranks)
    program = _Program(state, free, where)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.random_seed = limits.seed
    parameters.num_workers = 8
    parameters.interleave_search = True
    parameters.max_deterministic_time = limits.deterministic
    parameters.max_time_in_seconds = limits.seconds
    # Disabled: CP-SAT's handler would afterwards leave the system's default handler in place, and Ctrl-C would then
    # kill Python without a message.
    parameters.catch_sigint_signal = False
    status = _stoppable(solver, program.model)
    name = str(solver.status_name(status)).lower()
    bound = max(solver.best_objective_bound, 0.0) * program.unit
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solution(state, bound, name)
    found = program.read(solver)
    better = found if found.fits() and found.seconds() < state.seconds() else state
    return Solution(better, bound, name)


def _stoppable(solver: cp_model.CpSolver, model: cp_model.CpModel) -> Any:
    """Run the search in another thread, so that Python's Ctrl-C handler can stop it; return the status."""
    with ThreadPoolExecutor(1) as pool:
        search = pool.submit(solver.solve, model)
        try:
            while not search.done():
                wait([search], timeout=_PATIENCE_SECONDS)
            return search.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise


class _Program:
    """Program with binary variables: option of a free table.

    Shard of an option on a rank. Unit of time: see ``unit``.
    """

    def __init__(self, state: State, free: list[int], ranks: list[int]) -> None:
        self.state, self.problem, self.free, self.ranks = state, state.problem, free, ranks
        self.rest = state.copy()
        for table in free:
            self.rest.put(table, NOWHERE)
        self.unit = state.seconds() / TIME_STEPS
        self.model = cp_model.CpModel()
        self.yes: list[cp_model.IntVar] = []
        self.chosen: dict[int, int] = {}
        self.held: dict[int, dict[int, tuple[int, float]]] = {rank: {} for rank in range(self.problem.ranks)}
        self.on_rank: dict[tuple[int, int], int] = {}
        for table in free:
            self._table(table)
        self.switches = [self._switch(kinds, total) for kinds, total in _SWITCHES]
        self._memory()
        self._step()

    def _new(self, name: str, hint: bool) -> int:
        variable = self.model.new_bool_var(name)
        self.model.add_hint(variable, hint)
        self.yes.append(variable)
        return len(self.yes) - 1

    def _table(self, table: int) -> None:
        options = self.problem.costs.options
        now, ranks_now = self.state.choices[table]
        whole = len(self.ranks) == self.problem.ranks
        choices = []
        for number in self.problem.of_table[table]:
            option = options[number]
            if option.placed and option.shards > len(self.ranks):
                continue
            if not (option.placed or whole or number == now):
                continue
            choice = self._new(f"t{table} o{number}", number == now)
            self.chosen[choice] = number
            choices.append(self.yes[choice])
            if option.placed:
                self._shards(choice, number, ranks_now if number == now else ())
        self.model.add_exactly_one(choices)

    def _shards(self, choice: int, number: int, now: tuple[int, ...]) -> None:
        shards = self.problem.costs.options[number].shards
        places = []
        for rank in self.ranks:
            place = self._new(f"o{number} r{rank}", rank in now)
            self.held[rank][place] = (number, 1.0)
            self.on_rank[number, rank] = place
            places.append(self.yes[place])
        self.model.add(sum(places) == shards * self.yes[choice])

    def _switch(self, kind: str, total: int) -> int:
        """Add a variable that is true if any table of this kind is in the plan."""
        options = self.problem.costs.options
        members = [choice for choice, number in self.chosen.items() if _switch_kind(options[number].kind) == kind]
        fixed = bool(self.rest.totals[total] > 0)
        switch = self._new(f"any {kind}", fixed or bool(self.state.totals[total] > 0))
        if fixed:
            self.model.add(self.yes[switch] == 1)
        for member in members:
            self.model.add_implication(self.yes[member], self.yes[switch])
        return switch

    def _memory(self) -> None:
        """Limit the memory of every rank; memory on all ranks counts on each. Rounded up, so that solutions fit."""
        costs, step = self.problem.costs, self.problem.capacity / MEMORY_STEPS
        common = []

        def steps(size: float) -> int:
            """Convert bytes to steps, rounded up, and clipped to keep the solver's integers small."""
            return int(min(np.ceil(size / step), 2 * MEMORY_STEPS))

        for choice, number in self.chosen.items():
            size = costs.everywhere[number] + (0.0 if costs.options[number].placed else costs.shard[number, MEMORY])
            common.append((steps(size), self.yes[choice]))
        rest = self.rest.memory()
        for rank in range(self.problem.ranks):
            terms = [
                (steps(costs.shard[number, MEMORY]), self.yes[place]) for place, (number, _) in self.held[rank].items()
            ]
            total = sum(size * variable for size, variable in [*common, *terms])
            self.model.add(total <= MEMORY_STEPS - int(np.ceil(rest[rank] / step)))

    def _step(self) -> None:
        rows = Inequalities(len(self.yes))
        placed, row, copy = self.switches
        held = [self.held[rank] for rank in range(self.problem.ranks)]
        found = Variables(self.chosen, held, placed, row, copy, self.rest.loads, self.rest.totals)
        end = step_rows(self.problem, rows, found, floor_lines(self.problem, self.state.seconds()))
        times = [self.model.new_int_var(0, _LONGEST, f"time {at}") for at in range(rows.times)]
        for time, earlier, terms, constant in rows.rows:
            whole = [(round(min(seconds / self.unit, _NEVER)), self.yes[at]) for at, seconds in terms.items()]
            right = sum(times[other] for other in earlier) + sum(size * variable for size, variable in whole if size)
            self.model.add(times[time] >= right + round(constant / self.unit))
        self.model.minimize(times[end])

    def read(self, solver: cp_model.CpSolver) -> State:
        """Return the plan of the solver's solution."""
        state = self.rest.copy()
        options = self.problem.costs.options
        for choice, number in self.chosen.items():
            if not solver.value(self.yes[choice]):
                continue
            option = options[number]
            ranks = all_ranks(self.problem)
            if option.placed:
                ranks = tuple(rank for rank in self.ranks if solver.value(self.yes[self.on_rank[number, rank]]))
            state.put(option.table, (number, ranks))
        return state


_SWITCHES = (("placed", PLACED), ("row-wise", ROWS), ("data-parallel", COPIES))


def _switch_kind(kind: str) -> str:
    return kind if kind in ("row-wise", "data-parallel") else "placed"


def neighbourhood(state: State, ranks: Sequence[int]) -> list[int]:
    """Return the tables that are on ``ranks`` only, so that they can be solved separately."""
    inside = set(ranks)
    options = state.problem.costs.options
    return [
        table
        for table, (option, places) in enumerate(state.choices)
        if options[option].placed and inside.issuperset(places)
    ]
