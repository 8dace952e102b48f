"""Execution traces of several ranks: groups, sequence numbers and sizes of their collectives agree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recorded_traces import DLRM_ET, recorded

from costmodel.errors import InputError
from e2e.lowering.recorded_ranks import lower_ranks, with_groups
from e2e.operators import OperatorCall, OperatorTrace, Tensor
from e2e.traces.execution_trace import read_execution_trace

A = Tensor(1, 1, (64,), "float32", "cuda:0")


def rank(number: int, *details: tuple[object, ...], **more: object) -> OperatorTrace:
    """All-reduces with what is recorded inside each, then a wait that names the rank."""
    calls = []
    for place, inner in enumerate(details):
        calls.append(OperatorCall(10 * place, "c10d::allreduce_", None, 0, ((A,), "<Object>"), ((A,),)))
        calls.append(OperatorCall(10 * place + 1, "record_param_comms", 10 * place, 0, ((A,), place, *inner), ()))
    calls.append(OperatorCall(999, "record_param_comms", None, 0, (0, 0, number, "wait", (), ()), ()))
    return OperatorTrace(tuple(calls), source=f"rank{number}.json", **more)  # type: ignore[arg-type]


def test_groups_without_names_are_told_apart_in_the_order_of_their_use():
    world, other = 0xA0, 0xB0
    traces = [rank(1, (world, 1, "allreduce", (), ()), (other, 1, "allreduce", (), ()), (world, 1, "x", (), ()))]
    traces.append(rank(0, (0xC0, 0, "allreduce", (), ()), (0xD0, 0, "allreduce", (), ()), (0xC0, 0, "x", (), ())))
    graph = lower_ranks(traces)
    assert [entry.rank for entry in graph.ranks] == [0, 1]
    for entry in graph.ranks:
        met = [task.collective for task in entry.tasks]
        assert [(each.group, each.sequence, each.ranks, each.size_bytes) for each in met if each] == [
            ("group 0", 0, (0, 1), 256),
            ("group 1", 0, (0, 1), 256),
            ("group 0", 1, (0, 1), 256),
        ]


def test_named_groups_keep_their_ranks():
    trace = rank(3, (("dp", "data parallel"), 3, "allreduce", (), ()), process_groups={"dp": (1, 3)}, world_size=4)
    (met,) = [task.collective for task in lower_ranks([trace]).ranks[0].tasks]
    assert met is not None and (met.group, met.ranks) == ("dp", (1, 3))


def test_a_group_that_nobody_describes_is_refused():
    unknown = rank(0, (0xA0, 0, "all_to_all", (1, 1), (1, 1)))
    with pytest.raises(InputError, match="group 'group 0' has 2 of 4 ranks, but the trace does not tell which"):
        with_groups(unknown, 4)


def test_two_traces_of_one_rank_are_refused():
    with pytest.raises(InputError, match=r"rank1.json, rank1.json: give one trace of every rank"):
        lower_ranks([rank(1), rank(1)])


def test_the_eight_ranks_of_dlrm_meet_in_eight_collectives():
    folder = recorded(DLRM_ET) / "dlrm_pytorch_et"
    traces = [read_execution_trace(folder / f"dlrm_eg_{number}.json") for number in range(8)]
    graph = lower_ranks(list(reversed(traces)))
    assert [entry.rank for entry in graph.ranks] == list(range(8))
    met = [[task.collective for task in entry.tasks if task.collective] for entry in graph.ranks]
    kinds = [each.kind for each in met[0]]
    assert len(kinds) == 8
    for entry in met:
        assert [each.kind for each in entry] == kinds
        assert all(each.ranks == tuple(range(8)) for each in entry)
        assert [(each.group, each.sequence) for each in entry] == [(each.group, each.sequence) for each in met[0]]
    # Elements that every rank sends (of 4 and 8 bytes), read off the traces; what they receive of the fourth differs.
    exchanged = [{entry[place].size_bytes for entry in met} for place in range(8) if kinds[place] == "all_to_all"]
    assert exchanged == [{6144 * 4}, {24 * 8}, {384 * 4}, {3392 * 4}, {6144 * 4}]
    fourth = [entry[3] for entry in met]
    assert fourth[2].received_bytes == 2304 * 4 and len({each.received_bytes for each in fourth}) > 1
    reduced = [{entry[place].size_bytes for entry in met} for place in range(8) if kinds[place] == "all_reduce"]
    assert reduced == [{394241 * 4}, {112 * 4}, {226960 * 4}]
