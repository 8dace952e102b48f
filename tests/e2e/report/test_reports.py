"""A prediction as JSON, text and HTML: of one rank and of several."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from toy_predictions import predict_ranks, predict_step, reduced, setting, step

from costmodel.base.errors import InputError
from e2e.report.html_report import page, write_report
from e2e.report.outputs import show
from e2e.report.text_report import render
from e2e.step.memory import MemoryUsage

# What programs read of one GPU and of several, before the two were one record.
OF_ONE = {
    "workload", "machine", "iteration_seconds", "interval_seconds", "forward_seconds", "backward_seconds",
    "optimizer_seconds", "gpu_active_seconds", "gpu_idle_seconds", "host_bound_fraction", "breakdown", "overheads",
    "critical_path", "peak_memory_bytes", "memory_breakdown", "memory_capacity_bytes", "fits", "coverage", "kernels",
    "operators", "warnings", "notes",
}  # fmt: skip
OF_SEVERAL = {"cluster", "gpus", "nodes", "critical_path_seconds", "attribution", "ranks", "collectives", "stragglers"}


def memory(*sizes: int) -> dict[int, MemoryUsage]:
    return {rank: MemoryUsage(size, {"parameters": size}, 0, "aten::mm") for rank, size in enumerate(sizes)}


def test_reports_of_one_gpu_hold_the_figures_and_escape_names(tmp_path, capsys):
    prediction = predict_step(step(), setting(1.0, 1e-3)).prediction
    record = json.loads(json.dumps(prediction.to_json()))
    assert record["iteration_seconds"] == prediction.iteration_seconds and record["fits"] is True
    text = page(prediction)
    assert "toy &lt;model&gt;" in text and "<model>" not in text and "http" not in text
    write_report(prediction, tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text() == text
    render(prediction)
    printed = capsys.readouterr().out
    assert "aten::mm" in printed and "toy <model> on v100-pcie-32gb\n" in printed
    assert "launches    4 of 4 operator calls\n" in printed and "of 32 GiB: fits" in printed
    # What only several ranks have is not there.
    for word in ("mean rank", "alike", "collective", "straggler", "across ranks", "rank 0"):
        assert word not in printed
    assert not {"Ranks", "Collectives", "Stragglers"} & {part.partition("<")[0] for part in text.split("<h2>")}


def test_the_record_is_json_and_the_timeline_is_there():
    result = predict_ranks(reduced((10.0, 16.0)))
    record = json.loads(json.dumps(result.prediction.to_json()))
    assert record["ranks"][1]["attribution"]["compute"] == pytest.approx(16)
    assert record["collectives"][0]["skew_seconds"] == pytest.approx(6)
    assert result.timeline.task(0, 1, result.iteration).end > 0


def test_one_record_has_what_those_of_one_gpu_and_of_several_had():
    """The keys that programs read; of the rank that computes longest, memory of the fullest one."""
    one = predict_step(step(), setting(1.0, 1e-3)).prediction.to_json()
    record = predict_ranks(reduced((10.0, 16.0)), memory=memory(3, 2)).prediction.to_json()
    assert set(one) == set(record) == OF_ONE | OF_SEVERAL | {"other_seconds", "memory_shortage", "what_if"}
    assert record["gpu_active_seconds"] + record["gpu_idle_seconds"] == pytest.approx(record["iteration_seconds"])
    assert sum(record["breakdown"]["by_kind"].values()) == pytest.approx(20) and record["peak_memory_bytes"] == 3
    assert record["memory_breakdown"] == {"parameters": 3}


def test_reports_of_several_ranks_hold_the_figures(tmp_path, capsys):
    graph = replace(reduced((10.0, 16.0)), source="toy <job>")
    prediction = predict_ranks(graph, memory=memory(2 << 30, 2 << 30)).prediction
    render(prediction)
    printed = capsys.readouterr().out
    for piece in ("toy <job> on 2 x v100", "on 2 nodes", "20000.000 ms", "collective transfer", "all_reduce",
                  "straggler   rank 1 came last in 1 collectives; the next one waited 6000.000 ms",
                  "2.00 to 2.00 GiB", "device time by operator"):  # fmt: skip
        assert piece in printed
    written = page(prediction)
    assert "toy &lt;job&gt;" in written and "<job>" not in written and "http" not in written
    assert "waiting for ranks: 6000.000 ms" in written
    write_report(prediction, tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == written


def test_a_step_that_does_not_fit_ends_in_its_reason_whatever_the_warnings_say(capsys):
    result = predict_ranks(reduced((10.0, 16.0)), memory=memory(1, 64 << 30), warnings=["does not fit: a decoy"])
    with pytest.raises(
        InputError,
        match=r"^does not fit: rank 1 needs 64.0 GiB, v100-pcie-32gb has 32.0 GiB: 100% more than there is; the",
    ):
        show(result.prediction)
    assert "DOES NOT FIT" in capsys.readouterr().out
    show(predict_ranks(reduced((10.0, 16.0)), warnings=["does not fit: a decoy"]).prediction, as_json=True)
