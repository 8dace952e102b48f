"""Greedy plans, and local search over plans: options changed, shards moved and swapped, kicks out of local optima.

The greedy generators of table-wise plans are those of the published comparison. Tables in the order of decreasing cost,
each to the rank with the least cost so far that has memory for it (longest processing time first; AutoShard, KDD 2022,
DreamShard, NeurIPS 2022 and Lin et al., TPDS 2024 use the same):

  size               rows x dim
  lookup             pooling x dim: values read per sample
  size-lookup        pooling x dim x log10(rows) (as in the code of DreamShard: large tables miss caches more)
  normalised-lookup  distinct rows of the step's batch x dim: lookups divided by the mean reuse of a row. (The
                      published generator of this name is not defined in print; this is our reading of it.)
  random             tables in random order, each on a random rank with memory for it
  round-robin        table i on rank i modulo the ranks, or the next one with memory

A table too large for any single rank is row-wise in all of them.

Moves and swaps of shards away from the ranks that limit a step are evaluated together for one rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.gpu.embedding_tables import EmbeddingTable
from e2e.sharding.placement import KINDS
from e2e.sharding.step_model import NOWHERE, Choice, Problem, State, all_ranks
from e2e.sharding.task import LOADS, MEMORY
from e2e.step.arrays import Floats, Integers

GREEDY = ("size", "lookup", "size-lookup", "normalised-lookup", "random", "round-robin")


def greedy_plans(problem: Problem, seed: int = 0) -> dict[str, State | None]:
    """Map each generator to its plan, ``None`` if that does not fit in memory."""
    return {name: greedy_plan(problem, name, seed) for name in GREEDY}


def greedy_plan(problem: Problem, name: str, seed: int = 0) -> State | None:
    """Return the plan of the generator ``name``, ``None`` if it finds no memory for a table."""
    state = State(problem)
    whole = _place_oversized(state)
    if whole is None:
        return None
    if name == "random":
        generator = np.random.default_rng(seed)
        order = [whole[place] for place in generator.permutation(len(whole))]
        return _fill(state, order, lambda place, table: list(generator.permutation(problem.ranks)))
    if name == "round-robin":
        return _fill(
            state, whole, lambda place, table: [(place + step) % problem.ranks for step in range(problem.ranks)]
        )
    return _least_loaded(state, whole, costs_of(problem, name))


def costs_of(problem: Problem, name: str) -> list[float]:
    """Return the generator's cost of every table."""
    return [_COSTS[name](table, problem.task.samples) for table in problem.task.tables]


_COSTS: dict[str, Callable[[EmbeddingTable, int], float]] = {
    "size": lambda table, samples: float(table.rows * table.dim),
    "lookup": lambda table, samples: table.pooling * table.dim,
    "size-lookup": lambda table, samples: table.pooling * table.dim * math.log10(max(table.rows, 2)),
    "normalised-lookup": lambda table, samples: table.popularity().unique_rows(table.indices(samples)) * table.dim,
}


def _place_oversized(state: State) -> list[int] | None:
    """Make tables that no rank can hold row-wise; return the others.

    ``None`` if row-wise placement is not allowed or does not fit.
    """
    problem = state.problem
    options, shard, everywhere = problem.costs.options, problem.costs.shard, problem.costs.everywhere
    others = []
    for table, numbers in enumerate(problem.of_table):
        kinds = {options[number].kind: number for number in numbers}
        whole = kinds.get("table-wise")
        if whole is not None and shard[whole, MEMORY] + everywhere[whole] <= problem.capacity:
            others.append(table)
        elif "row-wise" in kinds:
            state.put(table, (kinds["row-wise"], all_ranks(problem)))
        else:
            return None
    return others if float(state.memory().max()) <= problem.capacity else None


def _least_loaded(state: State, tables: Sequence[int], costs: Sequence[float]) -> State | None:
    sums = np.zeros(state.problem.ranks)

    def by_sum(place: int, table: int) -> list[int]:
        return list(np.argsort(sums, kind="stable"))

    order = sorted(tables, key=lambda table: -costs[table])
    for place, table in enumerate(order):
        rank = _first_with_memory(state, table, by_sum(place, table))
        if rank is None:
            return None
        sums[rank] += costs[table]
    return state


def _fill(state: State, order: Sequence[int], preference: Callable[[int, int], Sequence[int]]) -> State | None:
    for place, table in enumerate(order):
        if _first_with_memory(state, table, preference(place, table)) is None:
            return None
    return state


def _first_with_memory(state: State, table: int, ranks: Sequence[int]) -> int | None:
    """Place the whole ``table`` on the first of ``ranks`` that can hold it; return the rank or ``None``."""
    problem = state.problem
    whole = next(at for at in problem.of_table[table] if problem.costs.options[at].kind == "table-wise")
    free = problem.capacity - state.memory() - problem.costs.everywhere[whole]
    for rank in ranks:
        if free[rank] >= problem.costs.shard[whole, MEMORY] and free.min() >= 0:
            state.put(table, (whole, (int(rank),)))
            return int(rank)
    return None


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
