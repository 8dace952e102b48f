"""Tables of reports of several ranks: means over ranks, rows per rank, grouped collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from e2e.explain.collective_figures import CollectiveFigures
from e2e.explain.rank_figures import RankFigures

RANK_HEAD = (
    "rank", "alike", "step", "compute", "communication", "exposed", "waiting", "bubble", "idle", "on the path", "GiB",
)  # fmt: skip
PATH_MEANING = (
    "on the path: how much of the step's critical path lies on this rank (a transfer is counted for one of the ranks "
    "in it). The column sums to the step; the step never waits for a rank with 0"
)
COLLECTIVE_HEAD = (
    "collective", "ranks", "bytes", "count", "transfer ms", "by shared links ms", "mean wait ms", "longest wait ms",
    "source",
)  # fmt: skip


def mean_figures(ranks: Sequence[RankFigures]) -> Mapping[str, float]:
    """Return means over all ranks, weighted by multiplicity."""
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


def rank_row(rank: RankFigures) -> tuple[str, ...]:
    """Return the row under :data:`RANK_HEAD`, times in milliseconds; see :data:`PATH_MEANING` for the path."""
    seconds = (
        rank.step_seconds,
        rank.compute_seconds,
        rank.communication_seconds,
        rank.exposed_transfer_seconds,
        rank.exposed_wait_seconds,
        rank.bubble_seconds,
        rank.idle_seconds,
        rank.path_seconds,
    )
    memory = "" if rank.peak_memory_bytes is None else f"{rank.peak_memory_bytes / 2**30:.2f}"
    return (str(rank.rank), str(rank.multiplicity), *(f"{value * 1e3:.3f}" for value in seconds), memory)


def collective_rows(collectives: Sequence[CollectiveFigures]) -> list[tuple[str, ...]]:
    """Group collectives of equal kind, ranks and size, longest total first: counts, bytes, milliseconds."""
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
