"""Hand-drawn graphs with mental arithmetic."""

from __future__ import annotations

import pytest

from costmodel.base.errors import SimulationError
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.simulate.timeline import Edge, Timeline
from e2e.step.execution_graph import Await, RecordEvent, Signal, StreamWait
from tests.e2e.drawn_graphs import Drawing, together


def times(timeline: Timeline, rank: int, *tasks: int) -> list[tuple[float, float]]:
    return [(timeline.task(rank, task).start, timeline.task(rank, task).end) for task in tasks]


# --- one rank, drawn by hand ---------------------------------------------------------------------------


def test_host_bound_kernels_start_when_their_launch_ends():
    d = Drawing()
    for _ in range(3):
        d.host(4, "T2")
        d.kernel("short", 2, launch=1)
    timeline = simulate(together(d))
    assert times(timeline, 0, 0, 1, 2) == [(5, 7), (10, 12), (15, 17)]
    assert timeline.step_seconds == 17
    assert timeline.task(0, 2).start_edge is Edge.LAUNCH


def test_device_bound_kernels_queue_while_the_host_runs_ahead():
    d = Drawing()
    for _ in range(3):
        d.kernel("long", 10, launch=1)
    timeline = simulate(together(d))
    assert times(timeline, 0, 0, 1, 2) == [(1, 11), (11, 21), (21, 31)]
    assert timeline.action(0, "main", 2).end == 3
    assert timeline.task(0, 2).start_edge is Edge.STREAM_ORDER


def test_two_streams_overlap():
    d = Drawing()
    d.kernel("a", 10, stream=1)
    d.kernel("b", 10, stream=2)
    timeline = simulate(together(d))
    assert times(timeline, 0, 0, 1) == [(1, 11), (2, 12)]
    assert timeline.activity(0).active == 11


def test_an_event_orders_two_streams():
    d = Drawing()
    d.kernel("a", 10, stream=1)
    d.event(5, record=1, wait=2)
    d.kernel("b", 3, stream=2)
    d.kernel("c", 4, stream=1)
    timeline = simulate(together(d))
    assert times(timeline, 0, 0, 1, 2) == [(1, 11), (11, 14), (11, 15)]
    assert timeline.task(0, 1).start_edge is Edge.EVENT
    assert timeline.place(timeline.task(0, 1).start_cause).task == 0


def test_an_event_recorded_again_leaves_earlier_waits_alone():
    d = Drawing()
    d.kernel("a", 10, stream=1)
    d.event(5, record=1, wait=2)
    d.kernel("b", 30, stream=1)
    d.add(RecordEvent(5, 1))
    d.kernel("c", 1, stream=2)
    d.add(StreamWait(5, 3))
    d.kernel("d", 1, stream=3)
    assert times(simulate(together(d)), 0, 2, 3) == [(11, 12), (41, 42)]


def test_a_wait_for_an_event_on_an_idle_stream_costs_nothing():
    d = Drawing()
    d.event(0, record=1, wait=2)
    d.kernel("a", 1, stream=2)
    assert times(simulate(together(d)), 0, 0) == [(1, 2)]


def test_a_synchronisation_in_the_middle_empties_the_queue():
    d = Drawing()
    d.kernel("a", 10)
    d.synchronize(cost=0.5)
    d.host(2)
    d.kernel("b", 10)
    timeline = simulate(together(d))
    wait = timeline.action(0, "main", 1)
    assert (wait.start, wait.ready, wait.end) == (1, 11, 11.5)
    assert wait.ready_edge is Edge.SYNCHRONISATION
    assert times(timeline, 0, 1) == [(14.5, 24.5)]


def test_item_waits_for_its_stream_only():
    """``loss.item()``: a copy to the host and a wait for its stream; another stream goes on."""
    d = Drawing()
    d.kernel("forward", 10, stream=7)
    d.kernel("prefetch", 100, stream=9)
    d.kernel("copy loss", 1, stream=7, kind="copy")
    d.synchronize(stream=7, cost=1)
    d.kernel("next", 1, stream=7)
    timeline = simulate(together(d))
    assert timeline.action(0, "main", 3).ready == 12
    assert times(timeline, 0, 3) == [(14, 15)]
    assert timeline.step_seconds == 102


def test_waiting_for_an_event_does_not_wait_for_what_follows_it():
    d = Drawing()
    d.kernel("a", 5)
    d.add(RecordEvent(1, 7))
    d.kernel("b", 50)
    d.synchronize(event=1)
    assert simulate(together(d)).action(0, "main", 3).end == 6


