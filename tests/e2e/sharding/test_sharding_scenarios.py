"""Plans where the models are wrong: scenarios, a step in each of them, the search for a plan that is fast in most."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.gpu.embedding_tables import EmbeddingTable
from costmodel.machines.machine_file import load_machine
from e2e.sharding.local_search import greedy_plans, kick
from e2e.sharding.placement import Rules, TablePlacement
from e2e.sharding.planner import PREMIUM, SearchEffort, find_plan
from e2e.sharding.scenarios import OWN_SHARE, Aim, ScenarioState, draw_scenarios, has_intervals, search_plans
from e2e.sharding.step_model import NOWHERE, State, all_ranks, state_of
from lab.bench.sharding import ExactTimes
from tests.e2e.sharding import toy_sharding as toy


def some_problem(seed: int, count: int = 8, gpus: int = 3, half_width: float = 0.85, **others):
    tables = toy.some_tables(seed, count)
    return toy.toy_problem(tables, gpus, half_width=half_width, **others)


def some_plan(problem, seed: int) -> State:
    state = State(problem)
    for table, numbers in enumerate(problem.of_table):
        state.put(table, (numbers[0], (table % problem.ranks,)))
    generator = np.random.default_rng(seed)
    for _ in range(5):
        state = kick(state, generator) or state
    return state


# --- draws ----------------------------------------------------------------------------------------


def test_the_first_scenario_is_the_models_and_the_others_mirror_each_other():
    problem = some_problem(0)
    found = draw_scenarios(problem, 41, seed=1)
    assert found.draws == 41
    assert found.added[:, :, 0].sum(axis=1) == pytest.approx(problem.costs.shard[:, :2].sum(axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(found.added / found.added[:, :, :1])[:, :2]
    assert logs[..., 1:21] == pytest.approx(-logs[..., 21:])
    assert draw_scenarios(problem, 41, seed=2).added[0, 0, 1] != found.added[0, 0, 1]


def test_tables_are_wrong_by_their_share_of_the_interval():
    """An 80 % interval of +-0.85 is a deviation of 0.85 / 1.28; of that, the table's own share."""
    problem = some_problem(0, count=40)
    found = draw_scenarios(problem, 401, seed=0)
    first = [numbers[0] for numbers in problem.of_table]
    logs = np.log(found.added[first, :2, 1:] / found.added[first, :2, :1])
    assert logs.std() == pytest.approx(0.85 / 1.2816 * OWN_SHARE, rel=0.02)
    tables = np.corrcoef(logs[0, 0], logs[1, 0])[0, 1]
    assert abs(tables) < 0.2  # one table says nothing about another
    same = next(numbers for numbers in problem.of_table if len(numbers) > 2)
    one, other = (np.log(found.added[number, 0, 1:] / found.added[number, 0, 0]) for number in same[:2])
    assert np.corrcoef(one, other)[0, 1] > 0.6  # but much about the same table cut otherwise


def test_models_without_intervals_leave_nothing_to_draw():
    problem = some_problem(0, half_width=0.0)
    assert not has_intervals(problem)
    assert has_intervals(some_problem(0))
    found = draw_scenarios(problem, 5, seed=0)
    assert (found.added == found.added[..., :1]).all()


def test_the_interval_of_lookups_is_that_of_their_estimates():
    from costmodel.gpu.factory import gpu_cost_model
    from costmodel.gpu.table_costs import table_seconds
    from costmodel.operators.lookups import EmbeddingLookup, TableLookup

    machine = load_machine("a100-sxm-40gb")
    found = table_seconds([EmbeddingTable("a", 10**6, 64, 10.0)], 4096, machine)
    record = EmbeddingLookup.of([TableLookup(10**6, 64, 40960, 4096, "float32", None)])
    [estimate] = gpu_cost_model(machine).estimate([record])
    assert estimate.upper > estimate.lower
    assert found.forward_half_width[0] == pytest.approx(math.log(estimate.upper / estimate.lower) / 2)


# --- steps ----------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 9), st.integers(1, 4))
def test_the_first_scenario_is_the_step_of_exact_kernels(seed, count, gpus):
    problem = some_problem(seed, count, gpus)
    state = some_plan(problem, seed)
    found = ScenarioState(state, draw_scenarios(problem, 5, seed)).seconds()
    assert found[0] == pytest.approx(ExactTimes().seconds(state), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 4), st.sampled_from([1e9, 8e6]))
def test_a_table_elsewhere_is_what_the_plan_with_it_there_takes(seed, gpus, memory):
    problem = some_problem(seed, 6, gpus, memory_bytes=memory)
    plan = ScenarioState(some_plan(some_problem(seed, 6, gpus), seed), draw_scenarios(problem, 9, seed))
    plan = ScenarioState(_moved_to(problem, plan.state), draw_scenarios(problem, 9, seed))
    generator = np.random.default_rng(seed)
    table = int(generator.integers(6))
    plan.put(table, NOWHERE)
    choices = []
    for number in problem.of_table[table]:
        option = problem.costs.options[number]
        ranks = generator.permutation(gpus)[: option.shards].tolist() if option.placed else all_ranks(problem)
        choices.append((number, tuple(ranks)))
    found = plan.with_table(choices)
    for choice, seconds in zip(choices, found, strict=True):
        state = plan.state.copy()
        state.put(table, choice)
        if state.fits():
            assert seconds == pytest.approx(ScenarioState(state, plan.scenarios).seconds())
        else:
            assert np.isinf(seconds).all()


