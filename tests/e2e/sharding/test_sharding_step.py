"""Placements, their costs and the step: sums by hand, and the closed form against the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e.sharding.local_search import greedy_plans
from e2e.sharding.placement import Option, Rules, TablePlacement, column_blocks, enumerate_options
from e2e.sharding.step_graph import planned_graph
from e2e.sharding.step_model import State, state_of
from e2e.sharding.task import FORWARD, INDICES, LENGTHS, MEMORY, OUTPUT, DensePart, piece_of
from e2e.simulate.simulator import simulate
from tests.e2e.sharding import toy_sharding as toy

US = 1e-6
DENSE = DensePart(30 * US, 40 * US, 50 * US, 10 * US, 20 * US, 5 * US, 60 * US, 15 * US)


def test_blocks_of_columns_are_equal_wide_enough_and_multiples_of_four():
    assert column_blocks(128, 8, 32) == [2, 4]
    assert column_blocks(96, 8, 32) == [2, 3]
    assert column_blocks(36, 8, 4) == [3]  # 36 / 2 = 18 is no multiple of four, 36 / 9 needs nine ranks
    assert column_blocks(128, 1, 32) == []


def test_every_kind_is_tried_and_rules_leave_kinds_out():
    tables = [toy.table("a", dim=64)]
    kinds = [(option.kind, option.shards) for option in enumerate_options(tables, 4)]
    assert kinds == [("table-wise", 1), ("column-wise", 2), ("row-wise", 4), ("data-parallel", 4)]
    only = enumerate_options(tables, 4, Rules(kinds=("table-wise",)))
    assert only == [Option(0, "table-wise", 1)]
    assert [option.kind for option in enumerate_options(tables, 1)] == ["table-wise"]


def test_a_block_of_rows_has_its_part_of_rows_and_lookups():
    piece = piece_of(toy.table("a", rows=1001, pooling=10), Option(0, "row-wise", 4))
    assert (piece.rows, piece.pooling, piece.dim) == (251, 2.5, 64)


def test_costs_of_a_whole_table_by_hand():
    # 4 ranks x 100 samples: 400 x 10 lookups of 64 columns.
    problem = toy.toy_problem([toy.table("a")], gpus=4)
    load = problem.costs.shard[0]
    assert load[FORWARD] == pytest.approx(400 * 10 * 64 * 1e-9)
    assert load[INDICES] == 400 * 10 * 8
    assert load[LENGTHS] == 400 * 8
    assert load[OUTPUT] == 400 * 64 * 4
    assert load[MEMORY] == 1000 * 64 * 4 + 400 * 10 * 8 + 400 * 8 + 2 * 400 * 64 * 4
    assert problem.costs.everywhere[0] == 2 * 100 * 64 * 4


def test_a_copy_needs_no_exchange_but_a_gradient_of_the_whole_table():
    problem = toy.toy_problem([toy.table("a", optimizer="rowwise_adagrad")], gpus=4)
    copy = [option.kind for option in problem.costs.options].index("data-parallel")
    load = problem.costs.shard[copy]
    assert load[INDICES] == load[OUTPUT] == 0
    assert load[FORWARD] == pytest.approx(100 * 10 * 64 * 1e-9)  # its own samples only
    # Weights, one number of state per row, a dense gradient.
    assert load[MEMORY] == 1000 * 64 * 4 + 1000 * 4 + 1000 * 64 * 4
    assert problem.costs.all_reduce[copy] > 0


def test_step_of_one_table_on_two_ranks_by_hand():
    problem = toy.toy_problem([toy.table("a")], gpus=2)
    state = state_of(problem, (TablePlacement("a", "table-wise", (1,)),))
    lookup = 200 * 10 * 64 * 1e-9

    def exchange(size):  # half of it leaves the rank
        return 5 * US + size / 2 * 1e-12

    output = exchange(200 * 64 * 4)
    inputs = exchange(0) + exchange(200 * 8) + exchange(200 * 10 * 8)
    # Forward, output, the next batch's inputs (nothing hides them here), gradients, backward.
    expected = 10 * US + lookup + output + inputs + output + 20 * US + 2 * lookup
    assert state.seconds() == pytest.approx(expected, rel=1e-6)
    assert simulate(planned_graph(state)).step_seconds == pytest.approx(expected, rel=1e-6)


def test_the_dense_part_hides_the_exchange_of_the_next_batch():
    problem = toy.toy_problem([toy.table("a")], gpus=2, dense=DENSE)
    bare = toy.toy_problem([toy.table("a")], gpus=2)
    place = (TablePlacement("a", "table-wise", (0,)),)
    added = state_of(problem, place).seconds() - state_of(bare, place).seconds()
    # Top forward and backward (90 us) cover the 15 us of inputs; the top's all_reduce (60 us) outlasts 10 us of
    # interaction; the optimizer ends the step after the bottom's all_reduce.
    inputs = 3 * 5 * US + (200 * 8 + 200 * 10 * 8) / 2 * 1e-12
    assert added == pytest.approx((30 + 40 + 50 + 60 + 20 + 15 + 5) * US - inputs, rel=1e-6)


@st.composite
def random_plans(draw):
    count, gpus = draw(st.integers(1, 5)), draw(st.integers(2, 4))
    sizes = st.tuples(st.integers(4, 3000), st.sampled_from([32, 64, 128]), st.floats(0.5, 40))
    tables = [toy.table(f"t{place}", *draw(sizes)) for place in range(count)]
    dense = draw(st.sampled_from([DensePart(), DENSE]))
    problem = toy.toy_problem(tables, gpus, dense=dense)
    state = State(problem)
    for place, numbers in enumerate(problem.of_table):
        number = draw(st.sampled_from(numbers))
        option = problem.costs.options[number]
        order = draw(st.permutations(range(gpus)))
        state.put(place, (number, tuple(order[: option.shards])))
    return state


@settings(max_examples=60, deadline=None)
@given(random_plans())
def test_the_closed_form_is_the_simulated_step_or_just_above(state):
    simulated = simulate(planned_graph(state)).step_seconds
    assert simulated <= state.seconds() * (1 + 1e-9)
    # Equal unless one rank has the most forward and another the most backward work: here they are the same rank.
    assert simulated == pytest.approx(state.seconds(), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(random_plans())
def test_loads_follow_changes(state):
    """Taking tables away and putting them back leaves nothing behind."""
    before = state.seconds(), state.memory().copy()
    choices = list(state.choices)
    for place in range(len(choices)):
        state.put(place, (-1, ()))
    assert np.abs(state.loads).max() < 1e-6 and abs(state.common_memory) < 1e-6
    for place, choice in enumerate(choices):
        state.put(place, choice)
    assert state.seconds() == pytest.approx(before[0], rel=1e-9)
    assert state.memory() == pytest.approx(before[1])


def test_a_collective_waits_for_the_last_rank():
    tables = [toy.table("big", pooling=40), toy.table("small", pooling=1)]
    problem = toy.toy_problem(tables, gpus=2)
    state = state_of(problem, (TablePlacement("big", "table-wise", (0,)), TablePlacement("small", "table-wise", (1,))))
    graph = planned_graph(state)
    timeline = simulate(graph)
    output = next(task for task in graph.ranks[1].tasks if task.name == "all_to_all of lookups")
    span = timeline.task(1, output.id)
    assert span.ready - span.start == pytest.approx(200 * 39 * 64 * 1e-9, rel=1e-6)


def test_greedy_generators_by_hand():
    tables = [
        toy.table("tall", rows=1000, dim=64, pooling=1),
        toy.table("busy", rows=10, dim=64, pooling=50),
        toy.table("wide", rows=400, dim=64, pooling=2),
    ]
    plans = greedy_plans(toy.toy_problem(tables, gpus=2))
    assert set(plans) == {"size", "lookup", "size-lookup", "normalised-lookup", "random", "round-robin"}
    ranks = {name: [choice[1][0] for choice in plan.choices] for name, plan in plans.items()}
    assert ranks["size"] == [0, 1, 1]  # 64,000 | 25,600 + 640
    assert ranks["lookup"] == [1, 0, 1]  # 50 | 2 + 1
    assert ranks["round-robin"] == [0, 1, 0]


def test_greedy_generators_skip_full_ranks_and_give_up_when_all_are():
    tables = [toy.table(f"t{place}", rows=1000) for place in range(3)]
    needed = toy.toy_problem(tables, gpus=2)
    shard, everywhere = needed.costs.shard[0, MEMORY], needed.costs.everywhere[0]
    rules = Rules(kinds=("table-wise",))
    two = 2 * shard + 3 * everywhere
    plans = greedy_plans(toy.toy_problem(tables, gpus=2, memory_bytes=two, rules=rules))
    assert all(plan is not None and plan.fits() for plan in plans.values())
    plans = greedy_plans(toy.toy_problem(tables, gpus=2, memory_bytes=two - 10, rules=rules))
    assert all(plan is None for plan in plans.values())


def test_greedy_generators_give_up_when_tables_cut_by_rows_do_not_fit_together():
    tables = [toy.table(f"t{place}", rows=1000) for place in range(2)]
    roomy = toy.toy_problem(tables, gpus=2)
    rows = next(at for at in roomy.of_table[0] if roomy.costs.options[at].kind == "row-wise")
    both = 2 * (roomy.costs.shard[rows, MEMORY] + roomy.costs.everywhere[rows])
    capacity = roomy.costs.shard[0, MEMORY] - 1
    assert roomy.costs.shard[rows, MEMORY] < capacity < both, "neither is held whole, each is in halves, both are not"
    plans = greedy_plans(toy.toy_problem(tables, gpus=2, memory_bytes=capacity))
    assert all(plan is None for plan in plans.values())


def test_a_table_that_fits_but_for_its_buffers_on_every_rank_is_cut_by_rows():
    tables = [toy.table("large", rows=1000)]
    roomy = toy.toy_problem(tables, gpus=2)
    whole = roomy.costs.shard[0, MEMORY]
    assert roomy.costs.options[0].kind == "table-wise" and roomy.costs.everywhere[0] > 0
    plans = greedy_plans(toy.toy_problem(tables, gpus=2, memory_bytes=whole + roomy.costs.everywhere[0] / 2))
    for plan in plans.values():
        assert [placement.kind for placement in plan.placements()] == ["row-wise"]
        assert plan.fits()
