"""The road from a request to its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from e2e.price.shared_overheads import standing_in
from e2e.sources.asked.request import PredictRequest
from e2e.sources.asked_values import asked_values
from e2e.sources.option_check import check
from e2e.sources.prepared_step import run, told
from e2e.sources.registry import source_of

if TYPE_CHECKING:
    from e2e.explain.predictor import PredictionResult


def predict_request(request: PredictRequest) -> PredictionResult:
    """The prediction; ``InputError`` for options that contradict each other. A warning names those without effect."""
    source = source_of(request)
    ignored = check(request, source)
    step = source.prepare(request)
    host = standing_in(step.setting.overheads) if step.starts is None else ""
    found = told(run(step), warnings=ignored, notes=[host] if host else [])
    asked = asked_values(request, source, step.taken)
    return replace(found, prediction=replace(found.prediction, asked=asked))
