"""Evaluation of one cell of a sweep: build the graph, check the memory, predict. Runs in workers; imports ``torch``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from costmodel.base.errors import InputError, ProjectError
from costmodel.base.termination import pass_ending
from e2e.parallelism.spec import ParallelSpec, parse_parallel, text_of
from e2e.sources import spread_model
from e2e.sources.known_requests import SpreadModel
from e2e.sources.prepared_step import PreparedStep, run
from e2e.sources.request import Cluster
from e2e.sources.request_parts import cluster_of
from e2e.step.memory_room import memory_room, verdict
from e2e.sweeps.sweep_results import SweepRow
from e2e.sweeps.sweep_space import SweepCell, SweepRequest


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
        return request.settled()


def evaluate(task: SweepTask) -> SweepRow:
    """Return the row of the first of the cell's specs that fits.

    An error becomes a row with its message, so that other cells are not affected.
    """
    try:
        return _first_that_fits(task)
    except Exception as error:
        pass_ending(error)
        found = error if isinstance(error, ProjectError) else f"{type(error).__name__}: {error}"
        return failure(task, str(found))


def failure(task: SweepTask, reason: str) -> SweepRow:
    """Return the row of a task that could not be computed."""
    cell = task.cell
    return SweepRow(cell.gpu, cell.gpus, 0, text_of(cell.parallel), "failed", " ".join(reason.split()))


def _first_that_fits(task: SweepTask) -> SweepRow:
    cell = task.cell
    nodes = cluster_of(Cluster(gpu=cell.gpu, network=task.request.network), cell.gpus).nodes
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
    cell, step = task.cell, spread_model.prepare_spread(task.asked(spec), task.captures)
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
    prediction, batch = run(step).prediction, step.batch
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
