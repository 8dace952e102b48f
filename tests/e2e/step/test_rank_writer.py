"""The writer of a rank: host work of units, hand-over to the autograd thread, numbers of events and collectives."""

from __future__ import annotations

import pytest

from e2e.step.execution_graph import (
    AUTOGRAD,
    MAIN,
    Await,
    Duration,
    HostWork,
    Launch,
    RankWriter,
    RecordEvent,
    Signal,
    StreamWait,
    Synchronize,
    Task,
)


def task(writer: RankWriter, call: int | None = None) -> Task:
    return Task(writer.next_task, "kernel", "kernel", 0, call=call)


def written(writer: RankWriter, thread: str = MAIN) -> list:
    return list(writer.finish().threads[thread])


def test_a_unit_has_host_work_before_between_and_after_its_launches():
    writer = RankWriter(0)
    call = writer.call("aten::add")
    writer.begin_unit(call)
    writer.launch(task(writer, call))
    writer.launch(task(writer, call))
    assert written(writer) == [
        HostWork("T1", call),
        HostWork("T2", call),
        Launch(0),
        HostWork("T5", call),
        Launch(1),
        HostWork("T3", call),
    ]


def test_a_unit_that_launches_nothing_is_one_piece_and_ends_with_the_next():
    writer = RankWriter(0)
    first, second = writer.call("aten::view"), writer.call("aten::t")
    writer.begin_unit(first)
    writer.begin_unit(second)
    kinds = [(each.kind, each.call) for each in written(writer)]
    assert kinds == [("T1", first), ("T5", first), ("T1", second), ("T5", second)]


def test_a_whole_unit_counts_all_launches_of_its_pass():
    writer = RankWriter(0)
    call = writer.call("aten::sort")
    writer.unit(task(writer, call), launches=3)
    names = [each.kind if isinstance(each, HostWork) else "launch" for each in written(writer)]
    assert names == ["T1", "T2", "launch", "T5", "T5", "T3"]
    with pytest.raises(ValueError, match="'kernel' names no call"):
        writer.unit(task(writer))


def test_main_waits_while_autograd_works():
    writer = RankWriter(0)
    for thread in (AUTOGRAD, MAIN, AUTOGRAD):
        writer.switch(thread)
        writer.enqueue(task(writer), Duration.measured(1.0))
    graph = writer.finish()
    launches = [Launch(place, Duration.measured(1.0)) for place in range(3)]
    assert graph.threads[MAIN] == (Signal(0), Await(1), launches[1], Signal(2), Await(3))
    assert graph.threads[AUTOGRAD] == (Await(0), launches[0], Signal(1), Await(2), launches[2], Signal(3))


@pytest.mark.parametrize(
    "order", [(AUTOGRAD, "thread 2", MAIN), ("thread 2", AUTOGRAD, MAIN), (AUTOGRAD, "thread 2", AUTOGRAD, MAIN)]
)
def test_a_third_thread_between_them_changes_nothing(order: tuple[str, ...]):
    """What is awaited is signalled, whoever worked in between."""
    writer = RankWriter(0)
    for thread in order:
        writer.switch(thread)
        writer.enqueue(task(writer))
    graph = writer.finish()
    assert graph.threads[MAIN][:2] == (Signal(0), Await(1))
    assert graph.threads[AUTOGRAD][0] == Await(0) and graph.threads[AUTOGRAD][-1] == Signal(1)
    assert all(isinstance(action, Launch) for action in graph.threads["thread 2"])


def test_another_thread_ends_the_unit_of_the_one_before():
    writer = RankWriter(0)
    call = writer.call("aten::mul")
    writer.begin_unit(call)
    writer.switch(AUTOGRAD)
    assert written(writer) == [HostWork("T1", call), HostWork("T5", call), Signal(0), Await(1)]


def test_events_collectives_and_calls_are_numbered():
    writer = RankWriter(3, {})
    writer.after(1, 0)
    writer.synchronize(7, event=1)
    writer.synchronize(8)
    expected = [RecordEvent(1, 0), StreamWait(1, 1), Synchronize(event=1, call=7), Synchronize(call=8)]
    assert written(writer) == expected
    assert [writer.next_in(group) for group in ("a", "b", "a")] == [0, 0, 1]
    assert [writer.call("x"), writer.call("x", "forward")] == [0, 1]
    assert writer.finish().calls[1].phase == "forward"
