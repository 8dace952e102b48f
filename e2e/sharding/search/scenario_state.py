"""Plan in many scenarios at once: step time in each, also for all possible places of one table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from e2e.sharding.problem.option_costs import LOADS, MEMORY
from e2e.sharding.problem.state import Choice, State
from e2e.sharding.problem.step_model import COPIES, PLACED, ROWS, SUMS, StepTimes
from e2e.sharding.search.scenarios import Scenarios
from e2e.step.arrays import Floats

# Kind of each transfer among the pieces of a step.
_TRANSFERS = {
    "splits": "all_to_all",
    "placed_input": "all_to_all",
    "row_input": "all_to_all",
    "placed_output": "all_to_all",
    "row_output": "reduce_scatter",
    "row_gradient": "all_gather",
    "copy_reduce": "all_reduce",
}


class ScenarioState:
    """``state`` (a copy of the given one) with its kernel times by scenario.

    Kernels are numbered: those of placed tables by rank, then that of blocks of rows and that of copies, which are the
    same on all ranks.

    ``added`` (ranks + 2, stages, draws): sums over the tables of a kernel; ``longest``, of the same shape: maxima.
    """

    def __init__(self, state: State, scenarios: Scenarios) -> None:
        self.problem, self.scenarios = state.problem, scenarios
        self.state = State(state.problem)
        self.added: Floats = np.zeros((state.problem.ranks + 2, *scenarios.added.shape[1:]))
        self.longest: Floats = np.zeros_like(self.added)
        self._members: list[dict[int, int]] = [{} for _ in self.added]
        for table, choice in enumerate(state.choices):
            self.put(table, choice)

    def put(self, table: int, choice: Choice) -> None:
        """Place a table, as :meth:`State.put`."""
        before = self.state.choices[table]
        self.state.put(table, choice)
        for kernel in self._kernels(before):
            members = self._members[kernel]
            del members[table]
            self.added[kernel] -= self.scenarios.added[before[0]]
            rest = self.scenarios.longest[list(members.values())]
            self.longest[kernel] = rest.max(axis=0, initial=0.0)
        for kernel in self._kernels(choice):
            self._members[kernel][table] = choice[0]
            self.added[kernel] += self.scenarios.added[choice[0]]
            np.maximum(self.longest[kernel], self.scenarios.longest[choice[0]], out=self.longest[kernel])

    def _kernels(self, choice: Choice) -> tuple[int, ...]:
        option, ranks = choice
        if option < 0:
            return ()
        kind = self.problem.costs.options[option].kind
        return {"row-wise": (self.problem.ranks,), "data-parallel": (self.problem.ranks + 1,)}.get(kind, ranks)

    def rank_seconds(self) -> Floats:
        """Mean over scenarios of the kernels of placed tables, forward plus backward, shape (ranks,)."""
        ranks = self.problem.ranks
        return np.asarray(np.maximum(self.added[:ranks], self.longest[:ranks]).sum(axis=1).mean(axis=-1))

    def seconds(self) -> Floats:
        """Step times, shape (draws,)."""
        kernels = self._passes(self.added, self.longest)
        placed = kernels[:-2].max(axis=0)
        state = self.state
        return self._step(state.loads.max(axis=0)[None], state.totals[None], placed[None], kernels[None, -2:])[0]

    def with_table(self, choices: Sequence[Choice]) -> Floats:
        """Step times with an unplaced table at each of ``choices``, shape (choices, draws).

        Infinite if memory is exceeded.
        """
        state, costs = self.state, self.problem.costs
        numbers = np.array([option for option, _ in choices])
        kernels = [self._kernels(choice) for choice in choices]
        which = np.array([kernel for found in kernels for kernel in found])
        option = np.repeat(numbers, [len(found) for found in kernels])
        starts = np.cumsum([0, *(len(found) for found in kernels[:-1])])
        # A shard only makes kernels longer: the longest is one of those that get it, or the previous longest.
        now = self._passes(self.added, self.longest)
        new = self._passes(
            self.added[which] + self.scenarios.added[option],
            np.maximum(self.longest[which], self.scenarios.longest[option]),
        )
        new = np.maximum.reduceat(new, starts, axis=0)
        first, ranks = which[starts], self.problem.ranks
        placed, rest = first < ranks, np.repeat(now[None, -2:], len(choices), axis=0)
        rest[~placed, first[~placed] - ranks] = new[~placed]
        busiest = np.where(placed[:, None, None], np.maximum(new, now[:-2].max(axis=0)), now[:-2].max(axis=0))
        loads = np.concatenate([state.loads, np.full((2, LOADS), -np.inf)])[which] + costs.shard[option]
        peak = np.maximum(state.loads.max(axis=0), np.maximum.reduceat(loads, starts, axis=0))
        totals = state.totals + self.problem.totals[numbers]
        totals[:, SUMS:] = np.maximum(state.totals[SUMS:], self.problem.totals[numbers, SUMS:])
        seconds = self._step(peak, totals, busiest, rest)
        common = state.common_memory + costs.everywhere[numbers] + np.where(placed, 0.0, costs.shard[numbers, MEMORY])
        fits = peak[:, MEMORY] + common <= self.problem.capacity * (1 + 1e-12)
        return np.where(fits[:, None], seconds, np.inf)

    def _passes(self, added: Floats, longest: Floats) -> Floats:
        """Forward and backward seconds of kernels, (..., stages, draws) -> (..., 2, draws)."""
        stages = np.maximum(added, longest)
        forward, launch = self.scenarios.forward, self.problem.costs.launch
        both = [stages[..., :forward, :].sum(axis=-2), stages[..., forward:, :].sum(axis=-2)]
        return np.stack(both, axis=-2) + launch[:, None]

    def _step(self, peak: Floats, totals: Floats, placed: Floats, others: Floats) -> Floats:
        """Step times (plans, draws).

        ``peak`` (plans, 6), ``totals`` (plans, 17); ``placed`` (plans, 2, draws): kernels of placed tables on the
        slowest rank; ``others`` (plans, 2, 2, draws): kernels of blocks of rows and of copies.
        """
        model, factors = self.problem.model, self.scenarios.transfers
        transfers = {
            name: seconds[:, None] * factors[_TRANSFERS[name]]
            for name, seconds in model.transfers(peak, totals).items()
        }
        any_placed, any_rows, any_copies = (totals[:, place, None] > 0 for place in (PLACED, ROWS, COPIES))
        return model.combine(
            StepTimes(
                placed_forward=any_placed * placed[:, 0],
                placed_backward=any_placed * placed[:, 1],
                row_forward=any_rows * others[:, 0, 0],
                row_backward=any_rows * others[:, 0, 1],
                copy_forward=any_copies * others[:, 1, 0],
                copy_backward=any_copies * others[:, 1, 1],
                **transfers,
            )
        )
