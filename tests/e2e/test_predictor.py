"""From operators to a prediction, with a model whose answers are mental arithmetic."""

from __future__ import annotations

import json

import pytest

from costmodel.interface import CostModel, Estimate
from costmodel.machine_catalog import load_machine
from e2e.html_report import page, write_report
from e2e.operators import OperatorCall, OperatorTrace, Tensor
from e2e.prediction import prediction_record
from e2e.predictor import Setting, predict
from e2e.text_report import render


class Toy(CostModel):
    """Every operator takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def estimate(self, operators):
        each = Estimate(self.seconds, 0.9 * self.seconds, 1.2 * self.seconds, "compute", {}, "fitted")
        return [each] * len(operators)


class Table:
    def __init__(self, seconds: float) -> None:
        self.each = seconds

    def seconds(self, kind, name):
        return self.each


def tensor(number: int, *shape: int, dtype: str = "float32") -> Tensor:
    return Tensor(number, number, shape, dtype, "cuda:0")


def step() -> OperatorTrace:
    """A product and a ReLU forward, a product backward, and an operator nobody knows."""
    a, b, c, d = tensor(1, 64, 32), tensor(2, 32, 16), tensor(3, 64, 16), tensor(4, 64, 16)
    calls = (
        OperatorCall(0, "aten::mm", None, 0, (a, b), (c,), "forward"),
        OperatorCall(1, "aten::relu", None, 0, (c,), (d,), "forward"),
        OperatorCall(2, "aten::mm", None, 0, (d, tensor(5, 16, 8)), (tensor(6, 64, 8),), "backward"),
        OperatorCall(3, "mine::secret", None, 0, (d,), (tensor(7, 64, 16),), "optimizer"),
    )
    return OperatorTrace(calls, source="toy <model>")


GPU = load_machine("v100-pcie-32gb")


def setting(kernel: float, host: float, **options) -> Setting:
    return Setting(GPU, Table(host), Toy(kernel), **options)


def test_a_device_bound_step_takes_the_sum_of_its_kernels():
    prediction = predict(step(), setting(kernel=1.0, host=1e-3)).prediction
    assert prediction.iteration_seconds == pytest.approx(4.0, rel=1e-2)
    assert prediction.forward_seconds == pytest.approx(2.0, rel=1e-2)
    assert prediction.backward_seconds == pytest.approx(1.0, rel=1e-2)
    assert prediction.optimizer_seconds == pytest.approx(1.0, rel=1e-2)
    assert prediction.gpu_active_seconds == pytest.approx(4.0, rel=1e-2)
    assert prediction.host_bound_fraction < 0.02
    assert prediction.kernels == 4 and prediction.coverage == {"fitted": 1.0}


def test_a_host_bound_step_takes_the_sum_of_its_overheads():
    """Per operator: T1, T2, T4, T3; each a second."""
    prediction = predict(step(), setting(kernel=1e-3, host=1.0)).prediction
    assert prediction.iteration_seconds == pytest.approx(16.0, rel=1e-2)
    assert prediction.overheads == pytest.approx({"T1": 4.0, "T2": 4.0, "T3": 4.0, "T4": 4.0})
    assert prediction.host_bound_fraction > 0.99
    replayed = predict(step(), setting(kernel=1e-3, host=1.0, cuda_graph=True)).prediction
    assert replayed.iteration_seconds == pytest.approx(1.0, rel=1e-2)


def test_the_critical_path_sums_to_the_step_and_the_interval_holds_it():
    prediction = predict(step(), setting(kernel=1.0, host=0.3)).prediction
    assert sum(part.seconds for part in prediction.critical_path) == pytest.approx(prediction.iteration_seconds)
    low, high = prediction.interval_seconds
    assert low < prediction.iteration_seconds < high
    # Two products err alike (0.2 + 0.2), the two element-wise kernels too: sqrt(0.16 + 0.16) on four seconds.
    assert (low, high) == pytest.approx(
        (prediction.iteration_seconds - 0.2828, prediction.iteration_seconds + 0.5657), rel=0.02
    )


def test_times_of_an_unknown_host_are_uncertain_as_a_whole():
    known, unknown = Table(1.0), Table(1.0)
    unknown.factor = 1.5
    low, high = predict(step(), Setting(GPU, known, Toy(1e-3))).prediction.interval_seconds
    assert high - low < 0.01
    low, high = predict(step(), Setting(GPU, unknown, Toy(1e-3))).prediction.interval_seconds
    assert (low, high) == pytest.approx((16 / 1.5, 16 * 1.5), rel=0.01)


def test_an_unknown_operator_is_counted_and_named():
    (warning,) = predict(step(), setting(1.0, 1e-3)).prediction.warnings
    assert "1 launches of operators without a model" in warning and "mine::secret (1)" in warning


def test_reports_hold_the_figures_and_escape_names(tmp_path, capsys):
    prediction = predict(step(), setting(1.0, 1e-3)).prediction
    record = json.loads(json.dumps(prediction_record(prediction)))
    assert record["iteration_seconds"] == prediction.iteration_seconds and record["fits"] is True
    text = page(prediction)
    assert "toy &lt;model&gt;" in text and "<model>" not in text and "http" not in text
    write_report(prediction, tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text() == text
    render(prediction)
    assert "aten::mm" in capsys.readouterr().out
