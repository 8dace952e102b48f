"""Plans: the cheapest way to hold latency targets."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

import e2e
from costmodel.base.errors import InputError, ShortageError
from e2e.commands.cli import app
from e2e.serving.serving_plan import PlanRow, ServingPlan, plan_record, plan_text, start_command, write_plan_page
from e2e.serving.serving_request import ServingRequest

_ASKED = {"model": "llama-3.2-1b", "gpus_of": "h100-sxm,l4", "gpus": "1", "workers": 1, "output_length": 32}


_DRAFT = "tokens=2,acceptance=0.6"


@pytest.fixture(scope="module")
def plan() -> ServingPlan:
    return e2e.plan_serve(**_ASKED, concurrency=300, tpot="20ms", price="2")


def test_the_cheapest_comes_first_and_holds_the_targets(plan: ServingPlan) -> None:
    best = plan.best
    assert best is plan.rows[0]
    assert best.probability >= 0.9
    assert best.copies * best.users >= 300
    assert best.per_hour == 2 * best.total_gpus
    assert [row.cost for row in plan.rows] == sorted(row.cost for row in plan.rows)
    assert {row.request.precision for row in plan.rows} == {"", "weights=fp8,kv=fp8"}


def test_nothing_surpasses_the_frontier(plan: ServingPlan) -> None:
    front = plan.frontier
    for row in plan.rows:
        assert not any(row.place[0] > each.place[0] and row.place[1] > each.place[1] for each in front)


def test_a_tighter_target_costs_more(plan: ServingPlan) -> None:
    tight = e2e.plan_serve(**_ASKED, concurrency=300, tpot="4ms", price="2")
    assert tight.best is None or tight.best.cost >= plan.best.cost
    assert e2e.plan_serve(**_ASKED | {"gpus_of": "l4"}, concurrency=3, tpot="1us").best is None


def test_copies_follow_from_the_rate() -> None:
    one, many = (e2e.plan_serve(**_ASKED | {"gpus_of": "l4"}, rate=rate, ttft="1s") for rate in (1.0, 100.0))
    assert one.best.copies == 1 < many.best.copies
    assert many.best.request.rate == pytest.approx(100 / many.best.copies)


def test_the_answer_of_a_setting_is_that_of_serve(plan: ServingPlan) -> None:
    rows = (row for row in plan.rows if row.users == 8 and not row.request.precision)
    row = next(row for row in rows if row.request.gpu == "h100-sxm")
    served = e2e.serve("llama-3.2-1b", gpu="h100-sxm", concurrency=8, output_length=32)
    assert row.served.tpot_seconds == served.tpot_seconds
    assert row.served.ttft_seconds == served.ttft_seconds
    assert row.served.output_tokens_per_second == served.output_tokens_per_second


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", ("vllm serve llama-3.2-1b", "--data-parallel-size 2", "--max-num-seqs 7", "--kv-cache-dtype fp8")),
        ("sglang", ("--enable-dp-attention", "--max-running-requests 14", "--quantization fp8")),
        ("trtllm", ("--tp_size 4", "--max_batch_size 7", "enable_attention_dp: true; kv_cache_config: {dtype: fp8}")),
    ],
)
def test_flags_start_the_setting(plan: ServingPlan, engine: str, words: tuple[str, ...]) -> None:
    asked = ServingRequest(
        model="llama-3.2-1b", gpu="h100-sxm", gpus=4, engine=engine, parallel="tp=4,dp-attention=2",
        precision="weights=fp8,kv=fp8", engine_options="sequences=7",
    )  # fmt: skip
    command = start_command(PlanRow(asked, plan.rows[0].served, 4, 7, 1.0))
    for each in words:
        assert each in command


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", ('"method": "mtp", "num_speculative_tokens": 1', "NixlConnector")),
        ("sglang", ("--speculative-algorithm EAGLE", "--speculative-num-draft-tokens 2", "--disaggregation-mode")),
        ("trtllm", ("decoding_type: MTP, num_nextn_predict_layers: 1", "cache_transceiver_config")),
    ],
)
def test_flags_of_drafts_and_of_copies_apart(plan: ServingPlan, engine: str, words: tuple[str, ...]) -> None:
    asked = ServingRequest(
        model="deepseek-r1", gpu="h200-sxm", gpus=8, engine=engine, speculate="tokens=1,acceptance=0.8",
        disaggregate="prefill=1,decode=1",
    )  # fmt: skip
    command = start_command(PlanRow(asked, plan.rows[0].served, 16, 64, 1.0))
    for each in words:
        assert each in command


def test_a_high_percentile_is_harder_to_hold_than_the_mean() -> None:
    asked = {**_ASKED, "gpus_of": "l4", "precision": "kv=bf16", "concurrency": 64, "ttft": "1s"}
    mean, high = (
        {row.users: row.probability for row in e2e.plan_serve(**asked, percentile=each).rows if row.users < 64}
        for each in ("mean", "p99")
    )
    assert mean.keys() == high.keys() and all(high[users] <= mean[users] for users in mean)
    # By the first burst, with which all users begin.
    assert high[32] < mean[32] - 0.1


def test_a_plan_tries_drafts_and_copies_apart_if_they_are_named() -> None:
    asked = {**_ASKED, "gpus_of": "h100-sxm", "precision": "kv=bf16", "concurrency": 4}
    found = e2e.plan_serve(**asked, disaggregate="prefill=1,decode=2", speculate=f"{_DRAFT},draft=llama-3.2-1b")
    ways = {(row.request.speculate != "", row.request.disaggregate, row.gpus) for row in found.rows}
    assert ways == {(drafts, *split) for drafts in (False, True) for split in (("", 1), ("prefill=1,decode=2", 3))}


def test_reports_say_the_same(plan: ServingPlan, tmp_path: Path) -> None:
    text, record = plan_text(plan), plan_record(plan)
    assert record["best"]["command"] in text
    json.dumps(record, allow_nan=False)
    write_plan_page(plan, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "Throughput per GPU" in page and f", users {plan.rows[0].users}, TTFT " in page.split("</p>")[0]


def test_what_cannot_be_is_told_in_one_line() -> None:
    with pytest.raises(InputError, match="give --concurrency USERS or --rate"):
        e2e.plan_serve(**_ASKED)
    with pytest.raises(InputError, match="--probability 1.5"):
        e2e.plan_serve(**_ASKED, rate=1.0, probability=1.5)
    with pytest.raises(InputError, match="--report plan.txt: a report is a page"):
        e2e.plan_serve(**_ASKED, rate=1.0, report="plan.txt")
    with pytest.raises(ShortageError, match="does not fit"):
        e2e.plan_serve("llama-3.1-70b", gpus_of="l4", gpus="1", rate=1.0)
    with pytest.raises(InputError, match="--engine tgi: choose one of vllm"):
        e2e.plan_serve(**_ASKED, rate=1.0, engine="vllm,tgi")
    ran = CliRunner().invoke(
        app, ["plan", "serve", "--model", "llama-3.2-1b", "--gpus-of", "l4", "--rate", "1", "--gpus", "x"]
    )
    assert ran.exit_code == 2


def test_ctrl_c_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int, count: int, text: str) -> None:
        raise KeyboardInterrupt

    found = e2e.plan_serve(**_ASKED, concurrency=8, progress=stop)
    assert found.stopped
    assert found.best is not None
    assert found.best.cost < math.inf
