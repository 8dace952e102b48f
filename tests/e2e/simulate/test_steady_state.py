"""Iterations one after another: which of them count, and by how much they differ."""

from __future__ import annotations

import pytest

from costmodel.base.errors import SimulationError
from e2e.simulate.simulator import SteadyState, simulate, simulate_iterations
from e2e.step.execution_graph import ExecutionGraph
from tests.e2e.drawn_graphs import Drawing, together


def overtaken() -> ExecutionGraph:
    """Rank 0 takes 15 s each time; rank 1, of three streams that hand on, 30 s once and 10 s from then on.

    Rank 1 ends at 30, 40, 50, 60, 70; rank 0 at 15, 30, 45, 60, 75. They never meet.
    """
    slow, quick = Drawing(0), Drawing(1)
    slow.host(15)
    for stream in (1, 2, 3):
        quick.kernel("k", 10, stream=stream, launch=0)
        if stream < 3:
            quick.event(stream, record=stream, wait=stream + 1)
    return together(slow, quick)


def test_the_first_half_of_the_iterations_does_not_count():
    steady = simulate_iterations(overtaken(), 5)
    assert steady.timeline.iteration_seconds == (30, 10, 10, 10, 15)
    # The last three of five.
    assert steady.period_seconds == pytest.approx(35 / 3)
    assert steady.spread == pytest.approx((15 - 10) / 15)
    assert not steady.settled


def test_of_six_or_more_iterations_the_last_does_not_count_either():
    steady = simulate_iterations(overtaken(), 6)
    assert steady.timeline.iteration_seconds == (30, 10, 10, 10, 15, 15)
    assert steady.period_seconds == 12.5
    assert simulate_iterations(overtaken(), 7).period_seconds == pytest.approx(40 / 3)


def test_eight_iterations_unless_told_otherwise():
    steady = simulate_iterations(overtaken())
    assert steady.timeline.iterations == 8 and steady.period_seconds == 15 and steady.spread == 0.0


@pytest.mark.parametrize(("spread", "settled"), [(0.0, True), (1e-6, True), (1.1e-6, False), (0.1, False)])
def test_settled_is_alike_to_a_millionth(spread: float, settled: bool):
    timeline = simulate(together(Drawing()))
    assert SteadyState(timeline, 1.0, spread).settled is settled


def test_the_refusal_names_the_graph():
    with pytest.raises(SimulationError) as caught:
        simulate_iterations(together(Drawing()), 1)
    assert str(caught.value) == "drawn: 1 iterations have no steady state; ask for two or more"


def test_all_threads_of_a_rank_begin_late():
    d = Drawing(4)
    d.host(1)
    d.host(2, thread="other")
    timeline = simulate(together(d), {4: 3.0, 9: 50.0})
    assert [timeline.action(4, thread, 0).start for thread in ("main", "other")] == [3, 3]
    assert timeline.step_seconds == 5
