"""Steps of the user's program, run as it is (``python -m e2e predict ... -- COMMAND``), on one GPU or many."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.operators.experts import BALANCED
from e2e.capture.distributed.distributed_capture import DistributedCapture, capture_job
from e2e.capture.launcher import Launch, parse_command
from e2e.capture.program_process import ProgramRanks
from e2e.capture.script import kept
from e2e.lowering.lower_trace import lower_ranks
from e2e.price.speed_band import band_of
from e2e.sources.built_in_model import assumptions
from e2e.sources.known_requests import Program
from e2e.sources.prepared_step import Batch, PreparedStep
from e2e.sources.step_setting import cluster_of, on_machine, placed_values, setting_of, step_options
from e2e.sources.user_script import seen_gpu
from e2e.step.operator_trace import has_own_samples
from e2e.step.options import StepOptions
from e2e.whatif.traced_rank import TracedRank


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

    def capture() -> tuple[DistributedCapture, tuple[str, ...]]:
        ranks = ProgramRanks(launch, options, folder, request.data == "synthetic")
        found = capture_job(ranks, gpus, cluster.gpus_per_node, ranks=request.ranks or None)
        return found, ranks.told(found)

    captured, told = kept(_key(request, launch, options, gpus), capture)
    compiled = options.compile or any(trace.compiled for trace in captured.traces)
    lowering = on_machine(replace(options, compile=compiled), machine, captured.switches)
    lowered = lower_ranks(
        captured.traces, captured.multiplicity, captured.source, lowering, machine.chip().architecture
    )
    return PreparedStep(
        lowered.graph,
        setting_of(request, machine, lowering),
        cluster,
        lowered.memory,
        [*lowered.warnings, *told, *assumptions(captured.traces)],
        speed_spread=request.speed_spread,
        band=band_of(machine),
        batch=_batch(captured, gpus),
        taken={"--dtype": f"the program's own, {captured.switches.described}", **placed_values(cluster)},
        traced={trace.rank: TracedRank(trace, lowering) for trace in captured.traces},
    )


def _size(request: Program, launch: Launch) -> tuple[int, int]:
    """Return the GPUs of the job and its nodes, from the launcher and from the request, which must agree."""
    nodes = request.nodes or launch.nodes or 1
    if request.nodes and launch.processes and launch.nodes and request.nodes != launch.nodes:
        raise InputError(f"--nodes {request.nodes}: {launch.launcher} starts {launch.nodes}; give one of the two")
    if launch.gpus is None:
        return request.gpus or nodes, nodes
    if request.gpus and request.gpus != launch.gpus:
        raise InputError(f"--gpus {request.gpus}: {launch.launcher} starts {launch.gpus}; give one of the two")
    return launch.gpus, nodes


def _key(request: Program, launch: Launch, options: StepOptions, gpus: int) -> Hashable:
    """Cache key of a capture: everything that it depends on."""
    settled = replace(options, compile=False, routing=BALANCED)
    return request.command, str(request.folder), settled, request.gpu, gpus, request.nodes, request.ranks, request.data


def _batch(captured: DistributedCapture, gpus: int) -> Batch | None:
    """Return the batch of a step: samples of a pass, of all its passes, on all GPUs."""
    samples, passes = captured.samples, max(1, len(captured.traces[0].passes))
    if samples is None or (gpus > 1 and not all(has_own_samples(trace) for trace in captured.traces)):
        return None
    made_of = [f"{passes} passes of {samples}"] if passes > 1 else [f"{samples}"] if gpus > 1 else []
    if gpus > 1:
        made_of.append(f"on each of {gpus} GPUs")
    return Batch(samples * passes * gpus, None, " ".join(made_of), samples)
