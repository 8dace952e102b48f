"""Streams of one rank by themselves: when tasks run, what blocks, what an event leaves behind. All by hand."""

from __future__ import annotations

import math

import pytest

from e2e.simulate.simulated_rank import LAUNCHED, Mark, Streams, action_cause


@pytest.fixture
def streams() -> Streams:
    """Three streams, six tasks."""
    return Streams(3, 6)


def settled(streams: Streams) -> Streams:
    streams.settle()
    return streams


def test_streams_begin_free_and_tasks_unknown(streams: Streams):
    assert streams.ready == [0.0] * 3 and streams.last == [LAUNCHED] * 3
    assert streams.blocked == [False] * 3 and streams.barriers == [None] * 3
    assert all(map(math.isnan, streams.starts + streams.ends)) and len(streams.starts) == len(streams.ends) == 6
    assert streams.causes == [LAUNCHED] * 6
    assert streams.transfers == streams.arriving == streams.unblocked == streams.reached == []


def test_causes_of_actions_are_numbers_below_those_of_tasks():
    assert [action_cause(action) for action in (0, 1, 7)] == [-2, -3, -9]
    assert action_cause(action_cause(5)) == 5


def test_a_task_starts_at_its_launch_or_behind_the_one_before(streams: Streams):
    streams.launch(0, 1, 1.0, 3.0)
    streams.launch(1, 1, 2.0, 5.0)  # behind task 0, which ends at 4
    streams.launch(2, 1, 9.0, 1.0)  # launched when task 1 ends: nothing kept it
    streams.launch(3, 0, 2.0, 0.5)
    assert streams.starts[:4] == [1, 4, 9, 2] and streams.ends[:4] == [4, 9, 10, 2.5]
    assert streams.causes[:4] == [LAUNCHED, 0, LAUNCHED, LAUNCHED]
    assert streams.ready == [2.5, 10, 0] and streams.last == [3, 2, LAUNCHED]


def test_a_shared_task_holds_its_stream_until_it_is_finished(streams: Streams):
    streams.launch(0, 0, 1.0, 3.0)
    streams.launch_shared(1, 0, 2.0)
    assert streams.arriving == [(1, 0, 4.0)] and streams.blocked == [True, False, False]
    assert (streams.starts[1], streams.causes[1]) == (4, 0) and math.isnan(streams.ends[1])
    streams.launch(2, 0, 3.0, 2.0)
    streams.launch(3, 1, 3.0, 2.0)  # another stream goes on
    assert math.isnan(streams.starts[2]) and streams.ends[3] == 5
    streams.finish(1, 0, 11.0)
    assert streams.unblocked == [0] and streams.transfers == []
    settled(streams)
    assert streams.ends[1] == 11 and (streams.starts[2], streams.ends[2], streams.causes[2]) == (11, 13, 1)
    assert streams.blocked == [False] * 3 and streams.unblocked == [] and not streams.queues[0]
    assert (streams.ready[0], streams.last[0]) == (13, 2)


def test_a_collective_remembers_its_transfer_and_who_came_last(streams: Streams):
    streams.launch_shared(4, 2, 1.0)
    streams.finish_collective(4, 2, 6.0, 8.0, (1, 9))
    assert streams.transfers == [(4, 6.0, 1, 9)] and streams.ends[4] == 8
    assert (streams.ready[2], streams.last[2], streams.unblocked) == (8, 4, [2])


def test_what_queued_up_goes_as_far_as_the_next_that_holds_the_stream(streams: Streams):
    streams.launch_shared(0, 0, 1.0)
    streams.launch(1, 0, 2.0, 1.0)
    streams.launch_shared(2, 0, 3.0)
    streams.launch(3, 0, 4.0, 1.0)
    streams.arriving.clear()
    streams.finish(0, 0, 10.0)
    settled(streams)
    assert (streams.starts[1], streams.ends[1]) == (10, 11)
    assert streams.arriving == [(2, 0, 11.0)] and streams.blocked[0] and streams.causes[2] == 1
    assert math.isnan(streams.starts[3]) and len(streams.queues[0]) == 1


