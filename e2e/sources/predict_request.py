"""Prediction of the step of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from e2e.capture.oversized_tensors import oversized_told
from e2e.price.shared_overheads import check_overheads, standing_in
from e2e.sources.asked_values import asked_values
from e2e.sources.prepared_step import PreparedStep, run, told
from e2e.sources.request import Request
from e2e.sources.request_parts import meant_values

if TYPE_CHECKING:
    from e2e.explain.predictor import PredictionResult


def predict_request(request: Request) -> PredictionResult:
    """Predict the step of ``request``, with a row for each of its what-if questions."""
    check_overheads(getattr(request, "overheads", None))
    whole = request.settled()
    if not whole.what_if:
        return _answer(whole, request, _prepared(whole))
    from e2e.sources.what_if_steps import WhatIfSteps, check_questions

    check_questions(whole)  # invalid questions are reported first
    steps = WhatIfSteps(whole, _prepared(whole))
    steps.check()
    answer = _answer(whole, request, steps.step)
    return replace(answer, prediction=replace(answer.prediction, what_if=steps.rows(answer)))


def _prepared(request: Request) -> PreparedStep:
    with oversized_told():
        return request.prepare()


def _answer(request: Request, given: Request, step: PreparedStep) -> PredictionResult:
    """Predict ``step``. ``given``: the request before its recipe filled in the defaults."""
    machine = step.setting.machine
    grace = machine.link("c2c") is not None
    host = standing_in(step.setting.overheads, grace=grace) if step.starts is None else ""
    found = told(run(step), notes=[host] if host else [])
    taken = {**step.taken, **request.settled_texts(given)}
    meant = meant_values(request, machine, step.cluster) | request.meant_texts(given)
    asked = asked_values(given, taken, meant)
    return replace(found, prediction=replace(found.prediction, asked=asked))
