"""Scenarios of model errors, and the search for a plan that is fast on average over them.

Costs are drawn from the intervals of the models. A plan that is perfectly even by the models' times is uneven by the
true ones, and the step waits for the slowest rank. So plans are judged by the mean over draws: tables cut over all
ranks, or copied, cannot make ranks uneven, and errors of many small tables on a rank average out more than those of a
few large ones.

The search takes large neighbourhoods of a few tables at a time: tables of two ranks (the busiest and another), or of
any, are removed and reinserted one after another at their best places (ruin and recreate, Schrimpf et al., J. Comput.
Phys. 2000); changes without improvement are undone. Moves of single tables begin and end the search.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from e2e.sharding.local_search import SMALLEST_GAIN
from e2e.sharding.step_model import COPIES, NOWHERE, PLACED, ROWS, SUMS, Choice, Problem, State, StepTimes, all_ranks
from e2e.sharding.task import BACKWARD, FORWARD, KINDS, LOADS, MEMORY, OptionCosts
from e2e.step.arrays import Floats

# Half-width of the 80 % interval of a normal distribution, in standard deviations.
_DEVIATIONS = 1.2816
# An interval covers the error common to all tables of a GPU (its level), which no placement can change, and the error
# of one table. In measured families the latter is this share: GEMM errs by 8.2 % on shapes left out, by 18.1 % on a GPU
# left out (`python -m lab.validate kernels`).
OWN_SHARE = 0.45
# Share of a table's error that depends on its cut; the rest is common to all cuts.
_CUT_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class Scenarios:
    """Drawn scenarios, ``draws`` of them; the first is the nominal one."""

    draws: int
    # Seconds that a shard adds to each stage of its kernels, and the least time of the stage with it, shapes (options,
    # stages, draws).
    added: Floats
    longest: Floats
    # Number of stages of the forward pass.
    forward: int
    # Kind -> factors of its times, shape (draws,).
    transfers: Mapping[str, Floats]


def has_intervals(problem: Problem) -> bool:
    """True if the models give any interval at all."""
    return bool(problem.costs.half_width.max(initial=0.0) > 0 or max(problem.times.half_width.values()) > 0)


def draw_scenarios(problem: Problem, draws: int, seed: int) -> Scenarios:
    """Draw ``draws`` scenarios (an odd number: the nominal one, and antithetic pairs) of lognormal factors.

    There are factors for each table and direction, each way to cut it, and each kind of collective.
    """
    generator = np.random.default_rng([seed, draws])
    costs, tables = problem.costs, [option.table for option in problem.costs.options]
    pairs = draws // 2

    def normal(*shape: int) -> Floats:
        half = generator.standard_normal((*shape, pairs))
        return np.concatenate([np.zeros((*shape, 1)), half, -half], axis=-1)

    deviation = costs.half_width / _DEVIATIONS * OWN_SHARE / np.hypot(1.0, _CUT_SHARE)
    errors = normal(len(problem.of_table), 2)[tables] + _CUT_SHARE * normal(len(tables), 2)
    factors = np.exp(deviation[:, :, None] * errors)
    added, longest, forward = _stages(costs)
    of_stage = factors[:, [0] * forward + [1] * (added.shape[1] - forward)]
    widths = problem.times.half_width
    transfers: dict[str, Floats] = {kind: np.exp(widths[kind] / _DEVIATIONS * normal()) for kind in KINDS}
    return Scenarios(1 + 2 * pairs, added[:, :, None] * of_stage, longest[:, :, None] * of_stage, forward, transfers)


def _stages(costs: OptionCosts) -> tuple[Floats, Floats, int]:
    """Added and longest seconds, shape (options, stages) each, and the number of stages of the forward pass.

    The dense updates of copies are a stage of their own.
    """
    lookups, pieces = costs.lookups, costs.pieces
    passes = [
        (added[used][:, pieces], longest[used][:, pieces])
        for added, longest in (lookups.forward_stages, lookups.backward_stages)
        for used in [(added.max(axis=1, initial=0.0) > 0) | (longest.max(axis=1, initial=0.0) > 0)]
    ]
    added = np.concatenate([passes[0][0], passes[1][0], costs.update[None]]).T
    longest = np.concatenate([passes[0][1], passes[1][1], np.zeros((1, len(pieces)))]).T
    return added, longest, len(passes[0][0])


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

    Both are taken over all scenarios but the first, which is the nominal one, if there are others.

    A nominal time (first scenario) above ``limit`` seconds is penalised strongly.
    """

    # Seconds of the best simple plan in each scenario, shape (draws,).
    rivals: Floats
    limit: float = sys.float_info.max

    def of(self, seconds: Floats) -> Floats:
        """Return the objective of step times, shape (..., draws) -> (...)."""
        share = seconds / self.rivals
        share = share[..., 1:] if share.shape[-1] > 1 else share
        missing = np.maximum(share - (1.0 - MARGIN), 0.0).mean(axis=-1) + _MEAN * share.mean(axis=-1)
        return np.asarray(missing + _PENALTY * np.maximum(seconds[..., 0] / self.limit - 1.0, 0.0))


def search_plans(state: State, scenarios: Scenarios, aim: Aim, rounds: int, deadline: float, seed: int) -> State:
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
