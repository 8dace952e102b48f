"""``--model`` and ``--model-config``: a model on one GPU; and the step of one GPU from any trace of its operators."""

from __future__ import annotations

from dataclasses import replace

from costmodel.base.errors import InputError
from costmodel.machines.cluster import Cluster
from costmodel.operators.attention import AttentionKernel
from costmodel.operators.expert_routing import BALANCED
from e2e.capture.models.catalog import build, build_from_file
from e2e.capture.models.stacks import stack_of
from e2e.capture.options import CaptureOptions
from e2e.capture.session import CapturedWorkload, capture
from e2e.capture.tf32_switches import NO_TF32, Tf32Switches
from e2e.lowering.lowered_step import lower_step
from e2e.price.speed_band import band_of
from e2e.sources.asked.request import ConfigurationOptions, PredictRequest
from e2e.sources.capture_notes import assumptions
from e2e.sources.prepared_step import Batch, PreparedStep
from e2e.sources.request_parts import (
    capture_options,
    forward_note,
    lowering_options,
    one_gpu,
    setting_of,
    taken_values,
)
from e2e.step.operator_trace import OperatorTrace
from e2e.whatif.operators_behind import TracedRank

# Parameters that are larger than the GPU's memory so many times are no step to look at.
MOST_TIMES_MEMORY = 100.0


def prepare_built_in(request: PredictRequest) -> PreparedStep:
    """The step of a built-in model, captured without a GPU."""
    workload, options = request.workload, capture_options(request)
    assert workload.model is not None
    one_gpu(request.machine)  # what is wrong with it is told before a capture
    model = build(workload.model, workload.samples, workload.sequence_length, options)
    return _modelled_step(model, request, options)


def prepare_configuration(request: PredictRequest) -> PreparedStep:
    """The step of the model of a Hugging Face configuration file, captured without a GPU."""
    workload, options = request.workload, capture_options(request)
    assert workload.model_config is not None
    one_gpu(request.machine)  # what is wrong with it is told before a capture
    model = build_from_file(workload.model_config, workload.samples, workload.sequence_length, options)
    return _modelled_step(model, request, options)


def single_step(
    trace: OperatorTrace,
    configuration: ConfigurationOptions,
    cluster: Cluster,
    attention: AttentionKernel | None = None,
    own: Tf32Switches = NO_TF32,
) -> PreparedStep:
    """The step of ``trace`` on the one GPU of ``cluster``, compiled where ``configuration`` asks for that.

    ``attention``, ``own``: see :func:`e2e.sources.request_parts.lowering_options`.
    """
    setting = setting_of(configuration, cluster.machine)
    lowering = lowering_options(configuration, cluster.machine, attention, own)
    architecture = cluster.machine.chip().architecture
    lowered = lower_step(trace, lowering, compiled=setting.compiled, architecture=architecture)
    traced = {trace.rank: TracedRank(trace, lowering)}
    balanced = None
    if lowering.routing != BALANCED:
        even = replace(lowering, routing=BALANCED)
        balanced = lower_step(trace, even, compiled=setting.compiled, architecture=architecture).graph
    older = stack_of(configuration.stack).older_libraries
    return PreparedStep(
        lowered.graph, setting, cluster, lowered.memory, lowered.warnings, traced=traced, balanced=balanced,
        band=band_of(cluster.machine, older_libraries=older),
    )  # fmt: skip


def require_size(model: CapturedWorkload, cluster: Cluster) -> None:
    """``InputError`` for a model of which one GPU of ``cluster`` holds so much that no change of its step brings it
    there: to capture it takes minutes, and there would be nothing to learn. Of sharded parameters the GPU's own part
    counts.
    """
    whole = model.module.parameters()
    parts = [each.to_local() if hasattr(each, "to_local") else each for each in whole]  # of DTensor
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


def _modelled_step(model: CapturedWorkload, request: PredictRequest, options: CaptureOptions) -> PreparedStep:
    require_size(model, one_gpu(request.machine))
    trace = capture(model, options)
    step = single_step(trace, request.configuration, one_gpu(request.machine), options.kernel)
    batch = None if model.samples is None else Batch(model.samples, model.sequence_length)
    taken = taken_values(request, model.sequence_length, model.optimizer, options.attention)
    step = replace(step, warnings=[*step.warnings, *assumptions([trace])], batch=batch, taken=taken)
    if options.mode != "inference" or model.sequence_length is None:
        return step
    return replace(step, notes=[forward_note(request)])
