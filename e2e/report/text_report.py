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
    heading,
    launches,
    mean_figures,
    memory_parts,
    milliseconds,
    next_hint,
    overhead_meanings,
    path_rows,
    peak_memory,
    phases,
    range_meaning,
    range_rows,
    rank_row,
    share_rows,
    speeds,
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
    _step(out, prediction)
    if several:
        _mean_rank(out, prediction)
    _longest_rank(out, prediction)
    _memory(out, prediction)
    _prices(out, prediction)
    _advice(out, prediction)
    if prediction.ranges:
        _listed(out, RANGE_HEAD, range_rows(prediction.ranges))
        out.print(range_meaning(prediction), soft_wrap=True)
    for kind in ("operator", "bound"):
        _table(out, (f"device time by {kind}", "ms", "share"), share_rows(prediction.breakdown[f"by_{kind}"])[:ROWS])
    if several:
        _table(out, ("critical path across ranks", "ms", "share"), share_rows(prediction.attribution)[:ROWS])
    _table(out, PATH_HEAD, path_rows(prediction)[:ROWS])
    if several:
        _listed(out, RANK_HEAD, (rank_row(rank) for rank in prediction.ranks))
        out.print(PATH_MEANING, soft_wrap=True)
    if prediction.collectives:
        _listed(out, COLLECTIVE_HEAD, collective_rows(prediction.collectives))
    _what_if(out, prediction.what_if)
    _remarks(out, prediction)


def _step(out: Console, prediction: Prediction) -> None:
    low, high = prediction.interval_seconds
    out.print(title(prediction), soft_wrap=True)
    _lines(out, heading(prediction))
    out.print(
        f"step        {milliseconds(prediction.iteration_seconds)}  "
        f"(80% interval {milliseconds(low)} to {milliseconds(high)})"
    )
    _lines(out, speeds(prediction))


def _lines(out: Console, lines: Iterable[tuple[str, str]]) -> None:
    for label, told in lines:
        out.print(f"{label:<11} {told}", soft_wrap=True, markup=False)


def _mean_rank(out: Console, prediction: Prediction) -> None:
    mean = mean_figures(prediction.ranks)
    out.print(
        f"mean rank   compute {milliseconds(mean['compute'])}, exposed communication "
        f"{milliseconds(mean['transfer'] + mean['wait'])} ({milliseconds(mean['transfer'])} transfer, "
        f"{milliseconds(mean['wait'])} waiting), pipeline bubble {milliseconds(mean['bubble'])}, "
        f"idle {milliseconds(mean['idle'])}",
        soft_wrap=True,
    )


def _longest_rank(out: Console, prediction: Prediction) -> None:
    """Print phases and GPU times of the only rank, or of the one that computes longest."""
    longest = prediction.longest_computing.rank
    which = f" (rank {longest}, the one that computes longest)" if len(prediction.ranks) > 1 else ""
    present = {name: seconds for name, seconds in phases(prediction).items() if seconds > 0}
    parts = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in present.items())
    out.print(f"phases      {parts}{which}", soft_wrap=True)
    out.print(
        f"GPU         active {milliseconds(prediction.gpu_active_seconds)}, "
        f"idle {milliseconds(prediction.gpu_idle_seconds)}{which}; "
        f"{prediction.host_bound_fraction:.0%} of the critical path is on the host",
        soft_wrap=True,
    )


def _memory(out: Console, prediction: Prediction) -> None:
    out.print(f"launches    {launches(prediction)}", soft_wrap=True)
    memory = peak_memory(prediction)
    if memory is not None:
        out.print(f"memory      {memory}")
    parts = memory_parts(prediction)
    if parts is not None:
        out.print(f"            {parts}{' (fullest rank)' if len(prediction.ranks) > 1 else ''}", soft_wrap=True)


def _prices(out: Console, prediction: Prediction) -> None:
    out.print(
        "host        " + ", ".join(f"{kind} {milliseconds(value)}" for kind, value in prediction.overheads.items())
    )
    if prediction.overheads:
        out.print(f"            {overhead_meanings(prediction)}", soft_wrap=True)
    sources = ", ".join(f"{share:.0%} {source}" for source, share in prediction.coverage.items())
    whole = "the device time of all ranks" if prediction.gpus > 1 else "the device time"
    out.print(f"coverage    {sources} (share of {whole} by source of its price)")


def _advice(out: Console, prediction: Prediction) -> None:
    advice = prediction.advice
    if advice is None:
        out.print(f"next        {next_hint(prediction)}", soft_wrap=True)
        return
    rows = advice_rows(advice)
    if rows:
        _listed(out, ADVICE_HEAD, rows)
    for line in advice_remarks(advice, prediction.fits):
        out.print(f"advice      {line}", soft_wrap=True, markup=False)


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
    for remark in what_if_remarks(rows):
        out.print(remark, soft_wrap=True, markup=False)
    for warning in what_if_warnings(rows):
        out.print(f"warning: {warning}", soft_wrap=True, markup=False)


def _remarks(out: Console, prediction: Prediction) -> None:
    for straggler in prediction.stragglers[:LISTED]:
        out.print(
            f"straggler   rank {straggler.rank} came last in {straggler.collectives} collectives; the next one waited "
            f"{milliseconds(straggler.caused_seconds)}"
        )
    for note in prediction.notes:
        out.print(f"note: {note}", soft_wrap=True)
    for warning in prediction.warnings:
        out.print(f"warning: {warning}", soft_wrap=True)


def plain_console() -> Console:
    """Return a console that prints plain, unwrapped table rows (for ``grep`` and editors) unless it is a terminal."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=PLAIN_WIDTH, no_color=True)
