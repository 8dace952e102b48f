"""Search for a plan that is fast on average over scenarios: large neighbourhoods of a few tables at a time.

Tables of two ranks (the busiest and another), or of any, are removed and reinserted one after another at their best
places (ruin and recreate, Schrimpf et al., J. Comput. Phys. 2000); changes without improvement are undone. Moves of
single tables begin and end the search.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np

from e2e.sharding.problem.option_costs import BACKWARD, FORWARD
from e2e.sharding.problem.state import NOWHERE, Choice, State, all_ranks
from e2e.sharding.search.moves import SMALLEST_GAIN
from e2e.sharding.search.scenario_state import ScenarioState
from e2e.sharding.search.scenarios import Scenarios
from e2e.step.arrays import Floats

MOST_TABLES = 6
# Probability of taking the second best place, and noise of the reinsertion order: without randomness the same tables
# would return to the same places.
_BLINK, _DISORDER = 0.1, 0.5
# Number of least loaded ranks, one of which gets a shard of columns.
_CALM_RANKS = 3
# Penalty weight of a step beyond the limit.
_PENALTY = 10.0
# Target margin over the rivals; weight of the mean step relative to the shortfall from that margin.
MARGIN, _MEAN = 0.05, 0.1


@dataclass(frozen=True, eq=False)
class Aim:
    """Objective to minimise: expected regret against the rivals, plus a little of the mean step.

    Both are taken over all scenarios but the first.

    A nominal time (first scenario) above ``limit`` seconds is penalised strongly.
    """

    # Seconds of the best simple plan in each scenario, shape (draws,).
    rivals: Floats
    limit: float = sys.float_info.max

    def of(self, seconds: Floats) -> Floats:
        """Return the objective of step times, shape (..., draws) -> (...)."""
        share = seconds[..., 1:] / self.rivals[1:]
        missing = np.maximum(share - (1.0 - MARGIN), 0.0).mean(axis=-1) + _MEAN * share.mean(axis=-1)
        return np.asarray(missing + _PENALTY * np.maximum(seconds[..., 0] / self.limit - 1.0, 0.0))


def search(state: State, scenarios: Scenarios, aim: Aim, rounds: int, deadline: float, seed: int) -> State:
    """Return the best plan found from ``state`` in ``rounds`` or until ``deadline`` of :func:`time.monotonic`."""
    generator = np.random.default_rng(seed)
    work = _Search(ScenarioState(state, scenarios), aim, deadline)
    work.descend()
    for _ in range(rounds):
        if time.monotonic() > deadline:
            break
        work.rebuild(generator)
    work.descend()
    # Recomputed in the order of the tables, without the rounding errors of thousands of additions and subtractions.
    return ScenarioState(work.plan.state, scenarios).state


class _Search:
    def __init__(self, plan: ScenarioState, aim: Aim, deadline: float) -> None:
        self.plan, self.aim, self.deadline = plan, aim, deadline
        self.problem, self.tables = plan.problem, range(len(plan.state.choices))
        first = [numbers[0] for numbers in self.problem.of_table]
        self.size = self.problem.costs.shard[first][:, [FORWARD, BACKWARD]].sum(axis=1)
        self.best = float(aim.of(plan.seconds()))

    def descend(self) -> None:
        """Move single tables until none helps."""
        improved = True
        while improved and time.monotonic() < self.deadline:
            improved = False
            for table in self.tables:
                if time.monotonic() > self.deadline:
                    break
                improved |= self._move(table)

    def _move(self, table: int) -> bool:
        before = self.plan.state.choices[table]
        self.plan.put(table, NOWHERE)
        choices = self._places(table, before)
        found = self.aim.of(self.plan.with_table(choices))
        at = int(found.argmin())
        better = bool(found[at] < self.best * (1 - SMALLEST_GAIN))
        self.plan.put(table, choices[at] if better else before)
        if better:
            self.best = float(found[at])
        return better

    def rebuild(self, generator: np.random.Generator) -> None:
        """Remove and reinsert some tables; undo that if it is no improvement."""
        chosen = self._some_tables(generator)
        before = [(table, self.plan.state.choices[table]) for table in chosen]
        self._put([(table, NOWHERE) for table in chosen])
        order = np.argsort(-np.log(self.size[chosen] + 1e-30) + generator.normal(0, _DISORDER, len(chosen)))
        now = np.inf
        for table in [chosen[at] for at in order.tolist()]:
            choices = self._places(table)
            found = self.aim.of(self.plan.with_table(choices))
            ranked = np.argsort(found, kind="stable")
            at = int(ranked[1 if len(ranked) > 1 and generator.random() < _BLINK else 0])
            now = float(found[at])
            if not np.isfinite(now):
                break
            self.plan.put(table, choices[at])
        if now < self.best * (1 - SMALLEST_GAIN):
            self.best = now
        else:
            self._put([(table, NOWHERE) for table in chosen])
            self._put(before)

    def _put(self, choices: list[tuple[int, Choice]]) -> None:
        for table, choice in choices:
            self.plan.put(table, choice)

    def _some_tables(self, generator: np.random.Generator) -> list[int]:
        """Choose random tables: half of the time any, else those of the busiest rank and another one."""
        count = int(generator.integers(1, MOST_TABLES + 1))
        pool = list(self.tables)
        if generator.random() < 0.5:
            busiest = int(self.plan.rank_seconds().argmax())
            ranks = {busiest, int(generator.integers(self.problem.ranks))}
            near = [table for table in self.tables if self._placed(table) and ranks & set(self._ranks(table))]
            pool = near if len(near) >= count else pool
        return [int(table) for table in generator.choice(pool, min(count, len(pool)), replace=False)]

    def _placed(self, table: int) -> bool:
        return self.problem.costs.options[self.plan.state.choices[table][0]].placed

    def _ranks(self, table: int) -> tuple[int, ...]:
        return self.plan.state.choices[table][1]

    def _places(self, table: int, now: Choice | None = None) -> list[Choice]:
        """Choices of an unplaced table: whole on any rank, or blocks of columns on the least loaded ranks.

        With ``now`` also those in which one of its blocks is elsewhere.
        """
        options, ranks = self.problem.costs.options, self.problem.ranks
        calm = np.argsort(self.plan.rank_seconds(), kind="stable").tolist()
        found: list[Choice] = []
        for number in self.problem.of_table[table]:
            option = options[number]
            if not option.placed:
                found.append((number, all_ranks(self.problem)))
            elif option.shards == 1:
                found += [(number, (rank,)) for rank in range(ranks)]
            else:
                chosen = [calm[: option.shards]]
                if option.shards < ranks:
                    chosen.append([*calm[: option.shards - 1], calm[option.shards]])
                if now is not None and now[0] == number:
                    chosen += [
                        [new if rank == gone else rank for rank in now[1]]
                        for gone in now[1]
                        for new in calm[:_CALM_RANKS]
                        if new not in now[1]
                    ]
                found += [(number, tuple(sorted(each))) for each in chosen]
        return found
