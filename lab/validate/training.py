"""The section ``training`` of ``python -m lab.validate``: predictions of published training steps of language models.

One parameter of a prediction is fitted to such steps (:mod:`e2e.price.speed_band`): here it is refitted for every
source, to the steps of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from rich.table import Table

from e2e.capture.models.stacks import stack_of
from e2e.price.speed_band import SpeedBand, load_speed_band, release_spread
from lab.fit.speed_band import left_out_bands
from lab.steps.training import BF16, AskedStep, TrainingRow
from lab.steps.training_runs import BareStep, PredictedStep, predicted_steps
from lab.validate.errors import print_left_out, section_console

GIB = 2**30
LENGTH_CLASSES = ((2048, "to 2k tokens"), (4096, "4k tokens"), (8192, "8k tokens"), (1 << 40, "16k tokens and more"))


@dataclass(frozen=True)
class TrainingCase:
    """One row, its request and its prediction without parameters fitted to whole steps; ``band``: fitted to those of
    other sources (``None``: there are none).
    """

    asked: AskedStep
    predicted: PredictedStep
    band: SpeedBand | None = None

    @cached_property
    def left_out(self) -> PredictedStep:
        """Prediction with the band fitted without the row's source."""
        row = self.asked.row
        if self.band is None or row.gpus == 1:
            return self.predicted
        return self.predicted.slowed(self.band.on(self.predicted.chip).slowdown(row.gpus))

    @property
    def error(self) -> float:
        """(predicted - measured) / measured, with this source left out of all fits."""
        return self.left_out.seconds / self.asked.row.seconds - 1.0

    @property
    def bare_error(self) -> float:
        """:attr:`error` without parameters fitted to whole steps."""
        return self.predicted.seconds / self.asked.row.seconds - 1.0

    @cached_property
    def interval_seconds(self) -> tuple[float, float]:
        """Interval of :attr:`left_out`; treats all families as unknown if no step of the row's chip was fitted to;
        wider if its libraries are older than the tables'.
        """
        if self.band is None or self.left_out is self.predicted:
            return self.predicted.interval_seconds
        errors = self.band.errors
        if self.predicted.chip not in self.band.chips:
            errors = replace(errors, families=())
        if stack_of(self.asked.stack).older_libraries:
            errors = errors.widened(release_spread())
        return self.left_out.interval(errors)

    @property
    def inside(self) -> bool:
        """True if the measured time lies in the interval."""
        low, high = self.interval_seconds
        return low <= self.asked.row.seconds <= high

    @property
    def memory_error(self) -> float | None:
        """:attr:`error` of the peak reserved by the allocator; ``None`` if not published or not predicted."""
        return _memory_error(self.predicted.peak_memory_bytes, self.asked.row.memory_gib)

    @property
    def allocated_error(self) -> float | None:
        """:attr:`memory_error` of the peak in use."""
        return _memory_error(self.predicted.allocated_bytes, self.asked.row.allocated_gib)

    @property
    def peer_errors(self) -> tuple[float, float] | None:
        """Errors of the source's own program: of the time, and of the memory in use; ``None`` if it has none."""
        row = self.asked.row
        if not row.peer_seconds or not row.allocated_gib:
            return None
        return row.peer_seconds / row.seconds - 1.0, row.peer_allocated_gib / row.allocated_gib - 1.0

    def groups(self) -> Iterator[tuple[str, str]]:
        """Yield (kind, name) of the groups to which the case belongs, that of all first."""
        row = self.asked.row
        yield "all", "all"
        yield "kind", self.asked.kind
        yield "cell", f"{self.asked.kind}, {row.family} on {row.gpu}"
        yield "source", row.family
        yield "GPU", row.gpu
        yield "model", self.asked.model
        yield "nodes", "one node" if row.gpus <= 8 else "several nodes"
        told = row.precision.lower() or self.asked.precision or "bf16"
        yield "precision", told.removeprefix("amp_")
        if told in BF16:
            yield "bf16", f"{row.family} on {self.asked.row.gpu}"
        yield "length", next(name for limit, name in LENGTH_CLASSES if self.asked.sequence_length <= limit)
        yield "recomputation", self.asked.spec.recompute
        if row.sealed:
            yield "sealed", self.asked.kind
        elif row.held_out:
            yield "held out", row.family
        if row.task != "pretrain":
            yield "fine-tuning", row.family


