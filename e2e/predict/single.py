"""A step on one GPU from the trace of its operators, wherever they come from."""

from __future__ import annotations

from costmodel.cluster import Cluster
from e2e.capture.options import CaptureOptions
from e2e.choices import AttentionForm
from e2e.compilation import compile_rank
from e2e.graph import ExecutionGraph
from e2e.lowering import LoweringOptions, lower
from e2e.memory import peak_memory
from e2e.operators import OperatorTrace
from e2e.predict.machines import setting_of
from e2e.predict.request import Request
from e2e.predict.step import PreparedStep
from e2e.predictor import lowering_warnings


def capture_options(request: Request, attention: AttentionForm = "eager") -> CaptureOptions:
    """How a step is captured; ``attention``: where none is asked for."""
    configuration = request.configuration
    return CaptureOptions(request.workload.mode, configuration.dtype, configuration.attention or attention)


def single_step(trace: OperatorTrace, request: Request, cluster: Cluster) -> PreparedStep:
    """``trace`` lowered, and compiled where that is asked for."""
    setting = setting_of(request.configuration, cluster.machine)
    rank = lower(trace, LoweringOptions(tf32=setting.tf32))
    warnings = lowering_warnings(rank)
    if setting.compiled:
        rank = compile_rank(rank, trace)
    elif trace.compiled:
        warnings.append("the script compiles its model (torch.compile), which runs eagerly here; add --compile")
    graph = ExecutionGraph((rank,), source=trace.source)
    return PreparedStep(graph, setting, cluster, {rank.rank: peak_memory(trace)}, warnings)
