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


@pytest.mark.parametrize(
    ("node", "position", "iteration", "action", "task"),
    [(0, 0, 0, 0, None), (2, 0, 0, 2, None), (3, 0, 0, None, 0), (4, 0, 1, 0, None), (7, 0, 1, None, 0),
     (8, 1, 0, 0, None), (12, 1, 0, 4, None), (13, 1, 0, None, 0), (14, 1, 0, None, 1), (15, 1, 1, 0, None),
     (21, 1, 1, None, 1)],
)  # fmt: skip
def test_every_number_is_one_node(timeline: Timeline, node, position, iteration, action, task):
    assert timeline.place(node) == TaskPlace(position, iteration, action, task)
    assert timeline.locate(node) == (position, action if task is None else (3, 5)[position] + task)


def test_times_of_tasks_by_iteration(timeline: Timeline):
    ready, end = timeline.task_times(2)
    assert ready.tolist() == [[3, 4], [6, 8]] and end.tolist() == [[6, 8], [9, 12]]


def test_graphs_compute_and_copies_do_not():
    d = Drawing()
    for kind, value in (("memset", 2), ("graph", 3), ("copy", 4)):
        d.kernel(kind, value, kind=kind, launch=0)
    found = simulate(together(d)).activity(0)
    assert (found.active, found.compute, found.communication) == (9, 3, 0)


def test_an_unknown_rank_is_named_with_those_there_are():
    with pytest.raises(KeyError) as caught:
        simulate(together(Drawing(2), Drawing(7))).task_times(5)
    assert caught.value.args == ("no rank 5; the timeline has [2, 7]",)
