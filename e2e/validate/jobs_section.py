"""The section ``dlrm`` of ``python -m e2e validate``: recorded jobs predicted, beside the figures of the papers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

from rich.console import Console
from rich.table import Table

from e2e.validate.predicted_jobs import JOBS, PredictedJobs, RankResult, predicted_jobs

# Lin et al., HiPC 2022 and their multi-GPU work of 2024: geometric means over their cells.
PUBLISHED = (
    ("DLRM on one GPU, own overheads", "7.96 %"),
    ("DLRM on one GPU, shared overheads", "10.15 %"),
    ("DLRM on several GPUs", "5.21 %"),
    ("language models", "3.00 %"),
    ("embedding lookups", "3-6 %"),
    ("all-to-all, all-reduce", "5-6 %"),
)
# An error of nothing would pull a geometric mean to nothing.
_LEAST = 1e-4


@dataclass(frozen=True)
class JobsSection:
    """All recorded jobs, predicted."""

    jobs: PredictedJobs

    def record(self) -> dict[str, Any]:
        """The JSON document."""
        return {**self.jobs.record(), "published": dict(PUBLISHED)}

    def render(self) -> None:
        """Every rank, every job's mean, and what the papers say of theirs."""
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 140, no_color=not sys.stdout.isatty())
        console.print(
            "recorded jobs predicted from their operators alone: (a) host overheads of the job's own profile, by "
            "operator; (b) of the other jobs', this one left out. Both as profiled, beside profiled steps",
            soft_wrap=True,
        )
        table = Table("job", "GPU", "rank", "recorded ms", "(a) ms", "error", "(b) ms", "error", box=None)
        table.add_column("profiler's operator records ms")
        for each in self.jobs.results:
            table.add_row(each.job, each.gpu, str(each.rank), *_times(each))
        console.print(table)
        console.print(self._means())
        published = "; ".join(f"{name} {figure}" for name, figure in PUBLISHED)
        console.print(f"papers, geometric means over their own cells: {published}", soft_wrap=True)
        console.print(
            "the profiler's share counts its operator records only: what its records of runtime calls cost is not "
            "measured (it needs a GPU) and stays in both sides",
            soft_wrap=True,
        )

    def _means(self) -> Table:
        table = Table("job", "ranks", "(a) mean", "geometric", "worst", "(b) mean", "geometric", "worst", box=None)
        for job in dict.fromkeys(each.job for each in self.jobs.results):
            ranks = self.jobs.of(job)
            own, left_out = [abs(each.own_error) for each in ranks], [abs(each.left_out_error) for each in ranks]
            figures = [*_figures(own), *_figures(left_out)]
            table.add_row(job, str(len(ranks)), *(f"{value:.1%}" for value in figures))
        return table


def _times(each: RankResult) -> list[str]:
    return [
        f"{each.recorded_seconds * 1e3:.2f}",
        f"{each.own_seconds * 1e3:.2f}",
        f"{each.own_error:+.1%}",
        f"{each.left_out_seconds * 1e3:.2f}",
        f"{each.left_out_error:+.1%}",
        f"{each.profiler_seconds * 1e3:.2f}",
    ]


def _figures(errors: list[float]) -> tuple[float, float, float]:
    return mean(errors), geometric_mean(max(each, _LEAST) for each in errors), max(errors)


def jobs_section(data: Path, only: str = "") -> JobsSection | None:
    """``None`` if ``only`` names something else; ``InputError`` if the recordings are not in ``data``."""
    if not any(only in f"{job.gpu}/{job.name}" for job in JOBS):
        return None
    return JobsSection(predicted_jobs(data, only))
