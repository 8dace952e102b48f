"""``python -m e2e serve`` and ``plan serve``: a language model as it is served, and the cheapest way to serve it."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from costmodel.base.errors import ShortageError
from e2e.commands.predict_command import JsonOption, ReportOption, TimelineOption, with_options
from e2e.serving.serving_request import PlanRequest, ServingRequest
from e2e.step.option_fields import options_of


@with_options(options_of(ServingRequest).values())
def serve_command(
    *, timeline: TimelineOption = None, report: ReportOption = None, as_json: JsonOption = False, **options: Any
) -> None:
    """Predict what a served language model gives its users: first token, tokens per second, cache, what limits."""
    from e2e.commands.e2e_api import serve
    from e2e.serving.serving_report import answer_text

    try:
        result = serve(**options, timeline=timeline, report=report)
    except ShortageError as error:
        if as_json and error.record:
            typer.echo(json.dumps(error.record, indent=2))
        raise
    typer.echo(json.dumps(result.to_json(), indent=2, allow_nan=False) if as_json else answer_text(result))


@with_options(options_of(PlanRequest).values())
def plan_serve_command(*, report: ReportOption = None, as_json: JsonOption = False, **options: Any) -> None:
    """Find the cheapest GPUs, parallelism, engine, precision and batch that hold latency targets, and the frontier."""
    from e2e.commands.e2e_api import plan_serve
    from e2e.serving.serving_plan import plan_record, plan_text

    def tell(done: int, count: int, text: str) -> None:
        print(f"{done} of {count}: {text}", file=sys.stderr, flush=True)

    plan = plan_serve(**options, report=report, progress=tell)
    typer.echo(json.dumps(plan_record(plan), indent=2, allow_nan=False) if as_json else plan_text(plan))
    if plan.stopped:
        raise KeyboardInterrupt
