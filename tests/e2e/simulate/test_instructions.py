"""What an execution graph becomes before it is run, and how its actions are told to people."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from costmodel.base.errors import SimulationError
from e2e.simulate.instructions import (
    CompiledRank,
    action_label,
    compile_graph,
)
from e2e.step.execution_graph import (
    Action,
    Await,
    CallInfo,
    ExecutionGraph,
    GpuLoad,
    HostWork,
    Launch,
    RecordEvent,
    Signal,
    StreamWait,
    Synchronize,
)
from tests.e2e.drawn_graphs import Drawing, seconds, together


def program(*drawings: Drawing) -> CompiledRank:
    return compile_graph(together(*drawings))[0]


def refusal(graph: ExecutionGraph) -> str:
    with pytest.raises(SimulationError) as caught:
        compile_graph(graph)
    return str(caught.value)


# --- what is refused -------------------------------------------------------------------------------


def test_a_graph_of_no_ranks_says_what_to_do():
    assert refusal(ExecutionGraph((), {}, "drawn")) == (
        "drawn: the graph has no ranks; capture or read at least one")  # fmt: skip
    assert refusal(ExecutionGraph(())) == "the graph has no ranks; capture or read at least one"


def test_ranks_and_multiplicities_must_fit():
    assert refusal(together(Drawing(3), Drawing(3))) == (
        "drawn: rank 3 appears twice; give every rank its own number")  # fmt: skip
    for multiplicity in ({8: 2}, {3: 0}, {3: -1}):
        ((rank, count),) = multiplicity.items()
        assert refusal(together(Drawing(3), multiplicity=multiplicity)) == (
            f"drawn: multiplicity {count} of rank {rank} fits no rank of the graph; "
            "name a rank that is in it, and 1 or more")  # fmt: skip
    assert len(compile_graph(together(Drawing(3), multiplicity={3: 1}))) == 1


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "has no duration; price the graph before it is simulated"),
        (-0.5, "takes -0.5 s; give a finite time of zero or more"),
        (math.inf, "takes inf s; give a finite time of zero or more"),
        (math.nan, "takes nan s; give a finite time of zero or more"),
    ],
)
def test_every_kind_of_work_needs_a_finite_time(value: float | None, told: str):
    duration = None if value is None else seconds(value)
    d = Drawing(2)
    d.kernel("gemm", 1)
    graph = together(d)
    (rank,) = graph.ranks
    task = replace(graph, ranks=(replace(rank, tasks=(replace(rank.tasks[0], duration=duration),)),))
    assert refusal(task) == f"drawn: rank 2, task 0 (kernel 'gemm' on stream 7) {told}"
    for action, name in (
        (HostWork("T2", None, duration), "T2"),
        (Synchronize(duration=duration), "synchronisation"),
    ):
        d = Drawing(2)
        d.host(1, thread="other")
        d.host(1)
        d.add(action)
        assert refusal(together(d)) == f"drawn: rank 2, thread 'main', action 1 ({name}) {told}"
    launch = replace(graph, ranks=(replace(rank, threads={"main": (Launch(0, duration),)}),))
    assert refusal(launch) == f"drawn: rank 2, thread 'main', action 0 (launch of gemm) {told}"


def test_a_synchronisation_is_of_a_stream_or_an_event():
    d = Drawing()
    d.add(Synchronize(7, 1, seconds(1)))
    assert refusal(together(d)) == (
        "drawn: rank 0, thread 'main', action 0 (synchronisation) waits for a stream and an event; give one of them"
    )


# --- what comes out --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "collective", "kept"),
    [
        (GpuLoad(1.0), GpuLoad(0.5, 0.5), {0, 1}),
        (GpuLoad(1.0), None, set()),
        (None, GpuLoad(0.5, 0.5), set()),
        (GpuLoad(0.0), GpuLoad(0.5, 0.5), set()),  # of no memory: nothing to share
        (GpuLoad(1.0), GpuLoad(0.0, 0.5), set()),
        (None, None, set()),
    ],
)
def test_loads_matter_where_kernels_meet_collectives(kernel, collective, kept):
    d = Drawing(0)
    d.kernel("a", 3)
    d.collective("c", 2, 0)
    d.tasks = [replace(d.tasks[0], load=kernel), replace(d.tasks[1], load=collective)]
    assert program(d).loads.keys() == kept


def drawn(*threads: tuple[Action, ...]) -> Drawing:
    d = Drawing()
    for number, actions in enumerate(threads):
        d.host(1, thread=str(number))
        d.add(*actions, thread=str(number))
    return d


def kernel(d: Drawing, stream: int, thread: str) -> Drawing:
    d.kernel("k", 1, stream=stream, thread=thread)
    return d


@pytest.mark.parametrize(
    ("drawing", "ordered"),
    [
        (drawn((Signal(1), Signal(1))), False),  # one thread
        (drawn((), ()), False),
        (kernel(kernel(drawn((), ()), 7, "0"), 7, "1"), True),
        (kernel(kernel(drawn((), ()), 7, "0"), 8, "1"), False),
        (kernel(kernel(kernel(drawn((), (), ()), 7, "0"), 8, "1"), 7, "2"), True),
        (drawn((RecordEvent(1, 7),), (StreamWait(1, 8),)), True),
        (drawn((RecordEvent(1, 7),), (Synchronize(event=1, duration=seconds(1)),)), True),
        (drawn((RecordEvent(1, 7),), (StreamWait(2, 8),)), False),
        (drawn((RecordEvent(1, 7),), (Synchronize(stream=7, duration=seconds(1)),)), True),
        (drawn((), (Synchronize(duration=seconds(1)),)), True),  # looks at the streams of all
        (drawn((Signal(1),), (Await(1),)), False),
        (drawn((Signal(1),), (Signal(1),)), True),
        (drawn((Signal(1),), (Signal(2),)), False),
    ],
)
def test_the_order_in_time_counts_where_threads_meet(drawing: Drawing, ordered: bool):
    assert program(drawing).ordered is ordered


def test_actions_are_told_by_what_they_do():
    d = Drawing()
    d.kernel("gemm", 1)
    d.calls[3] = CallInfo(3, "aten::mm")
    rank = d.graph()
    told = {
        HostWork("T2"): "T2",
        HostWork("T2", 3): "T2 of aten::mm",
        HostWork("T1", 4): "T1 of an unknown call",
        Launch(0): "launch of gemm",
        Synchronize(7): "synchronize stream 7",
        Synchronize(0): "synchronize stream 0",
        Synchronize(event=0): "synchronize event 0",
        Synchronize(): "synchronize device",
        RecordEvent(2, 7): "record event 2 on stream 7",
        StreamWait(2, 7): "stream 7 waits for event 2",
        Signal(5): "signal to another thread (flag 5)",
        Await(5): "wait for another thread (flag 5)",
    }
    assert {action: action_label(action, rank) for action in told} == told
