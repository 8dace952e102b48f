"""Steps of one batch from what another was measured to take."""

from __future__ import annotations

import pytest

from lab.validate.models import CaseResult, LabelledCase, Validation


def result(batch: int, measured: float, predicted: float, model: str = "bert", compiled: bool = False) -> CaseResult:
    case = LabelledCase("t4", model, "inf", 512, batch, measured, compiled)
    return CaseResult(case, predicted, (predicted, predicted), predicted / measured - 1, {})


def test_every_two_batches_of_one_model_are_a_pair_both_ways():
    # Ten percent too slow at both, so the ratio is right; then a third batch that is 20 % off beside them.
    results = [result(2, 10.0, 11.0), result(4, 20.0, 22.0), result(8, 40.0, 52.8), result(2, 5.0, 9.0, "gpt"),
               result(4, 7.0, 9.0, compiled=True)]  # fmt: skip
    found = Validation(results, {}).batches
    assert len(found) == 6
    assert found["t4/bert-inf-512-4 from 2"] == pytest.approx(0.0) == found["t4/bert-inf-512-2 from 4"]
    assert found["t4/bert-inf-512-8 from 2"] == pytest.approx(0.2)
    assert found["t4/bert-inf-512-2 from 8"] == pytest.approx(1 / 1.2 - 1)
