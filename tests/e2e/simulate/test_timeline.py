"""What a timeline says of a rank's device, and how its nodes are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.simulate.timeline import Edge, RankActivity, TaskPlace, covered
from tests.e2e.drawn_graphs import Drawing, together


def test_overlapping_kernels_are_active_once():
    d = Drawing()
    d.kernel("a", 10, stream=1)
    d.kernel("b", 4, stream=2)
    d.kernel("c", 20, stream=3)
    d.host(40)
    # Kernels from 1 to 23, host until 43.
    activity = simulate(together(d)).activity(0)
    assert (activity.active, activity.idle, activity.window) == (22, 21, 43)


def test_communication_is_exposed_where_no_kernel_runs():
    drawings = [Drawing(rank) for rank in range(2)]
    for d, late in zip(drawings, (0, 3), strict=True):
        d.host(late)
        d.collective("nccl", 10, 0)
        d.kernel("a", 5)
        d.kernel("copy", 7, kind="copy", stream=9)
    timeline = simulate(together(*drawings))
    # Rank 0: collective 1..14, waiting until 4; kernel 2..7; copy 3..10.
    assert timeline.activity(0) == RankActivity(
        window=14,
        active=13,
        idle=1,
        compute=5,
        communication=13,
        exposed_communication=8,
        collective_wait=3,
        exposed_transfer=7,
    )
    assert timeline.activity(1).collective_wait == 0


def test_a_window_cuts_what_reaches_beyond_it():
    d = Drawing()
    d.kernel("a", 10)
    assert simulate(together(d)).activity(0, (5, 20)) == RankActivity(15, 6, 9, 6, 0, 0, 0, 0)


def test_a_rank_without_device_work_is_idle():
    d = Drawing()
    d.host(3)
    assert simulate(together(d)).activity(0) == RankActivity(3, 0, 3, 0, 0, 0, 0, 0)


def test_an_unknown_rank_is_named():
    with pytest.raises(KeyError, match="no rank 5"):
        simulate(together(Drawing(2))).activity(5)


def test_every_node_is_found_again():
    drawings = [Drawing(rank) for rank in (4, 2)]
    for d in drawings:
        d.host(1)
        d.kernel("a", 1, thread="other")
        d.kernel("b", 1, thread="other")
    timeline = simulate_iterations(together(*drawings), 3).timeline
    assert len(timeline.end) == 2 * 3 * (3 + 2)
    # The second rank begins at 15; its second iteration at 20, tasks of that at 23.
    assert timeline.place(24) == TaskPlace(position=1, iteration=1, action=None, task=1)
    assert timeline.place(21) == TaskPlace(position=1, iteration=1, action=1, task=None)
    assert timeline.span(24) == timeline.task(2, 1, 1)
    assert timeline.span(21) == timeline.action(2, "other", 0, 1)


def test_iterations_follow_each_other_on_a_thread():
    d = Drawing()
    d.host(2)
    d.host(1)
    timeline = simulate_iterations(together(d), 2).timeline
    again = timeline.action(0, "main", 0, 1)
    assert (again.start, again.start_cause, again.start_edge) == (3, 1, Edge.PROGRAM_ORDER)
    assert timeline.window(1) == (3, 6)


def test_iterations_end_with_their_last_task():
    """The host is done with all of them at 3."""
    d = Drawing()
    d.kernel("a", 100, stream=1)
    timeline = simulate_iterations(together(d), 3).timeline
    assert timeline.iteration_ends == (101, 201, 301)
    assert timeline.iteration_seconds == (101, 100, 100)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20))
def test_covered_counts_every_second_once(intervals: list[tuple[int, int]]):
    spans = [(low, low + length) for low, length in intervals]
    seconds = {second for low, high in spans for second in range(low, high)}
    starts, ends = (np.array([span[side] for span in spans], dtype=float) for side in (0, 1))
    assert covered(starts, ends) == len(seconds)
