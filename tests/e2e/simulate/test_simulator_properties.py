"""Properties of random graphs, and a second simulator to compare with."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.base.errors import SimulationError
from e2e.simulate.simulated_rank import HostThreads
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.simulate.timeline import Edge
from e2e.step.execution_graph import ExecutionGraph, Launch
from tests.e2e.drawn_graphs import changed, durations, random_graph, scaled
from tests.e2e.slow_simulator import slow_simulate

seeds = st.integers(0, 10**6)


def drawn(seed: int, shared: bool, whole: bool, steps: int) -> ExecutionGraph:
    """``whole``: small whole seconds, zero among them, so that much happens at the same moment."""
    graph = random_graph(seed, shared=shared, steps=steps)
    return changed(graph, lambda value: float(round(value / 2.5))) if whole else graph


def results(graph: ExecutionGraph) -> dict[int, tuple[list[list[float]], list[float]]] | None:
    """As :func:`slow_simulate` gives them."""
    try:
        timeline = simulate(graph)
    except SimulationError:
        return None
    return {
        rank.rank: (
            [
                [timeline.action(rank.rank, name, place).end for place in range(len(actions))]
                for name, actions in rank.threads.items()
            ],
            [timeline.task(rank.rank, task.id).end for task in rank.tasks],
        )
        for rank in graph.ranks
    }


@settings(deadline=None, max_examples=400)
@given(seeds, st.booleans(), st.booleans(), st.integers(10, 90))
def test_agrees_with_another_method(seed: int, shared: bool, whole: bool, steps: int):
    graph = drawn(seed, shared, whole, steps)
    expected = slow_simulate(graph)
    found = results(graph)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found == {
            rank: ([pytest.approx(ends) for ends in threads], pytest.approx(tasks))
            for rank, (threads, tasks) in expected.items()
        }


@settings(deadline=None, max_examples=200)
@given(seeds, st.booleans(), st.booleans())
def test_the_order_of_the_ranks_does_not_matter(seed: int, shared: bool, whole: bool):
    graph = drawn(seed, shared, whole, 60)
    assert results(replace(graph, ranks=graph.ranks[::-1])) == results(graph)


def test_random_graphs_reach_the_rule_for_held_threads(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the two properties above would say nothing about it."""
    lifts = 0
    lift = HostThreads.lift

    def counted(host: HostThreads) -> None:
        nonlocal lifts
        lifts += 1
        lift(host)

    monkeypatch.setattr(HostThreads, "lift", counted)
    for seed in range(100):
        results(random_graph(seed, shared=True, steps=60))
    assert lifts > 20


@settings(deadline=None, max_examples=60)
@given(seeds)
def test_never_faster_than_a_chain_never_slower_than_one_after_another(seed: int):
    graph = random_graph(seed)
    step = simulate(graph).step_seconds
    for rank in graph.ranks:
        for actions in rank.threads.values():
            own = [action.duration.seconds for action in actions if getattr(action, "duration", None) is not None]
            assert step >= sum(own) - 1e-9
        for stream in {task.stream for task in rank.tasks}:
            assert step >= sum(task.duration.seconds for task in rank.tasks if task.stream == stream) - 1e-9
    assert step <= sum(durations(graph)) + 1e-9


@settings(deadline=None, max_examples=60)
@given(seeds, st.randoms(use_true_random=False))
def test_longer_work_never_ends_a_step_earlier(seed: int, source):
    """For threads with streams of their own: where they share one, another order of calls may well be better."""
    graph = random_graph(seed)
    slower = changed(graph, lambda value: value + (source.random() if source.random() < 0.2 else 0.0))
    before, after = simulate(graph), simulate(slower)
    assert (after.end >= before.end - 1e-9).all()
    assert (after.start >= before.start - 1e-9).all()


@settings(deadline=None, max_examples=30)
@given(seeds, st.booleans(), st.sampled_from([0.25, 2.0, 1024.0]))
def test_scaling_all_durations_scales_the_step(seed: int, shared: bool, factor: float):
    graph = random_graph(seed, shared=shared)
    try:
        step = simulate(graph).step_seconds
    except SimulationError:
        return
    # Powers of two: not even rounding differs.
    assert simulate(scaled(graph, factor)).step_seconds == step * factor


@settings(deadline=None, max_examples=30)
@given(seeds)
def test_every_launch_is_accounted_for_in_every_iteration(seed: int):
    graph = random_graph(seed)
    timeline = simulate_iterations(graph, 3).timeline
    launches = sum(isinstance(action, Launch) for rank in graph.ranks for action in rank.actions())
    assert launches == sum(layout.tasks for layout in timeline.layouts)
    assert not any(map(math.isnan, timeline.end))
    for rank in graph.ranks:
        for task in rank.tasks:
            spans = [timeline.task(rank.rank, task.id, iteration) for iteration in range(3)]
            assert all(span.end - span.ready >= task.duration.seconds - 1e-9 for span in spans)


@settings(deadline=None, max_examples=30)
@given(seeds)
def test_the_first_of_many_iterations_is_the_isolated_one(seed: int):
    """With streams of their own, later work on them cannot delay earlier work."""
    graph = random_graph(seed)
    assert simulate_iterations(graph, 3).timeline.iteration_ends[0] == simulate(graph).step_seconds


@settings(deadline=None, max_examples=60)
@given(seeds, st.booleans())
def test_every_node_starts_when_its_cause_ends(seed: int, shared: bool):
    try:
        timeline = simulate(random_graph(seed, shared=shared))
    except SimulationError:
        return
    for node in range(len(timeline.end)):
        span = timeline.span(node)
        assert span.start <= span.ready <= span.end
        if span.start_cause is not None:
            assert timeline.end[span.start_cause] == span.start
        else:
            assert span.start == 0
        if span.ready_edge is Edge.RENDEZVOUS:
            assert timeline.start[span.ready_cause] == span.ready
        elif span.ready_cause is not None:
            assert timeline.end[span.ready_cause] == span.ready
