"""Output of a prediction to a timeline file, a report and standard output."""

from __future__ import annotations

import json
from pathlib import Path

from costmodel.base.errors import ShortageError
from e2e.explain.prediction import Prediction
from e2e.explain.predictor import PredictionResult
from e2e.report.timeline_export import write_trace


def write_files(result: PredictionResult, timeline: Path | None, report: Path | None) -> None:
    """Write the timeline and the report, if given; raises ``OutputError`` naming a file that cannot be written."""
    if timeline is not None:
        write_trace(result.graph, result.timeline, timeline, result.path, result.iteration)
    if report is not None:
        from e2e.report.html_report import write_report

        write_report(result, report)


def show(prediction: Prediction, as_json: bool = False) -> None:
    """Print the prediction; then raise ``ShortageError`` if the step does not fit."""
    from e2e.report.text_report import render

    if as_json:
        print(json.dumps(prediction.to_json(), indent=2))
    else:
        render(prediction)
    if prediction.memory_shortage is not None:
        raise ShortageError(
            f"{prediction.memory_shortage}; the times above hold for a GPU with more memory; spread it, or try --advice"
        )
