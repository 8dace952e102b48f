"""Launches and operator calls of several ranks: what runs for every layer and micro-batch counts every time."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import e2e
from costmodel.operators.device_work import Gemm
from e2e.explain.predictor import PredictionResult
from e2e.parallelism.pieces import Called, Work
from e2e.parallelism.rewrites import Condenser
from e2e.simulate.simulator import simulate_iterations
from e2e.step.execution_graph import CallInfo, ExecutionGraph, HostWork, RankGraph

MODEL = {"model": "gpt2", "gpu": "h100-sxm", "sequence_length": 64}


class Host:
    factor = level = 1.0

    def seconds(self, kind, name, records=None):
        return 1e-6


def test_ranks_of_a_job_call_what_one_gpu_calls():
    alone = e2e.predict(**MODEL)
    rank = e2e.predict(**MODEL, gpus=2, parallel="dp=2").ranks[0]
    # Besides, gradients go into buckets and back: a call and a kernel each.
    more = rank.kernels - alone.kernels
    assert 0 < more < 0.5 * alone.kernels
    assert rank.operators - alone.operators == pytest.approx(more, rel=0.1)


def test_runs_of_kernels_put_together_keep_the_count():
    product = (Gemm(1, 64, 64, 64),)
    items = (
        Called(7),
        *(item for call in range(20) for item in (HostWork("T2", call), Work("mm", "kernel", product, call))),
    )
    calls = {call: CallInfo(call, "aten::mm", "forward") for call in range(20)}
    found = Condenser(Host()).items(items, calls)
    assert len(found) < len(items)
    assert [item for item in found if isinstance(item, Called)] == [Called(7)]


def slower(graph: ExecutionGraph, number: int, factor: float) -> ExecutionGraph:
    """``graph`` with kernels and host of one rank that take ``factor`` times as long."""

    def longer(item):
        if getattr(item, "duration", None) is None or getattr(item, "collective", None) is not None:
            return item
        return replace(item, duration=replace(item.duration, seconds=item.duration.seconds * factor))

    def changed(rank: RankGraph) -> RankGraph:
        if rank.rank != number:
            return rank
        threads = {name: tuple(map(longer, actions)) for name, actions in rank.threads.items()}
        return replace(rank, threads=threads, tasks=tuple(map(longer, rank.tasks)))

    return replace(graph, ranks=tuple(map(changed, graph.ranks)))


def test_the_path_is_on_the_ranks_that_the_step_waits_for(monkeypatch, tmp_path):
    """What a stage has of the path is by how much the step grows where that stage is slower; of most it is nothing."""
    kept: list[PredictionResult] = []
    monkeypatch.setattr("e2e.report.html_report.write_report", lambda answer, path: kept.append(answer))
    job = {"gpus": 4, "parallel": "pp=4,micro-batches=4", "batch_size": 4}
    answer = e2e.predict(**MODEL, **job, report=tmp_path / "report.html")
    assert sum(rank.path_seconds for rank in answer.ranks) == pytest.approx(answer.critical_path_seconds)
    (result,) = kept
    more = 1e-3
    step = simulate_iterations(result.graph, 6).period_seconds
    for rank in answer.ranks:
        own = sum(
            part.seconds
            for part in result.path.segments
            if part.rank == rank.rank and part.kind not in ("collective transfer", "collective wait", "bubble")
        )
        grown = simulate_iterations(slower(result.graph, rank.rank, 1 + more), 6).period_seconds - step
        assert own <= rank.path_seconds * (1 + 1e-9)
        assert grown / more == pytest.approx(own, rel=0.1, abs=0.02 * step)
    assert min(rank.path_seconds for rank in answer.ranks) < 0.05 * step < max(r.path_seconds for r in answer.ranks)
