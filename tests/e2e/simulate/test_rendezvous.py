"""Who meets whom, and what is said about those who do not."""

from __future__ import annotations

import pytest

from costmodel.base.errors import SimulationError
from e2e.simulate.simulator import Arrival, Rendezvous
from e2e.step.execution_graph import Collective

PAIR = Collective("all_reduce", "g", (0, 1), 0, 64)


def arrive(rendezvous: Rendezvous, rank: int, collective: Collective, start: float = 0.0, seconds: float = 1.0):
    return rendezvous.arrive(0, collective, rank, Arrival(rank, 0, 0, start), seconds)


def changed(**fields) -> Collective:
    return Collective(**{"kind": "all_reduce", "group": "g", "ranks": (0, 1), "sequence": 0, "size_bytes": 64} | fields)


def test_a_meeting_is_complete_when_all_ranks_have_come():
    rendezvous = Rendezvous({0: 1, 1: 1})
    assert arrive(rendezvous, 0, PAIR, start=5, seconds=2) is None
    meeting = arrive(rendezvous, 1, PAIR, start=3, seconds=4)
    assert meeting is not None
    assert meeting.seconds == 4
    assert meeting.last().position == 0
    assert not rendezvous.open


def test_of_two_last_ones_the_lower_rank_is_named():
    rendezvous = Rendezvous({0: 1, 1: 1})
    arrive(rendezvous, 1, PAIR, start=3)
    meeting = arrive(rendezvous, 0, PAIR, start=3)
    assert meeting is not None and meeting.last().position == 0


def test_groups_sequences_and_iterations_are_apart():
    rendezvous = Rendezvous({0: 1, 1: 1})
    assert arrive(rendezvous, 0, PAIR) is None
    assert arrive(rendezvous, 1, changed(group="h")) is None
    assert arrive(rendezvous, 1, changed(sequence=1)) is None
    assert rendezvous.arrive(1, PAIR, 1, Arrival(1, 0, 0, 0.0), 1.0) is None
    assert len(rendezvous.open) == 4


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (changed(kind="all_gather"), "rank 0 calls all_reduce, rank 1 calls all_gather"),
        (changed(size_bytes=128), "rank 0 has 64 bytes, rank 1 has 128 bytes"),
        (changed(ranks=(1, 2)), r"rank 0 has ranks \(0, 1\), rank 1 has \(1, 2\)"),
    ],
)
def test_ranks_that_disagree_are_named(other: Collective, message: str):
    rendezvous = Rendezvous({0: 1, 1: 1, 2: 1}, "file: ")
    arrive(rendezvous, 0, PAIR)
    with pytest.raises(SimulationError, match=r"file: all_reduce \(group 'g', sequence 0\): " + message):
        arrive(rendezvous, 1, other)


def test_uneven_sizes_are_fine_where_the_operation_allows_them():
    for kind in ("all_to_all", "broadcast"):
        rendezvous = Rendezvous({0: 1, 1: 1})
        arrive(rendezvous, 0, changed(kind=kind))
        assert arrive(rendezvous, 1, changed(kind=kind, size_bytes=1))


def test_the_order_in_which_ranks_are_listed_does_not_matter():
    rendezvous = Rendezvous({0: 1, 1: 1})
    arrive(rendezvous, 0, PAIR)
    assert arrive(rendezvous, 1, changed(ranks=(1, 0)))


def test_a_send_meets_a_receive_and_nothing_else():
    rendezvous = Rendezvous({0: 1, 1: 1})
    arrive(rendezvous, 0, changed(kind="send"))
    assert arrive(rendezvous, 1, changed(kind="recv", size_bytes=0))
    arrive(rendezvous, 0, changed(kind="send", sequence=1))
    with pytest.raises(SimulationError, match="rank 0 calls send, rank 1 calls send"):
        arrive(rendezvous, 1, changed(kind="send", sequence=1))
    with pytest.raises(SimulationError, match="has 3 ranks; give it the two"):
        arrive(Rendezvous({0: 1, 1: 1, 2: 1}), 0, changed(kind="send", ranks=(0, 1, 2)))


def test_a_rank_takes_part_once():
    rendezvous = Rendezvous({0: 1, 1: 1})
    arrive(rendezvous, 0, PAIR)
    with pytest.raises(SimulationError, match="rank 0 takes part twice"):
        arrive(rendezvous, 0, PAIR)
    arrive(rendezvous, 1, PAIR)
    with pytest.raises(SimulationError, match="rank 1 takes part twice"):
        arrive(rendezvous, 1, PAIR)


def test_a_rank_outside_the_group_is_refused():
    with pytest.raises(SimulationError, match="rank 2 takes part but its ranks are"):
        arrive(Rendezvous({0: 1, 1: 1, 2: 1}), 2, PAIR)
    with pytest.raises(SimulationError, match="lists a rank of the group twice"):
        arrive(Rendezvous({0: 1}), 0, changed(ranks=(0, 0)))


def test_absent_ranks_must_be_folded_into_present_ones():
    world = changed(ranks=tuple(range(8)))
    assert arrive(Rendezvous({0: 8}), 0, world)
    folded = Rendezvous({0: 4, 4: 4})
    assert arrive(folded, 0, world) is None
    assert folded.missing(folded.open[(0, "g", 0)]) == [4]
    assert arrive(folded, 4, world)
    with pytest.raises(SimulationError, match="rank 0 waits for rank 1, which is not in the graph; add it, or give"):
        arrive(Rendezvous({0: 4}), 0, world)
