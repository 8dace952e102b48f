"""The planner: optimal on small tasks, never worse than greedy, within memory, clear when nothing fits."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from costmodel.base.errors import InputError
from e2e.sharding.linear_program import relax
from e2e.sharding.placement import PLACED, Rules, TablePlacement
from e2e.sharding.plan_report import explain_plan
from e2e.sharding.planner import SearchEffort, find_plan, simulated_seconds
from e2e.sharding.step_model import state_of
from e2e.sharding.task import MEMORY
from lab.bench.sharding import optimum
from tests.e2e.sharding import toy_sharding as toy

QUICK = SearchEffort(seconds=1.0, kicks=5, rebuilds=50)
WHOLE = Rules(kinds=("table-wise",))


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 12), st.integers(2, 5), st.floats(0.9, 6.0))
@example(2, 2, 4, 1.0)
def test_every_table_once_memory_kept_and_never_worse_than_greedy(seed, count, gpus, room):
    tables = toy.some_tables(seed, count)
    roomy = toy.toy_problem(tables, gpus)
    least = sum(
        min(
            roomy.costs.options[number].shards * roomy.costs.shard[number, MEMORY] / gpus
            + roomy.costs.everywhere[number]
            for number in numbers
        )
        for numbers in roomy.of_table
    )
    problem = toy.toy_problem(tables, gpus, memory_bytes=least * room)
    try:
        planning = find_plan(problem, QUICK)
    except InputError as error:
        assert "GiB" in str(error) and "\n" not in str(error)
        assert room < 3, "three times the least memory is enough for any of these tables"
        return
    state = planning.best.state
    placements = state.placements()
    assert [placement.table for placement in placements] == [table.name for table in tables]
    for placement in placements:
        assert len(set(placement.ranks)) == len(placement.ranks)
        assert placement.kind in PLACED or placement.ranks == tuple(range(gpus))
    assert state.memory().max() <= problem.capacity * (1 + 1e-9)
    for candidate in planning.greedy.values():
        assert candidate is None or planning.best.simulated <= candidate.simulated * (1 + 1e-9)
    assert planning.bound <= state.seconds() * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_small_tasks_are_within_three_percent_of_the_optimum(seed):
    problem = toy.toy_problem(toy.some_tables(seed, 4), gpus=2 + seed % 2, batch_size=1000)
    planning = find_plan(problem, SearchEffort(seconds=1.0, kicks=10, rebuilds=200))
    best = optimum(problem)
    assert planning.bound <= best * (1 + 1e-6)
    assert planning.best.simulated <= best * 1.03


def test_two_tables_of_each_size_are_paired():
    """Loads 40, 30, 20, 10 on two ranks: 40 + 10 and 30 + 20, when tables stay whole."""
    tables = [toy.table(f"t{pooling}", pooling=pooling) for pooling in (40, 30, 20, 10)]
    planning = find_plan(toy.toy_problem(tables, 2, rules=WHOLE), QUICK)
    ranks = [placement.ranks[0] for placement in planning.best.state.placements()]
    assert ranks[0] == ranks[3] != ranks[1] == ranks[2]


def test_one_large_table_is_cut():
    """Alone on four ranks, a table of many lookups costs a fourth by rows (or half by columns)."""
    planning = find_plan(toy.toy_problem([toy.table("a", rows=10**6, pooling=100)], 4, batch_size=10_000), QUICK)
    assert planning.best.state.placements()[0].kind in ("row-wise", "column-wise")


def test_a_tiny_table_is_copied():
    tables = [toy.table("tiny", rows=4, pooling=1, dim=32)]
    planning = find_plan(toy.toy_problem(tables, 4, batch_size=10_000), QUICK)
    assert planning.best.state.placements() == (TablePlacement("tiny", "data-parallel", (0, 1, 2, 3)),)


def test_the_bound_of_even_tables_is_their_mean():
    """Eight alike tables on eight ranks: no plan of whole tables beats one each."""
    tables = [toy.table(f"t{place}", rows=10**6) for place in range(8)]
    problem = toy.toy_problem(tables, 8, memory_bytes=1e12, rules=WHOLE)
    even = state_of(
        problem, tuple(TablePlacement(each.name, "table-wise", (place,)) for place, each in enumerate(tables))
    )
    found = relax(problem, even.seconds() * 2)
    assert found is not None
    assert found.seconds == pytest.approx(even.seconds(), rel=0.01)


def test_nothing_fits_says_how_much_is_missing_and_what_would_do():
    tables = [toy.table(f"t{place}", rows=10**6) for place in range(4)]  # 256 MB each
    with pytest.raises(InputError) as caught:
        find_plan(toy.toy_problem(tables, 2, memory_bytes=400e6), QUICK)
    text = str(caught.value)
    assert text.startswith("nothing fits on 2 x toy: tables and buffers need at least 1.0 GiB in all")
    assert "0.2 GiB are missing" in text
    assert "; 3 GPUs would hold them" in text  # 1.024 GB in parts of 0.4 GB


def test_a_table_too_large_for_any_rank_is_named():
    with pytest.raises(InputError, match="no part of table 'huge' takes less than 0.2 GiB"):
        find_plan(toy.toy_problem([toy.table("huge", rows=10**6)], 2, memory_bytes=100e6, rules=WHOLE), QUICK)


def test_a_table_too_large_for_one_rank_is_cut_by_the_greedy_ones_too():
    tables = [toy.table("huge", rows=10**6), toy.table("small")]
    planning = find_plan(toy.toy_problem(tables, 4, memory_bytes=150e6), QUICK)
    size = planning.greedy["size"]
    assert size is not None
    assert [placement.kind for placement in size.state.placements()] == ["row-wise", "table-wise"]


def test_one_gpu_needs_no_exchange():
    planning = find_plan(toy.toy_problem(toy.some_tables(0, 3), 1), QUICK)
    names = {task.name for task in _tasks(planning.best.state)}
    assert all(placement.ranks == (0,) for placement in planning.best.state.placements())
    assert planning.best.simulated == pytest.approx(planning.best.state.seconds())
    assert "lookup, placed" in names


def _tasks(state):
    from e2e.sharding.step_graph import planned_graph

    return planned_graph(state).ranks[0].tasks


def test_the_explanation_names_the_busiest_rank_and_its_tables():
    tables = [toy.table("busy", rows=10**6, pooling=90), toy.table("calm", rows=10**6, pooling=10)]
    planning = find_plan(toy.toy_problem(tables, 2, batch_size=2000, rules=WHOLE), QUICK)
    found = explain_plan(planning)
    worst = found.bottlenecks[0]
    busy = planning.best.state.placements()[0].ranks[0]
    assert (worst.load, worst.rank, worst.tables) == ("backward lookup", busy, ("busy",))
    assert worst.ratio == pytest.approx(1.8)
    assert found.waiting[1 - busy] > 0 and found.waiting[busy] == 0
    assert found.kinds == {"table-wise": 2}
    assert set(found.gains) == set(planning.greedy)


def test_the_same_seed_gives_the_same_plan():
    problem = toy.toy_problem(toy.some_tables(5, 10), 4)
    effort = SearchEffort(seconds=30.0, kicks=4, rebuilds=40, seed=3)
    one, other = (find_plan(problem, effort).best.state for _ in range(2))
    assert one.choices == other.choices
    assert simulated_seconds(one) == simulated_seconds(other)
