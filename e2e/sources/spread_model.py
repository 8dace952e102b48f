"""Steps from ``--parallel``: built-in transformers and Hugging Face configurations over GPUs. Sweeps use it too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.operators.expert_routing import BALANCED
from e2e.capture.models.stacks import stack_of
from e2e.parallelism import ParallelGraph
from e2e.parallelism import build as build_parallel
from e2e.parallelism.condense import Condenser
from e2e.parallelism.spec import require_consistent
from e2e.price.release_spread import OLDER_NOTE
from e2e.price.speed_band import band_of
from e2e.sources.known_requests import SpreadModel
from e2e.sources.prepared_step import Batch, PreparedStep
from e2e.sources.request_parts import (
    FORWARD_ALONE,
    cluster_of,
    placed_values,
    setting_of,
    step_options,
    taken_values,
)
from e2e.step.options import StepOptions

IN_PIECES = (
    "tp-overlap=yes launches products in {tp} pieces, each beside a transfer: a step that waits for the host takes "
    "longer with it than without"
)


def prepare_spread(request: SpreadModel, captures: Path | None = None) -> PreparedStep:
    """Prepare one training step, or one forward pass, of all ranks. ``captures``: cache folder of captured layers."""
    spec = request.parallel
    if spec is None:
        raise InputError(f"{request.named}: say how the work is spread, such as --parallel dp=8 or --parallel fsdp=8")
    require_consistent(spec, request.gpus)
    cluster = cluster_of(request, spec.world_size)
    step = step_options(request)
    setting = setting_of(request, cluster.machine, step)

    def of(step: StepOptions) -> ParallelGraph:
        return build_parallel(
            request.named, spec, step, captures=captures, condenser=Condenser(setting.overheads),
            node_gpus=cluster.gpus_per_node, host_bandwidth=cluster.host_bandwidth,
        )  # fmt: skip

    built = of(step)
    balanced = None if step.routing == BALANCED else of(replace(step, routing=BALANCED)).graph
    older = stack_of(step.stack).older_libraries
    band = band_of(cluster.machine, older_libraries=older)
    notes = [
        *([FORWARD_ALONE] if step.inference else []),
        *([OLDER_NOTE] if older and band is not None else []),
        *([IN_PIECES.format(tp=spec.tp)] if spec.tp_overlap else []),
    ]
    made_of = f"batch size {request.samples} x {spec.micro_batches} micro-batches x {spec.replicas} replicas"
    return PreparedStep(
        built.graph,
        setting,
        cluster,
        built.memory,
        built.warnings,
        skew=request.skew,
        band=band,
        notes=notes,
        balanced=balanced,
        batch=Batch(built.samples, built.sequence_length, made_of),
        taken=taken_values(step, request.samples, built.sequence_length, "AdamW" if request.mode == "train" else "")
        | placed_values(cluster),
    )
