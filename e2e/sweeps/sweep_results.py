"""Rows of a sweep: evaluation of one cell, and results on disk.

Evaluation builds the graph, checks the memory and predicts. Results are one line of JSON each, written as they come,
never computed twice. The key of a result (:func:`e2e.parallelism.capture_cache.capture_key`) covers the request, the
cell, the program's own files and the versions of captured libraries: after any change of these a cell is computed
anew. Evaluation runs in workers and imports ``torch``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from costmodel.base.errors import InputError, OutputError, ProjectError
from costmodel.base.input_files import MALFORMED, decoded, read_text
from costmodel.base.output_files import append_whole, write_whole
from costmodel.base.process import pass_ending
from e2e.parallelism.spec import ParallelSpec, parse_parallel, text_of
from e2e.sources import built_in_model
from e2e.sources.prepared_step import PreparedStep, cluster_of, run_step
from e2e.sources.requests import SpreadModel
from e2e.step.memory_room import memory_room, verdict
from e2e.step.options import ClusterOptions
from e2e.sweeps.sweep_space import SweepCell, SweepRequest

CellStatus = Literal["ok", "may not fit", "does not fit", "not possible", "failed"]


@dataclass(frozen=True)
class SweepRow:
    """Result of one cell. Times in seconds, memory in bytes; ``None`` if ``status`` says that there is no step."""

    gpu: str
    gpus: int
    nodes: int
    # The way that was built, recomputation included, as `--parallel` takes it.
    parallel: str
    # `failed` (error of the program, lost worker) is not stored: the next run tries again
    status: CellStatus
    # Reason why there is no step, in words.
    reason: str = ""
    iteration_seconds: float | None = None
    interval_seconds: tuple[float, float] | None = None
    samples: int | None = None
    samples_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    # Communication that no kernel overlaps, on the rank that computes longest.
    exposed_seconds: float | None = None
    # Waits of that rank for its neighbours in a pipeline.
    bubble_seconds: float | None = None
    peak_memory_bytes: int | None = None
    memory_capacity_bytes: int | None = None
    mfu: float | None = None
    # The cell's batch size, recipe and precision, if different from the request's.
    batch_size: int | None = None
    recipe: str | None = None
    precision: str | None = None

    @property
    def way(self) -> str:
        """Way as given on the command line.

        ``parallel``, and the values in which this row differs from others of the sweep.
        """
        more = (("--batch-size", self.batch_size), ("--recipe", self.recipe), ("--precision", self.precision))
        return " ".join([self.parallel, *(f"{option} {value}" for option, value in more if value is not None)])


class ResultFile:
    """File ``DIRECTORY/results.jsonl``. Raises ``OutputError`` if it cannot be written."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "results.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{directory}: cannot be made: {error.strerror}; choose another folder with -o"
            ) from error
        self._ends_line = True  # False if an editor, or an interrupted run, left the last line without a newline
        self._rows = self._read()

    def get(self, key: str) -> SweepRow | None:
        """Return the result of an earlier run, or ``None``."""
        return self._rows.get(key)

    def add(self, key: str, row: SweepRow) -> None:
        """Store a result; it is on disk when this returns."""
        self._rows[key] = row
        try:
            with self.path.open("ab", buffering=0) as file:
                line = ("" if self._ends_line else "\n") + json.dumps({"key": key, **asdict(row)}) + "\n"
                append_whole(file, line.encode())
        except OSError as error:
            raise OutputError(
                f"{self.path}: cannot be written: {error.strerror}; choose another place, or free some"
            ) from error
        self._ends_line = True

    def _read(self) -> dict[str, SweepRow]:
        if not self.path.exists():
            return {}
        try:
            text = read_text(self.path, "table")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{self.path}: cannot be read: {error}; move the file away") from error
        rows, lines = {}, text.splitlines()
        for number, line in enumerate(lines, 1):
            try:
                record = decoded(line)
                key = record.pop("key")
                rows[key] = _read_row(record)
            except MALFORMED as error:
                if number == len(lines):
                    self._cut_last_line(lines)  # the run was interrupted while writing
                    return rows
                raise InputError(f"{self.path}:{number}: is no result of a sweep; move the file away") from error
        self._ends_line = text.endswith("\n")
        return rows

    def _cut_last_line(self, lines: list[str]) -> None:
        try:
            write_whole(self.path, "".join(line + "\n" for line in lines[:-1]))
        except OSError as error:
            raise OutputError(
                f"{self.path}: cannot be written: {error.strerror}; choose another place, or free some"
            ) from error


