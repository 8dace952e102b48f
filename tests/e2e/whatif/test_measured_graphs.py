"""Recorded graphs with larger buckets: measured times times the ratio that the models predict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from e2e.simulate.simulator import simulate
from e2e.step.execution_graph import CallInfo, RecordEvent, StreamWait
from e2e.whatif.merged_calls import bucket_sizes, joined_buckets
from tests.e2e.drawn_graphs import Drawing, together
from tests.e2e.toy_predictions import ToyCluster, ToyCollectives


def backward(rank: int, waits_between: bool = False) -> Drawing:
    """Three buckets of 400 bytes, reduced on stream 20 while kernels run; the optimizer waits for the last."""
    drawing = Drawing(rank)
    drawing.calls[0] = CallInfo(0, "aten::mm", "backward")
    for number in range(3):
        drawing.host(1.0, "T2", call=0)
        drawing.kernel("mm", 2.0, call=0)
        drawing.collective("nccl", 5.0, number, size=400)
        drawing.tasks[-1] = replace(drawing.tasks[-1], call=0)
        drawing.add(RecordEvent(number, 20))
        if waits_between and number == 1:
            drawing.add(StreamWait(number, 7))
    drawing.add(*(StreamWait(number, 7) for number in range(3)))
    drawing.kernel("optimizer", 1.0)
    return drawing


def transfers():
    return ToyCluster(), ToyCollectives()


def test_buckets_are_joined_with_what_waits_for_them():
    graph = together(backward(0), backward(1))
    assert bucket_sizes(graph) == [400, 400, 400]
    made = joined_buckets(graph, 800, transfers)
    for rank in made.ranks:
        sizes = [task.collective.size_bytes for task in rank.tasks if task.collective]
        assert sizes == [800, 400]
        joined = next(task for task in rank.tasks if task.collective)
        # The toy's transfers are as long as their bytes: two in one take what both took.
        assert joined.duration.seconds == pytest.approx(10.0)
        actions = rank.threads["main"]
        marks = [place for place, action in enumerate(actions) if isinstance(action, RecordEvent)]
        launched = next(place for place, action in enumerate(actions) if getattr(action, "task", None) == joined.id)
        assert all(place > launched for place in marks)
    assert simulate(made).step_seconds >= simulate(graph).step_seconds  # it begins later and gains nothing here


def test_what_somebody_waits_for_is_not_joined_nor_what_ranks_would_join_otherwise():
    alone = joined_buckets(together(backward(0, True), backward(1, True)), 1200, transfers)
    assert [len([t for t in rank.tasks if t.collective]) for rank in alone.ranks] == [2, 2]
    unlike = joined_buckets(together(backward(0, True), backward(1)), 1200, transfers)
    assert [len([t for t in rank.tasks if t.collective]) for rank in unlike.ranks] == [3, 3]