def _moved_to(problem, state: State) -> State:
    moved = State(problem)
    for table, choice in enumerate(state.choices):
        moved.put(table, choice)
    return moved


def test_a_table_taken_away_leaves_nothing_behind():
    problem = some_problem(3)
    state = some_plan(problem, 3)
    plan, fresh = (ScenarioState(state, draw_scenarios(problem, 9, 0)) for _ in range(2))
    for table in range(4):
        before = plan.state.choices[table]
        plan.put(table, NOWHERE)
        plan.put(table, before)
    assert plan.seconds() == pytest.approx(fresh.seconds())
    assert plan.longest == pytest.approx(fresh.longest)


# --- plans ----------------------------------------------------------------------------------------


def test_the_aim_is_what_is_missing_of_a_margin_and_minds_the_limit():
    aim = Aim(rivals=np.array([1.0, 1.0, 2.0]), limit=1.0)
    assert aim.of(np.array([1.0, 0.5, 1.0])) == pytest.approx(0.1 * 0.5)
    assert aim.of(np.array([1.0, 1.05, 1.0])) == pytest.approx((0.10 + 0.0) / 2 + 0.1 * (1.05 + 0.5) / 2)
    assert aim.of(np.array([1.1, 0.5, 1.0])) > 1.0
    assert np.isinf(aim.of(np.full(3, np.inf)))


def test_the_search_finds_a_plan_that_is_better_on_scenarios_it_has_not_seen():
    problem = some_problem(5, count=24, gpus=4, batch_size=2000)
    start = greedy_plans(problem)["lookup"]
    scenarios = draw_scenarios(problem, 65, seed=0)
    aim = Aim(ScenarioState(start, scenarios).seconds())
    found = search_plans(start, scenarios, aim, rounds=150, deadline=time.monotonic() + 60.0, seed=0)
    assert found.fits()
    unseen = draw_scenarios(problem, 401, seed=9)
    before, after = (ScenarioState(state, unseen).seconds()[1:].mean() for state in (start, found))
    assert after < before


def test_caution_prefers_what_cannot_become_uneven():
    """Loads 30 + 30 and 20 + 20 + 20 are even if the models are right. Where they are wrong, tables with their columns
    on both ranks stay even; by the models' own times nothing speaks for cutting them.
    """
    loads = (30, 30, 20, 20, 20)
    tables = [toy.table(f"t{place}", 10**6, 128, float(pooling)) for place, pooling in enumerate(loads)]
    rules = Rules(kinds=("table-wise", "column-wise"))
    effort = SearchEffort(seconds=60.0, kicks=3, rebuilds=60)
    sure, unsure = (
        toy.toy_problem(tables, 2, batch_size=5000, memory_bytes=1e11, rules=rules, half_width=width)
        for width in (0.0, 0.85)
    )
    ranks = (0, 0, 1, 1, 1)
    even = state_of(unsure, tuple(TablePlacement(f"t{at}", "table-wise", (rank,)) for at, rank in enumerate(ranks)))
    cut = state_of(unsure, tuple(TablePlacement(f"t{at}", "column-wise", (0, 1)) for at in range(5)))
    assert cut.seconds() == pytest.approx(even.seconds(), rel=1e-5)
    assert "table-wise" in {each.kind for each in find_plan(sure, effort).best.state.placements()}
    planning = find_plan(unsure, effort)
    assert {each.kind for each in planning.best.state.placements()} == {"column-wise"}
    assert planning.best.expected < ScenarioState(even, draw_scenarios(unsure, 401, 5)).seconds()[1:].mean() * 0.97
    assert planning.confidence is not None and planning.confidence > 0.9


@pytest.mark.parametrize("seed", range(4))
def test_caution_costs_little_where_the_models_are_right_and_nothing_against_greedy(seed):
    problem = some_problem(seed, count=14, gpus=4, batch_size=1000)
    planning = find_plan(problem, SearchEffort(seconds=2.0, kicks=3, rebuilds=100))
    assert planning.best.simulated <= planning.fastest.simulated * (1 + PREMIUM)
    for candidate in planning.greedy.values():
        assert candidate is None or planning.best.simulated <= candidate.simulated * (1 + 1e-9)


def test_the_same_seed_gives_the_same_cautious_plan():
    problem = some_problem(2, count=10, gpus=4)
    effort = SearchEffort(seconds=120.0, kicks=2, rebuilds=40, seed=3)
    one, other = (find_plan(problem, effort).best.state for _ in range(2))
    assert one.choices == other.choices


def test_no_caution_where_costs_are_taken_to_be_right():
    planning = find_plan(some_problem(2), SearchEffort(seconds=1.0, kicks=2, rebuilds=20, cautious=False))
    assert planning.best is planning.fastest and planning.confidence is None
    assert replace(planning.best).expected == pytest.approx(planning.best.simulated)