@dataclass(frozen=True)
class TrainingFigures:
    """Errors of a group, as fractions, each source left out."""

    kind: str
    name: str
    count: int
    mape: float
    median: float
    p90: float
    worst: float
    bias: float
    # Without parameters fitted to whole steps.
    bare_mape: float
    bare_bias: float
    interval: float
    # Rows predicted not to fit, though they ran.
    refused: int
    # Mean error of the `memory_count` published peaks, None without any.
    memory: float | None
    memory_count: int
    # The same for the memory in use.
    allocated: float | None = None
    # Errors of the source's own program, where it has predicted the steps.
    peer_mape: float | None = None
    peer_allocated: float | None = None
    # Number of cases in which our time is nearer than that program's.
    nearer: int = 0


@dataclass(frozen=True)
class TrainingReport:
    """All cases. ``left_out``: reasons for rows without a request; ``failed``: errors of ``predict``, by row."""

    cases: Sequence[TrainingCase]
    left_out: Mapping[str, str]
    failed: Mapping[str, str]

    def figures(self) -> list[TrainingFigures]:
        """Figures of every group with a case."""
        groups: dict[tuple[str, str], list[TrainingCase]] = {}
        for case in self.cases:
            for group in case.groups():
                groups.setdefault(group, []).append(case)
        order = list(dict.fromkeys(kind for kind, _ in groups))
        return [training_figures(*group, groups[group]) for group in sorted(groups, key=lambda g: order.index(g[0]))]

    def record(self) -> dict[str, Any]:
        """JSON document of the report."""
        rows = [
            {
                "case": f"{case.asked.row.gpu}/{case.asked.row.name}",
                "asked": {
                    "model": case.asked.model,
                    "batch_size": case.asked.batch_size,
                    "sequence_length": case.asked.sequence_length,
                    "parallel": _spec_text(case.asked),
                    "stack": case.asked.stack,
                    "compiled": case.asked.compiled,
                    "lora": case.asked.lora,
                    "document_length": case.asked.document_length,
                    "assumed": list(case.asked.assumed),
                },
                "measured_seconds": case.asked.row.seconds,
                "measured_memory_gib": case.asked.row.memory_gib or None,
                "left_out_seconds": case.left_out.seconds,
                "left_out_interval_seconds": list(case.interval_seconds),
                "error": case.error,
                "error_nothing_fitted": case.bare_error,
                "inside": case.inside,
                "memory_error": case.memory_error,
                "allocated_error": case.allocated_error,
                "peer_errors": case.peer_errors,
                **{f"predicted_{name}": value for name, value in vars(case.predicted).items() if name != "failure"},
            }
            for case in self.cases
        ]
        return {
            "figures": [asdict(each) for each in self.figures()],
            "cases": rows,
            "left_out": dict(self.left_out),
            "failed": dict(self.failed),
        }

    def render(self) -> None:
        """Print every row, then the figures of every group, then the skipped rows, by reason."""
        console = section_console(160)
        console.print(_case_table(self.cases))
        console.print(_figure_table(self.figures()))
        console.print(_evidence(self.cases), soft_wrap=True)
        print_left_out(console, self.left_out)
        print_left_out(console, self.failed, "failed")
        for each in self.figures():
            if each.kind == "source" and each.peer_mape is not None and each.peer_allocated is not None:
                console.print(
                    f"{each.name} itself: time {each.peer_mape:.1%}, memory in use {each.peer_allocated:.1%}; "
                    f"its time is beaten in {each.nearer} of {each.count} rows",
                    soft_wrap=True,
                )


def training_figures(kind: str, name: str, cases: Sequence[TrainingCase]) -> TrainingFigures:
    """Errors of ``cases``, at least one."""
    signed = np.array([case.error for case in cases])
    bare = np.array([case.bare_error for case in cases])
    size = np.abs(signed)
    memory = [abs(case.memory_error) for case in cases if case.memory_error is not None]
    allocated = [abs(case.allocated_error) for case in cases if case.allocated_error is not None]
    peers = [(case.error, case.peer_errors) for case in cases if case.peer_errors is not None]
    return TrainingFigures(
        kind,
        name,
        len(cases),
        float(size.mean()),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(size.max()),
        float(signed.mean()),
        float(np.abs(bare).mean()),
        float(bare.mean()),
        float(np.mean([case.inside for case in cases])),
        sum(case.predicted.shortage is not None for case in cases),
        float(np.mean(memory)) if memory else None,
        len(memory),
        float(np.mean(allocated)) if allocated else None,
        float(np.mean([abs(peer[0]) for _, peer in peers])) if peers else None,
        float(np.mean([abs(peer[1]) for _, peer in peers])) if peers else None,
        sum(abs(own) < abs(peer[0]) for own, peer in peers),
    )


