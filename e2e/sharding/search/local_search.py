"""Local search over plans: options of tables are changed, shards moved and swapped, small kicks leave local optima."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from e2e.sharding.problem.option_costs import MEMORY
from e2e.sharding.problem.placement import KINDS
from e2e.sharding.problem.state import NOWHERE, Choice, Problem, State, all_ranks
from e2e.sharding.search.moves import SMALLEST_GAIN, improve, score
from e2e.step.arrays import Floats

KICKED_TABLES = 4


def construct(problem: Problem, options: Sequence[int] | None = None) -> State | None:
    """Tables one after another, the one with the largest share of all costs or of all memory first, each on the ranks
    with the least so far.

    A table that would take more than a rank's even share of everything, or more memory than a rank has, is cut: into
    the fewest blocks of columns that do not, else into blocks of rows; or all as ``options`` (one per table) say.
    ``None`` if one does not fit.
    """
    weights = rough_weights(problem)
    shard = problem.costs.shard
    first = [numbers[0] for numbers in problem.of_table]
    seconds, memory = shard[first] @ weights, shard[first, MEMORY]
    share = float(seconds.sum()) / problem.ranks
    size = np.maximum(seconds / max(share, 1e-30), memory / problem.capacity)
    state = State(problem)
    for table in np.argsort(-size, kind="stable").tolist():
        choices = _choices(state, table, weights)
        if not choices:
            return None
        wanted = [choice for choice in choices if options is not None and choice[0] == options[table]]
        state.put(table, min(wanted or choices, key=lambda choice: _excess(problem, choice, weights, share)))
    return state


def _excess(problem: Problem, choice: Choice, weights: Floats, share: float) -> tuple[float, int, int]:
    """How much a shard is above an even ``share``; of those that are not: whole, few columns, rows, copies."""
    option = problem.costs.options[choice[0]]
    seconds = float(problem.costs.shard[choice[0]] @ weights)
    return max(seconds - share, 0.0) if option.placed else 0.0, KINDS.index(option.kind), option.shards


def rough_weights(problem: Problem) -> Floats:
    """Seconds per unit of load, around even ranks with every table whole or in its first form."""
    first = [numbers[0] for numbers in problem.of_table]
    return problem.model.weights(problem.costs.shard[first].sum(axis=0) / problem.ranks)


def best_choice(state: State, table: int, weights: Floats) -> Choice | None:
    """The option of a table that has none, on the least loaded ranks with memory, with the best score."""
    best: tuple[float, Choice] | None = None
    for choice in _choices(state, table, weights):
        state.put(table, choice)
        found = score(state, weights)
        state.put(table, NOWHERE)
        if best is None or found < best[0]:
            best = (found, choice)
    return None if best is None else best[1]


def _choices(state: State, table: int, weights: Floats) -> list[Choice]:
    """One per option that has memory."""
    problem = state.problem
    costs = problem.costs
    memory = state.memory()
    order = np.argsort(state.loads @ weights, kind="stable")
    found: list[Choice] = []
    for number in problem.of_table[table]:
        option = costs.options[number]
        room = problem.capacity - costs.everywhere[number] - memory
        if float(room.min()) < (0.0 if option.placed else costs.shard[number, MEMORY]):
            continue
        if not option.placed:
            found.append((number, all_ranks(problem)))
            continue
        free = [int(rank) for rank in order if room[rank] >= costs.shard[number, MEMORY]]
        if len(free) >= option.shards:
            found.append((number, tuple(free[: option.shards])))
    return found


def change_options(state: State, weights: Floats, tables: Sequence[int], deadline: float) -> bool:
    """Gives each of ``tables`` the option that makes the plan best, ranks chosen anew; whether any changed."""
    improved = False
    now = score(state, weights)
    for table in tables:
        if time.monotonic() > deadline:
            break
        before = state.choices[table]
        state.put(table, NOWHERE)
        choice = best_choice(state, table, weights)
        state.put(table, choice if choice is not None else before)
        found = score(state, weights)
        if found < now * (1 - SMALLEST_GAIN):
            now, improved = found, True
        else:
            state.put(table, before)
    return improved


def descend(state: State, deadline: float) -> State:
    """A copy of ``state`` from which neither moves and swaps nor other options of one table go on."""
    state = state.copy()
    while time.monotonic() < deadline:
        weights = state.problem.model.weights(state.loads.max(axis=0))
        improve(state, weights, deadline)
        tables = _by_weight(state, weights)
        if not change_options(state, weights, tables, deadline):
            break
    return state


def _by_weight(state: State, weights: Floats) -> list[int]:
    """Tables, the most costly first."""
    shard = state.problem.costs.shard
    size = [float(shard[option] @ weights) for option, _ in state.choices]
    return sorted(range(len(size)), key=lambda table: -size[table])


def iterate(state: State, rounds: int, deadline: float, seed: int) -> State:
    """Kicks the best plan and descends again, ``rounds`` times or until ``deadline`` (of :func:`time.monotonic`)."""
    generator = np.random.default_rng(seed)
    best = state
    for _ in range(rounds):
        if time.monotonic() > deadline:
            break
        trial = kick(best, generator)
        if trial is None:
            continue
        weights = trial.problem.model.weights(trial.loads.max(axis=0))
        improve(trial, weights, deadline)
        trial = descend(trial, deadline) if len(state.choices) <= 100 else trial
        if trial.fits() and trial.seconds() < best.seconds() * (1 - SMALLEST_GAIN):
            best = trial
    return best


def kick(state: State, generator: np.random.Generator) -> State | None:
    """Some tables get other places at random; ``None`` if memory does not allow it."""
    trial = state.copy()
    problem = trial.problem
    count = min(KICKED_TABLES, len(trial.choices))
    for table in generator.choice(len(trial.choices), count, replace=False):
        number = int(generator.choice(problem.of_table[table]))
        option = problem.costs.options[number]
        ranks = generator.permutation(problem.ranks)[: option.shards] if option.placed else range(problem.ranks)
        trial.put(int(table), (number, tuple(int(rank) for rank in ranks)))
    return trial if trial.fits() else None
