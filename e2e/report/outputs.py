"""A prediction to standard output, a timeline file and a report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from costmodel.base.errors import InputError
from e2e.explain.prediction import prediction_record
from e2e.explain.predictor import PredictionResult
from e2e.report.timeline_export import write_trace


@dataclass(frozen=True)
class Outputs:
    """Files to write, and whether standard output is JSON."""

    timeline: Path | None = None
    report: Path | None = None
    as_json: bool = False


def write_outputs(result: PredictionResult, outputs: Outputs) -> None:
    """``OutputError`` names a file that cannot be written; ``InputError`` in the end if the step does not fit."""
    from e2e.report.html_report import write_report
    from e2e.report.text_report import render

    prediction = result.prediction
    if outputs.timeline is not None:
        write_trace(result.graph, result.timeline, outputs.timeline)
    if outputs.report is not None:
        write_report(prediction, outputs.report)
    if outputs.as_json:
        print(json.dumps(prediction_record(prediction), indent=2))
    else:
        render(prediction)
    if prediction.memory_shortage is not None:
        raise InputError(f"{prediction.memory_shortage}; the times above hold for a GPU with more memory")
