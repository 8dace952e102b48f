"""What a prediction says it was asked: every option that counts, as given or by the default that was taken."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from costmodel.operators.expert_routing import ExpertRouting
from e2e.capture.script_reference import script_name
from e2e.explain.step_facts import AskedValue
from e2e.parallelism.spec import ParallelSpec, text_of
from e2e.simulate.skew import Skew, skew_text
from e2e.sources.asked.option_table import TABLE
from e2e.sources.asked.request import PredictRequest
from e2e.sources.registry import StepSource
from e2e.step.routing_text import routing_text
from e2e.whatif.questions import WhatIf

# Defaults that are the same for all sources where the option is used; of others the source says what it took.
_DEFAULTS: Mapping[str, str] = {
    "--mode": "train (forward, backward, optimizer)",
    "--dtype": "float32 (TF32 off)",
    "--compile": "no (eager)",
    "--cuda-graph": "no",
    "--overheads": "hosts of the GPU's generation",
}


def asked_values(
    request: PredictRequest, source: StepSource, taken: Mapping[str, str], meant: Mapping[str, str] | None = None
) -> tuple[AskedValue, ...]:
    """In the order of the table: options that ``source`` uses. ``taken``: what it took where nothing was asked;
    ``meant``: what a value means on the machine at hand, asked or not.
    """
    return tuple(_values(request, source, taken, meant or {}))


def _values(
    request: PredictRequest, source: StepSource, taken: Mapping[str, str], meant: Mapping[str, str]
) -> Iterator[AskedValue]:
    for row in TABLE:
        rule = source.rule(row)
        if rule.effect not in ("used", "needed"):
            continue
        given = row.given(request)
        if given:
            yield AskedValue(row.option, meant.get(row.option, _text(row.value(request))), True)
        # Of --parallel a recipe sets the keys that are not given.
        if not given or row.option == "--parallel":
            default = taken.get(row.option, "" if given else _DEFAULTS.get(row.option, ""))
            default = default if given else meant.get(row.option, default)
            if default:
                yield AskedValue(row.option, default, False)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, ParallelSpec):
        return text_of(value)
    if isinstance(value, ExpertRouting):
        return routing_text(value)
    if isinstance(value, Skew):
        return skew_text(value)
    if isinstance(value, WhatIf):
        return value.text
    if callable(value):
        return script_name(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(_text(each) for each in value)
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
