"""``--script``: the user's own step, on one GPU or with ``--gpus`` on as many: DDP, FSDP2, tensor parallel ..."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from e2e.capture.distributed.distributed_capture import capture_distributed
from e2e.capture.script import Fallback, capture_script, load_script, taken_names
from e2e.capture.session import CapturedWorkload
from e2e.lowering import LoweringOptions
from e2e.lowering.lowered_step import lower_ranks
from e2e.sources.asked.request import PredictRequest, WorkloadOptions
from e2e.sources.capture_notes import assumptions
from e2e.sources.prepared_step import Batch, PreparedStep
from e2e.sources.request_parts import capture_options, cluster_of, one_gpu, placed_values, setting_of
from e2e.sources.single_gpu import require_size, single_step
from e2e.whatif.operators_behind import TracedRank

_OWN: Mapping[str, str] = {
    "--mode": "the script's own",
    "--dtype": "the script's own, TF32 off",
    "--attention": "flash (the kernel that PyTorch takes)",
}


def prepare(request: PredictRequest) -> PreparedStep:
    """The step of a script of one process on one GPU, compiled where that is asked for."""
    workload, options = request.workload, capture_options(request, "flash")
    assert workload.script is not None
    cluster = one_gpu(request.machine)
    loaded = load_script(workload.script, options, **_parameters(workload))
    require_size(loaded, cluster)
    trace = capture_script(loaded, options)
    step = single_step(trace, request.configuration, cluster, options.kernel)
    batch = None if loaded.samples is None else Batch(loaded.samples, loaded.sequence_length)
    return replace(
        step, warnings=[*step.warnings, *_unused(workload), *assumptions([trace])], batch=batch, taken=_taken(loaded)
    )


def prepare_ranks(request: PredictRequest) -> PreparedStep:
    """The step of a script of as many processes as ``gpus`` says; ranks that are alike are captured once."""
    workload, gpus = request.workload, request.machine.gpus
    assert workload.script is not None and gpus is not None
    cluster = cluster_of(request.machine, gpus)
    captured = capture_distributed(
        workload.script,
        gpus,
        capture_options(request, "flash"),
        parameters=_parameters(workload),
        gpus_per_node=cluster.gpus_per_node,
        ranks=request.configuration.ranks or None,
    )
    setting = setting_of(request.configuration, cluster.machine)
    options = LoweringOptions(tf32=setting.tf32, attention=capture_options(request, "flash").kernel)
    architecture = cluster.machine.chip().architecture
    lowered = lower_ranks(captured.traces, captured.multiplicity, captured.source, options, architecture)
    warnings = list(lowered.warnings)
    if captured.compiled:
        warnings.append("the script compiles its model (torch.compile): predicted as eager code on several GPUs")
    warnings += [*_unused(workload), *assumptions(captured.traces)]
    taken = dict(_OWN) | placed_values(cluster)
    traced = {trace.rank: TracedRank(trace, options) for trace in captured.traces}
    return PreparedStep(
        lowered.graph,
        setting,
        cluster,
        lowered.memory,
        warnings,
        skew=request.machine.skew,
        taken=taken,
        traced=traced,
    )


def _taken(loaded: CapturedWorkload) -> dict[str, str]:
    """By option, what the script has of its own. It sets its optimizer and number types itself."""
    sizes = {"--batch-size": loaded.samples, "--sequence-length": loaded.sequence_length}
    told = {option: f"{size} (the script's own)" for option, size in sizes.items() if size is not None}
    return dict(_OWN) | told


def _unused(workload: WorkloadOptions) -> list[str]:
    """Sizes that are given and that the script's function does not take."""
    assert workload.script is not None
    sizes = {"batch_size": workload.batch_size, "sequence_length": workload.sequence_length}
    given = [name for name, value in sizes.items() if value is not None]
    taken = taken_names(workload.script, given)
    return [
        f"--{name.replace('_', '-')}: without effect, the script's function has no parameter {name}"
        for name in given
        if name not in taken
    ]


def _parameters(workload: WorkloadOptions) -> dict[str, Any]:
    """What the script's function is called with, as far as it takes it; its own defaults where nothing is given."""
    size = Fallback(1) if workload.batch_size is None else workload.batch_size
    return {"batch_size": size, "sequence_length": workload.sequence_length}
