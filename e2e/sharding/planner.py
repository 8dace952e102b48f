"""Planner from a task to a plan: enumerate, price, generate, improve, rebuild, re-rank by simulation.

The local search moves shards by the closed form of a step, which adds up tables and knows only the slowest one by
itself. The model of a table-batched kernel has more terms (stages that wait for chains of loads), which need all tables
of a rank together: with these the plan is then rebuilt, a few tables at a time, first by the models' times, then over
scenarios of their errors.

If nothing fits, the diagnosis is the missing memory and the number of GPUs that suffices.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from costmodel.base.errors import InputError
from costmodel.cost_model import CostModel
from e2e.sharding.linear_program import Relaxation, relax
from e2e.sharding.local_search import construct, descend, greedy_plans, iterate
from e2e.sharding.placement import MOST_GPUS, enumerate_options
from e2e.sharding.scenarios import Aim, Scenarios, ScenarioState, draw_scenarios, has_intervals, search_plans
from e2e.sharding.step_graph import planned_graph
from e2e.sharding.step_model import Problem, State
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


# Largest number of tables for which every start is searched.
FEW_TABLES = 200
# Number of scenarios of a search (fewer with many tables), and of those used to choose among plans.
DRAWS, DRAWS_OF_MANY, DRAWS_OF_CHOICE = 129, 33, 513
# Accepted increase of the nominal step time over the fastest plan's, in exchange for robustness to model errors: plans
# stay within 3 % of the best one known.
PREMIUM = 0.029


@dataclass(frozen=True)
class SearchEffort:
    """Limits of the search."""

    # Wall-clock time of the search, a fifth more with many tables; a search that ends earlier is repeatable.
    seconds: float = 15.0
    # Number of kicks of the local search, and of rebuilds by the models' times and over scenarios each.
    kicks: int = 60
    rebuilds: int = 4_000
    # False: the models' times are taken to be right, without scenarios of errors.
    cautious: bool = True
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
    cautious = effort.cautious and problem.ranks > 1 and has_intervals(problem)
    greedy = greedy_plans(problem, effort.seed)
    found = {name: state for name, state in greedy.items() if state is not None}
    relaxation = _relaxation(problem, found)
    starts = _starts(problem, found, relaxation)
    if not starts:
        raise InputError(shortage_message(problem, shortage(problem)))
    few = len(problem.of_table) <= FEW_TABLES
    ends = [begin + share * effort.seconds for share in ((0.4, 0.6, 1.0) if few else (0.8, 1.0, 1.2))]
    plans = {"local search": _search(problem, starts, effort, ends[0])}
    if problem.ranks > 1:
        plans |= _rebuilt("rebuilt", 1, plans, found, effort, ends[1] if cautious else ends[2])
    if cautious:
        plans |= _rebuilt("scenarios", DRAWS if few else DRAWS_OF_MANY, plans, found, effort, ends[2])
    scenarios = draw_scenarios(problem, DRAWS_OF_CHOICE if cautious else 1, effort.seed + 1)
    candidates = [_candidate(name, state, scenarios) for name, state in plans.items()]
    by_greedy = {name: None if state is None else _candidate(name, state, scenarios) for name, state in greedy.items()}
    every = [*candidates, *(candidate for candidate in by_greedy.values() if candidate is not None)]
    best, fastest = _chosen(every, [each for each in by_greedy.values() if each is not None])
    others = tuple(sorted((each for each in every if each is not best), key=lambda each: each.simulated))
    bound = relaxation.seconds if relaxation is not None else 0.0
    return Planning(problem, best, fastest, others, by_greedy, bound, time.monotonic() - begin)


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


def _rebuilt(
    name: str,
    draws: int,
    plans: Mapping[str, State],
    greedy: Mapping[str, State],
    effort: SearchEffort,
    deadline: float,
) -> dict[str, State]:
    """Rebuild the best of ``plans`` with the kernels' own times in so many scenarios; with one, by the models' times.

    The plan is to be fast under model errors, and nearly as fast as the best by nominal times.
    """
    scenarios = draw_scenarios(next(iter(plans.values())).problem, draws, effort.seed)
    simple = [ScenarioState(state, scenarios).seconds() for state in greedy.values()]
    times = {name: ScenarioState(state, scenarios).seconds() for name, state in plans.items()}
    fastest = min(times.values(), key=lambda seconds: float(seconds[0]))
    limit = min([float(fastest[0]) * (1 + PREMIUM), *(float(seconds[0]) for seconds in simple)])
    aim = Aim(_rivals(simple or [fastest]), limit)
    start = plans[min(times, key=lambda name: float(aim.of(times[name])))]
    found = search_plans(start, scenarios, aim, effort.rebuilds, deadline, effort.seed)
    return {name: found} if found.fits() else {}


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
