"""Nodes of two ranks over two iterations: when, why, and where they are, all by hand.

Rank 4 stands first: host 1 s, a kernel of 5 s, a synchronisation; 3 actions and a task, nodes 0 to 3 and 4 to 7.
Rank 2: host 2 s, a kernel of 3 s, a signal; another thread awaits that and launches 4 s on a stream of its own; 5
actions and 2 tasks, nodes 8 to 14 and 15 to 21. Every launch takes a second.
"""

from __future__ import annotations

import pytest

from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.simulate.timeline import Edge, Span, TaskPlace, Timeline
from e2e.step.execution_graph import Await, Signal
from tests.e2e.drawn_graphs import Drawing, together


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    one, other = Drawing(4), Drawing(2)
    one.host(1)
    one.kernel("a", 5)
    one.synchronize(stream=7)
    other.host(2)
    other.kernel("b", 3)
    other.add(Signal(0))
    other.add(Await(0), thread="other")
    other.kernel("c", 4, stream=8, thread="other")
    return simulate_iterations(together(one, other), 2).timeline


def test_actions_follow_each_other_over_iterations(timeline: Timeline):
    order = Edge.PROGRAM_ORDER
    assert timeline.action(4, "main", 0) == Span(0, 0, 1, None, Edge.NONE, None, Edge.NONE)
    assert timeline.action(4, "main", 1) == Span(1, 1, 2, 0, order, 0, order)
    assert timeline.action(4, "main", 0, 1) == Span(7, 7, 8, 2, order, 2, order)
    assert timeline.action(2, "main", 0, 1) == Span(3, 3, 5, 10, order, 10, order)


def test_a_synchronisation_waits_for_the_task_of_its_iteration(timeline: Timeline):
    order, wait = Edge.PROGRAM_ORDER, Edge.SYNCHRONISATION
    assert timeline.action(4, "main", 2) == Span(2, 7, 7, 1, order, 3, wait)
    assert timeline.action(4, "main", 2, 1) == Span(9, 14, 14, 5, order, 7, wait)


def test_an_await_waits_for_the_signal_of_its_iteration(timeline: Timeline):
    order = Edge.PROGRAM_ORDER
    assert timeline.action(2, "other", 0) == Span(0, 3, 3, None, Edge.NONE, 10, Edge.FLAG)
    assert timeline.action(2, "other", 0, 1) == Span(4, 6, 6, 12, order, 17, Edge.FLAG)


def test_a_task_starts_after_its_launch_or_after_its_stream(timeline: Timeline):
    assert timeline.task(4, 0) == Span(2, 2, 7, 1, Edge.LAUNCH, 1, Edge.LAUNCH)
    assert timeline.task(4, 0, 1) == Span(9, 9, 14, 5, Edge.LAUNCH, 5, Edge.LAUNCH)
    assert timeline.task(2, 0, 1) == Span(6, 6, 9, 16, Edge.LAUNCH, 16, Edge.LAUNCH)
    assert timeline.task(2, 1) == Span(4, 4, 8, 12, Edge.LAUNCH, 12, Edge.LAUNCH)
    assert timeline.task(2, 1, 1) == Span(8, 8, 12, 14, Edge.STREAM_ORDER, 14, Edge.STREAM_ORDER)


@pytest.mark.parametrize(
    ("node", "position", "iteration", "action", "task"),
    [(0, 0, 0, 0, None), (2, 0, 0, 2, None), (3, 0, 0, None, 0), (4, 0, 1, 0, None), (7, 0, 1, None, 0),
     (8, 1, 0, 0, None), (12, 1, 0, 4, None), (13, 1, 0, None, 0), (14, 1, 0, None, 1), (15, 1, 1, 0, None),
     (21, 1, 1, None, 1)],
)  # fmt: skip
def test_every_number_is_one_node(timeline: Timeline, node, position, iteration, action, task):
    assert timeline.place(node) == TaskPlace(position, iteration, action, task)
    assert timeline.locate(node) == (position, action if task is None else (3, 5)[position] + task)


def test_ends_of_iterations_and_of_ranks(timeline: Timeline):
    assert timeline.rank_ends(4) == (7, 14) and timeline.rank_ends(2) == (8, 12)
    assert timeline.iteration_ends == (8, 14) and timeline.iteration_seconds == (8, 6)
    assert timeline.step_seconds == 14
    assert (timeline.window(0), timeline.window(1)) == ((0, 8), (8, 14))


def test_times_of_tasks_by_iteration(timeline: Timeline):
    ready, end = timeline.task_times(2)
    assert ready.tolist() == [[3, 4], [6, 8]] and end.tolist() == [[6, 8], [9, 12]]


def test_graphs_compute_and_copies_do_not():
    d = Drawing()
    for kind, value in (("memset", 2), ("graph", 3), ("copy", 4)):
        d.kernel(kind, value, kind=kind, launch=0)
    found = simulate(together(d)).activity(0)
    assert (found.active, found.compute, found.communication) == (9, 3, 0)


def test_a_collective_tells_for_whom_it_waited():
    """Ranks 1 and 5 come at 1 and at 4; tasks are nodes 2 and 5 in turn."""
    drawings = [Drawing(1), Drawing(5)]
    for d, late in zip(drawings, (0, 3), strict=True):
        d.host(late)
        d.collective("nccl", 2, 0, ranks=(1, 5))
    timeline = simulate(together(*drawings))
    assert timeline.task(1, 0) == Span(1, 4, 6, 1, Edge.LAUNCH, 5, Edge.RENDEZVOUS)
    assert timeline.task(5, 0) == Span(4, 4, 6, 4, Edge.LAUNCH, 4, Edge.LAUNCH)


def test_what_follows_an_event_of_another_stream_says_so():
    d = Drawing()
    d.kernel("a", 5, stream=1)
    d.event(0, record=1, wait=2)
    d.kernel("b", 1, stream=2)
    d.event(1, record=2, wait=2)
    d.kernel("c", 1, stream=2)
    timeline = simulate(together(d))
    a, b = (len(d.threads["main"]) + task for task in (0, 1))
    assert timeline.task(0, 1) == Span(6, 6, 7, a, Edge.EVENT, a, Edge.EVENT)
    assert timeline.task(0, 2) == Span(7, 7, 8, b, Edge.STREAM_ORDER, b, Edge.STREAM_ORDER)


def test_an_unknown_rank_is_named_with_those_there_are():
    with pytest.raises(KeyError) as caught:
        simulate(together(Drawing(2), Drawing(7))).task_times(5)
    assert caught.value.args == ("no rank 5; the timeline has [2, 7]",)