def training_section(rows: Sequence[TrainingRow], only: str = "", *, anew: bool = False) -> TrainingReport | None:
    """Report of ``rows`` whose ``gpu/name`` contains ``only``; ``None`` if there is none.

    The band of speeds for a row is the shipped one fitted without its source, or with ``anew`` one fitted to all other
    rows.
    """
    found, left_out, failed = predicted_steps(rows, only)
    if not found and not left_out and not failed:
        return None
    bands = left_out_bands(found) if anew else _shipped_bands(found)
    cases = [TrainingCase(step.asked, step.predicted, bands[step.asked.row.family]) for step in found]
    return TrainingReport(cases, left_out, failed)


def _shipped_bands(steps: Sequence[BareStep]) -> dict[str, SpeedBand | None]:
    band = load_speed_band()
    sources = dict.fromkeys(step.asked.row.family for step in steps)
    return {name: None if band is None else band.left_out.get(name, band) for name in sources}


def _memory_error(predicted: int | None, published_gib: float) -> float | None:
    return None if predicted is None or not published_gib else predicted / GIB / published_gib - 1.0


def _spec_text(asked: AskedStep) -> str:
    from e2e.parallelism.spec import text_of

    return text_of(asked.spec)


def _case_table(cases: Sequence[TrainingCase]) -> Table:
    table = Table("GPU", "row", "spread", "measured s", "predicted s", "error", "nothing fitted", "memory", box=None)
    for case in cases:
        row, memory = case.asked.row, case.memory_error
        bare = f"{case.bare_error:+.1%}"
        told = "does not fit" if case.predicted.shortage else "" if memory is None else f"{memory:+.1%}"
        if case.peer_errors is not None and case.allocated_error is not None:
            told += f"; in use {case.allocated_error:+.1%}, {row.family} {case.peer_errors[1]:+.1%}"
        seconds = (f"{value:.3f}" for value in (row.seconds, case.left_out.seconds))
        table.add_row(
            row.gpu,
            row.name.removeprefix(row.source.replace(" ", "-") + "/"),
            _spec_text(case.asked),
            *seconds,
            f"{case.error:+.1%}" + ("" if case.peer_errors is None else f", {row.family} {case.peer_errors[0]:+.1%}"),
            bare,
            told,
        )
    return table


def _evidence(cases: Sequence[TrainingCase]) -> str:
    """Statement on how many of the rows had not been looked at during development."""
    sealed = sum(case.asked.row.sealed for case in cases)
    if sealed == len(cases):
        return f"{sealed} sealed rows: drawn before work began, looked at by nobody, fitted to by nothing"
    return (
        f"development error: {len(cases) - sealed} of the {len(cases)} rows were looked at while the models were made. "
        "Each source is left out of what is fitted to whole steps, but not of what was chosen by looking"
    )


def _figure_table(figures: Sequence[TrainingFigures]) -> Table:
    heads = ("group", "rows", "mean", "median", "p90", "worst", "bias", "nothing fitted: mean", "bias", "in interval")
    table = Table(*heads, "refused", "memory", box=None)
    for each in figures:
        sizes = (f"{value:.1%}" for value in (each.mape, each.median, each.p90, each.worst))
        memory = "" if each.memory is None else f"{each.memory:.1%} of {each.memory_count}"
        memory += "" if each.allocated is None else f"; in use {each.allocated:.1%}"
        name = each.name if each.kind == "all" else f"{each.kind}: {each.name}"
        inside, refused = f"{each.interval:.0%}", str(each.refused)
        bare = f"{each.bare_mape:.1%}", f"{each.bare_bias:+.1%}"
        table.add_row(name, str(each.count), *sizes, f"{each.bias:+.1%}", *bare, inside, refused, memory)
    return table
