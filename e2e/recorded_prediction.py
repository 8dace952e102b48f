"""Predictions from recordings: measured kernels and host times where they are, another GPU by scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from costmodel.cluster import load_cluster, single_gpu
from costmodel.collectives import collective_cost_model
from costmodel.errors import InputError
from costmodel.gpu.factory import gpu_cost_model
from costmodel.machine_catalog import load_machine
from costmodel.machine_records import Machine
from e2e.collective_pricing import price_collectives
from e2e.gpu_names import machine_of_gpu, recorded_machine
from e2e.graph import ExecutionGraph, RankGraph
from e2e.lowered_step import lowering_warnings
from e2e.lowering import LoweringOptions, lower
from e2e.measured_kernels import with_measured
from e2e.memory import peak_memory
from e2e.predictor import Place, Result, Setting, explain_once, predict
from e2e.retarget import Scaling, retarget
from e2e.shared_overheads import fitted_overheads
from e2e.traces.recorded_graph import RecordedStep, recorded_graph, recorded_ranks
from e2e.traces.recorded_run import RecordedRun, read_recorded_run
from e2e.traces.steps import last_step

_INFLATED = "host times are as recorded, the profiler's share included"


@dataclass(frozen=True)
class Recording:
    """Files of a recorded run and what is asked of it. ``gpu``: ``None`` for the recorded one; ``retarget``: the GPU
    to which measured kernels are scaled; ``nodes`` and ``network``: over which the ranks are spread there.
    """

    kineto: Sequence[str]
    traces: Sequence[str]
    gpu: str | None = None
    retarget: str | None = None
    nodes: int = 1
    network: str | None = None
    tf32: bool = False
    cuda_graph: bool = False


def predict_recording(recording: Recording) -> Result:
    """One rank's steady step, or one iteration of all ranks of a job. ``InputError`` for files that do not fit."""
    run = read_recorded_run(recording.kineto, recording.traces)
    if recording.retarget is not None and not run.links:
        raise InputError("--retarget needs the operators behind the kernels; give --trace of every rank too")
    if len(run.profiles) > 1 or run.profiles[0].world_size > 1 or not run.links:
        return _several(run, recording)
    return _single(run, recording)


def _single(run: RecordedRun, recording: Recording) -> Result:
    """The trace's graph with the overheads of the profile's host, and with its kernels on the same GPU.

    Of several steps in the execution trace the last whole one, as without a profile.
    """
    profile = run.profiles[0]
    whole = run.links[profile.rank]
    linked = whole.part(last_step(whole.trace))
    recorded, machine = _machines(run, recording)
    rank = lower(linked.trace, LoweringOptions(tf32=recording.tf32))
    warnings = lowering_warnings(rank)
    overheads = fitted_overheads(Path(profile.source).name, profile)
    notes = [whole.describe(), "host overheads are those of the profile, without the profiler's share"]
    graph = ExecutionGraph((rank,), source=linked.trace.source)
    if recorded is not None and (recording.retarget is not None or recorded.name == machine.name):
        measured = with_measured(rank, linked)
        graph = replace(graph, ranks=(measured.graph,))
        notes.append(
            f"{measured.tasks} of {len(rank.tasks)} kernels and copies have their recorded times on {recorded.name}"
        )
        if recording.retarget is not None:
            graph = _scaled(graph, {rank.rank: rank}, recorded, machine, notes)
    else:
        notes.append(f"kernels are predicted for {machine.name}; the profile is of {profile.gpu or 'an unknown GPU'}")
    setting = Setting(machine, overheads, tf32=recording.tf32, cuda_graph=recording.cuda_graph)
    memory = {rank.rank: peak_memory(linked.trace)}
    return predict(graph, setting, single_gpu(machine), memory, warnings=warnings, notes=notes)


def _several(run: RecordedRun, recording: Recording) -> Result:
    """Kernels, transfers and host times as recorded; on another GPU kernels scaled, transfers predicted."""
    recorded, machine = _machines(run, recording)
    if recorded is not None and recording.retarget is None and recorded.name != machine.name:
        raise InputError(
            f"--gpu {machine.name}: the run was recorded on {run.gpu}; --retarget {machine.name} moves it there"
        )
    step, warnings = _recorded(run, recording.retarget is not None)
    size = sum(step.graph.multiplicity.get(rank.rank, 1) for rank in step.graph.ranks)
    notes = [linked.describe() for linked in list(run.links.values())[:1]] if len(run.links) == 1 else []
    if len(run.links) > 1:
        operators = sum(linked.linked_operators for linked in run.links.values())
        total = sum(linked.total_operators for linked in run.links.values())
        notes.append(f"{operators} of {total} operators of {len(run.links)} ranks linked with their profiles")
    notes.append(_INFLATED)
    memory = {rank: peak_memory(linked.trace) for rank, linked in run.links.items()}
    if recording.retarget is None:
        notes.append(f"kernels and transfers are as recorded on {machine.name}")
        place = Place("as recorded", recording.nodes)
        return explain_once(step.graph, machine, place, memory, starts=step.starts, warnings=warnings, notes=notes)
    assert recorded is not None
    lowered = {
        rank: replace(lower(linked.trace, LoweringOptions(tf32=recording.tf32)), rank=rank)
        for rank, linked in run.links.items()
    }
    graph = _scaled(step.graph, lowered, recorded, machine, notes)
    cluster = load_cluster(recording.retarget, size, recording.nodes, recording.network)
    graph = price_collectives(graph, cluster, collective_cost_model(cluster))
    notes.append(f"transfers are predicted for {cluster.name}")
    return explain_once(graph, machine, cluster, memory, starts=step.starts, warnings=warnings, notes=notes)


def _recorded(run: RecordedRun, moved: bool) -> tuple[RecordedStep, list[str]]:
    """``moved``: to another GPU, where transfers are predicted and hold no waiting."""
    if len(run.profiles) > 1:
        return recorded_ranks(run.profiles, links=run.links), []
    profile = run.profiles[0]
    step = recorded_graph(profile, run.links.get(profile.rank))
    if profile.world_size == 1:
        return step, []
    if moved:
        return step, [f"{profile.source} is one of {profile.world_size} ranks; the others are taken as alike"]
    return step, [
        f"{profile.source} is one of {profile.world_size} ranks: its collectives include the waiting for the others; "
        "give the profiles of all ranks to tell both apart"
    ]


def _machines(run: RecordedRun, recording: Recording) -> tuple[Machine | None, Machine]:
    """The GPU of the recording (``None``: its name is not known, and nothing needs it) and the one asked for."""
    asked = recording.retarget or recording.gpu
    name = run.gpu
    if asked is None:
        machine = recorded_machine(name, run.profiles[0].source)
        return machine, machine
    target = _target(asked)
    if recording.retarget is not None:
        return recorded_machine(name, run.profiles[0].source) if recording.gpu is None else _target(
            recording.gpu
        ), target
    return machine_of_gpu(name), target


def _target(name: str) -> Machine:
    machine = load_machine(name)
    machine.chip()
    return machine


def _scaled(
    graph: ExecutionGraph, lowered: dict[int, RankGraph], recorded: Machine, target: Machine, notes: list[str]
) -> ExecutionGraph:
    result = retarget(graph, lowered, Scaling(recorded, gpu_cost_model(recorded), gpu_cost_model(target)))
    notes.append(
        f"kernels are the recorded ones times the predicted ratio of {target.name} to {recorded.name}; "
        f"{result.described_fraction:.0%} of their time by operator, the rest as element-wise"
    )
    return result.graph
