"""Steps from ``--model`` and ``--model-config`` on one GPU, and single-GPU steps from any operator trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from costmodel.base.errors import InputError
from costmodel.machines.cluster import Cluster
from costmodel.operators.expert_routing import BALANCED
from e2e.capture.models.catalog import build, build_from_file
from e2e.capture.models.stacks import stack_of
from e2e.capture.session import CapturedWorkload, capture
from e2e.lowering.lowered_step import lower_step
from e2e.price.speed_band import band_of
from e2e.sources.capture_notes import assumptions
from e2e.sources.known_requests import Model
from e2e.sources.prepared_step import Batch, PreparedStep
from e2e.sources.request import Request
from e2e.sources.request_parts import forward_note, on_machine, one_gpu, setting_of, step_options, taken_values
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import NO_TF32, StepOptions, Tf32Switches
from e2e.whatif.operators_behind import TracedRank

# Models whose parameters exceed the GPU's memory more often than this are rejected before the capture.
MOST_TIMES_MEMORY = 100.0


def prepare_single(request: Model) -> PreparedStep:
    """Prepare the step of a built-in model or of a Hugging Face configuration file, captured without a GPU."""
    cluster = one_gpu(request.gpu)  # invalid GPUs are reported before a capture
    options = step_options(request, attention=request.attention or "eager")
    make: Any = build if request.model is not None else build_from_file
    model: CapturedWorkload = make(request.named, request.samples, request.sequence_length, options)
    require_size(model, cluster)
    trace = capture(model, options)
    step = single_step(trace, cluster, request, options)
    batch = None if model.samples is None else Batch(model.samples, model.sequence_length)
    taken = taken_values(options, request.samples, model.sequence_length, model.optimizer)
    forward = options.inference and model.sequence_length is not None
    notes = [forward_note(request.cache_length, request.sequence_length)] if forward else step.notes
    return replace(step, warnings=[*step.warnings, *assumptions([trace])], batch=batch, taken=taken, notes=notes)


def single_step(
    trace: OperatorTrace, cluster: Cluster, request: Request, options: StepOptions, own: Tf32Switches = NO_TF32
) -> PreparedStep:
    """Prepare the step of ``trace`` with ``options`` on the GPU of ``cluster``. ``own``: TF32 switches of a script."""
    machine = cluster.machine
    lowering, architecture = on_machine(options, machine, own), machine.chip().architecture
    lowered = lower_step(trace, lowering, architecture)
    traced = {trace.rank: TracedRank(trace, lowering)}
    balanced = None
    if lowering.routing != BALANCED:
        balanced = lower_step(trace, replace(lowering, routing=BALANCED), architecture).graph
    older = stack_of(options.stack).older_libraries
    return PreparedStep(
        lowered.graph, setting_of(request, machine, options), cluster, lowered.memory, lowered.warnings,
        traced=traced, balanced=balanced, band=band_of(machine, older_libraries=older),
    )  # fmt: skip


def require_size(model: CapturedWorkload, cluster: Cluster) -> None:
    """Raise ``InputError`` for a model far too large for one GPU of ``cluster``, which takes minutes to capture.

    Only the GPU's own part of sharded parameters counts.
    """
    whole = model.module.parameters()
    parts = [each.to_local() if hasattr(each, "to_local") else each for each in whole]  # local part of a DTensor
    held = sum(each.numel() * each.element_size() for each in parts)
    times = held / cluster.machine.memory[-1].capacity_bytes
    if times > MOST_TIMES_MEMORY:
        count = sum(each.numel() for each in parts)
        several = cluster.gpus > 1
        advice = "shard them (fully_shard)" if several else "spread it with --gpus and --parallel"
        raise InputError(
            f"{model.name}: {count / 1e12:.3g} T parameters{' of one rank' if several else ''} take {held / 2**40:.3g} "
            f"TiB, {times:.0f} times the memory of one {cluster.machine.name}; {advice}, or correct its sizes"
        )
