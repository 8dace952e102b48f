"""The writer of a rank: host work of units, hand-over to the autograd thread, numbers of events and collectives."""

from __future__ import annotations

import pytest

from e2e.step.execution_graph import (
    AUTOGRAD,
    MAIN,
    Await,
    HostWork,
    Launch,
    RankWriter,
    Signal,
    Task,
)


def task(writer: RankWriter, call: int | None = None) -> Task:
    return Task(writer.next_task, "kernel", "kernel", 0, call=call)


def written(writer: RankWriter, thread: str = MAIN) -> list:
    return list(writer.finish().threads[thread])


def test_a_whole_unit_counts_all_launches_of_its_pass():
    writer = RankWriter(0)
    call = writer.call("aten::sort")
    writer.unit(task(writer, call), launches=3)
    names = [each.kind if isinstance(each, HostWork) else "launch" for each in written(writer)]
    assert names == ["T1", "T2", "launch", "T5", "T5", "T3"]
    with pytest.raises(ValueError, match="'kernel' names no call"):
        writer.unit(task(writer))


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
