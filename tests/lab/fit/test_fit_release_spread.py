"""What whole steps change from release to release: pairs of one model on one card, and the interval that holds them."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.gpu import gpu_cost_model
from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import Gemm, Normalization
from e2e.price.speed_band import OfOlderLibraries, release_spread
from lab.data.timm_steps import TimmStep
from lab.fit.speed_band import main, release_pairs, spread_of

OLD = TimmStep("resnet50.a1", "rtx-4090", False, False, False, 240, 256, 224, 0.1, 25e6)
HEAD = "model,infer_step_time,infer_batch_size,infer_img_size,param_count\n"


def test_a_pair_is_one_model_on_one_card_run_alike():
    new = replace(OLD, model="resnet50.b2", version=291, seconds=0.09)  # other weights are no other step
    others = [
        replace(new, machine="rtx-3090"),
        replace(new, batch=128),
        replace(new, side=288),
        replace(new, channels_last=True),
        replace(new, compiled=True),
        replace(new, parameters=30e6),
    ]
    assert release_pairs([OLD, *others]) == []
    assert release_pairs([new, *others, OLD]) == [(OLD, new)]


def test_the_spread_holds_four_of_five_pairs_whichever_way_they_moved():
    moves = [0.0, 0.01, -0.02, 0.05, -0.05, 0.1, -0.1, 0.2, 0.3, -0.4, 0.02]
    pairs = [(OLD, replace(OLD, version=291, seconds=OLD.seconds * math.exp(move))) for move in moves]
    spread = spread_of(pairs)
    assert spread == pytest.approx(0.2)
    assert sum(abs(move) <= spread + 1e-9 for move in moves) / len(moves) == pytest.approx(0.8, abs=0.03)


def written(data: Path, version: str, seconds: float, models: int) -> None:
    (data / "timm").mkdir(exist_ok=True)
    rows = "".join(f"net_{place},{seconds * 1e3},256,224,{place + 1}.0\n" for place in range(models))
    (data / "timm" / f"benchmark-infer-amp-nchw-{version}-rtx4090.csv").write_text(HEAD + rows, encoding="utf-8")


def products_written(data: Path, older: float) -> None:
    """Two laboratories' products of 2 ms on H100, the one's ``older`` times as long."""
    (seconds,) = (each.seconds for each in gpu_cost_model(load_machine("h100-sxm")).estimate([PRODUCT]))
    texts = {
        "llmservingsim/H100/meta-llama/Llama-3.1-8B/tp1/layers.csv.gz": (
            f"layer_name,input,latency(ns)\ndown_proj,{PRODUCT.m},{seconds * 1e9}\n"
        ),
        "vidur/compute/h100/some/model/mlp.csv.gz": (
            "n_head,n_kv_head,n_embd,n_expanded_embd,use_gated_mlp,num_tokens,num_tensor_parallel_workers,"
            f"time_stats.mlp_down_proj.median\n32,8,4096,14336,True,{PRODUCT.m},1,{seconds * older * 1e3}\n"
        ),
    }
    for name, text in texts.items():
        (data / name).parent.mkdir(parents=True)
        with gzip.open(data / name, "wt", encoding="utf-8") as stream:
            stream.write(text)


PRODUCT = Gemm(1, 12000, 4096, 14336, "bfloat16", transpose_b=True)


def test_the_file_says_what_it_was_measured_on(tmp_path):
    written(tmp_path, "pt240-cu124", 0.1, 120)
    written(tmp_path, "pt291-cu128", 0.09, 120)
    products_written(tmp_path, 1.25)
    output = tmp_path / "spread.json"
    assert main(["--releases", "--data", str(tmp_path), "-o", str(output)]) == 0
    record = json.loads(output.read_text(encoding="utf-8"))
    assert record["pairs"] == 120 and len(record["provenance"]["tables"]) == 4
    assert release_spread(output) == pytest.approx(math.log(0.1 / 0.09), abs=1e-4)
    assert max(record["older_products"]["logs"]) == pytest.approx(math.log(1.25), abs=1e-3)


def test_older_libraries_take_longer_for_products_of_chips_they_were_not_tuned_to_and_for_nothing_else():
    others = [Gemm(1, 8192, 4096, 4096), Normalization("layer_norm", 8192, 4096, "bfloat16")]
    larger = [replace(PRODUCT, m=m) for m in (64, 512, 4096, 32768)]
    for name in ("h100-sxm", "a100-sxm-80gb"):
        machine = load_machine(name)
        newer = gpu_cost_model(machine)
        older = OfOlderLibraries(newer, machine)
        assert older.estimate(others) == newer.estimate(others)
        pairs = zip(older.estimate(larger), newer.estimate(larger), strict=True)
        ratios = [(old.seconds / new.seconds, old.upper / new.upper) for old, new in pairs]
        assert all(1.02 < ratio == pytest.approx(bound) for ratio, bound in ratios) == (name == "h100-sxm")
        assert name == "h100-sxm" or ratios == [(1.0, 1.0)] * 4
        seconds = [each.seconds for each in older.estimate(larger)]
        assert seconds == sorted(seconds)
