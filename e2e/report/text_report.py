"""Report of a prediction as text; the HTML page uses the same formats of times and memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from e2e.explain.prediction import Prediction
from e2e.report.tables import (
    ADVICE_HEAD,
    COLLECTIVE_HEAD,
    PATH_MEANING,
    RANGE_HEAD,
    RANK_HEAD,
    advice_remarks,
    advice_rows,
    collective_rows,
    heading,
    mean_figures,
    next_hint,
    overhead_meanings,
    range_meaning,
    range_rows,
    rank_row,
    render_what_if,
    short_name,
    speeds,
)
from e2e.step.memory_room import largest_fitting

ROWS = 12
PLAIN_WIDTH = 240
# Most listed ranks and collectives.
LISTED = 16
# Labels of the parts of memory, and the smallest part that is shown.
MEMORY_ROLES = {"optimizer_state": "optimizer", "cache": "KV cache", "reserve": "allocator's reserve"}
SMALLEST_PART = 10 << 20


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
        _listed(out, RANGE_HEAD, ((escape(name), *figures) for name, *figures in range_rows(prediction.ranges)))
        out.print(range_meaning(prediction), soft_wrap=True)
    for title, key in (("operator", "by_operator"), ("bound", "by_bound")):
        _shares(out, f"device time by {title}", prediction.breakdown[key])
    if several:
        _shares(out, "critical path across ranks", prediction.attribution)
    _path(out, prediction)
    if several:
        _listed(out, RANK_HEAD, (rank_row(rank) for rank in prediction.ranks))
        out.print(PATH_MEANING, soft_wrap=True)
    if prediction.collectives:
        _listed(out, COLLECTIVE_HEAD, collective_rows(prediction.collectives))
    render_what_if(out, prediction.what_if)
    _remarks(out, prediction)


def title(prediction: Prediction) -> str:
    """Return the title: workload, machine, number of GPUs and nodes."""
    count = f"{prediction.gpus} x " if prediction.gpus > 1 else ""
    nodes = f" on {prediction.nodes} nodes" if prediction.nodes > 1 else ""
    return f"{prediction.workload} on {count}{prediction.machine}{nodes}"


def phases(prediction: Prediction) -> Mapping[str, float]:
    """Seconds of each phase; ``other`` only if it is not zero."""
    known = {
        "forward": prediction.forward_seconds,
        "backward": prediction.backward_seconds,
        "optimizer": prediction.optimizer_seconds,
    }
    return known | ({"other": prediction.other_seconds} if prediction.other_seconds > 0 else {})


def launches(prediction: Prediction) -> str:
    """Format the numbers of launches and of operator calls, per rank if there are several."""
    several = len(prediction.ranks) > 1
    kernels = _between([rank.kernels for rank in prediction.ranks]) if several else f"{prediction.kernels:,}"
    operators = _between([rank.operators for rank in prediction.ranks]) if several else f"{prediction.operators:,}"
    each = f" on each of {len(prediction.ranks)} distinct ranks" if several else ""
    if prediction.cuda_graph:
        return f"1 of a CUDA graph of {kernels}, captured from {operators} operator calls{each}"
    return f"{kernels} in {operators} operator calls{each}"


def _between(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def peak_memory(prediction: Prediction) -> str | None:
    """Format the peak memory and whether it fits, ``None`` if unknown."""
    peaks = [rank.peak_memory_bytes for rank in prediction.ranks if rank.peak_memory_bytes is not None]
    if not peaks:
        return None
    fits = {"does not fit": "DOES NOT FIT", "not known": "not known for all ranks"}.get(
        prediction.memory_verdict, prediction.memory_verdict
    )
    least = f"{min(peaks) / 2**30:.2f} to " if len(prediction.ranks) > 1 else ""
    room = f"{prediction.memory_room_bytes / 2**30:.1f} GiB"
    in_use = max(rank.allocated_bytes or 0 for rank in prediction.ranks)
    # The allocator takes all room there is: on a full card the bytes in use tell whether it fits.
    full = in_use < max(peaks) and max(peaks) > largest_fitting(prediction.memory_room_bytes)
    kept = f" ({in_use / 2**30:.2f} GiB in use, the rest kept by the allocator)" if full else ""
    return f"{least}{max(peaks) / 2**30:.2f} GiB at the peak{kept} of {room} for tensors: {fits}"


def memory_parts(prediction: Prediction) -> str | None:
    """Format the composition of the memory of the fullest rank, largest first, ``None`` if unknown."""
    parts = sorted(prediction.memory_breakdown.items(), key=lambda item: -item[1])
    told = ", ".join(
        f"{MEMORY_ROLES.get(role, role)} {size / 2**30:.2f}" for role, size in parts if size >= SMALLEST_PART
    )
    return f"{told} GiB" if told else None


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


def _shares(out: Console, head: str, parts: Mapping[str, float]) -> None:
    whole = sum(parts.values()) or 1.0
    table = Table(head, "ms", "share", box=None)
    for name, seconds in list(parts.items())[:ROWS]:
        table.add_row(escape(short_name(name)), f"{seconds * 1e3:.3f}", f"{seconds / whole:.1%}")
    out.print(table)


def _path(out: Console, prediction: Prediction) -> None:
    table = Table("critical path", "operator", "ms", "share", "waits mostly for", box=None)
    for part in prediction.critical_path[:ROWS]:
        share = part.seconds / prediction.critical_path_seconds if prediction.critical_path_seconds else 0.0
        names = escape(short_name(part.name)), escape(short_name(part.waits_for))
        table.add_row(part.kind, names[0], f"{part.seconds * 1e3:.3f}", f"{share:.1%}", names[1])
    out.print(table)


def _listed(out: Console, head: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(*head, box=None)
    found = list(rows)
    for row in found[:LISTED]:
        table.add_row(*row)
    if len(found) > LISTED:
        table.add_row(f"... {len(found) - LISTED} more in --json")
    out.print(table)


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


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{seconds * 1e3:.3f} ms"


def plain_console() -> Console:
    """Return a console that prints plain, unwrapped table rows (for ``grep`` and editors) unless it is a terminal."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=PLAIN_WIDTH, no_color=True)