def _read_row(record: Mapping[str, Any]) -> SweepRow:
    interval = record["interval_seconds"]
    return SweepRow(**{**record, "interval_seconds": None if interval is None else (interval[0], interval[1])})


@dataclass(frozen=True)
class SweepTask:
    """Task of a worker: ``cell`` of ``request``; ``captures``: cache folder of captures (``None``: no cache)."""

    request: SweepRequest
    cell: SweepCell
    captures: Path | None = None

    def asked(self, spec: ParallelSpec) -> SpreadModel:
        """Return the equivalent request of ``predict``."""
        asked, cell = self.request, self.cell
        request = SpreadModel(
            model=asked.model,
            batch_size=cell.batch_size or asked.samples,
            sequence_length=asked.sequence_length,
            dtype=asked.dtype,
            attention=asked.attention,
            parallel=spec,
            compile=asked.compiled,
            stack=asked.stack,
            precision=cell.precision or asked.precision,
            recipe=cell.recipe or asked.recipe,
            gpu=cell.gpu,
            gpus=cell.gpus,
            network=asked.network,
        )
        return request.with_defaults()


def evaluate(task: SweepTask) -> SweepRow:
    """Return the row of the first of the cell's specs that fits.

    An error becomes a row with its message, so that other cells are not affected.
    """
    try:
        return _first_that_fits(task)
    except Exception as error:
        pass_ending(error)
        found = error if isinstance(error, ProjectError) else f"{type(error).__name__}: {error}"
        return failed_row(task, str(found))


def failed_row(task: SweepTask, reason: str) -> SweepRow:
    """Return the row of a task that could not be computed."""
    cell = task.cell
    return SweepRow(cell.gpu, cell.gpus, 0, text_of(cell.parallel), "failed", " ".join(reason.split()))


def _first_that_fits(task: SweepTask) -> SweepRow:
    cell = task.cell
    nodes = cluster_of(ClusterOptions(gpu=cell.gpu, network=task.request.network), cell.gpus).nodes
    row = None
    for spec in cell.specs():
        try:
            # Validated as given, so that errors do not show values of the recipe.
            parse_parallel(text_of(spec), cell.gpus)
            row = _evaluate(task, spec)
        except InputError as error:
            return SweepRow(cell.gpu, cell.gpus, nodes, text_of(spec), "not possible", str(error))
        if row.status == "ok":
            return row
    assert row is not None
    return row


def _evaluate(task: SweepTask, spec: ParallelSpec) -> SweepRow:
    cell, step = task.cell, built_in_model.prepare_spread(task.asked(spec), task.captures)
    machine = step.setting.machine
    capacity, room = int(machine.memory[-1].capacity_bytes), memory_room(machine, step.graph, step.cluster)
    fullest = max((usage.within(room).peak_bytes for usage in step.memory.values()), default=None)
    needed = max((usage.allocated_bytes for usage in step.memory.values()), default=None)
    judged = verdict(needed, room)
    if needed is not None and judged in ("may not fit", "does not fit"):
        reason = f"{needed / 2**30:.1f} GiB of {room / 2**30:.1f} GiB for tensors on the fullest rank"
        return SweepRow(
            cell.gpu, cell.gpus, step.cluster.nodes, text_of(spec), judged, reason,
            peak_memory_bytes=fullest, memory_capacity_bytes=capacity,
        )  # fmt: skip
    return _row(cell, spec, step, fullest)


def _row(cell: SweepCell, spec: ParallelSpec, step: PreparedStep, fullest: int | None) -> SweepRow:
    prediction, batch = run_step(step).prediction, step.batch
    assert batch is not None and batch.tokens is not None
    seconds, longest = prediction.iteration_seconds, prediction.longest_computing
    return SweepRow(
        gpu=cell.gpu,
        gpus=cell.gpus,
        nodes=prediction.nodes,
        parallel=text_of(spec),
        status="ok",
        iteration_seconds=seconds,
        interval_seconds=prediction.interval_seconds,
        samples=batch.samples,
        samples_per_second=batch.samples / seconds,
        tokens_per_second_per_gpu=batch.tokens / seconds / cell.gpus,
        exposed_seconds=longest.exposed_transfer_seconds + longest.exposed_wait_seconds,
        bubble_seconds=longest.bubble_seconds,
        peak_memory_bytes=fullest,
        memory_capacity_bytes=prediction.memory_capacity_bytes,
        mfu=None if prediction.utilisation is None else prediction.utilisation.mfu,
        batch_size=cell.batch_size,
        recipe=cell.recipe,
        precision=cell.precision,
    )
