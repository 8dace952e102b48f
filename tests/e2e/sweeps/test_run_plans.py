"""Which ways a sweep predicts, and how a whole run ranks them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from costmodel.base.errors import InputError

pytest.importorskip("torch")

import e2e
from e2e.parallelism.spec import text_of
from e2e.sources.requests import SpreadModel
from e2e.sweeps.first_look import promising_cells, with_best_way
from e2e.sweeps.sweep_driver import DAY, ranking_key, run_plan
from e2e.sweeps.sweep_results import SweepRow
from e2e.sweeps.sweep_space import SweepRequest, cells_of

TINY = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 128,
}  # fmt: skip


def row(rate: float, gpus: int) -> SweepRow:
    return SweepRow("h100-sxm", gpus, 1, "dp=8", "ok", tokens_per_second_per_gpu=rate, samples_per_second=rate * gpus)


def test_a_deadline_puts_the_late_last_and_a_price_the_cheap_first():
    slow, fast = row(1000.0, 8), row(800.0, 16)
    plan = run_plan("1B", None, "2.5")
    assert plan.seconds(slow) == pytest.approx(1e9 / 8000)
    assert plan.cost(slow) == pytest.approx(1e9 / 1000 / 3600 * 2.5)
    assert sorted((fast, slow), key=lambda each: ranking_key(each, plan)) == [slow, fast]
    hurried = replace(plan, deadline=1e9 / 8000 - 1)
    assert sorted((slow, fast), key=lambda each: ranking_key(each, hurried)) == [fast, slow]
    assert run_plan(1e12, "30d", None).deadline == 30 * DAY
    for wrong in (("many", None), ("-1", None), ("1T", "soon"), (None, "3d")):
        with pytest.raises(InputError, match="--tokens|--deadline"):
            run_plan(*wrong, None)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    return str(path)


def test_more_tries_have_the_fewer_among_them_and_what_cannot_fit_is_not_tried(tiny: str):
    request = SweepRequest(tiny, global_batch=16, layers=4, sequence_length=64)
    cells = cells_of(request, ["h100-sxm"], [8], ["auto"])
    tries = [promising_cells(request, cells, most).cells for most in (1, 4, 16)]
    assert tries[0] == tries[1][:1] and tries[1] == tries[2][:4]
    large = SweepRequest("llama-3.1-405b", layers=126, sequence_length=4096)
    assert not promising_cells(large, cells_of(large, ["h100-sxm"], [8], ["auto"]), 4).cells


# Megatron-Bridge's performance summaries of 25.09 and 25.11 and torchtitan's performance.md of May 2024: recipe, model
# and its layers, sequences, GPUs, global batch, setting.
PUBLISHED = [
    ("megatron", "llama-3-70b", 80, 8192, "dgx-h100", 64, 128, "fsdp=2,tp=4,pp=8,zero=1,virtual-stages=5"),
    ("megatron", "llama-3.1-405b", 126, 8192, "dgx-h100", 1024, 512, "fsdp=8,cp=2,tp=8,pp=8,zero=1,virtual-stages=8"),
    ("megatron", "llama-3.1-405b", 126, 8192, "dgx-b200", 128, 64, "fsdp=2,cp=2,tp=4,pp=8,zero=1,virtual-stages=8"),
    ("torchtitan", "llama-3-70b", 80, 8192, "a100-sxm-80gb", 64, 64, "fsdp=64,zero=3"),
    ("torchtitan", "llama-2-70b", 80, 4096, "a100-sxm-80gb", 64, 64, "fsdp=64,zero=3"),
]


@pytest.mark.parametrize(("recipe", "model", "layers", "length", "gpu", "gpus", "batch", "setting"), PUBLISHED)
def test_what_experts_published_is_among_the_ways_that_are_predicted(
    recipe, model, layers, length, gpu, gpus, batch, setting
):
    """So that the best way found is at least as fast."""
    request = SweepRequest(model, global_batch=batch, sequence_length=length, layers=layers, recipe=recipe)
    looked = promising_cells(request, cells_of(request, [gpu], [gpus], ["auto"]), 12)
    assert any(set(setting.split(",")) <= set(text_of(cell.parallel).split(",")) for cell in looked.cells)


def test_gpus_alone_take_the_fastest_of_the_ways_that_were_tried(tiny: str):
    found = e2e.predict(model_config=tiny, gpu="h100-sxm", gpus=2, sequence_length=64)
    assert any("the fastest of" in note for note in found.notes) and found.gpus == 2
    assert found.throughput.samples_per_second > 0


def test_gpus_alone_prefer_a_way_that_fits_to_a_faster_one_that_may_not(tiny: str, monkeypatch: pytest.MonkeyPatch):
    """Without recomputation it may not fit, with some it does."""

    def predicted(request: SpreadModel) -> SimpleNamespace:
        again = request.parallel.recompute != "none"
        rate = SimpleNamespace(tokens_per_second_per_gpu=80.0 if again else 100.0)
        return SimpleNamespace(
            prediction=SimpleNamespace(fits=True if again else None, throughput=rate, memory_shortage=None)
        )

    monkeypatch.setattr("e2e.sweeps.first_look.predict_request", predicted)
    asked = SpreadModel(model_config=Path(tiny), sequence_length=64, gpu="h100-sxm", gpus=2)
    best, line = with_best_way(asked)
    assert best.parallel.recompute == "selective" and " 80 tokens/s/GPU" in line
