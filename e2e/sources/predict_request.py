"""The road from a request to its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from e2e.capture.oversized_tensors import oversized_told
from e2e.price.shared_overheads import check_overheads, standing_in
from e2e.sources.asked.request import PredictRequest
from e2e.sources.asked_values import asked_values
from e2e.sources.option_check import check
from e2e.sources.prepared_step import PreparedStep, run, told
from e2e.sources.recipes import meant_by, settled, told_by
from e2e.sources.registry import StepSource, source_of
from e2e.sources.request_parts import meant_values

if TYPE_CHECKING:
    from e2e.explain.predictor import PredictionResult


def predict_request(request: PredictRequest) -> PredictionResult:
    """The prediction; ``InputError`` for options that contradict each other. A warning names those without effect."""
    source = source_of(request)
    ignored = check(request, source)
    check_overheads(request.configuration.overheads)
    whole = settled(request, source.name)
    if request.what_if:
        return _with_questions(whole, request, source, ignored)
    return _answer(whole, request, source, _prepared(whole, source), ignored)


def _prepared(request: PredictRequest, source: StepSource) -> PreparedStep:
    with oversized_told():
        return source.prepare(request)


def _answer(
    request: PredictRequest, given: PredictRequest, source: StepSource, step: PreparedStep, ignored: Sequence[str]
) -> PredictionResult:
    """``given``: the request before its recipe settled what it leaves open."""
    machine = step.setting.machine
    grace = machine.link("c2c") is not None
    host = standing_in(step.setting.overheads, grace=grace) if step.starts is None else ""
    found = told(run(step), warnings=ignored, notes=[host] if host else [])
    taken = {**step.taken, **told_by(given, request)}
    meant = meant_values(request, machine, step.cluster) | meant_by(given, request)
    asked = asked_values(given, source, taken, meant)
    return replace(found, prediction=replace(found.prediction, asked=asked))


def _with_questions(
    request: PredictRequest, given: PredictRequest, source: StepSource, ignored: Sequence[str]
) -> PredictionResult:
    """The prediction of the step as it is, with a row for each question; what cannot be asked is told first."""
    from e2e.sources.what_if_steps import WhatIfSteps, check_questions

    check_questions(request, source)
    steps = WhatIfSteps(request, source, _prepared(request, source))
    steps.check()
    answer = _answer(request, given, source, steps.step, ignored)
    return replace(answer, prediction=replace(answer.prediction, what_if=steps.rows(answer)))
