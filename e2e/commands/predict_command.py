"""``python -m e2e predict``."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Any

import typer

from e2e.commands import options as written

# Exit status if a step may not fit; ShortageError has that of a step that does not fit.
MAY_NOT_FIT = 3


@written.with_options
def predict_command(
    *,
    price: written.PriceOption = None,
    advice: written.AdviceOption = False,
    timeline: written.TimelineOption = None,
    report: written.ReportOption = None,
    as_json: written.JsonOption = False,
    **options: Any,
) -> None:
    """Predicts one steady step of a model on one GPU or many, or replays a recorded run."""
    import e2e.sources.predict_request  # noqa: F401 (libraries are loaded before their objects are spared)
    from costmodel.base.spared_objects import old_objects_spared
    from e2e.commands.e2e_api import predict
    from e2e.report.outputs import show

    # Output of a script goes to standard error. The process ends after its answer, so garbage collection can wait.
    with redirect_stdout(sys.stderr), old_objects_spared():
        prediction = predict(price=price, advice=tell if advice else False, timeline=timeline, report=report, **options)
    show(prediction, as_json)
    if prediction.memory_verdict == "may not fit":
        raise typer.Exit(MAY_NOT_FIT)


def tell(line: str) -> None:
    """Print progress to standard error."""
    print(line, file=sys.stderr, flush=True)
