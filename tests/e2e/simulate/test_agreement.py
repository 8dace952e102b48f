"""Ranks that meet in a collective: when they have all come, what they may differ in, and the whole of each message."""

from __future__ import annotations

import pytest

from costmodel.base.errors import SimulationError
from e2e.simulate.simulator import Arrival, Meeting, Rendezvous
from e2e.step.execution_graph import Collective

WHERE = "job: all_reduce (group 'g', sequence 7): "


def call(kind: str = "all_reduce", ranks: tuple[int, ...] = (0, 1), size: int = 64, **fields) -> Collective:
    return Collective(kind, "g", ranks, 7, size, **fields)


def arrive(rendezvous: Rendezvous, rank: int, collective: Collective, start: float = 0.0) -> Meeting | None:
    return rendezvous.arrive(0, collective, rank, Arrival(rank, 0, 0, start), 1.0)


def refusal(first: Collective, second: Collective, ranks: dict[int, int] | None = None) -> str:
    """What is said when rank 0 comes with ``first`` and then rank 1 with ``second``."""
    rendezvous = Rendezvous(ranks or dict.fromkeys(range(4), 1), "job: ")
    assert arrive(rendezvous, 0, first) is None
    with pytest.raises(SimulationError) as caught:
        arrive(rendezvous, 1, second)
    return str(caught.value)


def agree(first: Collective, second: Collective) -> bool:
    rendezvous = Rendezvous({0: 1, 1: 1})
    assert arrive(rendezvous, 0, first) is None
    return arrive(rendezvous, 1, second) is not None


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_where_all_put_in_the_same_sizes_must_agree(kind):
    said = refusal(call(kind), call(kind, size=65))
    assert (
        said
        == f"job: {kind} (group 'g', sequence 7): rank 0 has 64 bytes, rank 1 has 65 bytes; give both the same size"
    )
    assert agree(call(kind), call(kind))


def test_ranks_and_kinds_must_agree():
    assert (
        refusal(call(), call(ranks=(1, 2)))
        == f"{WHERE}rank 0 has ranks (0, 1), rank 1 has (1, 2); give both the same group"
    )
    assert (
        refusal(call(), call("all_gather"))
        == f"{WHERE}rank 0 calls all_reduce, rank 1 calls all_gather; let both call the same"
    )
    assert agree(call(), call(ranks=(1, 0)))


def test_a_message_has_one_size_unless_the_receiver_does_not_know():
    assert refusal(call("send"), call("recv", size=32)) == (
        "job: send (group 'g', sequence 7): rank 0 sends 64 bytes, rank 1 receives 32; give both the same size"
    )
    assert refusal(call("recv", size=32), call("send")) == (
        "job: recv (group 'g', sequence 7): rank 1 sends 64 bytes, rank 0 receives 32; give both the same size"
    )
    assert agree(call("send"), call("recv")) and agree(call("recv"), call("send"))
    assert agree(call("send"), call("recv", size=0)) and agree(call("recv", size=0), call("send"))


def test_a_message_is_between_two():
    with pytest.raises(SimulationError) as caught:
        arrive(Rendezvous({0: 1, 1: 1, 2: 1}, "job: "), 0, call("recv", ranks=(0, 1, 2)))
    assert str(caught.value) == "job: recv (group 'g', sequence 7): has 3 ranks; give it the two that take part"


def test_a_rank_takes_part_once_and_only_where_it_belongs():
    assert (
        refusal(call(ranks=(0, 2)), call(ranks=(0, 2))) == f"{WHERE}rank 1 takes part but its ranks are (0, 2); add it"
    )
    twice = f"{WHERE}rank 0 takes part twice; number the collectives of a group one by one"
    rendezvous = Rendezvous({0: 1, 1: 1}, "job: ")
    arrive(rendezvous, 0, call())
    with pytest.raises(SimulationError) as caught:
        arrive(rendezvous, 0, call())
    assert str(caught.value) == twice
    assert arrive(rendezvous, 1, call()) is not None
    with pytest.raises(SimulationError) as caught:
        arrive(rendezvous, 0, call())
    assert str(caught.value) == twice
    with pytest.raises(SimulationError) as caught:
        arrive(Rendezvous({0: 1}, "job: "), 0, call(ranks=(0, 0)))
    assert str(caught.value) == f"{WHERE}rank 0 lists a rank of the group twice: (0, 0); name each once"


def test_as_many_ranks_may_be_absent_as_are_folded_into_others():
    """Ranks 0 and 2 stand for two each: two of the group are not in the graph, and no more."""
    assert arrive(Rendezvous({0: 8}), 0, call(ranks=tuple(range(8)))) is not None
    folded = {0: 2, 2: 2}
    rendezvous = Rendezvous(folded, "job: ")
    assert arrive(rendezvous, 0, call(ranks=(0, 1, 2, 3))) is None
    (meeting,) = rendezvous.open.values()
    assert rendezvous.missing(meeting) == [2]
    assert arrive(rendezvous, 2, call(ranks=(0, 1, 2, 3))) is meeting
    with pytest.raises(SimulationError) as caught:
        arrive(Rendezvous(folded, "job: "), 0, call(ranks=(0, 1, 2, 3, 4)))
    assert str(caught.value) == (
        f"{WHERE}rank 0 waits for rank 1, which is not in the graph; add it, or give the multiplicity of the rank that "
        "stands for it"
    )


@pytest.mark.parametrize(("starts", "last"), [((5, 3, 4), 0), ((3, 5, 4), 1), ((3, 5, 5), 1), ((5, 5, 5), 0)])
def test_the_last_to_come_is_the_lowest_of_several(starts, last):
    rendezvous = Rendezvous(dict.fromkeys(range(3), 1))
    for rank in (2, 1):
        arrive(rendezvous, rank, call(ranks=(0, 1, 2)), starts[rank])
    meeting = arrive(rendezvous, 0, call(ranks=(0, 1, 2)), starts[0])
    assert meeting is not None and meeting.last() == Arrival(last, 0, 0, starts[last])
