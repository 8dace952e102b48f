"""``python -m e2e plan serve``: the cheapest way to serve a model within latency targets."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from e2e.commands.predict_command import JsonOption, ReportOption, with_options
from e2e.serving.serving_request import PlanRequest
from e2e.step.option_fields import options_of


@with_options(options_of(PlanRequest).values())
def plan_serve_command(*, report: ReportOption = None, as_json: JsonOption = False, **options: Any) -> None:
    """Find the cheapest GPUs, parallelism, engine, precision and batch that hold latency targets, and the frontier."""
    from e2e.commands.e2e_api import plan_serve
    from e2e.serving.plan_report import plan_record, plan_text

    plan = plan_serve(**options, report=report, progress=_tell)
    typer.echo(json.dumps(plan_record(plan), indent=2, allow_nan=False) if as_json else plan_text(plan))
    if plan.stopped:
        raise KeyboardInterrupt


def _tell(done: int, count: int, text: str) -> None:
    print(f"{done} of {count}: {text}", file=sys.stderr, flush=True)
