"""Steps of the user's program, run as it is (``python -m e2e predict ... -- COMMAND``), on one GPU or many."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.machines.cluster import Cluster
from costmodel.operators.experts import BALANCED
from e2e.capture.distributed.distributed_capture import DistributedCapture, capture_job
from e2e.capture.launcher import Launch, parse_command
from e2e.capture.missing.loaders import Loading
from e2e.capture.program import Evaluation
from e2e.capture.program_process import ProgramRanks
from e2e.capture.script import kept
from e2e.capture.script_errors import OtherGpusError
from e2e.explain.prediction import Prediction, RareWork
from e2e.sources.prepared_step import PreparedStep, cluster_of, on_machine, run_step, step_options
from e2e.sources.requests import Program
from e2e.sources.user_script import seen_gpu, step_of_ranks
from e2e.step.options import StepOptions

ALONE = (
    "no launcher: the program finds the environment of torchrun; of what has several GPUs in one process, "
    "nn.DataParallel alone is known"
)


def prepare(request: Program) -> PreparedStep:
    """Prepare a steady step of the program; ranks that run the same operators are captured once.

    What the program compiles is compiled in the prediction too.
    """
    folder = request.folder or Path.cwd()
    launch = parse_command(request.command, folder)
    gpus, nodes = _size(request, launch)
    cluster = cluster_of(replace(request, nodes=nodes), gpus)
    machine = cluster.machine
    options = step_options(request, attention="flash", seen_gpu=seen_gpu(machine))

    def capture() -> tuple[DistributedCapture, tuple[str, ...], tuple[Evaluation, ...], tuple[Loading, ...]]:
        ranks = ProgramRanks(launch, options, folder, request.data == "synthetic")
        with closing(ranks):
            found = capture_job(ranks, gpus, cluster.gpus_per_node, ranks=request.ranks or None)
        return found, ranks.told(found), ranks.evaluations(found), ranks.loading(found)

    try:
        captured, told, evaluations, loading = kept(_key(request, options, gpus), capture)
    except OtherGpusError as error:
        if request.gpus or launch.gpus is not None:
            raise
        step = prepare(replace(request, gpus=error.gpus))
        return replace(step, notes=(*step.notes, f"{error.said}: {error.gpus} GPUs taken, --gpus says otherwise"))
    compiled = options.compile or any(trace.compiled for trace in captured.traces)
    if options.compile:  # all of it, whatever the program compiles itself
        captured = replace(captured, traces=tuple(replace(trace, regions=None) for trace in captured.traces))
    lowering = on_machine(replace(options, compile=compiled), machine, captured.switches)
    taken = {"--dtype": f"the program's own, {captured.switches.described}"}
    found = [(each, _apart(request, captured, each, lowering, cluster)) for each in evaluations]
    apart = [f"not in the step: {each.told}: {each.passes * once.iteration_seconds:.3g} s" for each, once in found]
    rare = [
        RareWork(each.every, once.iteration_seconds, once.interval_seconds, each.whole)
        for each, once in found
        if each.every
    ]
    alone = (ALONE,) if gpus > 1 and not launch.launcher else ()
    if launch.launcher and launch.gpus is None and not request.gpus:
        alone = (f"{launch.launcher} does not say on how many GPUs: {gpus} taken; give --gpus",)
    step = step_of_ranks(request, captured, lowering, cluster, taken=taken, notes=(*told, *apart, *alone))
    return replace(step, rare=rare, loading=loading)


def _apart(
    request: Program, captured: DistributedCapture, evaluation: Evaluation, options: StepOptions, cluster: Cluster
) -> Prediction:
    """Predict one pass that is no part of the step, or a step that does more."""
    rank = evaluation.trace.rank
    once = replace(captured, traces=(evaluation.trace,), multiplicity={rank: cluster.gpus}, samples=None)
    return run_step(step_of_ranks(request, once, options, cluster, taken={})).prediction


def _size(request: Program, launch: Launch) -> tuple[int, int | None]:
    """Return the GPUs of the job and its nodes, if told, from the launcher and from the request, which must agree."""
    nodes = request.nodes or launch.nodes
    if request.nodes and launch.processes and launch.nodes and request.nodes != launch.nodes:
        raise InputError(f"--nodes {request.nodes}: {launch.launcher} starts {launch.nodes}; give one of the two")
    if launch.gpus is None:
        return request.gpus or nodes or 1, nodes
    if request.gpus and request.gpus != launch.gpus:
        raise InputError(f"--gpus {request.gpus}: {launch.launcher} starts {launch.gpus}; give one of the two")
    return launch.gpus, nodes


def _key(request: Program, options: StepOptions, gpus: int) -> Hashable:
    """Cache key of a capture: everything that it depends on."""
    settled = replace(options, compile=False, routing=BALANCED)
    return request.command, str(request.folder), settled, request.gpu, gpus, request.nodes, request.ranks, request.data
