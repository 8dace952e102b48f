"""From a task to a plan: enumerate, price, generate, improve, re-rank by simulation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from costmodel.base.errors import InputError
from costmodel.model.cost_model import CostModel
from e2e.sharding.polish import ExactTimes, kick_polish, polish
from e2e.sharding.problem.memory_fit import shortage, shortage_message
from e2e.sharding.problem.option_costs import option_costs
from e2e.sharding.problem.placement import enumerate_options
from e2e.sharding.problem.state import Problem, State
from e2e.sharding.problem.task import ShardingTask
from e2e.sharding.problem.transfers import TransferTimes
from e2e.sharding.search.bound import Relaxation, relax
from e2e.sharding.search.greedy import greedy_plans
from e2e.sharding.search.local_search import construct, descend, iterate
from e2e.sharding.search.scenario_search import Aim, search
from e2e.sharding.search.scenario_state import ScenarioState
from e2e.sharding.search.scenarios import Scenarios, draw, uncertain
from e2e.sharding.step_graph import planned_graph
from e2e.simulate.simulator import simulate
from e2e.step.arrays import Floats

# Tables up to which every start is searched, and yes-or-no variables up to which CP-SAT gets the whole task.
FEW_TABLES = 200
WHOLE_PROGRAM = 3_000
NEIGHBOUR_RANKS = 4
# Scenarios that a search looks at (fewer with many tables), and others, that the choice among plans looks at.
DRAWS, DRAWS_OF_MANY, DRAWS_OF_CHOICE = 129, 33, 513
# How much longer than the fastest plan's a step may be by the models' own times, for being faster where these are
# wrong: a plan stays within 3 % of the best one known.
PREMIUM = 0.029


@dataclass(frozen=True)
class SearchEffort:
    """``seconds`` of search (of the clock; a search that ends before is repeatable), ``kicks`` of the local search,
    ``deterministic`` work of CP-SAT (its own measure; 0: without it), ``simulated``: how many plans are re-ranked
    beside the greedy ones, ``rebuilds`` of the search over scenarios (0: without it), which may take a fifth of
    ``seconds`` more.
    """

    seconds: float = 15.0
    kicks: int = 60
    deterministic: float = 0.5
    simulated: int = 4
    rebuilds: int = 4_000
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan by ``generator``; ``seconds`` of a step by the closed form, ``simulated`` by the simulator; ``scenarios``
    (draws,): of a step where the models are wrong as they may be, the first as they say.
    """

    generator: str
    state: State
    seconds: float
    simulated: float
    scenarios: Floats

    @property
    def expected(self) -> float:
        """Mean over the scenarios."""
        return float(self.scenarios[1:].mean() if len(self.scenarios) > 1 else self.scenarios[0])


@dataclass(frozen=True, eq=False)
class Planning:
    """``best``: least expected regret among the plans that are fast by the simulator too; ``fastest`` by that alone.
    ``greedy``: generator -> candidate, ``None`` where it does not fit. ``bound``: no plan is faster by the closed form
    (0: unknown). ``solver``: the word of CP-SAT, empty if it was not asked.
    """

    problem: Problem
    best: Candidate
    fastest: Candidate
    others: tuple[Candidate, ...]
    greedy: Mapping[str, Candidate | None]
    bound: float
    solver: str
    search_seconds: float

    @property
    def gap(self) -> float | None:
        """How much faster a plan might be at the most, as a share of the bound."""
        return self.best.state.seconds() / self.bound - 1 if self.bound > 0 else None

    @property
    def confidence(self) -> float | None:
        """In which share of the scenarios the best plan is faster than every greedy one (``None``: nothing to tell)."""
        rivals = [each.scenarios[1:] for each in self.greedy.values() if each is not None and each is not self.best]
        if not rivals or not rivals[0].size:
            return None
        return float((self.best.scenarios[1:] < np.min(rivals, axis=0)).mean())