def test_the_autograd_thread_runs_while_the_main_thread_awaits_it():
    d = Drawing()
    d.kernel("forward", 10)
    d.add(Signal(0), Await(1))
    d.add(Await(0), thread="autograd")
    d.host(3, thread="autograd")
    d.kernel("backward", 20, thread="autograd")
    d.add(Signal(1), thread="autograd")
    d.kernel("optimizer", 1)
    timeline = simulate(together(d))
    assert times(timeline, 0, 0, 1, 2) == [(1, 11), (11, 31), (31, 32)]
    awaited = timeline.action(0, "main", 2)
    assert (awaited.start, awaited.end, awaited.ready_edge) == (1, 5, Edge.FLAG)


def test_threads_on_one_stream_act_in_the_order_of_time():
    d = Drawing()
    d.host(5, thread="slow")
    d.kernel("second", 10, thread="slow")
    d.host(2, thread="fast")
    d.kernel("first", 10, thread="fast")
    assert times(simulate(together(d)), 0, 0, 1) == [(13, 23), (3, 13)]


def test_a_thread_that_waits_for_another_rank_holds_back_only_what_comes_later():
    """Thread ``a`` wakes at 101 and launches before ``b``, whose launch is at 200 though nothing else delays it."""
    d = Drawing(0)
    d.collective("nccl", 1, 0, thread="a")
    d.synchronize(thread="a")
    d.kernel("early", 50, launch=0.5, thread="a")
    d.host(200, thread="b")
    d.kernel("late", 1, thread="b")
    other = Drawing(1)
    other.host(99)
    other.collective("nccl", 1, 0)
    for order in ((d, other), (other, d)):
        assert times(simulate(together(*order)), 0, 1, 2) == [(101.5, 151.5), (201, 202)]


def test_of_held_ranks_the_one_that_acts_first_goes_on():
    """Rank 0's ``b`` may launch at 50, but not at 201: before that, at 100, rank 1's ``b`` wakes rank 0's ``a``."""
    one, other = Drawing(0), Drawing(1)
    one.collective("x", 1, 0, thread="a")
    one.synchronize(thread="a")
    one.kernel("early", 150, launch=0.5, thread="a")
    one.host(49, thread="b")
    one.kernel("middle", 5, thread="b")
    one.host(150, thread="b")
    one.kernel("late", 1, thread="b")
    one.collective("z", 1, 1, stream=30, thread="b")
    other.collective("z", 1, 1, stream=30, thread="a")
    other.synchronize(thread="a")
    other.host(99, thread="b")
    other.collective("x", 1, 0, thread="b")
    for order in ((one, other), (other, one)):
        assert times(simulate(together(*order)), 0, 1, 2, 3) == [(101.5, 251.5), (50, 55), (251.5, 252.5)]


def test_a_flag_stays_signalled_from_the_first_time_on():
    d = Drawing()
    d.host(1)
    d.add(Signal(0))
    d.host(5)
    d.add(Signal(0))
    d.host(3, thread="other")
    d.add(Await(0), thread="other")
    d.host(4, thread="late")
    d.add(Signal(0), thread="late")
    assert simulate(together(d)).action(0, "other", 1).end == 3
    d = Drawing()
    d.host(9)
    d.add(Signal(0))
    d.host(4, thread="first")
    d.add(Signal(0), thread="first")
    d.add(Await(0), thread="other")
    assert simulate(together(d)).action(0, "other", 0).end == 4


# --- several ranks -------------------------------------------------------------------------------------


def test_an_all_reduce_on_a_side_stream_does_not_delay_the_compute_stream():
    """The fault of the published predictor: +40 % on overlapped data-parallel training."""
    drawings = []
    for rank in (0, 1):
        d = Drawing(rank)
        d.kernel("backward 2", 10, launch=1)
        d.event(0, record=7, wait=20)
        d.collective("all-reduce 2", 8, 0)
        d.kernel("backward 1", 10)
        d.event(1, record=7, wait=20)
        d.collective("all-reduce 1", 8, 1)
        d.add(RecordEvent(2, 20), StreamWait(2, 7))
        d.kernel("optimizer", 1)
        drawings.append(d)
    timeline = simulate(together(*drawings))
    # backward 1..11 and 11..21; the first all-reduce 11..19 beside it, the second 21..29 exposed, then the optimizer.
    for rank in (0, 1):
        assert times(timeline, rank, 0, 1, 2, 3, 4) == [(1, 11), (11, 19), (11, 21), (21, 29), (29, 30)]
        assert timeline.activity(rank).exposed_transfer == 8


