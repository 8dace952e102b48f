"""Local search over plans: change options of tables, move and swap shards, leave local optima by small kicks."""

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
    """Place tables one after another on the least loaded ranks, largest share of all costs or memory first.

    A table that would exceed a rank's even share of the cost, or a rank's memory, is cut: into the fewest blocks of
    columns that do not, else into blocks of rows; or as ``options`` (one per table) say. ``None`` if one does not fit.
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
    """Sort key of a choice: excess of a shard over an even ``share``, kind, number of shards.

    Kinds are ordered whole, columns, rows, copies.
    """
    option = problem.costs.options[choice[0]]
    seconds = float(problem.costs.shard[choice[0]] @ weights)
    return max(seconds - share, 0.0) if option.placed else 0.0, KINDS.index(option.kind), option.shards


def rough_weights(problem: Problem) -> Floats:
    """Approximate seconds per unit of load, at even ranks with every table in its first option."""
    first = [numbers[0] for numbers in problem.of_table]
    return problem.model.weights(problem.costs.shard[first].sum(axis=0) / problem.ranks)


def best_choice(state: State, table: int, weights: Floats) -> Choice | None:
    """Return the best-scoring option of an unplaced table, on the least loaded ranks with memory, or ``None``."""
    best: tuple[float, Choice] | None = None
    for choice in _choices(state, table, weights):
        state.put(table, choice)
        found = score(state, weights)
        state.put(table, NOWHERE)
        if best is None or found < best[0]:
            best = (found, choice)
    return None if best is None else best[1]


def _choices(state: State, table: int, weights: Floats) -> list[Choice]:
    """Return one choice per option that fits in memory."""
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
    """Give each of ``tables`` its best option, ranks chosen anew; return ``True`` if any changed."""
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
    """Return a copy of ``state`` improved until neither moves, swaps nor other options of one table help."""
    state = state.copy()
    while time.monotonic() < deadline:
        weights = state.problem.model.weights(state.loads.max(axis=0))
        improve(state, weights, deadline)
        tables = _by_weight(state, weights)
        if not change_options(state, weights, tables, deadline):
            break
    return state


def _by_weight(state: State, weights: Floats) -> list[int]:
    """Return the tables, the most costly first."""
    shard = state.problem.costs.shard
    size = [float(shard[option] @ weights) for option, _ in state.choices]
    return sorted(range(len(size)), key=lambda table: -size[table])


def iterate(state: State, rounds: int, deadline: float, seed: int) -> State:
    """Kick the best plan and descend again, ``rounds`` times or until ``deadline`` (of :func:`time.monotonic`)."""
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
    """Place some tables at random; ``None`` if the memory does not suffice."""
    trial = state.copy()
    problem = trial.problem
    count = min(KICKED_TABLES, len(trial.choices))
    for table in generator.choice(len(trial.choices), count, replace=False):
        number = int(generator.choice(problem.of_table[table]))
        option = problem.costs.options[number]
        ranks = generator.permutation(problem.ranks)[: option.shards] if option.placed else range(problem.ranks)
        trial.put(int(table), (number, tuple(int(rank) for rank in ranks)))
    return trial if trial.fits() else None