def make_problem(task: ShardingTask, collectives: CostModel | None = None) -> Problem:
    """``task`` with everything priced; ``InputError`` for a task without tables."""
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
    """The best plan found; ``InputError`` says what is missing where nothing fits."""
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
    """Of a step, kernels priced together, collectives waiting for the last rank."""
    return simulate(planned_graph(state)).step_seconds


def _candidate(name: str, state: State, scenarios: Scenarios) -> Candidate:
    """What simulation says beside the closed form is taken for the same share in every scenario."""
    simulated, times = simulated_seconds(state), ScenarioState(state, scenarios).seconds()
    return Candidate(name, state, state.seconds(), simulated, times * (simulated / times[0]) if times[0] > 0 else times)


def _chosen(every: list[Candidate], greedy: list[Candidate]) -> tuple[Candidate, Candidate]:
    """The plan to take, and the fastest: at most ``PREMIUM`` lie between them, and no greedy plan does."""
    fastest = min(every, key=lambda candidate: candidate.simulated)
    if len(fastest.scenarios) == 1:
        return fastest, fastest
    limit = min([fastest.simulated * (1 + PREMIUM), *(each.simulated for each in greedy)])
    aim = Aim(_rivals([each.scenarios for each in greedy] or [fastest.scenarios]))
    allowed = [each for each in every if each.simulated <= limit]
    return min(allowed, key=lambda each: float(aim.of(each.scenarios))), fastest


def _rivals(times: list[Floats]) -> Floats:
    """Of the best plan in each scenario."""
    return np.asarray(np.min(times, axis=0))


def _robust(
    plans: Mapping[str, State], greedy: Mapping[str, State], effort: SearchEffort, deadline: float
) -> dict[str, State]:
    """A plan that is fast where the models are wrong, too, and nearly as fast as the best where they are right."""
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
    """Below the best greedy plan, or below a time that every plan beats that anybody would want."""
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
    """Descends from the starts (from the best one of a large task), then kicks the best."""
    few = len(problem.of_table) <= FEW_TABLES
    begin = time.monotonic()
    span = max(deadline - begin, 0.0)
    chosen = starts if few else starts[:1]
    found = [descend(state, begin + span * 0.6 * (place + 1) / len(chosen)) for place, state in enumerate(chosen)]
    best = min(found, key=State.seconds)
    return iterate(best, effort.kicks, begin + 0.75 * span, effort.seed)


def _refined(greedy: Mapping[str, State], deadline: float) -> dict[str, State]:
    """Greedy plans with shards moved and swapped: other local optima, for the simulator to choose from."""
    improved = {f"{name}, improved": descend(state, deadline) for name, state in greedy.items()}
    return dict(sorted(improved.items(), key=lambda item: item[1].seconds()))


def _polished(plans: Mapping[str, State], effort: SearchEffort, deadline: float) -> dict[str, State]:
    """The best few ``plans`` with exact times of kernels, and the best of them kicked and polished again and again."""
    chosen = list(plans.items())[: effort.simulated]
    found = {}
    begin = time.monotonic()
    for place, (name, state) in enumerate(chosen):
        until = begin + 0.7 * max(deadline - begin, 0.0) * (place + 1) / len(chosen)
        found[f"{name}, polished"] = polish(state, until)
    best = min(found.values(), key=ExactTimes().seconds)
    return found | {"kicked, polished": kick_polish(best, effort.kicks, deadline, effort.seed)}


def _exact(start: State, effort: SearchEffort, deadline: float) -> tuple[State, str, float]:
    """CP-SAT on all tables, or on those of a few ranks at a time: the plan, its word, what it has proven."""
    problem = start.problem
    left = deadline - time.monotonic()
    if effort.deterministic <= 0 or left <= 0 or problem.ranks == 1:
        return start, "", 0.0
    from e2e.sharding.search.integer_program import Limits, neighbourhood, solve

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
    """The rank that holds up the step, and some others."""
    weights = state.problem.model.weights(state.loads.max(axis=0))
    slowest = int((state.loads @ weights).argmax())
    others = [rank for rank in generator.permutation(state.problem.ranks).tolist() if rank != slowest]
    return [slowest, *others[: NEIGHBOUR_RANKS - 1]]
