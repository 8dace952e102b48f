"""``--model`` and ``--model-config``: a model on one GPU; and the step of one GPU from any trace of its operators."""

from __future__ import annotations

from costmodel.machines.cluster import Cluster
from e2e.capture.models.catalog import build, build_from_file
from e2e.capture.session import capture
from e2e.lowering import LoweringOptions
from e2e.lowering.lowered_step import lower_step
from e2e.sources.asked.request import ConfigurationOptions, PredictRequest
from e2e.sources.prepared_step import PreparedStep
from e2e.sources.request_parts import capture_options, one_gpu, setting_of
from e2e.step.operator_trace import OperatorTrace

# Said of a step that has nothing else.
FORWARD_ALONE = "the step is one forward pass over all its tokens on one GPU, without a cache of earlier ones"


def prepare_built_in(request: PredictRequest) -> PreparedStep:
    """The step of a built-in model, captured without a GPU."""
    workload, options = request.workload, capture_options(request)
    assert workload.model is not None
    cluster = one_gpu(request.machine)
    model = build(workload.model, workload.samples, workload.sequence_length, options)
    return single_step(capture(model, options), request.configuration, cluster)


def prepare_configuration(request: PredictRequest) -> PreparedStep:
    """The step of the model of a Hugging Face configuration file, captured without a GPU."""
    workload, options = request.workload, capture_options(request)
    assert workload.model_config is not None
    cluster = one_gpu(request.machine)
    model = build_from_file(workload.model_config, workload.samples, workload.sequence_length, options)
    return single_step(capture(model, options), request.configuration, cluster)


def single_step(trace: OperatorTrace, configuration: ConfigurationOptions, cluster: Cluster) -> PreparedStep:
    """The step of ``trace`` on the one GPU of ``cluster``, compiled where ``configuration`` asks for that."""
    setting = setting_of(configuration, cluster.machine)
    lowered = lower_step(trace, LoweringOptions(tf32=setting.tf32), compiled=setting.compiled)
    notes = [FORWARD_ALONE] if trace.calls and all(call.phase == "forward" for call in trace.calls) else []
    return PreparedStep(lowered.graph, setting, cluster, lowered.memory, lowered.warnings, notes)
