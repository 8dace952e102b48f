"""Launches and operator calls of several ranks: what runs for every layer and micro-batch counts every time."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import e2e
from costmodel.operators.device_work import Gemm
from e2e.parallelism.condense import Condenser
from e2e.parallelism.layers.pieces import Called, Work
from e2e.report.text_report import launches
from e2e.step.execution_graph import CallInfo, HostWork

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


def test_every_micro_batch_calls_its_operators_again():
    one, four = (e2e.predict(**MODEL, gpus=4, parallel=f"pp=4,micro-batches={count}", batch_size=4) for count in (1, 4))
    for few, many in zip(one.ranks, four.ranks, strict=True):
        assert 2.5 * few.operators < many.operators < 4 * few.operators
        # Nothing is launched that nobody calls: the shares of one micro-batch and of four are alike.
        assert many.kernels / many.operators == pytest.approx(few.kernels / few.operators, rel=0.25)
        assert many.kernels < many.operators
    assert four.operators == sum(rank.operators for rank in four.ranks)
    assert four.kernels == sum(rank.kernels for rank in four.ranks)
    told = launches(four)
    counts = [rank.kernels for rank in four.ranks]
    assert told.startswith(f"{min(counts):,} to {max(counts):,} in ") and told.endswith("on each of 4 distinct ranks")


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


def test_the_path_is_on_the_ranks_that_the_step_waits_for():
    """Over all ranks it is the step; of a stage that nobody waits for it is nothing, as that rank's own path shows."""
    answer = e2e.predict(**MODEL, gpus=4, parallel="pp=4,micro-batches=4", batch_size=4)
    assert sum(rank.path_seconds for rank in answer.ranks) == pytest.approx(answer.critical_path_seconds)
    for rank in answer.ranks:
        assert sum(rank.attribution.values()) == pytest.approx(answer.critical_path_seconds)
