"""Last stage of the search: changes and swaps of single tables, evaluated with exact kernel times.

The closed form adds up tables and knows only the slowest one by itself; the model of a table-batched kernel has more
terms (stages that wait for chains of loads), which need all tables of a rank together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from e2e.sharding.problem.state import Choice, State, all_ranks
from e2e.sharding.search.local_search import kick
from e2e.sharding.search.moves import SMALLEST_GAIN
from e2e.sharding.step_graph import options_of_rank


class ExactTimes:
    """Exact step times of plans of one problem, with a cache of kernels."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[int, ...], tuple[float, float]] = {}

    def seconds(self, state: State) -> float:
        """Return the time of a step.

        An upper bound if different ranks have the most forward and the most backward work.
        """
        groups = [options_of_rank(state, rank) for rank in range(state.problem.ranks)]
        placed = np.array([self._kernel(state, group["placed"]) for group in groups]).max(axis=0)
        rows, copies = (self._kernel(state, groups[0][name]) for name in ("rows", "copies"))
        pieces = replace(
            state.problem.model.pieces(state.loads.max(axis=0), state.totals),
            placed_forward=placed[0],
            placed_backward=placed[1],
            row_forward=np.array(rows[0]),
            row_backward=np.array(rows[1]),
            copy_forward=np.array(copies[0]),
            copy_backward=np.array(copies[1]),
        )
        return float(state.problem.model.combine(pieces))

    def _kernel(self, state: State, options: list[int]) -> tuple[float, float]:
        key = tuple(sorted(options))
        if key not in self._kernels:
            self._kernels[key] = state.problem.costs.kernel(key) if key else (0.0, 0.0)
        return self._kernels[key]


def kick_polish(state: State, rounds: int, deadline: float, seed: int) -> State:
    """Kick, polish and keep improvements, ``rounds`` times or until ``deadline``."""
    generator, exact, best = np.random.default_rng(seed), ExactTimes(), state
    for _ in range(rounds):
        if time.monotonic() > deadline:
            break
        trial = kick(best, generator)
        if trial is None:
            continue
        trial = polish(trial, deadline, exact)
        if exact.seconds(trial) < exact.seconds(best) * (1 - SMALLEST_GAIN):
            best = trial
    return best


def polish(state: State, deadline: float, exact: ExactTimes | None = None) -> State:
    """Return a copy of ``state``, improved until no single change helps.

    Stops at ``deadline`` of :func:`time.monotonic`.
    """
    state, exact = state.copy(), exact or ExactTimes()
    best, improved = exact.seconds(state), True
    while improved and time.monotonic() < deadline:
        improved = False
        for changes in _changes(state):
            if time.monotonic() > deadline:
                break
            before = [(table, state.choices[table]) for table, _ in changes]
            for table, choice in changes:
                state.put(table, choice)
            seconds = exact.seconds(state) if state.fits() else np.inf
            if seconds < best * (1 - SMALLEST_GAIN):
                best, improved = seconds, True
                continue
            for table, choice in before:
                state.put(table, choice)
    return state


def _changes(state: State) -> Iterator[list[tuple[int, Choice]]]:
    """Yield every change of one table's place or cut, then every swap of two whole tables of different ranks.

    Each change is relative to the state at the time it is yielded.
    """
    tables = range(len(state.choices))
    for table in tables:
        for choice in _elsewhere(state, table):
            yield [(table, choice)]
    for one in tables:
        for other in range(one):
            (first, here), (second, there) = state.choices[one], state.choices[other]
            if len(here) == len(there) == 1 and here != there:
                yield [(one, (first, there)), (other, (second, here))]


def _elsewhere(state: State, table: int) -> Iterator[Choice]:
    problem = state.problem
    for number in problem.of_table[table]:
        option = problem.costs.options[number]
        if not option.placed:
            yield number, all_ranks(problem)
        elif option.shards == 1:
            for rank in range(problem.ranks):
                yield number, (rank,)
        else:
            seconds = state.loads[:, 0] + state.loads[:, 1]
            yield number, tuple(sorted(int(rank) for rank in np.argsort(seconds, kind="stable")[: option.shards]))
            current, ranks = state.choices[table]
            if current == number:
                for gone in ranks:
                    for new in set(range(problem.ranks)) - set(ranks):
                        yield number, tuple(new if rank == gone else rank for rank in ranks)
