"""Graphs that cannot be run, and what is said about them."""

from __future__ import annotations

import pytest

from costmodel.base.errors import SimulationError
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.step.execution_graph import Await, StreamWait
from tests.e2e.drawn_graphs import Drawing, together


def test_a_rank_that_never_arrives_is_named():
    one, other = Drawing(0), Drawing(1)
    one.collective("nccl", 1, 4)
    other.host(1)
    message = (
        r"all_reduce \(group 'world', sequence 4\): rank 0 waits in 'nccl' for rank 1, which never arrives: "
        "it ends without this call"
    )
    with pytest.raises(SimulationError, match=message):
        simulate(together(one, other))


def test_collectives_in_another_order_are_named():
    one, other = Drawing(0), Drawing(1)
    for d, order in ((one, (0, 1)), (other, (1, 0))):
        for sequence in order:
            d.collective("nccl", 1, sequence)
    message = (
        r"sequence 0\): rank 0 waits .* for rank 1, which never arrives: it waits in all_reduce "
        r"\(group 'world', sequence 1\) for rank 0; a circle of ranks 0, 1: the order of collectives differs"
    )
    with pytest.raises(SimulationError, match=message):
        simulate(together(one, other))


def test_a_flag_that_nobody_signals_is_named():
    d = Drawing()
    d.host(1)
    d.add(Await(9))
    with pytest.raises(
        SimulationError, match=r"rank 0, thread 'main', action 1 \(wait for another thread \(flag 9\)\) waits forever"
    ):
        simulate(together(d))


def test_an_event_that_nothing_records_is_named():
    d = Drawing()
    d.add(StreamWait(3, 7))
    d.kernel("a", 1)
    with pytest.raises(SimulationError, match="rank 0: stream 7 waits forever for event 3, which nothing records"):
        simulate(together(d))
    d = Drawing()
    d.synchronize(event=3)
    with pytest.raises(SimulationError, match=r"action 0 \(synchronize event 3\) waits forever"):
        simulate(together(d))


def test_a_circle_of_three_groups_is_named():
    """Each waits in one group for the next rank, which is in another."""
    drawings = [Drawing(rank) for rank in range(3)]
    for d in drawings:
        following, before = (d.rank + 1) % 3, (d.rank + 2) % 3
        d.collective("mine", 1, 0, group=f"group {d.rank}", ranks=(d.rank, following))
        d.collective("other", 1, 0, group=f"group {before}", ranks=(before, d.rank))
    message = (
        r"all_reduce \(group 'group 0', sequence 0\): rank 0 waits in 'mine' for rank 1, which never arrives: it waits "
        r"in all_reduce \(group 'group 1', sequence 0\) for rank 2, which never arrives: it waits in all_reduce "
        r"\(group 'group 2', sequence 0\) for rank 0; a circle of ranks 0, 1, 2: the order of collectives differs"
    )
    with pytest.raises(SimulationError, match=message):
        simulate(together(*drawings))


def test_a_rank_with_fewer_collectives_is_named_with_its_last():
    one, other = Drawing(0), Drawing(1)
    for sequence in range(3):
        one.collective("nccl", 1, sequence)
    for sequence in range(2):
        other.collective("nccl", 1, sequence)
    with pytest.raises(SimulationError, match=r"sequence 2\).* rank 1, .*its last of this group is 1\)"):
        simulate(together(one, other))


def test_a_missing_call_is_named_although_its_rank_is_in_the_next_iteration():
    """Rank 1 goes on to its next step and waits there: what it lacks is the cause, not the circle that follows."""
    one, other = Drawing(0), Drawing(1)
    one.collective("nccl", 1, 0)
    one.host(5)
    one.collective("nccl", 1, 1)
    other.collective("nccl", 1, 0)
    message = r"sequence 1\): rank 0 waits in 'nccl' for rank 1, which never arrives: it ends without this call"
    with pytest.raises(SimulationError, match=message):
        simulate_iterations(together(one, other), 3)


def test_a_send_without_its_receive_is_named():
    one, other = Drawing(0), Drawing(1)
    one.collective("ncclSend", 1, 0, kind="send", group="stage 0 to 1")
    other.kernel("a", 1)
    message = r"send \(group 'stage 0 to 1', sequence 0\): rank 0 waits in 'ncclSend' for rank 1, .*it has none of this"
    with pytest.raises(SimulationError, match=message):
        simulate(together(one, other))


def test_a_folded_pipeline_must_name_ranks_of_the_graph():
    """Rank 0 sends to rank 1, which is neither in the graph nor alike anything that receives."""
    one = Drawing(0)
    one.collective("ncclSend", 1, 0, kind="send")
    with pytest.raises(SimulationError, match=r"send \(group 'world', sequence 0\): rank 0 has no partner: rank 1 is"):
        simulate(together(one, multiplicity={0: 2}))


def test_a_ring_of_alike_ranks_needs_only_one_of_them():
    one = Drawing(0)
    one.collective("ncclSend", 1, 0, kind="send", group="to the next", stream=20)
    one.collective("ncclRecv", 1, 0, kind="recv", group="from the last", ranks=(0, 7), stream=21)
    assert simulate(together(one, multiplicity={0: 8})).step_seconds == 3


def test_a_collective_behind_an_event_that_never_comes_is_explained():
    one, other = Drawing(0), Drawing(1)
    one.collective("nccl", 1, 0)
    other.add(StreamWait(3, 20))
    other.collective("nccl", 1, 0)
    with pytest.raises(SimulationError, match="rank 1, which never arrives: its stream 20 waits for event 3"):
        simulate(together(one, other))
