"""Selection is the fastest cover of the chains by measured kernels, never slower than unfused."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.operators.layers import Conv2d, Epilogue, FusedConvs
from fusion.model.conv_graph import Node, Site, select, unfused_plan


def conv(tag: int) -> Conv2d:
    """A 1x1 convolution 8 -> 8 that differs from others by its (irrelevant) image height."""
    return Conv2d(1, 8, 4, 4, 8, (1, 1), epilogue=Epilogue(bias=tag % 2 == 1), dilation=(1 + tag, 1))


def node(name: str, operator: Conv2d) -> Node:
    return Node(name, operator, f"{name}.in", None, (), f"{name}.out", ())


def site(*nodes: Node) -> Site:
    operator = FusedConvs(tuple(member.operator for member in nodes))
    return Site("+".join(member.name for member in nodes), operator.kind, nodes, operator)


def chosen(plan) -> list[str]:
    return ["+".join(member.name for member in group.nodes) for group in plan.groups]


A, B, C, D = (node(name, conv(tag)) for tag, name in enumerate("abcd"))
GRAPH = SimpleNamespace(nodes=(A, B, C, D))
ONE_EACH = {member.operator: 1.0 for member in GRAPH.nodes}


def test_overlapping_sites_are_resolved_over_the_whole_chain():
    """b+c saves most by itself (0.9), but a+b with c+d saves 1.2 together."""
    ab, bc, cd = site(A, B), site(B, C), site(C, D)
    seconds = ONE_EACH | {ab.operator: 1.4, bc.operator: 1.1, cd.operator: 1.4}
    plan = select(GRAPH, [ab, bc, cd], seconds)
    assert chosen(plan) == ["a+b", "c+d"]
    assert plan.fuses(ab) and not plan.fuses(bc)


def test_a_slower_or_equal_site_is_left_alone():
    slower, equal = site(A, B), site(C, D)
    plan = select(GRAPH, [slower, equal], ONE_EACH | {slower.operator: 2.1, equal.operator: 2.0})
    assert chosen(plan) == ["a", "b", "c", "d"] == chosen(unfused_plan(GRAPH))


def test_a_fused_group_stands_where_its_last_node_stood():
    """Program order a, c, b, d with the site a+b: c must come before the kernel that ends at b."""
    graph = SimpleNamespace(nodes=(A, C, B, D))
    ab = site(A, B)
    assert chosen(select(graph, [ab], ONE_EACH | {ab.operator: 1.0})) == ["c", "a+b", "d"]


@st.composite
def problems(draw):
    """Up to two chains (branches of a model), sites over random intervals, times in whole microseconds."""
    chains, tag = [], 0
    for index in range(draw(st.integers(1, 2))):
        length = draw(st.integers(1, 5))
        chains.append([node(f"n{index}{at}", conv(tag + at)) for at in range(length)])
        tag += length
    sites = [
        site(*chain[start:stop])
        for chain in chains
        for start, stop in combinations(range(len(chain) + 1), 2)
        if 2 <= stop - start <= 3 and draw(st.booleans())
    ]
    operators = [member.operator for chain in chains for member in chain] + [member.operator for member in sites]
    seconds = {operator: draw(st.integers(1, 30)) * 1e-6 for operator in operators}
    return SimpleNamespace(nodes=tuple(member for chain in chains for member in chain)), sites, seconds


def brute_force(graph, sites, seconds) -> float:
    """Least total over all sets of sites that do not overlap."""
    best = sum(seconds[member.operator] for member in graph.nodes)
    for count in range(1, len(sites) + 1):
        for subset in combinations(sites, count):
            names = [member.name for one in subset for member in one.nodes]
            if len(names) == len(set(names)):
                rest = sum(seconds[member.operator] for member in graph.nodes if member.name not in names)
                best = min(best, rest + sum(seconds[one.operator] for one in subset))
    return best


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_plan_is_optimal_and_covers_every_node_once(problem):
    graph, sites, seconds = problem
    plan = select(graph, sites, seconds)
    total = sum(seconds[group.operator] for group in plan.groups)
    assert abs(total - brute_force(graph, sites, seconds)) < 1e-12
    assert sorted(member.name for group in plan.groups for member in group.nodes) == sorted(
        member.name for member in graph.nodes
    )
    for group in plan.groups:
        assert seconds[group.operator] <= sum(seconds[member.operator] for member in group.nodes)
