"""The models suite on CPU tensors: the code that runs on a GPU, small models of every kind."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from e2e.capture.models import catalog, dlrm
from e2e.capture.models.configurations import PRESETS
from e2e.capture.models.image_models import ResNet50
from lab.bench.measured_models import SAMPLES, ModelCase, measure_models

TINY = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64}
CASES_OF_EVERY_KIND = (
    ModelCase("tiny-gpt", 2, 8, "train", "bfloat16", "flash", traced=True),
    ModelCase("tiny-gpt", 2, 8, "inference"),
    ModelCase("tiny-images", 2, 0, "forward-backward"),
    ModelCase("tiny-dlrm", 4),
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny-gpt", TINY)
    monkeypatch.setitem(catalog.IMAGES, "tiny-images", (ResNet50, 32))
    ddp = dlrm.CONFIGS["dlrm-ddp"]
    monkeypatch.setitem(dlrm.CONFIGS, "tiny-dlrm", replace(ddp, rows=tuple(min(each, 50) for each in ddp.rows)))
    monkeypatch.setattr("lab.bench.measured_models._SAMPLE_SECONDS", 0.01)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "models.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.thorough
def test_every_kind_of_model_is_measured_and_resumed(tmp_path):
    lines: list[str] = []
    measure_models("cpu", tmp_path, 5.0, False, lines.append, CASES_OF_EVERY_KIND[:2])
    measure_models("cpu", tmp_path, 5.0, True, lines.append, CASES_OF_EVERY_KIND)
    rows = table(tmp_path)
    assert [row["model"] for row in rows] == ["tiny-gpt", "tiny-gpt", "tiny-images", "tiny-dlrm"]
    for row in rows:
        assert not row["error"]
        assert 0 < float(row["minimum_s"]) <= float(row["median_s"])
        assert int(row["samples"]) == SAMPLES and int(row["steps"]) >= 2
    assert float(rows[0]["profiled_s"]) > 0
    assert (tmp_path / rows[0]["trace"]).stat().st_size > 1000
    runs = json.loads((tmp_path / "models.json").read_text())["runs"]
    assert len(runs) == 2 and all(run["torch"] and run["device"] for run in runs)


def test_a_case_that_fails_is_a_row_and_the_others_go_on(tmp_path):
    cases = (ModelCase("no-such-model", 1), CASES_OF_EVERY_KIND[1])
    measure_models("cpu", tmp_path, 5.0, False, lambda line: None, cases)
    failed, measured = table(tmp_path)
    assert "no-such-model" in failed["error"] and not failed["median_s"]
    assert measured["median_s"]
