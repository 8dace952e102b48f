"""Planner from a task to a plan: enumerate, price, generate, improve, polish, re-rank by simulation.

The last stage of the search changes and swaps single tables, evaluated with exact kernel times. The closed form adds up
tables and knows only the slowest one by itself; the model of a table-batched kernel has more terms (stages that wait
for chains of loads), which need all tables of a rank together.

If nothing fits, the diagnosis is the missing memory and the number of GPUs that suffices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from costmodel.base.errors import InputError
from costmodel.cost_model import CostModel
from e2e.sharding.linear_program import Relaxation, relax
from e2e.sharding.local_search import SMALLEST_GAIN, construct, descend, greedy_plans, iterate, kick
from e2e.sharding.placement import MOST_GPUS, enumerate_options
from e2e.sharding.scenarios import Aim, Scenarios, ScenarioState, draw, search, uncertain
from e2e.sharding.step_graph import options_of_rank, planned_graph
from e2e.sharding.step_model import Choice, Problem, State, all_ranks
from e2e.sharding.task import MEMORY, ShardingTask, TransferTimes, option_costs
from e2e.simulate.simulator import simulate
from e2e.step.arrays import Floats

GIB = 2**30


@dataclass(frozen=True)
class Shortage:
    """Memory shortage, in bytes of all GPUs together."""

    # Lower bound of the needed memory.
    needed: float
    available: float
    # A table without an option that fits on a rank, or empty; `table_bytes`: the least bytes of its shards.
    table: str
    table_bytes: float
    # The fewest GPUs for which the sum fits; 0: no number does.
    gpus: int


def shortage(problem: Problem) -> Shortage:
    """Compare the least memory that the tables can take with the available memory."""
    costs, ranks = problem.costs, problem.ranks
    needed, worst, name = 0.0, 0.0, ""
    for table, numbers in enumerate(problem.of_table):
        whole = [
            costs.options[number].shards * costs.shard[number, MEMORY] + ranks * costs.everywhere[number]
            for number in numbers
        ]
        needed += min(whole)
        least = min(float(costs.shard[number, MEMORY] + costs.everywhere[number]) for number in numbers)
        if least > max(problem.capacity, worst):
            worst, name = least, problem.task.tables[table].name
    return Shortage(needed, problem.capacity * ranks, name, worst, _enough(problem, needed))


def _enough(problem: Problem, needed: float) -> int:
    """Number of GPUs that suffices: weights are spread over more GPUs, buffers for a GPU's own samples are not."""
    task = problem.task
    weights = sum(table.weight_bytes + table.optimizer_bytes for table in task.tables)
    own = (needed - weights) / problem.ranks
    if own >= problem.capacity:
        return 0
    count = -(-weights // max(int(problem.capacity - own), 1))
    per_node = task.cluster.node_gpus
    if count > per_node:
        count = -(-count // per_node) * per_node
    return int(count) if count <= MOST_GPUS else 0


def shortage_message(problem: Problem, found: Shortage) -> str:
    """Return a one-line message: the shortage and a remedy."""
    task = problem.task
    where = f"{problem.ranks} x {task.cluster.machine.name}"
    room = f"{problem.capacity / GIB:.1f} GiB of each left for tables ({task.reserve:.0%} reserved)"
    if found.table:
        return (
            f"nothing fits on {where}: no part of table {found.table!r} takes less than "
            f"{found.table_bytes / GIB:.1f} GiB on a GPU, {room}; "
            "allow more kinds of placement, take more GPUs or a smaller batch"
        )
    more = f"{found.gpus} GPUs would hold them" if found.gpus else "no number of these GPUs holds a batch of this size"
    if found.needed > found.available:
        missing = (found.needed - found.available) / GIB
        return (
            f"nothing fits on {where}: tables and buffers need at least {found.needed / GIB:.1f} GiB in all, "
            f"{room}: {missing:.1f} GiB are missing; {more}, or use a smaller dtype or optimizer state"
        )
    return (
        f"no placement found that fits on {where}: tables and buffers need {found.needed / GIB:.1f} of "
        f"{found.available / GIB:.1f} GiB, {room}, but no way was found to pack them; lower --reserve or take more GPUs"
    )


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


# Largest number of tables for which every start is searched, and of binary variables for which CP-SAT gets the whole
# task.
FEW_TABLES = 200
WHOLE_PROGRAM = 3_000
NEIGHBOUR_RANKS = 4
# Number of scenarios of a search (fewer with many tables), and of those used to choose among plans.
DRAWS, DRAWS_OF_MANY, DRAWS_OF_CHOICE = 129, 33, 513
# Accepted increase of the nominal step time over the fastest plan's, in exchange for robustness to model errors: plans
# stay within 3 % of the best one known.
PREMIUM = 0.029


@dataclass(frozen=True)
class SearchEffort:
    """Limits of the search."""

    # Wall-clock time of the search; a search that ends earlier is repeatable; the scenario search may add a fifth.
    seconds: float = 15.0
    # Number of kicks of the local search.
    kicks: int = 60
    # Work limit of CP-SAT, in its own measure; 0: without CP-SAT.
    deterministic: float = 0.5
    # Number of plans that are re-ranked by simulation, besides the greedy ones.
    simulated: int = 4
    # Number of rebuilds of the search over scenarios; 0: without it.
    rebuilds: int = 4_000
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Candidate:
    """Plan made by ``generator``."""

    generator: str
    state: State
    # Step time by the closed form; `simulated`: by the simulator.
    seconds: float
    simulated: float
    # Step times under perturbed models, shape (draws,); the first is the nominal one.
    scenarios: Floats

    @property
    def expected(self) -> float:
        """Mean step time over the perturbed scenarios."""
        return float(self.scenarios[1:].mean() if len(self.scenarios) > 1 else self.scenarios[0])


@dataclass(frozen=True, eq=False)
class Planning:
    """Result of the search."""

    problem: Problem
    # Least expected regret among the plans that are fast in simulation; `fastest`: the fastest in simulation.
    best: Candidate
    fastest: Candidate
    others: tuple[Candidate, ...]
    # Generator -> candidate; `None`: does not fit.
    greedy: Mapping[str, Candidate | None]
    # Lower bound of the step of any plan by the closed form; 0: unknown.
    bound: float
    # Status of CP-SAT, empty if it was not run.
    solver: str
    search_seconds: float

    @property
    def gap(self) -> float | None:
        """Upper bound of the possible improvement, relative to the bound; ``None`` if no bound is known."""
        return self.best.state.seconds() / self.bound - 1 if self.bound > 0 else None

    @property
    def confidence(self) -> float | None:
        """Share of the scenarios in which the best plan is faster than every greedy one.

        ``None`` without scenarios or rivals.
        """
        rivals = [each.scenarios[1:] for each in self.greedy.values() if each is not None and each is not self.best]
        if not rivals or not rivals[0].size:
            return None
        return float((self.best.scenarios[1:] < np.min(rivals, axis=0)).mean())


def make_problem(task: ShardingTask, collectives: CostModel | None = None) -> Problem:
    """Price everything in ``task``; raises ``InputError`` for a task without tables."""
    if not task.tables:
        raise InputError("no tables to shard; list some in the file")
    if collectives is None:
        from costmodel.collectives import collective_cost_model

        collectives = collective_cost_model(task.cluster)
    times = TransferTimes(collectives, task.ranks, task.cluster.nodes)
    options = enumerate_options(task.tables, task.ranks, task.rules)
    without = set(range(len(task.tables))) - {option.table for option in options}
    if without:
        raise InputError(f"table {task.tables[min(without)].name!r} has no placement of the kinds allowed; allow more")
    return Problem(task, option_costs(task, options, times), times)


def find_plan(problem: Problem, effort: SearchEffort | None = None) -> Planning:
    """Return the best plan found; if nothing fits, raises ``InputError`` with the shortage."""
    effort = effort or SearchEffort()
    begin = time.monotonic()
    few = len(problem.of_table) <= FEW_TABLES
    robust = effort.rebuilds > 0 and problem.ranks > 1 and uncertain(problem)
    deadline = begin + effort.seconds * (0.4 if few else 0.8)
    greedy = greedy_plans(problem, effort.seed)
    found = {name: state for name, state in greedy.items() if state is not None}
    relaxation = _relaxation(problem, found)
    starts = _starts(problem, found, relaxation)
    if not starts:
        raise InputError(shortage_message(problem, shortage(problem)))
    local = _search(problem, starts, effort, deadline)
    exact, solver, proven = _exact(local, effort, deadline)
    plans = {"local search": local, **({"cp-sat": exact} if exact is not local else {})}
    if few:
        until = begin + effort.seconds * (0.6 if robust else 1.0)
        plans |= _polished({"best": exact, **_refined(found, deadline)}, effort, until)
    if robust:
        plans |= _robust(plans, found, effort, begin + 1.2 * effort.seconds)
    scenarios = draw(problem, DRAWS_OF_CHOICE if robust else 1, effort.seed + 1)
    candidates = [_candidate(name, state, scenarios) for name, state in plans.items()]
    by_greedy = {name: None if state is None else _candidate(name, state, scenarios) for name, state in greedy.items()}
    every = [*candidates, *(candidate for candidate in by_greedy.values() if candidate is not None)]
    best, fastest = _chosen(every, [each for each in by_greedy.values() if each is not None])
    others = tuple(sorted((each for each in every if each is not best), key=lambda each: each.simulated))
    bound = max(relaxation.seconds if relaxation is not None else 0.0, proven)
    return Planning(problem, best, fastest, others, by_greedy, bound, solver, time.monotonic() - begin)


def simulated_seconds(state: State) -> float:
    """Simulated time of a step: kernels priced per group, collectives wait for the last rank."""
    return simulate(planned_graph(state)).step_seconds


def _candidate(name: str, state: State, scenarios: Scenarios) -> Candidate:
    """Make a candidate; the ratio of simulation to closed form is assumed to be the same in every scenario."""
    simulated, times = simulated_seconds(state), ScenarioState(state, scenarios).seconds()
    return Candidate(name, state, state.seconds(), simulated, times * (simulated / times[0]) if times[0] > 0 else times)


def _chosen(every: list[Candidate], greedy: list[Candidate]) -> tuple[Candidate, Candidate]:
    """Choose the plan and the fastest plan.

    The former is at most ``PREMIUM`` slower and not slower than a greedy one.
    """
    fastest = min(every, key=lambda candidate: candidate.simulated)
    if len(fastest.scenarios) == 1:
        return fastest, fastest
    limit = min([fastest.simulated * (1 + PREMIUM), *(each.simulated for each in greedy)])
    aim = Aim(_rivals([each.scenarios for each in greedy] or [fastest.scenarios]))
    allowed = [each for each in every if each.simulated <= limit]
    return min(allowed, key=lambda each: float(aim.of(each.scenarios))), fastest


def _rivals(times: list[Floats]) -> Floats:
    """Time of the best plan in each scenario."""
    return np.asarray(np.min(times, axis=0))


def _robust(
    plans: Mapping[str, State], greedy: Mapping[str, State], effort: SearchEffort, deadline: float
) -> dict[str, State]:
    """Return a plan that is fast under model errors, and nearly as fast as the best by nominal times."""
    first = next(iter(plans.values()))
    many = len(first.choices) > FEW_TABLES
    scenarios = draw(first.problem, DRAWS_OF_MANY if many else DRAWS, effort.seed)
    simple = [ScenarioState(state, scenarios).seconds() for state in greedy.values()]
    times = {name: ScenarioState(state, scenarios).seconds() for name, state in plans.items()}
    fastest = min(times.values(), key=lambda seconds: float(seconds[0]))
    limit = min([float(fastest[0]) * (1 + PREMIUM), *(float(seconds[0]) for seconds in simple)])
    aim = Aim(_rivals(simple or [fastest]), limit)
    start = plans[min(times, key=lambda name: float(aim.of(times[name])))]
    found = search(start, scenarios, aim, effort.rebuilds, deadline, effort.seed)
    return {"scenarios": found} if found.fits() else {}


def _relaxation(problem: Problem, found: Mapping[str, State]) -> Relaxation | None:
    """Lower bound over plans faster than the best greedy one, or than a time that any sensible plan beats."""
    known = [state.seconds() for state in found.values()]
    limit = min(known) if known else float(max(times.max() for times in problem.times.seconds.values()))
    return relax(problem, limit)


def _starts(problem: Problem, greedy: Mapping[str, State], relaxation: Relaxation | None) -> list[State]:
    built = [construct(problem)]
    if relaxation is not None:
        built.append(construct(problem, relaxation.options))
    states = [state for state in built if state is not None and state.fits()]
    return sorted([*states, *greedy.values()], key=State.seconds)


def _search(problem: Problem, starts: list[State], effort: SearchEffort, deadline: float) -> State:
    """Descend from the starts (for a large task only from the best one), then kick the best."""
    few = len(problem.of_table) <= FEW_TABLES
    begin = time.monotonic()
    span = max(deadline - begin, 0.0)
    chosen = starts if few else starts[:1]
    found = [descend(state, begin + span * 0.6 * (place + 1) / len(chosen)) for place, state in enumerate(chosen)]
    best = min(found, key=State.seconds)
    return iterate(best, effort.kicks, begin + 0.75 * span, effort.seed)


def _refined(greedy: Mapping[str, State], deadline: float) -> dict[str, State]:
    """Improve the greedy plans by moving and swapping shards: more local optima for the simulator to choose from."""
    improved = {f"{name}, improved": descend(state, deadline) for name, state in greedy.items()}
    return dict(sorted(improved.items(), key=lambda item: item[1].seconds()))


def _polished(plans: Mapping[str, State], effort: SearchEffort, deadline: float) -> dict[str, State]:
    """Polish the best ``plans`` with exact kernel times, and kick and polish the best of them repeatedly."""
    chosen = list(plans.items())[: effort.simulated]
    found = {}
    begin = time.monotonic()
    for place, (name, state) in enumerate(chosen):
        until = begin + 0.7 * max(deadline - begin, 0.0) * (place + 1) / len(chosen)
        found[f"{name}, polished"] = polish(state, until)
    best = min(found.values(), key=ExactTimes().seconds)
    return found | {"kicked, polished": kick_polish(best, effort.kicks, deadline, effort.seed)}


def _exact(start: State, effort: SearchEffort, deadline: float) -> tuple[State, str, float]:
    """Run CP-SAT on all tables, or on those of a few ranks at a time; return plan, status, and lower bound."""
    problem = start.problem
    left = deadline - time.monotonic()
    if effort.deterministic <= 0 or left <= 0 or problem.ranks == 1:
        return start, "", 0.0
    from e2e.sharding.integer_program import Limits, neighbourhood, solve

    size = sum(problem.ranks if option.placed else 1 for option in problem.costs.options)
    if size <= WHOLE_PROGRAM:
        solution = solve(start, limits=Limits(effort.deterministic, left, effort.seed))
        return solution.state, solution.status, solution.bound
    state, generator, rounds = start, np.random.default_rng(effort.seed), 0
    while time.monotonic() < deadline and rounds < effort.kicks // 8:
        ranks = _neighbours(state, generator)
        limits = Limits(effort.deterministic / 4, max(deadline - time.monotonic(), 0.1), effort.seed)
        state = solve(state, neighbourhood(state, ranks), ranks, limits).state
        rounds += 1
    return state, f"{rounds} neighbourhoods", 0.0


def _neighbours(state: State, generator: np.random.Generator) -> list[int]:
    """Return the rank that limits the step, and some others at random."""
    weights = state.problem.model.weights(state.loads.max(axis=0))
    slowest = int((state.loads @ weights).argmax())
    others = [rank for rank in generator.permutation(state.problem.ranks).tolist() if rank != slowest]
    return [slowest, *others[: NEIGHBOUR_RANKS - 1]]
