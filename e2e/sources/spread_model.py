"""``--parallel``: built-in transformers and Hugging Face configurations, spread over GPUs. Sweeps start here too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from costmodel.operators.expert_routing import BALANCED
from e2e.capture.models.stacks import stack_of
from e2e.parallelism import ParallelGraph, Step, build
from e2e.parallelism.condense import Condenser
from e2e.parallelism.spec import require_consistent
from e2e.price.release_spread import OLDER_NOTE
from e2e.price.speed_band import band_of
from e2e.sources.asked.request import PredictRequest
from e2e.sources.prepared_step import Batch, PreparedStep
from e2e.sources.request_parts import FORWARD_ALONE, cluster_of, placed_values, setting_of, taken_values

IN_PIECES = (
    "tp-overlap=yes launches products in {tp} pieces, each beside a transfer: a step that waits for the host takes "
    "longer with it than without"
)


def prepare(request: PredictRequest, captures: Path | None = None) -> PreparedStep:
    """One training step, or one forward pass, of all ranks. ``captures``: a folder where captured layers are kept for
    other calls.
    """
    workload, configuration, machine = request.workload, request.configuration, request.machine
    model, spec = workload.model or workload.model_config, configuration.parallel
    assert model is not None and spec is not None
    require_consistent(spec, machine.gpus)
    cluster = cluster_of(machine, spec.world_size)
    setting = setting_of(configuration, cluster.machine)
    step = Step(
        workload.samples,
        workload.sequence_length,
        configuration.number_type,
        configuration.attention or "eager",
        configuration.stack,
        configuration.compiled,
        configuration.lora,
        configuration.mixture,
        configuration.precision,
        configuration.routing,
        workload.mode == "inference",
        workload.document_length,
        configuration.optimizer,
    )

    def of(step: Step) -> ParallelGraph:
        return build(
            model, spec, step, captures=captures, condenser=Condenser(setting.overheads),
            node_gpus=cluster.gpus_per_node, host_bandwidth=cluster.host_bandwidth,
        )  # fmt: skip

    built = of(step)
    balanced = None if step.routing == BALANCED else of(replace(step, routing=BALANCED)).graph
    older = stack_of(configuration.stack).older_libraries
    band = band_of(cluster.machine, older_libraries=older)
    notes = [
        *([FORWARD_ALONE] if step.inference else []),
        *([OLDER_NOTE] if older and band is not None else []),
        *([IN_PIECES.format(tp=spec.tp)] if spec.tp_overlap else []),
    ]
    made_of = f"batch size {step.batch_size} x {spec.micro_batches} micro-batches x {spec.replicas} replicas"
    return PreparedStep(
        built.graph,
        setting,
        cluster,
        built.memory,
        built.warnings,
        skew=machine.skew,
        band=band,
        notes=notes,
        balanced=balanced,
        batch=Batch(built.samples, built.sequence_length, made_of),
        taken=taken_values(
            request,
            built.sequence_length,
            "AdamW" if workload.mode == "train" else "",
            configuration.attention or "eager",
        )
        | placed_values(cluster),
    )