def test_the_follower_is_a_shared_task_that_was_launched_before(streams: Streams):
    assert streams.follower(0, 99.0) is None
    streams.launch_shared(0, 0, 1.0)
    streams.launch_shared(1, 0, 5.0)
    streams.launch(2, 0, 5.0, 1.0)
    assert streams.follower(0, 5.0) is None  # launched at that moment: its launch is what kept it
    assert streams.follower(0, 4.0) is None
    assert streams.follower(0, 5.5) == 1
    streams.follow(0, 0, 5.5)
    assert streams.ends[0] == streams.starts[1] == 5.5 and streams.causes[1] == 0
    assert streams.follower(0, 99.0) is None  # task 2 is shared with nobody
    streams.finish(1, 0, 7.0)
    settled(streams)
    assert (streams.starts[2], streams.causes[2], streams.ends[2]) == (7, 1, 8)


def test_a_wait_for_what_was_reached_delays_what_comes_next(streams: Streams):
    streams.launch(0, 0, 1.0, 3.0)
    mark = Mark(7)
    streams.put(0, mark, 2.0, 5)
    assert (mark.recorded, mark.seconds, mark.cause) == (True, 4.0, 0) and streams.reached == []
    streams.wait(1, mark)
    streams.launch(1, 1, 2.0, 1.0)
    assert not streams.blocked[1] and streams.barriers[1] is None
    assert (streams.starts[1], streams.causes[1]) == (4, 0)
    # Where the stream is busy until then or longer, the event is not what the next task waits for.
    streams.launch(2, 2, 1.0, 3.0)
    streams.wait(2, mark)
    streams.launch(3, 2, 2.0, 1.0)
    assert (streams.starts[3], streams.causes[3]) == (4, 2)


def test_an_event_is_reached_when_it_is_recorded_or_when_its_stream_is_ready(streams: Streams):
    streams.launch(0, 0, 1.0, 3.0)
    for called, seconds, cause in ((3.0, 4.0, 0), (4.0, 4.0, action_cause(6)), (9.0, 9.0, action_cause(6))):
        mark = Mark(0)
        streams.put(0, mark, called, 6)
        assert (mark.seconds, mark.cause) == (seconds, cause)
    assert streams.ready[0] == 4  # an event takes no time


def test_a_stream_that_waits_is_blocked_until_the_event_is_reached(streams: Streams):
    mark = Mark(3)
    streams.wait(1, mark)
    assert streams.blocked[1] and streams.barriers[1] is mark and mark.streams == [1] and not mark.recorded
    streams.launch(0, 1, 1.0, 2.0)
    streams.wait(1, Mark(4, True, 20.0, 5))  # queues up behind it
    streams.launch(1, 1, 1.5, 2.0)
    assert math.isnan(streams.starts[0]) and len(streams.queues[1]) == 3
    streams.put(0, mark, 6.0, 2)
    assert mark.recorded and streams.unblocked == [1]
    settled(streams)
    assert streams.barriers[1] is None and not streams.blocked[1]
    assert (streams.starts[0], streams.causes[0], streams.ends[0]) == (6, action_cause(2), 8)
    assert (streams.starts[1], streams.causes[1]) == (20, 5)


def test_all_streams_that_wait_for_an_event_go_on(streams: Streams):
    mark = Mark(0)
    for slot in (1, 2):
        streams.wait(slot, mark)
        streams.launch(slot, slot, 1.0, 2.0)
    streams.put(0, mark, 5.0, 0)
    settled(streams)
    assert streams.starts[1:3] == [5, 5] and streams.blocked == [False] * 3


def test_an_event_behind_a_blocked_stream_is_reached_with_it(streams: Streams):
    """Recorded at once, reached when the collective before it is over; then the stream that waits for it goes on."""
    mark, late = Mark(0), Mark(1)
    streams.launch_shared(0, 0, 1.0)
    streams.put(0, mark, 2.0, 8)
    streams.put(0, late, 9.0, 9)
    assert mark.recorded and mark.seconds is None
    streams.wait(1, mark)
    streams.launch(1, 1, 3.0, 1.0)
    streams.finish(0, 0, 7.0)
    settled(streams)
    assert (mark.seconds, mark.cause) == (7, 0) and (late.seconds, late.cause) == (9, action_cause(9))
    assert (streams.starts[1], streams.causes[1]) == (7, 0)


def test_marks_that_a_thread_waits_for_are_told(streams: Streams):
    watched, other = Mark(threads=["main"]), Mark(0)
    streams.put(0, other, 1.0, 0)
    streams.put(0, watched, 2.0, 1)
    assert streams.reached == [watched] and (watched.event, watched.seconds) == (None, 2.0)
