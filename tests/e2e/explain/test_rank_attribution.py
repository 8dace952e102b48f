"""Where a rank's time goes, by hand and for random graphs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e.explain.critical_path import critical_path
from e2e.explain.rank_figures import rank_attribution
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.step.execution_graph import ExecutionGraph
from tests.e2e.drawn_graphs import Drawing, random_graph, together


def attribution(graph: ExecutionGraph, rank: int):
    timeline = simulate(graph)
    position = next(place for place, each in enumerate(graph.ranks) if each.rank == rank)
    return rank_attribution(critical_path(graph, timeline, rank=rank), graph.ranks[position], timeline)


def receiver(kernel: float) -> ExecutionGraph:
    """Rank 1 receives what rank 0 has computed for 10, beside a kernel of its own, and then computes on."""
    first, second = Drawing(0), Drawing(1)
    first.kernel("forward", 10, launch=0)
    first.event(0, 7, 20)
    first.collective("send", 2, 0, kind="send", launch=0)
    second.kernel("other", kernel, launch=0, bound="memory")
    second.collective("recv", 2, 0, kind="recv", launch=0)
    second.event(0, 20, 7)
    second.kernel("forward", 5, launch=0)
    return together(first, second)


def test_waiting_beside_a_kernel_is_the_kernels_time():
    assert attribution(receiver(4), 1) == {"bubble": 6, "compute": 5, "memory": 4, "collective transfer": 2}
    assert attribution(receiver(0), 1) == {"bubble": 10, "compute": 5, "collective transfer": 2}


def test_a_kernel_that_lasts_longer_leaves_no_bubble():
    assert attribution(receiver(12), 1) == {"memory": 12, "compute": 5}
    assert attribution(receiver(11), 1) == {"memory": 10, "compute": 5, "collective transfer": 2}


def test_waiting_beside_another_transfer_is_the_transfers_time():
    first, second = Drawing(0), Drawing(1)
    for drawing, late in ((first, 0), (second, 9)):
        drawing.collective("early", 4, 0, group="a", stream=30, launch=0)
        drawing.kernel("late", late, launch=0)
        drawing.event(0, 7, 20)
        drawing.collective("nccl", 3, 0, launch=0)
    # Rank 0 waits from 0 to 9 for rank 1; until 4 the other transfer runs.
    assert attribution(together(first, second), 0) == {"collective transfer": 7, "collective wait": 5}


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_it_sums_to_the_window_of_every_rank(seed: int, iterations: int):
    graph = random_graph(seed, steps=60)
    timeline = simulate_iterations(graph, iterations + 1).timeline
    for iteration in range(iterations):
        low, high = timeline.window(iteration)
        for rank in graph.ranks:
            path = critical_path(graph, timeline, iteration=iteration, rank=rank.rank)
            parts = rank_attribution(path, rank, timeline)
            assert sum(parts.values()) == pytest.approx(high - low)
            # Nothing is waited for while a kernel runs.
            activity = timeline.activity(rank.rank, (low, high))
            waited = parts.get("collective wait", 0.0) + parts.get("bubble", 0.0)
            assert activity.compute + activity.exposed_transfer + waited <= high - low + 1e-6
