"""Steps from ``--trace``: the last step of an execution trace.

The trace is of one GPU, of one rank of a job with identical ranks, or there are traces of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from costmodel.base.errors import InputError
from e2e.lowering.lowered_step import lower_ranks
from e2e.sources.known_requests import Trace
from e2e.sources.prepared_step import PreparedStep
from e2e.sources.request_parts import cluster_of, gpu_machine, on_machine, one_gpu, setting_of, step_options
from e2e.sources.single_gpu import single_step
from e2e.step.collective_names import kind_of
from e2e.step.execution_graph import RankGraph
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import Tf32Switches
from e2e.traces.formats.chakra import is_chakra, read_chakra
from e2e.traces.formats.steps import last_step
from e2e.traces.formats.survey import read_last_step
from e2e.traces.recorded_ranks import ranks_of_job
from e2e.traces.recorded_run import expand_files
from e2e.whatif.operators_behind import TracedRank


def prepare_trace(request: Trace) -> PreparedStep:
    """Prepare the step; raises ``InputError`` if a trace has collectives but the number of ranks is not known."""
    gpu_machine(request.gpu)  # invalid names are reported before a large file is read
    files, asked = expand_files(request.traces), request.gpus
    if len(files) > 1:
        return _all_ranks(request, files)
    path = files[0]
    operators = read_trace(path)
    collectives = any(kind_of(call.name) for call in operators.calls)
    if (asked or told_ranks(operators)) > 1 or (collectives and asked == 1):
        return _one_of_many(request, operators)
    if collectives:
        raise InputError(f"{path}: a rank of a job with collectives; give --gpus, the number of its ranks")
    if (request.nodes or 1) > 1:
        raise InputError(f"--nodes {request.nodes}: the step runs on one GPU; give --gpus, the GPUs of the whole job")
    options = step_options(request)
    step = single_step(operators, one_gpu(request.gpu), request, options, recorded_switches([operators]))
    require_gpu_work(operators, step.graph.ranks[0])
    return step


def require_gpu_work(trace: OperatorTrace, rank: RankGraph) -> None:
    """Raise ``InputError`` if ``rank`` of a recorded ``trace`` has no GPU work: it was recorded without a GPU."""
    if trace.calls and not rank.tasks:
        raise InputError(
            f"{trace.source}: none of its {len(trace.calls):,} operators works on a GPU: the step was recorded on a "
            "CPU, which calls others than a GPU does; record it on a GPU, or give the step as a --script, which needs "
            "none"
        )


# Argument position of the allow-TF32 flag in calls of cuDNN's convolutions.
_ALLOWS_TF32 = {"aten::cudnn_convolution": 8, "aten::cudnn_convolution_transpose": 9}


def recorded_switches(traces: Sequence[OperatorTrace]) -> Tf32Switches:
    """TF32 switches as far as recorded calls tell: only forward convolutions record theirs, matrix products do not."""
    calls = (call for trace in traces for call in trace.calls if call.name in _ALLOWS_TF32)
    return Tf32Switches(convolutions=any(call.inputs[_ALLOWS_TF32[call.name] :] == (True,) for call in calls))


def read_trace(path: Path) -> OperatorTrace:
    """Read the last step of PyTorch's JSON or of Chakra's protobuf messages."""
    return last_step(read_chakra(path)) if is_chakra(path) else read_last_step(path)


def told_ranks(operators: OperatorTrace) -> int:
    """Number of ranks of the job as far as the trace tells, else 1."""
    return max([operators.world_size, *(len(ranks) for ranks in operators.process_groups.values())])


def _all_ranks(request: Trace, files: Sequence[Path]) -> PreparedStep:
    """Prepare the ranks of a job with matching collectives; kernels and host times are predicted."""
    count, asked = len(files), request.gpus
    if asked not in (None, count):
        raise InputError(f"--gpus {asked}: there are traces of {count} ranks; leave it out")
    cluster = cluster_of(request, count)
    traces = ranks_of_job([read_trace(path) for path in files])
    source = f"{traces[0].source} and {count - 1} other ranks"
    options = on_machine(step_options(request), cluster.machine, recorded_switches(traces))
    setting = setting_of(request, cluster.machine, options)
    skew = request.skew
    lowered = lower_ranks(traces, {}, source, options)
    traced = {trace.rank: TracedRank(trace, options) for trace in traces}
    warnings = [
        *lowered.warnings,
        f"the {count} ranks are taken to begin together, as execution traces do not tell; where they begin apart, "
        "collectives wait, which no interval here holds: give the profiles of all ranks, too (--kineto)",
    ]
    return PreparedStep(lowered.graph, setting, cluster, lowered.memory, warnings, skew=skew, traced=traced)


def _one_of_many(request: Trace, operators: OperatorTrace) -> PreparedStep:
    """Prepare a job whose other ranks are assumed identical. Older traces do not contain their number."""
    told = told_ranks(operators)
    gpus = request.gpus or told
    if told not in (1, gpus):
        raise InputError(f"{operators.source}: of a job of {told} ranks; --gpus says {gpus}; leave --gpus out")
    cluster = cluster_of(request, gpus)
    trace = replace(operators, world_size=gpus)
    options = on_machine(step_options(request), cluster.machine, recorded_switches([trace]))
    setting = setting_of(request, cluster.machine, options)
    skew = request.skew
    lowered = lower_ranks([trace], {trace.rank: gpus}, operators.source, options)
    warnings = list(lowered.warnings)
    if gpus > 1:
        warnings.append(f"the trace is of one rank; the other {gpus - 1} are taken as alike")
    traced = {trace.rank: TracedRank(trace, options)}
    return PreparedStep(lowered.graph, setting, cluster, lowered.memory, warnings, skew=skew, traced=traced)
