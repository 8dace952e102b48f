"""Ranks that differ: starts, speeds, jitter."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.base.errors import InputError
from e2e.explain.critical_path import critical_path
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.simulate.skew import Skew, parse_skew, skewed
from tests.e2e.drawn_graphs import Drawing, together


def job(ranks: int = 2, multiplicity: dict[int, int] | None = None):
    drawings = [Drawing(rank) for rank in range(ranks)]
    for drawing in drawings:
        drawing.kernel("gemm", 10, launch=0)
        drawing.event(0, 7, 20)
        drawing.collective("nccl", 2, 0, ranks=tuple(range(ranks)), launch=0)
        drawing.synchronize(stream=20)
    return together(*drawings, multiplicity=multiplicity)


def test_a_late_start_is_waited_for_once():
    graph = job()
    timeline = simulate(graph, {1: 3.0})
    assert [timeline.task(rank, 1).end for rank in (0, 1)] == [15, 15]
    path = critical_path(graph, timeline)
    assert path.by_kind == {"compute": 10, "late start": 3, "collective transfer": 2}
    assert critical_path(graph, timeline, rank=0).by_kind == {
        "compute": 10, "collective wait": 3, "collective transfer": 2}  # fmt: skip
    # The collective brings them back in step.
    assert simulate_iterations(graph, 4, {1: 3.0}).timeline.iteration_seconds == (15, 12, 12, 12)


def test_without_variation_nothing_changes():
    graph = job()
    assert skewed(graph, Skew()) is graph


def test_the_spread_is_one_factor_per_rank_and_the_step_takes_the_slowest():
    graph = skewed(job(8), Skew(spread=0.1, seed=3))
    kernels = [rank.tasks[0].duration.seconds for rank in graph.ranks]
    assert len(set(kernels)) == 8
    assert simulate(graph).step_seconds == pytest.approx(max(kernels) + 2)
    assert all(rank.tasks[1].duration.seconds == 2 for rank in graph.ranks)
    again = skewed(job(8), Skew(spread=0.1, seed=3))
    assert [rank.tasks[0].duration.seconds for rank in again.ranks] == kernels


def test_factors_have_the_mean_and_deviation_asked_for():
    drawing = Drawing(0)
    for _ in range(4000):
        drawing.kernel("k", 1.0)
    graph = skewed(together(drawing), Skew(jitter=0.2, seed=1))
    seconds = np.array([task.duration.seconds for task in graph.ranks[0].tasks])
    assert seconds.mean() == pytest.approx(1.0, abs=0.02)
    assert seconds.std() == pytest.approx(0.2, abs=0.02)


def test_a_folded_rank_is_the_slowest_of_those_it_stands_for():
    """Of 4,096 normal draws the largest is 3.5 deviations above the mean, give or take half a deviation."""
    graph = skewed(job(1, {0: 4096}), Skew(spread=0.02, seed=5))
    assert graph.ranks[0].tasks[0].duration.seconds == pytest.approx(10 * 1.07, rel=0.012)
    with pytest.raises(InputError, match="rank 0 stands for 4096 ranks, which would vary apart"):
        skewed(job(1, {0: 4096}), Skew(jitter=0.02))


def test_the_text_of_the_option():
    assert parse_skew("spread=0.02, jitter=0.05,seed=1,start=3:2.5") == Skew({3: 0.0025}, 0.02, 0.05, 1)
    for text in ("spread", "spread=-1", "wobble=1", "start=3", "seed=x", "spread=inf", "jitter=nan"):
        with pytest.raises(InputError, match="--skew .*: expected spread="):
            parse_skew(text)
    with pytest.raises(InputError, match="--skew start=7:1: give ranks of"):
        skewed(job(), Skew({7: 1e-3}))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("spread=1e308", r"--skew spread=1e\+308: a relative deviation must be 0 to 1$"),
        ("jitter=1.1", r"--skew jitter=1\.1: a relative deviation must be 0 to 1$"),
        ("start=0:1e308", r"--skew start=0:1e\+308: must be 0 to 3,600,000 ms"),
        ("start=0:nan", "--skew start=0:nan: must be"),
        ("start=0:-5", "--skew start=0:-5: must be"),
        ("spread=0.1,spread=0.2", "spread is given twice"),
        ("start=1:1,start=1:2", "start of rank 1 is given twice"),
    ],
)
def test_what_no_job_is_like_is_refused(text, told):
    with pytest.raises(InputError, match=told):
        parse_skew(text)