def test_everyone_waits_for_the_straggler():
    drawings = [Drawing(rank) for rank in range(3)]
    for d, late in zip(drawings, (0, 5, 20), strict=True):
        d.host(late)
        d.collective("nccl", [3, 4, 2][d.rank], 0, ranks=(0, 1, 2))
    timeline = simulate(together(*drawings))
    # All meet at 21; the longest transfer given is 4.
    assert [timeline.task(rank, 0).start for rank in range(3)] == [1, 6, 21]
    assert {timeline.task(rank, 0).ready for rank in range(3)} == {21}
    assert {timeline.task(rank, 0).end for rank in range(3)} == {25}
    assert [timeline.task(rank, 0).ready_edge for rank in range(3)] == [Edge.RENDEZVOUS, Edge.RENDEZVOUS, Edge.LAUNCH]
    assert timeline.place(timeline.task(0, 0).ready_cause).position == 2


def test_a_pipeline_of_sends_and_receives():
    first, second = Drawing(0), Drawing(1)
    for step in range(2):
        first.kernel("stage 0", 10)
        first.event(step, record=7, wait=20)
        first.collective("send", 1, step, kind="send", group="0-1")
        second.collective("recv", 1, step, kind="recv", group="0-1", size=0)
        second.event(step, record=20, wait=7)
        second.kernel("stage 1", 10)
    timeline = simulate(together(first, second))
    # Stage 0: 1..11, 11..21; transfers 11..12, 21..22; stage 1: 12..22, 22..32.
    assert times(timeline, 1, 1, 3) == [(12, 22), (22, 32)]


def test_folded_ranks_need_only_their_representatives():
    d = Drawing(0)
    d.collective("nccl", 5, 0, ranks=tuple(range(1024)))
    assert simulate(together(d, multiplicity={0: 1024})).step_seconds == 6
    with pytest.raises(SimulationError, match="rank 0 waits for rank 1, which is not in the graph"):
        simulate(together(d))


def test_two_groups_that_cross_in_one_rank():
    """Rank 1 is in both groups, one after the other on the same stream."""
    drawings = [Drawing(rank) for rank in range(3)]
    drawings[0].collective("a", 10, 0, group="a", ranks=(0, 1))
    drawings[1].collective("a", 10, 0, group="a", ranks=(0, 1))
    drawings[1].collective("b", 10, 0, group="b", ranks=(1, 2))
    drawings[2].collective("b", 10, 0, group="b", ranks=(1, 2))
    timeline = simulate(together(*drawings))
    assert times(timeline, 2, 0) == [(1, 21)]
    assert timeline.task(2, 0).ready == 11


# --- steady state --------------------------------------------------------------------------------------


def test_device_bound_iterations_hide_the_host():
    d = Drawing()
    d.host(3)
    d.kernel("a", 10)
    graph = together(d)
    assert simulate(graph).step_seconds == 14
    steady = simulate_iterations(graph, 6)
    assert steady.period_seconds == pytest.approx(10)
    assert steady.settled
    assert steady.timeline.iteration_seconds == pytest.approx((14, 10, 10, 10, 10, 10))


def test_a_synchronisation_per_iteration_exposes_both():
    d = Drawing()
    d.host(7)
    d.kernel("a", 20)
    d.synchronize(cost=1)
    assert simulate_iterations(together(d), 4).period_seconds == pytest.approx(29)


def test_events_and_flags_belong_to_one_iteration():
    """Were the flag of the first iteration still set, autograd's second launch would not wait for the main thread."""
    d = Drawing()
    d.host(10)
    d.add(Signal(0))
    d.add(Await(0), thread="autograd")
    d.kernel("a", 1, launch=1, thread="autograd")
    timeline = simulate_iterations(together(d), 3).timeline
    assert [timeline.task(0, 0, iteration).start for iteration in range(3)] == [11, 21, 31]


def test_steady_iterations_of_ranks_that_meet():
    """The slower rank sets the pace of both."""
    drawings = [Drawing(0), Drawing(1)]
    for d, value in zip(drawings, (10, 12), strict=True):
        d.kernel("a", value)
        d.event(0, record=7, wait=20)
        d.collective("nccl", 3, 0)
        d.event(1, record=20, wait=7)
    steady = simulate_iterations(together(*drawings), 8)
    assert steady.period_seconds == pytest.approx(15)
