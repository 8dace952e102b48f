"""One cell of a sweep: build the graph, see whether it fits, predict. Runs in worker processes; imports ``torch``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from costmodel.cluster import Cluster, load_cluster
from costmodel.errors import InputError, ProjectError
from costmodel.gpu.factory import gpu_cost_model
from e2e.memory import MemoryUsage
from e2e.parallelism import ParallelGraph, Step, build, parse_parallel
from e2e.parallelism.condense import Condenser
from e2e.prediction import Prediction
from e2e.predictor import Setting, predict
from e2e.shared_overheads import load_overheads
from e2e.sweep.results import Row
from e2e.sweep.space import Candidate, Question


@dataclass(frozen=True)
class Job:
    """``candidate`` of ``question``; captures are kept in ``captures`` (``None``: nowhere)."""

    question: Question
    candidate: Candidate
    captures: Path | None = None


def evaluate(job: Job) -> Row:
    """The first of the candidate's specs that fits. An error becomes a row that says why: one cell must not take the
    others with it.
    """
    try:
        return _first_that_fits(job)
    except Exception as error:
        found = error if isinstance(error, ProjectError) else f"{type(error).__name__}: {error}"
        return failure(job, str(found))


def failure(job: Job, reason: str) -> Row:
    """The row of a job that could not be computed."""
    candidate = job.candidate
    return Row(candidate.gpu, candidate.gpus, 0, candidate.parallel, "failed", " ".join(reason.split()))


def _first_that_fits(job: Job) -> Row:
    question, candidate = job.question, job.candidate
    cluster = load_cluster(candidate.gpu, candidate.gpus, network=question.network)
    row = None
    for spec in candidate.specs():
        try:
            row = _evaluate(job, spec, cluster)
        except InputError as error:
            return Row(candidate.gpu, candidate.gpus, cluster.nodes, spec, "not possible", str(error))
        if row.status == "ok":
            return row
    assert row is not None
    return row


def _evaluate(job: Job, spec: str, cluster: Cluster) -> Row:
    question, candidate = job.question, job.candidate
    step = Step(question.batch_size, question.sequence_length, question.dtype, question.attention)
    model, overheads = gpu_cost_model(cluster.machine), load_overheads()
    setting = Setting(cluster.machine, overheads, model, tf32=question.dtype == "tf32")
    # Cells of many stages and micro-batches have millions of kernels: as `predict` does, in runs of them.
    condenser = Condenser(overheads)
    layout = parse_parallel(spec, candidate.gpus)
    built = build(question.model, layout, step, captures=job.captures, condenser=condenser)
    capacity = int(cluster.machine.memory[-1].capacity_bytes)
    fullest = _fullest(built.memory.values())
    if fullest is not None and fullest > capacity:
        reason = f"{fullest / 2**30:.1f} GiB of {capacity / 2**30:.0f} GiB on the fullest rank"
        return Row(
            candidate.gpu, candidate.gpus, cluster.nodes, spec, "does not fit", reason,
            peak_memory_bytes=fullest, memory_capacity_bytes=capacity,
        )  # fmt: skip
    return _row(candidate, spec, built, predict(built.graph, setting, cluster, built.memory).prediction)


def _row(candidate: Candidate, spec: str, built: ParallelGraph, prediction: Prediction) -> Row:
    seconds, slowest = prediction.iteration_seconds, prediction.slowest
    return Row(
        gpu=candidate.gpu,
        gpus=candidate.gpus,
        nodes=prediction.nodes,
        parallel=spec,
        status="ok",
        iteration_seconds=seconds,
        interval_seconds=prediction.interval_seconds,
        samples=built.samples,
        samples_per_second=built.samples / seconds,
        tokens_per_second_per_gpu=built.samples * built.sequence_length / seconds / candidate.gpus,
        exposed_seconds=slowest.exposed_transfer_seconds + slowest.exposed_wait_seconds,
        bubble_seconds=slowest.bubble_seconds,
        peak_memory_bytes=_fullest(built.memory.values()),
        memory_capacity_bytes=prediction.memory_capacity_bytes,
    )


def _fullest(usages: Iterable[MemoryUsage]) -> int | None:
    return max((usage.peak_bytes for usage in usages), default=None)
