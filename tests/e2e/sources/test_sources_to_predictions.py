"""Every kind of source through the one driver: as one rank and, where it makes sense, as several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.e2e.recorded_traces import DLRM, DLRM_ET, LINEAR, LINEAR_ET, recorded
from tests.web_pages import read_page

pytest.importorskip("torch")

from e2e.commands.cli import app
from e2e.explain.critical_path import HOST_KINDS
from e2e.explain.predictor import PredictionResult
from e2e.report.html_report import render_page
from e2e.report.text_report import render
from e2e.sources.predict_request import predict_request
from e2e.sources.requests import request_of

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 32,
}  # fmt: skip
SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def make_step(batch_size=4):
    model = torch.nn.Linear(64, 64).cuda()
    if dist.is_available() and int(__import__("os").environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(batch_size, 64, device="cuda")

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return model, step
"""
TABLES = """
origin: drawn for this test
defaults: {dim: 64, pooling: 10, optimizer: rowwise_adagrad}
tables:
  - {name: user, rows: 20000}
  - {name: country, rows: 200, pooling: 1}
model: {bottom: [32, 64], top: [128, 1]}
"""
SMALL: dict[str, Any] = {"batch_size": 2, "sequence_length": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sources")
    (made / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (made / "train.py").write_text(SCRIPT, encoding="utf-8")
    (made / "tables.yaml").write_text(TABLES, encoding="utf-8")
    return made


def ran(
    parallel: str | None = None, gpus: int | None = None, sharding: Path | None = None, **workload: Any
) -> PredictionResult:
    asked = {"parallel": parallel, "sharding": sharding, "gpu": "v100-sxm2-32gb", "gpus": gpus}
    return predict_request(request_of({**workload, **asked}))


def configuration(folder: Path) -> Iterator[PredictionResult]:
    yield ran(model_config=folder / "config.json", **SMALL)
    yield ran(model_config=folder / "config.json", **SMALL, parallel="pp=2,dp=2,micro-batches=2")


def script(folder: Path) -> Iterator[PredictionResult]:
    reference = f"{folder / 'train.py'}:make_step"
    yield ran(script=reference)
    yield ran(script=reference, gpus=4)


def execution_trace(folder: Path) -> Iterator[PredictionResult]:
    yield ran(traces=(str(recorded(LINEAR_ET)),))
    one_of_eight = recorded(DLRM_ET) / "dlrm_pytorch_et/dlrm_eg_0.json"
    yield ran(traces=(str(one_of_eight),), gpus=8)


def recorded_trace(folder: Path) -> Iterator[PredictionResult]:
    yield ran(kineto=(str(recorded(LINEAR)),), traces=(str(recorded(LINEAR_ET)),))
    yield ran(kineto=(str(recorded(DLRM)),), traces=(str(recorded(DLRM_ET)),))


def sharding_plan(folder: Path) -> Iterator[PredictionResult]:
    for gpus in (1, 2):
        plan = folder / f"plan{gpus}.json"
        given = ["--tables", folder / "tables.yaml", "--gpu", "a100-sxm-40gb", "--gpus", gpus, "--batch-size", 64]
        done = CliRunner().invoke(app, ["shard", *map(str, given), "--seconds", "0.3", "-o", str(plan)])
        assert done.exit_code == 0, done.output
        yield ran(model="dlrm", tables=folder / "tables.yaml", sharding=plan, gpus=gpus)


SOURCES = (configuration, script, execution_trace, recorded_trace, sharding_plan)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_one_rank_and_several_go_the_same_way(source, folder, capsys):
    one, several = source(folder)
    assert (one.prediction.gpus, len(one.prediction.ranks)) == (1, 1)
    # Exchanges of a sharded model with itself, which take no time.
    assert all(each.ranks == 1 and each.transfer_seconds == 0 for each in one.prediction.collectives)
    assert several.prediction.gpus > 1 and several.prediction.collectives
    for result in (one, several):
        check(result)
    assert set(one.prediction.to_json()) == set(several.prediction.to_json())
    assert "alike" not in shown(one, capsys) and "alike" in shown(several, capsys)


def check(result: PredictionResult) -> None:
    prediction, window = result.prediction, pytest.approx(result.prediction.critical_path_seconds)
    low, high = prediction.interval_seconds
    assert 0 < low <= prediction.iteration_seconds <= high
    assert sum(each.seconds for each in prediction.critical_path) == window
    assert sum(prediction.attribution.values()) == window
    assert all(sum(rank.attribution.values()) == window for rank in prediction.ranks)
    phases = (prediction.forward_seconds, prediction.backward_seconds, prediction.optimizer_seconds)
    assert min(phases) > 0 and sum(phases) + prediction.other_seconds == window
    assert prediction.gpu_active_seconds + prediction.gpu_idle_seconds == window
    assert sum(prediction.coverage.values()) == pytest.approx(1)
    host = sum(seconds for kind, seconds in prediction.attribution.items() if kind in HOST_KINDS)
    assert prediction.host_bound_fraction * prediction.critical_path_seconds == pytest.approx(host)
    by_operator, *by = (sum(prediction.breakdown[way].values()) for way in ("by_operator", "by_bound", "by_kind"))
    assert by == pytest.approx([by_operator] * 2)
    for name in ("kernels", "operators"):
        assert sum(getattr(rank, name) for rank in prediction.ranks) == getattr(prediction, name)
    used, rate = prediction.utilisation, prediction.throughput
    if used is not None and len(used.peak_flops_per_second) == 1:
        (peak,) = used.peak_flops_per_second.values()
        possible = peak * prediction.gpus * prediction.iteration_seconds
        assert (used.mfu * possible, used.hfu * possible) == pytest.approx((used.model_flops, used.executed_flops))
    if rate is not None and rate.sequence_length is not None:
        tokens = rate.samples * rate.sequence_length
        assert rate.tokens_per_second * prediction.iteration_seconds == pytest.approx(tokens)
    assert prediction.fits is True and prediction.peak_memory_bytes == max(
        rank.peak_memory_bytes or 0 for rank in prediction.ranks
    )
    assert prediction.memory_shortage is None
    assert set(result.paths) == {rank.rank for rank in result.graph.ranks}


def shown(result: PredictionResult, capsys: pytest.CaptureFixture[str]) -> str:
    """Both reports."""
    render(result.prediction)
    return capsys.readouterr().out + read_page(render_page(result)).text
