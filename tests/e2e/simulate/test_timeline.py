"""Device time of a rank in a timeline, and ends of iterations."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.simulate.timeline import RankActivity, union_seconds
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
        exposed_transfer=7,
    )


def test_a_window_cuts_what_reaches_beyond_it():
    d = Drawing()
    d.kernel("a", 10)
    assert simulate(together(d)).activity(0, (5, 20)) == RankActivity(15, 6, 9, 6, 0, 0)


def test_a_rank_without_device_work_is_idle():
    d = Drawing()
    d.host(3)
    assert simulate(together(d)).activity(0) == RankActivity(3, 0, 3, 0, 0, 0)


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
    assert union_seconds(starts, ends) == len(seconds)
