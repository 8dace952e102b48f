"""A prediction as JSON, text and HTML: of one rank and of several."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from e2e.commands.cli import app
from e2e.explain.critical_path import PathPart
from e2e.explain.prediction import Advice, Alternative, AskedValue, LargestBatch, WhatIfRow, throughput_of
from e2e.explain.utilisation import GpuPrice, StepEnergy, cost_of
from e2e.report.html_report import render_page, write_report
from e2e.report.tables import number_text
from e2e.report.text_report import PLAIN_WIDTH, render
from e2e.step.memory import MemoryUsage
from tests.e2e.toy_predictions import predict_ranks, predict_step, reduced, setting, step
from tests.web_pages import read_page

# What programs read of one GPU and of several, before the two were one record.
OF_ONE = {
    "workload", "machine", "iteration_seconds", "interval_seconds", "forward_seconds", "backward_seconds",
    "optimizer_seconds", "gpu_active_seconds", "gpu_idle_seconds", "host_bound_fraction", "breakdown", "overheads",
    "critical_path", "peak_memory_bytes", "memory_breakdown", "memory_capacity_bytes", "fits", "coverage", "kernels",
    "operators", "warnings", "notes",
}  # fmt: skip
OF_BOTH = {
    "other_seconds", "memory_shortage", "asked", "board", "throughput", "mean", "utilisation", "energy", "cost",
    "advice", "what_if", "ranges", "cuda_graph", "memory_room_bytes", "memory_verdict",
}  # fmt: skip
OF_SEVERAL = {"cluster", "gpus", "nodes", "critical_path_seconds", "attribution", "ranks", "collectives", "stragglers"}


def memory(*sizes: int) -> dict[int, MemoryUsage]:
    return {rank: MemoryUsage(size, {"parameters": size}, 0, "aten::mm") for rank, size in enumerate(sizes)}


def test_reports_of_one_gpu_hold_the_figures_and_escape_names(tmp_path, capsys):
    result = predict_step(step(), setting(1.0, 1e-3))
    prediction = result.prediction
    record = json.loads(json.dumps(prediction.to_json()))
    assert record["iteration_seconds"] == prediction.iteration_seconds and record["fits"] is True
    text = render_page(result)
    read = read_page(text)
    assert "toy <model> on v100-pcie-32gb" in read.text and read.count("model") == 0
    write_report(result, tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text() == text
    render(prediction)
    printed = capsys.readouterr().out
    assert "aten::mm" in printed and "toy <model> on v100-pcie-32gb\n" in printed
    assert "launches    4 in 4 operator calls\n" in printed and "of 31.3 GiB for tensors: fits" in printed
    # What only several ranks have is not there.
    for word in ("mean rank", "alike", "collective", "straggler", "across ranks", "rank 0"):
        assert word not in printed
    assert not {"ranks", "collectives"} & {attributes.get("id") for name, attributes in read.tags if name == "section"}


ALTERNATIVES = [
    Alternative("--compile", "torch.compile", 0.5, 2, 2.0, 3 << 30, True),
    Alternative("--batch-size 64", "memory", 9.0, 64, 8.0, 99 << 30, False),
    Alternative("--parallel tp=3", "heads", problem="3 does not divide 8"),
]


def full_result():
    """With everything that a report can say beside the times."""
    result = predict_step(step(), setting(1.0, 1e-3))
    prediction = replace(
        result.prediction,
        asked=(AskedValue("--model", "<gpt2>", True), AskedValue("--dtype", "float32 (TF32 off)", False)),
        throughput=throughput_of(2, 500, 4.0, 1, "2 x 1"),
        energy=StepEnergy(720.0, 180.0, 250.0),
        cost=cost_of(GpuPrice(3.6, "EUR", "a contract", "2026-11-01"), 4.0, 1),
        advice=Advice(ALTERNATIVES, LargestBatch(48, 31 << 30), ["--cuda-graph"], "stopped with Ctrl-C"),
        what_if=(what_if("as it is", 4.0), what_if("kernels:<gemm>=2x", 2.0)),
    )
    return replace(result, prediction=prediction)


def what_if(question, seconds):
    path = {"host": 1.0, "device": seconds - 1.0, "communication": 0.0, "other": 0.0}
    longest = PathPart("compute", "aten::mm", seconds - 1.0, 1, "")
    return WhatIfRow(question, seconds, (seconds, seconds), 4.0 / seconds, None, path, longest, warnings=("doubtful",))


def test_text_and_page_say_what_was_asked_how_fast_it_is_what_it_costs_and_what_to_change(capsys):
    """The same lines in both, and all figures in the record."""
    result = full_result()
    prediction = result.prediction
    render(prediction)
    printed, written = capsys.readouterr().out, read_page(render_page(result)).text
    for piece in (
        "--model <gpt2>",
        "--dtype float32 (TF32 off)",
        "v100-pcie-32gb: NVIDIA Tesla V100",
        "32 GiB, limit 250 W, 80 multiprocessors",
        "0.5 samples/s, 250 tokens/s (a step is 2 sequences of 500 tokens: 2 x 1)",
        "about 720 J a step, 0.2 kWh per million tokens, 180 of 250 W a board",
        "0.004 EUR a step, 4 EUR per million tokens at 3.6 EUR per GPU and hour (a contract, 2026-11-01)",
        "T1 between operators",
        "kernels:<gemm>=2x",
        "75% -> 50%",
        "kernels:<gemm>=2x: doubtful",
        "2.00x as fast",
        "largest batch that fits: 48 per GPU and micro-batch (31.0 GiB allocated)",
        "also predicted: --batch-size 64 8.00x, does not fit",
        "not possible (reasons in --json): --parallel tp=3",
        "incomplete: stopped with Ctrl-C; not predicted: --cuda-graph",
    ):
        assert piece in printed, piece
        assert piece in written, piece
    assert "MFU" in printed and "HFU" in written
    record = json.loads(json.dumps(prediction.to_json()))
    assert record["advice"]["alternatives"][0]["gain"] == 2.0 and record["advice"]["largest_batch"]["batch_size"] == 48
    assert record["advice"]["best"] == ["--compile"]
    assert record["cost"]["price"]["date"] == "2026-11-01" and record["asked"][0]["given"] is True


def test_the_memory_line_of_a_full_card_tells_what_is_in_use(capsys):
    """The allocator takes all that there is; whether a step fits goes by what is in use."""
    prediction = full_result().prediction

    def line(peak: int, reserve: int) -> str:
        (rank,) = prediction.ranks
        rank = replace(rank, peak_memory_bytes=peak << 30, memory_breakdown={"reserve": reserve << 30})
        render(replace(prediction, ranks=(rank,), memory_room_bytes=40 << 30))
        return next(row for row in capsys.readouterr().out.splitlines() if row.startswith("memory"))

    assert "40.00 GiB at the peak (30.00 GiB in use, the rest kept by the allocator) of 40.0 GiB" in line(40, 10)
    assert "30.00 GiB at the peak of 40.0 GiB" in line(30, 10) and "41.00 GiB at the peak of" in line(41, 0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (6.47e-5, "0.0000647"),
        (8.3516, "8.352"),
        (24.70, "24.7"),
        (116512.0, "116,500"),
        (2.6e9, "2,600,000,000"),
    ],
)
def test_numbers_are_no_powers_of_ten(value, text):
    assert number_text(value) == text


def test_kernels_of_templates_keep_their_row(capsys):
    """Names of hundreds of letters with all template arguments, as profiles have them."""
    functor = "at::native::BinaryFunctor<float, float, float, at::native::(anonymous namespace)::threshold<float>>"
    name = f"void at::native::vectorized_elementwise_kernel<4, {functor}, 3>(int, {functor}, 3)"
    prediction = full_result().prediction
    part = PathPart("kernel", name, 1.0, 1, f"launch of {name}")
    figures = {**prediction.breakdown, "by_operator": {name: 1.0}}
    render(replace(prediction, critical_path=(part,), breakdown=figures))
    rows = [line for line in capsys.readouterr().out.splitlines() if "vectorized" in line]
    assert len(rows) == 2 and all("vectorized_elementwise_kernel<4, BinaryFunctor<float, " in row for row in rows)
    assert max(map(len, rows)) < PLAIN_WIDTH and "1000.000" in rows[0]


def test_without_advice_the_text_says_how_to_get_it(capsys):
    prediction = full_result().prediction
    render(replace(prediction, advice=None))
    assert "--advice predicts other settings" in capsys.readouterr().out
    recorded = (AskedValue("--kineto", "profile.json", True),)
    render(replace(prediction, advice=None, asked=recorded))
    printed = capsys.readouterr().out
    assert "--what-if asks about the recorded step" in printed and "--advice" not in printed


def test_one_record_has_what_those_of_one_gpu_and_of_several_had():
    """The keys that programs read; of the rank that computes longest, memory of the fullest one."""
    one = predict_step(step(), setting(1.0, 1e-3)).prediction.to_json()
    record = predict_ranks(reduced((10.0, 16.0)), memory=memory(3, 2)).prediction.to_json()
    assert set(one) == set(record) == OF_ONE | OF_SEVERAL | OF_BOTH
    assert record["gpu_active_seconds"] + record["gpu_idle_seconds"] == pytest.approx(record["iteration_seconds"])
    assert sum(record["breakdown"]["by_kind"].values()) == pytest.approx(20) and record["peak_memory_bytes"] == 3
    assert record["memory_breakdown"] == {"parameters": 3}


def test_reports_of_several_ranks_hold_the_figures(tmp_path, capsys):
    graph = replace(reduced((10.0, 16.0)), source="toy <job>")
    result = predict_ranks(graph, memory=memory(2 << 30, 2 << 30))
    prediction = result.prediction
    render(prediction)
    printed = capsys.readouterr().out
    for piece in ("toy <job> on 2 x v100", "on 2 nodes", "20000.000 ms", "collective transfer", "all_reduce",
                  "straggler   rank 1 came last in 1 collectives; the next one waited 6000.000 ms",
                  "2.00 to 2.00 GiB", "device time by operator"):  # fmt: skip
        assert piece in printed
    written = render_page(result)
    read = read_page(written)
    assert "toy <job> on 2 x v100" in read.text and read.count("job") == 0
    assert "rank 0, waiting for ranks: 6 s" in written and "rank 1" in read.text
    assert "The GPU has 32 GiB." in read.text
    write_report(result, tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == written


@pytest.mark.parametrize(
    ("gib", "status", "word"), [(29, 0, "fits"), (31, 3, "may not fit"), (33, 4, "DOES NOT FIT"), (None, 0, "")]
)
def test_the_exit_status_says_whether_a_step_fits(monkeypatch, gib, status, word):
    held = None if gib is None else memory(gib << 30, 1 << 30)
    prediction = predict_ranks(reduced((10.0, 16.0)), memory=held).prediction
    monkeypatch.setattr("e2e.commands.e2e_api.predict", lambda *_, **__: prediction)
    for more in ([], ["--json"]):
        done = CliRunner().invoke(app, ["predict", "--model", "gpt2", "--gpu", "v100-pcie-32gb", *more])
        assert done.exit_code == status, done.output
        assert word in done.stdout if not more else json.loads(done.stdout)["memory_verdict"]
