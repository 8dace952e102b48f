"""The road from a request to its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from e2e.predict.checking import check
from e2e.predict.request import Request
from e2e.predict.sources import source_of
from e2e.predict.step import run, told

if TYPE_CHECKING:
    from e2e.predictor import Result


def predict_request(request: Request) -> Result:
    """The prediction; ``InputError`` for options that contradict each other. A warning names those without effect."""
    source = source_of(request)
    ignored = check(request, source)
    step = source.prepare(request)
    return told(run(step), warnings=ignored)
