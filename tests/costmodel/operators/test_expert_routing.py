"""How rows are shared by experts: conservation, order, and the rank that gets most."""

from __future__ import annotations

import pytest

from costmodel.operators.experts import BALANCED, ExpertRouting

LAW = ExpertRouting(alpha=1.2)


def test_equal_shares_are_whole_rows_that_add_up():
    assert BALANCED.counts(64, 8) == (8,) * 8
    assert sum(BALANCED.counts(3, 8)) == 3 and max(BALANCED.counts(3, 8)) == 1


@pytest.mark.parametrize(("rows", "experts"), [(4096 * 8, 128), (5, 64), (1000, 8)])
def test_a_power_law_shares_all_rows_unevenly_and_always_alike(rows, experts):
    counts = LAW.counts(rows, experts)
    assert sum(counts) == rows and len(counts) == experts and counts == LAW.counts(rows, experts)
    assert max(counts) > 2 * rows / experts or rows < experts


def test_a_larger_exponent_gives_the_first_expert_more():
    mild, steep = (max(ExpertRouting(alpha).counts(2**15, 128)) for alpha in (1.01, 2.0))
    assert steep > 2 * mild


def test_the_slowest_rank_gets_the_mean_where_all_get_the_same():
    assert sum(BALANCED.slowest(4096, 64, 8)) == 512 and len(BALANCED.slowest(4096, 64, 8)) == 8
    assert BALANCED.imbalance(64, 8) == pytest.approx(1.0)
    assert 1.0 < ExpertRouting(spread=1.0).imbalance(64, 8) < 4
    assert 1.0 < LAW.imbalance(64, 2) < LAW.imbalance(64, 8) < 8


def test_a_capacity_drops_what_is_beyond_it():
    assert max(ExpertRouting(alpha=1.2, capacity=1.0).counts(1024, 8)) == 128
    assert sum(ExpertRouting(alpha=1.2, capacity=1.0).counts(1024, 8)) < 1024
    assert ExpertRouting(capacity=1.25).counts(1024, 8) == BALANCED.counts(1024, 8)


@pytest.mark.parametrize(("rows", "met"), [(64, 50), (128, 81), (512, 126)])
def test_alike_experts_that_are_drawn_have_a_poisson_number_of_rows(rows, met):
    """128 (1 - exp(-rows / 128)) experts have any."""
    counts = ExpertRouting(spread=0.0).counts(rows, 128)
    assert sum(counts) == rows
    assert sum(1 for each in counts if each) == pytest.approx(met, abs=1)


@pytest.mark.parametrize(("experts", "spread"), [(384, 1.0), (128, 2.0)])
def test_the_most_popular_expert_may_have_so_many_rows_that_none_has_no_chance(experts, spread):
    counts = ExpertRouting(spread=spread).counts(64 * experts, experts)
    assert sum(counts) == 64 * experts and max(counts) > 745  # exp(-745) is the least positive number


def test_rows_meet_at_popular_experts():
    met = [sum(1 for each in ExpertRouting(spread=spread).counts(64, 128) if each) for spread in (0.0, 1.0, 2.0)]
    assert met[0] > met[1] > met[2] > 16


def test_many_rows_are_shared_by_popularity():
    """Logarithms of the quantiles of two experts are 0.674 apart from the middle: exp(1.349) times the rows."""
    few, many = sorted(ExpertRouting(spread=1.0).counts(10000, 2))
    assert many / few == pytest.approx(3.853, rel=0.01)
