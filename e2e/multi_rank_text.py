"""A prediction of several ranks as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from e2e.multi_rank_prediction import CollectiveFigures, MultiRankPrediction, RankFigures
from e2e.text_report import milliseconds, plain_console

ROWS = 16


def render_ranks(prediction: MultiRankPrediction, console: Console | None = None) -> None:
    """Prints the step, its critical path across ranks, every rank, the collectives, stragglers, memory, warnings."""
    out = console or plain_console()
    low, high = prediction.interval_seconds
    nodes = f" on {prediction.nodes} nodes" if prediction.nodes > 1 else ""
    out.print(f"{prediction.workload} on {prediction.gpus} x {prediction.machine}{nodes}", soft_wrap=True)
    out.print(
        f"step        {milliseconds(prediction.iteration_seconds)}  "
        f"(80% interval {milliseconds(low)} to {milliseconds(high)})"
    )
    _totals(out, prediction)
    sources = ", ".join(f"{share:.0%} {source}" for source, share in prediction.coverage.items())
    out.print(f"coverage    {sources} (share of the device time of all ranks by source of its price)")
    out.print(_path_table(prediction))
    out.print(_rank_table(prediction))
    out.print(_collective_table(prediction.collectives))
    for straggler in prediction.stragglers[:ROWS]:
        out.print(
            f"straggler   rank {straggler.rank} came last in {straggler.collectives} collectives; the next one waited "
            f"{milliseconds(straggler.caused_seconds)}"
        )
    for note in prediction.notes:
        out.print(f"note: {note}", soft_wrap=True)
    for warning in prediction.warnings:
        out.print(f"warning: {warning}", soft_wrap=True)


def _totals(out: Console, prediction: MultiRankPrediction) -> None:
    mean = mean_figures(prediction.ranks)
    out.print(
        f"mean rank   compute {milliseconds(mean['compute'])}, exposed communication "
        f"{milliseconds(mean['transfer'] + mean['wait'])} ({milliseconds(mean['transfer'])} transfer, "
        f"{milliseconds(mean['wait'])} waiting), pipeline bubble {milliseconds(mean['bubble'])}, "
        f"idle {milliseconds(mean['idle'])}",
        soft_wrap=True,
    )
    out.print(
        f"slowest     forward {milliseconds(prediction.forward_seconds)}, backward "
        f"{milliseconds(prediction.backward_seconds)}, optimizer {milliseconds(prediction.optimizer_seconds)} (rank "
        f"{prediction.slowest.rank}); {prediction.host_bound_fraction:.0%} of the critical path is on the host",
        soft_wrap=True,
    )
    peaks = [rank.peak_memory_bytes for rank in prediction.ranks if rank.peak_memory_bytes is not None]
    if peaks:
        fits = {True: "fits", False: "DOES NOT FIT", None: "not known for all ranks"}[prediction.fits]
        out.print(
            f"memory      {min(peaks) / 2**30:.2f} to {max(peaks) / 2**30:.2f} GiB at the peak of "
            f"{prediction.memory_capacity_bytes / 2**30:.0f} GiB: {fits}"
        )


def mean_figures(ranks: Sequence[RankFigures]) -> Mapping[str, float]:
    """Means over all ranks, alike ones counted as often as they are."""
    count = sum(rank.multiplicity for rank in ranks) or 1

    def mean(values: Iterable[float]) -> float:
        return sum(value * rank.multiplicity for value, rank in zip(values, ranks, strict=True)) / count

    return {
        "compute": mean(rank.compute_seconds for rank in ranks),
        "transfer": mean(rank.exposed_transfer_seconds for rank in ranks),
        "wait": mean(rank.exposed_wait_seconds for rank in ranks),
        "bubble": mean(rank.bubble_seconds for rank in ranks),
        "idle": mean(rank.idle_seconds for rank in ranks),
    }


def _path_table(prediction: MultiRankPrediction) -> Table:
    table = Table("critical path across ranks", "ms", "share", box=None)
    whole = prediction.critical_path_seconds or 1.0
    for kind, seconds in prediction.attribution.items():
        table.add_row(kind, f"{seconds * 1e3:.3f}", f"{seconds / whole:.1%}")
    return table


def _rank_table(prediction: MultiRankPrediction) -> Table:
    """Milliseconds of every rank."""
    table = Table("rank", "alike", "step", "compute", "communication", "exposed", "waiting", "bubble", "idle", "GiB",
                  box=None)  # fmt: skip
    for rank in prediction.ranks[:ROWS]:
        memory = "" if rank.peak_memory_bytes is None else f"{rank.peak_memory_bytes / 2**30:.2f}"
        seconds = (
            rank.step_seconds,
            rank.compute_seconds,
            rank.communication_seconds,
            rank.exposed_transfer_seconds,
            rank.exposed_wait_seconds,
            rank.bubble_seconds,
            rank.idle_seconds,
        )
        table.add_row(str(rank.rank), str(rank.multiplicity), *(f"{value * 1e3:.3f}" for value in seconds), memory)
    if len(prediction.ranks) > ROWS:
        table.add_row(f"... {len(prediction.ranks) - ROWS} more in --json")
    return table


def collective_rows(collectives: Sequence[CollectiveFigures]) -> list[tuple[str, ...]]:
    """Alike collectives (kind, ranks, size) together, what takes longest first: counts, bytes, milliseconds."""
    groups: dict[tuple[str, int, int], list[CollectiveFigures]] = {}
    for each in collectives:
        groups.setdefault((each.kind, each.ranks, each.size_bytes), []).append(each)
    ordered = sorted(groups.items(), key=lambda item: -sum(each.transfer_seconds for each in item[1]))
    rows: list[tuple[str, ...]] = []
    for (kind, ranks, size), alike in ordered:
        waits = [wait for each in alike for wait in each.waiting_seconds.values()]
        rows.append(
            (
                kind,
                str(ranks),
                f"{size:,}",
                str(len(alike)),
                f"{1e3 * sum(each.transfer_seconds for each in alike):.3f}",
                f"{1e3 * sum(each.sharing_seconds for each in alike):.3f}",
                f"{1e3 * sum(waits) / len(waits):.3f}",
                f"{1e3 * max(waits):.3f}",
                alike[0].source,
            )
        )
    return rows


COLLECTIVE_HEAD = (
    "collective", "ranks", "bytes", "count", "transfer ms", "by shared links ms", "mean wait ms", "longest wait ms",
    "source",
)  # fmt: skip


def _collective_table(collectives: Sequence[CollectiveFigures]) -> Table:
    table = Table(*COLLECTIVE_HEAD, box=None)
    rows = collective_rows(collectives)
    for row in rows[:ROWS]:
        table.add_row(*row)
    if len(rows) > ROWS:
        table.add_row(f"... {len(rows) - ROWS} more")
    return table
