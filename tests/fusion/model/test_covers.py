"""Plans: what they count, which sites they hold, and which of two equal ones is taken."""

from __future__ import annotations

import pytest

from fusion.model.conv_graph import FusionPlan, Group, select
from tests.fusion.model.test_selection import GRAPH, ONE_EACH, A, B, C, D, chosen, site


def test_a_plan_fuses_a_site_only_if_one_kernel_computes_exactly_its_nodes():
    plan = FusionPlan((Group((A, B, C), site(A, B, C).operator), Group((D,), D.operator)))
    assert plan.fuses(site(A, B, C))
    assert not any(plan.fuses(other) for other in (site(A, B), site(B, C), site(B, A, C), site(C, D)))


def test_of_equal_covers_the_one_with_fewer_fused_nodes_wins():
    """The block of three and the pair in it both save one second."""
    pair, block = site(A, B), site(A, B, C)
    for sites in ([pair, block], [block, pair]):
        seconds = ONE_EACH | {pair.operator: 1.0, block.operator: 2.0}
        assert chosen(select(GRAPH, sites, seconds)) == ["a+b", "c", "d"]


def test_a_site_without_a_time_of_its_own_is_left_out():
    """Every node has one; the kernel of the site was never measured."""
    assert chosen(select(GRAPH, [site(A, B)], ONE_EACH)) == ["a", "b", "c", "d"]


def test_a_node_without_a_time_bars_its_sites_alone():
    ab, cd = site(A, B), site(C, D)
    seconds = {operator: time for operator, time in ONE_EACH.items() if operator != A.operator}
    assert chosen(select(GRAPH, [ab, cd], seconds | {ab.operator: 0.1, cd.operator: 0.1})) == ["a", "b", "c+d"]


def test_sites_that_begin_alike_must_go_on_alike():
    """An intermediate has one user; a graph that says otherwise is no graph of ours."""
    seconds = ONE_EACH | {site(A, B).operator: 0.1, site(A, C).operator: 0.1}
    with pytest.raises(AssertionError, match="two users"):
        select(GRAPH, [site(A, B), site(A, C)], seconds)
