"""``python -m e2e serve``: latencies and throughput of a language model as it is served."""

from __future__ import annotations

import json
from typing import Any

import typer

from costmodel.base.errors import ShortageError
from e2e.commands.predict_command import JsonOption, ReportOption, TimelineOption, with_options
from e2e.serving.serving_request import ServingRequest
from e2e.step.option_fields import options_of


@with_options(options_of(ServingRequest).values())
def serve_command(
    *, timeline: TimelineOption = None, report: ReportOption = None, as_json: JsonOption = False, **options: Any
) -> None:
    """Predict what a served language model gives its users: first token, tokens per second, cache, what limits."""
    from e2e.commands.e2e_api import serve

    try:
        result = serve(**options, timeline=timeline, report=report)
    except ShortageError as error:
        if as_json and error.record:
            print(json.dumps(error.record, indent=2))
        raise
    if as_json:
        print(json.dumps(result.to_json(), indent=2, allow_nan=False))
    else:
        from e2e.serving.serving_report import show

        typer.echo(show(result))
