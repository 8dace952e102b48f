"""Where the time of a step goes, by hand and as a property."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.base.errors import SimulationError
from e2e.explain.critical_path import CriticalPath, Segment, critical_path
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.simulate.timeline import Edge
from e2e.step.execution_graph import ExecutionGraph
from tests.e2e.drawn_graphs import Drawing, random_graph, together
from tests.e2e.toy_predictions import predict_ranks, reduced


def path_of(graph: ExecutionGraph, rank: int | None = None) -> CriticalPath:
    return critical_path(graph, simulate(graph), rank=rank)


def pieces(path: CriticalPath) -> list[tuple[str, float, str]]:
    return [(segment.kind, segment.seconds, segment.waits_for) for segment in path.segments]


def sums(path: CriticalPath, key: Callable[[Segment], str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for segment in path.segments:
        found[key(segment)] = found.get(key(segment), 0.0) + segment.seconds
    return found


def by_name(path: CriticalPath) -> dict[str, float]:
    return sums(path, lambda segment: segment.name)


def test_a_host_bound_step_is_the_host_and_its_last_kernel():
    d = Drawing()
    for _ in range(2):
        d.host(4, "T2")
        d.kernel("gemm", 2)
        d.host(3, "T1")
    path = path_of(together(d))
    assert pieces(path) == [
        ("T2", 4, "start"),
        ("T4", 1, "T2"),
        ("T1", 3, "launch of gemm"),
        ("T2", 4, "T1"),
        ("T4", 1, "T2"),
        ("T1", 3, "launch of gemm"),
    ]
    assert path.host_bound_fraction == 1


def test_an_item_in_the_middle_puts_device_and_host_one_after_the_other():
    d = Drawing()
    d.kernel("forward", 10)
    d.synchronize(stream=7, cost=2)
    d.host(3, "T5")
    d.kernel("backward", 20)
    path = path_of(together(d))
    assert pieces(path) == [
        ("T4", 1, "start"),
        ("compute", 10, "launch of forward"),
        ("synchronisation", 2, "forward"),
        ("T5", 3, "synchronize stream 7"),
        ("T4", 1, "T5"),
        ("compute", 20, "launch of backward"),
    ]
    assert path.segments[2].edge is Edge.SYNCHRONISATION
    assert math.fsum(segment.seconds for segment in path.segments if segment.edge is Edge.SYNCHRONISATION) == 2


def straggler() -> ExecutionGraph:
    drawings = [Drawing(rank) for rank in range(2)]
    for d, late in zip(drawings, (2, 30), strict=True):
        d.kernel("backward", late)
        d.event(0, record=7, wait=20)
        d.collective("nccl", 4, 0)
        d.event(1, record=20, wait=7)
        d.kernel("optimizer", 1)
    return together(*drawings)


def test_the_path_of_all_ranks_follows_the_last_to_arrive():
    path = path_of(straggler())
    assert path.by_kind == {"compute": 31, "collective transfer": 4, "T4": 1}
    assert path.by_rank == {1: 31, 0: 5}
    transfer = path.segments[2]
    assert (transfer.name, transfer.edge, transfer.waits_for) == ("nccl", Edge.RENDEZVOUS, "rank 1: nccl")


def test_the_path_of_one_rank_waits_in_the_collective():
    path = path_of(straggler(), rank=0)
    assert path.by_kind == {"collective wait": 28, "collective transfer": 4, "compute": 3, "T4": 1}
    assert path.seconds == 36
    waited = path_of(straggler(), rank=1)
    assert "collective wait" not in waited.by_kind


def test_a_rank_that_is_done_early_is_idle_to_the_end():
    one, other = Drawing(0), Drawing(1)
    one.host(3)
    other.host(10)
    path = path_of(together(one, other), rank=0)
    assert path.by_kind == {"idle": 7, "host": 3}


def test_one_of_many_iterations_is_taken_by_itself():
    d = Drawing()
    d.host(3)
    d.kernel("a", 10)
    d.kernel("b", 5)
    graph = together(d)
    timeline = simulate_iterations(graph, 5).timeline
    path = critical_path(graph, timeline, iteration=4)
    assert by_name(path) == {"a": 10, "b": 5}
    assert path.window == (64, 79)
    assert critical_path(graph, timeline, iteration=0).by_kind == {"compute": 15, "host": 3, "T4": 1}


def test_a_graph_without_work_has_no_path():
    with pytest.raises(SimulationError, match="nothing to do"):
        path_of(together(Drawing()))


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 10**6), st.booleans())
def test_segments_follow_each_other_and_sum_to_the_step(seed: int, shared: bool):
    graph = random_graph(seed, shared=shared, steps=60)
    try:
        timeline = simulate(graph)
    except SimulationError:
        return
    for rank in (None, graph.ranks[0].rank):
        path = critical_path(graph, timeline, rank=rank)
        assert path.seconds == pytest.approx(timeline.step_seconds, rel=1e-12)
        moment = 0.0
        for segment in path.segments:
            assert segment.start == pytest.approx(moment, abs=1e-9)
            assert segment.seconds > 0
            moment = segment.start + segment.seconds
        for sums in (path.by_kind, path.by_rank):
            assert sum(sums.values()) == pytest.approx(timeline.step_seconds)
        assert rank is None or {segment.rank for segment in path.segments} == {rank}


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_across_ranks_nothing_on_the_path_waits(seed: int):
    graph = random_graph(seed, steps=60)
    assert not {"collective wait", "idle"} & path_of(graph).by_kind.keys()


def test_a_rank_that_the_step_never_waits_for_has_nothing_of_the_path_but_transfers():
    """10 s against 16 s before a common transfer of 4 s: up to 6 s more on the first rank change nothing."""
    answer = predict_ranks(reduced((10.0, 16.0)))
    own = {rank: [each.kind for each in answer.path.segments if each.rank == rank] for rank in (0, 1)}
    assert set(own[0]) <= {"collective transfer"} and "compute" in own[1]
    later = predict_ranks(reduced((15.9, 16.0)))
    assert later.prediction.iteration_seconds == pytest.approx(20)
    assert not any(each.kind == "compute" and each.rank == 0 for each in later.path.segments)
    longer = predict_ranks(reduced((17.0, 16.0)))
    assert longer.prediction.iteration_seconds == pytest.approx(21)
    assert not any(each.kind == "compute" and each.rank == 1 for each in longer.path.segments)
    for each in (answer, later, longer):
        ranks = each.prediction.ranks
        assert sum(rank.path_seconds for rank in ranks) == pytest.approx(each.prediction.critical_path_seconds)
        assert [rank.path_seconds for rank in ranks] == pytest.approx(
            [each.path.by_rank.get(rank, 0) for rank in (0, 1)]
        )
