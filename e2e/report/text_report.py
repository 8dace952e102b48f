"""Report of a prediction on standard output: text, or the record as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from costmodel.base.errors import ShortageError
from e2e.explain.prediction import Prediction, WhatIfRow
from e2e.report.tables import (
    ADVICE_HEAD,
    COLLECTIVE_HEAD,
    PATH_HEAD,
    PATH_MEANING,
    RANGE_HEAD,
    RANK_HEAD,
    advice_remarks,
    advice_rows,
    collective_rows,
    figure_lines,
    milliseconds,
    next_hint,
    option_lines,
    path_rows,
    range_meaning,
    range_rows,
    rank_rows,
    share_rows,
    speed_lines,
    title,
    what_if_cells,
    what_if_remarks,
    what_if_warnings,
)

ROWS = 12
PLAIN_WIDTH = 240
# Most listed ranks and collectives.
LISTED = 16


def show(prediction: Prediction, as_json: bool = False) -> None:
    """Print the prediction; then raise ``ShortageError`` if the step does not fit."""
    if as_json:
        print(json.dumps(prediction.to_json(), indent=2))
    else:
        render(prediction)
    if prediction.memory_shortage is not None:
        raise ShortageError(
            f"{prediction.memory_shortage}; the times above hold for a GPU with more memory; spread it, or try --advice"
        )


def render(prediction: Prediction, console: Console | None = None) -> None:
    """Print a prediction.

    Options, step time, throughput and utilisation, composition, memory, advice, critical path, coverage and warnings.
    For several ranks also every rank, the collectives and stragglers.
    """
    out = console or plain_console()
    several = prediction.gpus > 1
    low, high = prediction.interval_seconds
    interval = f"(80% interval {milliseconds(low)} to {milliseconds(high)})"
    out.print(title(prediction), soft_wrap=True, markup=False)
    _lines(out, option_lines(prediction))
    _lines(out, [("step", f"{milliseconds(prediction.iteration_seconds)}  {interval}")])
    _lines(out, speed_lines(prediction))
    _lines(out, figure_lines(prediction))
    _advice(out, prediction)
    if prediction.ranges:
        _listed(out, RANGE_HEAD, range_rows(prediction.ranges))
        out.print(range_meaning(prediction), soft_wrap=True)
    for kind in ("operator", "line", "bound"):
        if f"by_{kind}" in prediction.breakdown:
            rows = share_rows(prediction.breakdown[f"by_{kind}"])[:ROWS]
            _table(out, (f"device time by {kind}", "ms", "share"), rows)
    if several:
        _table(out, ("critical path across ranks", "ms", "share"), share_rows(prediction.attribution)[:ROWS])
    _table(out, PATH_HEAD, path_rows(prediction)[:ROWS])
    if several:
        _listed(out, RANK_HEAD, rank_rows(prediction.ranks))
        out.print(PATH_MEANING, soft_wrap=True)
    if prediction.collectives:
        _listed(out, COLLECTIVE_HEAD, collective_rows(prediction.collectives))
    _what_if(out, prediction.what_if)
    _remarks(out, prediction)


def _lines(out: Console, lines: Iterable[tuple[str, str]]) -> None:
    for label, told in lines:
        out.print(f"{label:<11} {told}", soft_wrap=True, markup=False)


def _advice(out: Console, prediction: Prediction) -> None:
    advice = prediction.advice
    if advice is None:
        _lines(out, [("next", next_hint(prediction))])
        return
    if advice.best:
        _listed(out, ADVICE_HEAD, advice_rows(advice))
    _lines(out, (("advice", line) for line in advice_remarks(advice, prediction.fits)))


def _table(out: Console, head: Iterable[str], rows: Iterable[Sequence[str]], fold: bool = False) -> None:
    table = Table(*head, box=None)
    for column in table.columns:
        column.overflow = "fold" if fold else "ellipsis"
    for row in rows:
        table.add_row(*map(escape, row))
    out.print(table)


def _listed(out: Console, head: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    found = list(rows)
    more = [(f"... {len(found) - LISTED} more in --json",)] if len(found) > LISTED else []
    _table(out, head, [*found[:LISTED], *more])


def _what_if(out: Console, rows: Sequence[WhatIfRow]) -> None:
    """Print the table and its warnings, if anything was asked."""
    if not rows:
        return
    _table(out, *what_if_cells(rows), fold=True)
    for line in (*what_if_remarks(rows), *(f"warning: {warning}" for warning in what_if_warnings(rows))):
        out.print(line, soft_wrap=True, markup=False)


def _remarks(out: Console, prediction: Prediction) -> None:
    for straggler in prediction.stragglers[:LISTED]:
        told = f"rank {straggler.rank} came last in {straggler.collectives} collectives; the next one waited "
        _lines(out, [("straggler", told + milliseconds(straggler.caused_seconds))])
    for name, texts in (("note", prediction.notes), ("warning", prediction.warnings)):
        for text in texts:
            out.print(f"{name}: {text}", soft_wrap=True, markup=False)


def plain_console() -> Console:
    """Return a console that prints plain, unwrapped table rows (for ``grep`` and editors) unless it is a terminal."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=PLAIN_WIDTH, no_color=True)
