"""A prediction to standard output, a timeline file and a report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.errors import InputError
from e2e.predictor import Result
from e2e.timeline_export import write_trace

if TYPE_CHECKING:
    # One GPU does without the models of collectives, which are slow to import.
    from e2e.multi_rank import MultiRankResult


@dataclass(frozen=True)
class Outputs:
    """Files to write, and whether standard output is JSON."""

    timeline: Path | None = None
    report: Path | None = None
    as_json: bool = False


def write_outputs(result: Result | MultiRankResult, outputs: Outputs) -> None:
    """``OutputError`` names a file that cannot be written; ``InputError`` in the end if the step does not fit."""
    if isinstance(result, Result):
        _write_single(result, outputs)
    else:
        _write_ranks(result, outputs)
    if result.prediction.fits is False:
        reasons = [line for line in result.prediction.warnings if line.startswith("does not fit")]
        raise InputError(f"{'; '.join(reasons) or 'does not fit'}; the times above hold for a GPU with more memory")


def _write_single(result: Result, outputs: Outputs) -> None:
    from e2e.html_report import write_report
    from e2e.prediction import prediction_record
    from e2e.text_report import render

    if outputs.timeline is not None:
        write_trace(result.graph, result.steady.timeline, outputs.timeline)
    if outputs.report is not None:
        write_report(result.prediction, outputs.report)
    if outputs.as_json:
        print(json.dumps(prediction_record(result.prediction), indent=2))
    else:
        render(result.prediction)


def _write_ranks(result: MultiRankResult, outputs: Outputs) -> None:
    from e2e.multi_rank_html import write_ranks_report
    from e2e.multi_rank_prediction import multi_rank_record
    from e2e.multi_rank_text import render_ranks

    if outputs.timeline is not None:
        write_trace(result.graph, result.timeline, outputs.timeline)
    if outputs.report is not None:
        write_ranks_report(result.prediction, outputs.report)
    if outputs.as_json:
        print(json.dumps(multi_rank_record(result.prediction), indent=2))
    else:
        render_ranks(result.prediction)
