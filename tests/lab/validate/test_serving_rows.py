"""Rows of measured serving, as they are asked."""

from __future__ import annotations

import gzip
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from e2e.serving.serving_request import ServingRequest
from lab.validate.engine_times import HostTimes, RowLine, fitted
from lab.validate.serving import MeasuredServing, read_silicon

NAMES = (
    "row,gpu,gpus,engine,engine_version,model,weights,expert_weights,tp,ep,attention_dp,isl_tokens,osl_tokens,"
    "shortest_length_ratio,concurrency,ttft_mean_ms,tpot_mean_ms,speculative,source,flags"
)


@pytest.mark.parametrize(
    ("engine", "tp", "ep", "asked"),
    [
        ("trtllm", 4, 1, "tp=4,ep=4"),
        ("trtllm", 4, 2, "tp=2,ep=2"),  # the product of both is written for tp
        ("trtllm", 8, 8, "tp=8,ep=8"),
        ("sglang", 4, 1, "tp=4,ep=1"),
    ],
)
def test_gpt_oss_ran_with_as_many_ranks_of_experts_as_of_tensors(tmp_path: Path, engine, tp, ep, asked):
    row = f"a,h200-sxm,{tp},{engine},,gpt-oss-120b,bf16,mxfp4,{tp},{ep},1,1024,1024,1,8,100,10,none,inferencex,"
    (tmp_path / "serving").mkdir()
    with gzip.open(tmp_path / "serving" / "silicon.csv.gz", "wt") as file:
        file.write(f"{NAMES}\n{row}\n")
    (found,) = read_silicon(tmp_path)
    assert found.request.parallel == f"{asked},dp-attention=1"
    assert f"tp={found.request.gpus}," in asked + ","


def test_host_times_are_found_again():
    times = HostTimes(8e-4, 20e-6, 0.05)
    asked = MeasuredServing("gpu/engine/model", "", ServingRequest(model="llama-3.1-8b", gpu="h100-sxm"), {})
    lines = []
    for users in (4, 16, 64, 128):
        # Predicted times to the first token at 0, 20, 80 and 300 ms of the server.
        line = RowLine(asked, 5e-3, 1.0, users, (0.1, 0.12, 0.3, 0.52))
        measured = {"tpot": 5e-3 + 8e-4 + users * 20e-6, "ttft": 0.12 + 0.18 / 2}
        lines.append(replace(line, row=replace(asked, measured=measured)))
    assert astuple(fitted(lines)) == pytest.approx(astuple(times))
