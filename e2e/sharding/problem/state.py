"""State of a plan during the search: option and ranks of every table, and the resulting loads."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from e2e.sharding.problem.option_costs import LOADS, MEMORY, OptionCosts
from e2e.sharding.problem.placement import TablePlacement
from e2e.sharding.problem.step_model import SUMS, TOTALS, StepModel, option_totals
from e2e.sharding.problem.task import ShardingTask
from e2e.sharding.problem.transfers import TransferTimes
from e2e.step.arrays import Floats

Choice = tuple[int, tuple[int, ...]]
NOWHERE: Choice = (-1, ())


@dataclass(frozen=True, eq=False)
class Problem:
    """Task with the costs of its options. ``of_table``: option numbers of each table."""

    task: ShardingTask
    costs: OptionCosts
    times: TransferTimes
    model: StepModel = field(init=False)
    totals: Floats = field(init=False)
    of_table: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        groups: list[list[int]] = [[] for _ in self.task.tables]
        for place, option in enumerate(self.costs.options):
            groups[option.table].append(place)
        model = StepModel(self.times, self.task.dense, self.costs.launch, self.task.ranks)
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "totals", option_totals(self.costs))
        object.__setattr__(self, "of_table", tuple(map(tuple, groups)))

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.task.ranks

    @property
    def capacity(self) -> float:
        """Bytes on a rank for tables and their buffers."""
        return float(self.task.memory_bytes)


class State:
    """Choice of every table: (option, ranks); ``NOWHERE`` while it has none.

    ``loads`` (ranks, 6): of placed tables; ``totals`` (17,): of the plan; ``common_memory``: bytes on every rank.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.choices: list[Choice] = [NOWHERE] * len(problem.task.tables)
        self.loads: Floats = np.zeros((problem.ranks, LOADS))
        self.totals: Floats = np.zeros(TOTALS)
        self.common_memory = 0.0
        self._largest: Floats = np.zeros((len(self.choices), TOTALS - SUMS))

    def copy(self) -> State:
        """Return an independent copy."""
        other = State.__new__(State)
        other.problem, other.choices = self.problem, list(self.choices)
        other.loads, other.totals = self.loads.copy(), self.totals.copy()
        other.common_memory, other._largest = self.common_memory, self._largest.copy()
        return other

    def put(self, table: int, choice: Choice) -> None:
        """Move ``table`` to another place (``NOWHERE``: remove it)."""
        self._add(self.choices[table], -1.0)
        self.choices[table] = choice
        self._add(choice, 1.0)
        self._largest[table] = self.problem.totals[choice[0], SUMS:] if choice[0] >= 0 else 0.0
        self.totals[SUMS:] = self._largest.max(axis=0)

    def _add(self, choice: Choice, sign: float) -> None:
        option, ranks = choice
        if option < 0:
            return
        costs = self.problem.costs
        self.totals[:SUMS] += sign * self.problem.totals[option, :SUMS]
        self.common_memory += sign * costs.everywhere[option]
        if costs.options[option].placed:
            self.loads[list(ranks)] += sign * costs.shard[option]
        else:
            self.common_memory += sign * costs.shard[option, MEMORY]

    def seconds(self) -> float:
        """Return the time of a step."""
        return float(self.problem.model.seconds(self.loads.max(axis=0), self.totals))

    def memory(self) -> Floats:
        """Bytes of tables and buffers on every rank, shape (ranks,)."""
        return self.loads[:, MEMORY] + self.common_memory

    def fits(self) -> bool:
        """True if every table has a place and no rank exceeds its memory."""
        complete = all(option >= 0 for option, _ in self.choices)
        return complete and float(self.memory().max()) <= self.problem.capacity * (1 + 1e-12)

    def placements(self) -> tuple[TablePlacement, ...]:
        """Return the placements as in a plan."""
        options, tables = self.problem.costs.options, self.problem.task.tables
        return tuple(
            TablePlacement(table.name, options[option].kind, tuple(ranks))
            for table, (option, ranks) in zip(tables, self.choices, strict=True)
        )


def state_of(problem: Problem, placements: tuple[TablePlacement, ...]) -> State:
    """Return the state of a plan; raises ``KeyError`` for a placement that is not among the problem's options."""
    options = problem.costs.options
    known = {(options[at].table, options[at].kind, options[at].shards): at for at in range(len(options))}
    state = State(problem)
    for table, placement in enumerate(placements):
        state.put(table, (known[table, placement.kind, len(placement.ranks)], placement.ranks))
    return state


def all_ranks(problem: Problem) -> tuple[int, ...]:
    """Return the ranks of an option that is on all of them."""
    return tuple(range(problem.ranks))
