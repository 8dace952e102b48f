"""A step on one GPU from the trace of its operators, wherever they come from."""

from __future__ import annotations

from costmodel.machines.cluster import Cluster
from e2e.capture.options import CaptureOptions
from e2e.sources.asked_machine import setting_of
from e2e.sources.lowered_step import lower_step
from e2e.sources.prepared_step import PreparedStep
from e2e.sources.request import PredictRequest
from e2e.step.choices import AttentionForm
from e2e.step.operator_trace import OperatorTrace


def capture_options(request: PredictRequest, attention: AttentionForm = "eager") -> CaptureOptions:
    """How a step is captured; ``attention``: where none is asked for."""
    configuration = request.configuration
    return CaptureOptions(request.workload.mode, configuration.dtype, configuration.attention or attention)


def single_step(trace: OperatorTrace, request: PredictRequest, cluster: Cluster) -> PreparedStep:
    """``trace`` lowered, and compiled where that is asked for."""
    setting = setting_of(request.configuration, cluster.machine)
    lowered = lower_step(trace, setting)
    return PreparedStep(lowered.graph, setting, cluster, lowered.memory, lowered.warnings)
