"""Moves and swaps of shards away from the ranks that limit a step, evaluated together for one rank."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from e2e.sharding.problem.option_costs import LOADS, MEMORY
from e2e.sharding.problem.state import State
from e2e.step.arrays import Floats, Integers

# Weight of the evenness of ranks relative to the step time: if several ranks are equally slow, no single move shortens
# the step, but it may enable the next one to.
EVENNESS = 1e-3
SMALLEST_GAIN = 1e-7
# Ranks considered for a swap; more make each search step slower with hardly better results.
PARTNERS = 12


@dataclass(frozen=True, eq=False)
class Shards:
    """All placed shards: table, rank and loads (shards, 6) of each."""

    table: Integers
    rank: Integers
    load: Floats


def shards_of(state: State) -> Shards:
    """Return the shards of every placed table."""
    options, shard = state.problem.costs.options, state.problem.costs.shard
    found = [
        (table, rank, option)
        for table, (option, ranks) in enumerate(state.choices)
        if option >= 0 and options[option].placed
        for rank in ranks
    ]
    columns = np.array(found, dtype=np.int64).reshape(-1, 3)
    return Shards(columns[:, 0].copy(), columns[:, 1].copy(), shard[columns[:, 2]])


def score(state: State, weights: Floats) -> float:
    """Seconds of a step plus a small penalty for uneven ranks."""
    rank_seconds = state.loads @ weights
    evenness = _evenness((rank_seconds**2).sum(), float(rank_seconds.sum()))
    return state.seconds() + EVENNESS * float(evenness)


def _evenness(squares: Floats, total: float) -> Floats:
    return np.asarray(squares / total if total > 0 else 0.0 * squares)


def critical_ranks(state: State, weights: Floats) -> list[int]:
    """Return the ranks with the most of any load that costs time, the most expensive load first."""
    loads = [load for load in np.argsort(-weights * state.loads.max(axis=0)) if weights[load] > 0]
    over = [int(state.memory().argmax())] if state.memory().max() > state.problem.capacity else []
    return list(dict.fromkeys([*over, *(int(state.loads[:, load].argmax()) for load in loads)]))


def improve(state: State, weights: Floats, deadline: float = math.inf) -> bool:
    """Move and swap shards until no change of a critical rank helps, or until ``deadline`` of :func:`time.monotonic`.

    Returns ``True`` if any change was made.
    """
    improved = False
    shards = shards_of(state)
    while time.monotonic() < deadline:
        if not any(_best_exchange(state, shards, rank, weights) for rank in critical_ranks(state, weights)):
            return improved
        improved = True
    return improved


def _best_exchange(state: State, shards: Shards, rank: int, weights: Floats) -> bool:
    """Apply the best move or swap of a shard of ``rank``, also to ``shards``; return ``False`` if there is none."""
    here = np.flatnonzero(shards.rank == rank)
    if not here.size or state.problem.ranks == 1:
        return False
    rivals = _Rivals(state, rank, weights)
    ranks = np.arange(state.problem.ranks)
    nothing = np.zeros((len(ranks), LOADS))
    moved = rivals.scores(shards.load[here], nothing, ranks)
    moved[:, rank] = np.inf
    there = np.flatnonzero((shards.rank != rank) & np.isin(shards.rank, _partners(state, weights)))
    swapped = rivals.scores(shards.load[here], shards.load[there], shards.rank[there])
    _forbid_meetings(state, shards, here, there, moved, swapped)
    limit = score(state, weights) * (1 - SMALLEST_GAIN)
    best_move, best_swap = float(moved.min()), float(swapped.min()) if there.size else np.inf
    if min(best_move, best_swap) >= limit:
        return False
    if best_move <= best_swap:
        at, target = divmod(int(moved.argmin()), moved.shape[1])
        _send(state, shards, int(here[at]), target)
    else:
        at, other = divmod(int(swapped.argmin()), swapped.shape[1])
        partner = int(there[other])
        _send(state, shards, int(here[at]), int(shards.rank[partner]))
        _send(state, shards, partner, rank)
    return True


def _partners(state: State, weights: Floats) -> Integers:
    """Return the ranks to swap with: those with the least work, and those with the least memory in use."""
    by_seconds, by_memory = np.argsort(state.loads @ weights), np.argsort(state.loads[:, MEMORY])
    return np.union1d(by_seconds[:PARTNERS], by_memory[: PARTNERS // 2])


def _send(state: State, shards: Shards, shard: int, target: int) -> None:
    """Move a shard, in the plan and in the list of shards."""
    table, source = int(shards.table[shard]), int(shards.rank[shard])
    option, ranks = state.choices[table]
    state.put(table, (option, tuple(target if rank == source else rank for rank in ranks)))
    shards.rank[shard] = target


def _forbid_meetings(
    state: State, shards: Shards, here: Integers, there: Integers, moved: Floats, swapped: Floats
) -> None:
    """Exclude changes that would put two shards of a table on one rank."""
    holds = np.zeros((len(state.choices), state.problem.ranks), dtype=bool)
    holds[shards.table, shards.rank] = True
    mine = shards.table[here]
    moved[holds[mine]] = np.inf
    if there.size:
        target = shards.rank[there]
        source = int(shards.rank[here[0]])
        swapped[holds[mine][:, target]] = np.inf
        swapped[:, holds[shards.table[there], source]] = np.inf


class _Rivals:
    """Scores of plans in which ``rank`` gives away shards; loads of uninvolved ranks count by their maximum."""

    def __init__(self, state: State, rank: int, weights: Floats) -> None:
        self.state, self.rank, self.weights = state, rank, weights
        loads = state.loads.copy()
        loads[rank] = -np.inf
        first = loads.argmax(axis=0)
        columns = np.arange(LOADS)
        largest = loads[first, columns]
        loads[first, columns] = -np.inf
        second = np.maximum(loads.max(axis=0), 0.0)
        # Largest load of any rank other than this one and b, shape (ranks, 6).
        self.others = np.where(np.arange(len(loads))[:, None] == first, second, np.maximum(largest, 0.0))
        seconds = state.loads @ weights
        self.seconds, self.total, self.squares = seconds, float(seconds.sum()), float((seconds**2).sum())

    def scores(self, given: Floats, taken: Floats, target: Integers) -> Floats:
        """Scores of exchanges of shards between ``rank`` and the ranks ``target``, shape (given, taken)."""
        state, problem = self.state, self.state.problem
        change = given[:, None, :] - taken[None, :, :]
        mine = state.loads[self.rank] - change
        theirs = state.loads[target][None] + change
        peak = np.maximum(np.maximum(mine, theirs), self.others[target][None])
        seconds = problem.model.seconds(peak, state.totals)
        shift = change @ self.weights
        before = self.seconds[self.rank] ** 2 + self.seconds[target] ** 2
        after = (self.seconds[self.rank] - shift) ** 2 + (self.seconds[target][None] + shift) ** 2
        scores = seconds + EVENNESS * _evenness(self.squares - before[None] + after, self.total)
        room = problem.capacity - state.common_memory
        full = np.maximum(mine[..., MEMORY], theirs[..., MEMORY]) > max(room, float(state.loads[:, MEMORY].max()) - 1.0)
        if float(state.memory().max()) <= problem.capacity:
            full = np.maximum(mine[..., MEMORY], theirs[..., MEMORY]) > room
        return np.where(full, np.inf, scores)
