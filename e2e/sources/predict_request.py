"""Prediction of the step of a request, with every relevant option: the given value or the default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from costmodel.machines.cluster import Cluster
from costmodel.machines.machine_records import Machine
from e2e.capture.script_errors import oversized_told
from e2e.explain.prediction import AskedValue
from e2e.price.host_overheads import check_overheads, foreign_host_note
from e2e.sources.prepared_step import PreparedStep, run_step, with_remarks
from e2e.sources.requests import Request
from e2e.step.option_fields import Options, options_of

if TYPE_CHECKING:
    from e2e.explain.predictor import PredictionResult


def asked_values(request: Request, taken: Mapping[str, str], meant: Mapping[str, str]) -> tuple[AskedValue, ...]:
    """Return the options of ``request``.

    ``taken``: by option, the default that was used where no value was given; ``meant``: by option, the meaning of its
    value on this machine, given or not.
    """
    return tuple(_values(request, taken, meant))


def _values(request: Request, taken: Mapping[str, str], meant: Mapping[str, str]) -> Iterator[AskedValue]:
    options = options_of(type(request)).values()
    # The source of the step comes first.
    for each in sorted(options, key=lambda each: not each.words.source):
        value, flag = getattr(request, each.name), each.flag
        given = each.is_given(value)
        if given:
            yield AskedValue(flag, meant.get(flag, each.text(value)), True)
        # A recipe sets the keys of --parallel that are not given.
        if not given or flag == "--parallel":
            default = taken.get(flag, "" if given else each.words.default_text)
            default = default if given else meant.get(flag, default)
            if default:
                yield AskedValue(flag, default, False)


def _meant_values(request: Options, machine: Machine, cluster: object) -> dict[str, str]:
    """Return the meaning of option values that depends on ``machine`` and ``cluster``, by option."""
    meant = {}
    if isinstance(cluster, Cluster) and cluster.network_text:
        meant["--network"] = cluster.network_text
    if getattr(request, "dtype", None) == "tf32" and "tf32" not in machine.compute:
        meant["--dtype"] = f"tf32 (computed in float32: {machine.name} has no units for TF32)"
    return meant


def predict_request(request: Request) -> PredictionResult:
    """Predict the step of ``request``, with a row for each of its what-if questions."""
    check_overheads(getattr(request, "overheads", None))
    whole = request.with_defaults()
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
    host = foreign_host_note(step.setting.overheads, grace=grace) if step.starts is None else ""
    found = with_remarks(run_step(step), notes=[host] if host else [])
    taken = {**step.taken, **request.default_texts(given)}
    meant = _meant_values(request, machine, step.cluster) | request.meaning_texts(given)
    asked = asked_values(given, taken, meant)
    return replace(found, prediction=replace(found.prediction, asked=asked))
