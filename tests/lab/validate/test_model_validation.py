"""Figures of the validation against measured models, on invented cases."""

from __future__ import annotations

import json

import pytest

from lab.validate.models import CaseResult, LabelledCase, Validation


def result(gpu: str, measured: float, predicted: float, analytic: float, compiled: bool = False) -> CaseResult:
    case = LabelledCase(gpu, "toy", "inf", 128, 1, measured, compiled)
    interval = (0.9 * predicted, 1.1 * predicted)
    return CaseResult(
        case, predicted, interval, predicted / measured - 1, {"fitted": 1 - analytic, "analytic": analytic}
    )


VALIDATION = Validation(
    [result("fast", 1.0, 1.05, 0.0), result("fast", 2.0, 1.6, 0.5), result("slow", 10.0, 10.0, 0.1, compiled=True)],
    {"slow/other": "no configuration"},
)


def test_eager_and_compiled_steps_have_figures_of_their_own():
    eager, compiled = VALIDATION.summary, VALIDATION.compiled_summary
    assert eager is not None and compiled is not None
    assert (eager.count, compiled.count) == (2, 1)
    assert eager.mape == pytest.approx(0.125) and eager.worst == pytest.approx(0.2)
    assert eager.bias == pytest.approx(-0.075)
    assert eager.interval == pytest.approx(0.5)  # 1.0 lies in 0.945 to 1.155, 2.0 not in 1.44 to 1.76


def test_coverage_weighs_steps_by_their_time():
    eager = VALIDATION.summary
    assert eager is not None
    assert eager.coverage == pytest.approx({"analytic": 0.8 / 2.65, "fitted": (1.05 + 0.8) / 2.65})


def test_the_record_is_json_and_the_report_names_every_gpu(capsys):
    record = json.loads(json.dumps(VALIDATION.record()))
    assert record["summary"]["mape"] == pytest.approx(0.125) and record["left_out"] == {
        "slow/other": "no configuration"
    }
    VALIDATION.render()
    report = capsys.readouterr().out
    assert "fast" in report and "slow" in report and "analytic 30%" in report
    assert "left out: slow/other: no configuration" in report
