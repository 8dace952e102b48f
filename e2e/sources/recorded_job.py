"""Steps from recorded files: execution traces (``--trace``) and profiles (``--kineto``).

Of an execution trace the last step is taken. Recorded runs keep their measured kernel and host times, which are scaled
for another GPU. A trace is of one GPU, of one rank of a job with identical ranks, or there are traces of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.collectives import collective_cost_model
from costmodel.gpu.factory import gpu_cost_model
from costmodel.machines.cluster import Cluster, load_cluster, load_gpu, single_gpu
from costmodel.machines.machine_records import Machine
from e2e.explain.predictor import RecordedSite, Setting
from e2e.lowering.lower_trace import lower, lower_ranks, lowering_warnings
from e2e.price.collective_pricing import price_collectives
from e2e.price.host_overheads import OverheadTable, fitted_overheads
from e2e.price.recorded_kernels import Scaling, retarget, with_measured
from e2e.sources.built_in_model import single_step
from e2e.sources.prepared_step import PreparedStep, cluster_of, on_machine, step_options, step_setting
from e2e.sources.requests import Recording, Trace
from e2e.step.collective_names import kind_of
from e2e.step.execution_graph import ExecutionGraph, RankGraph
from e2e.step.memory import peak_memory
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import StepOptions, Tf32Switches
from e2e.traces.recorded_graph import RecordedStep, recorded_graph, recorded_ranks
from e2e.traces.recorded_run import (
    RecordedRun,
    expand_files,
    machine_of_gpu,
    ranks_of_job,
    read_recorded_run,
    recorded_machine,
)
from e2e.traces.step_window import choose_step, doubts, last_step, read_last_step
from e2e.whatif.traced_rank import TracedRank


def prepare_trace(request: Trace) -> PreparedStep:
    """Prepare the step; raises ``InputError`` if a trace has collectives but the number of ranks is not known."""
    load_gpu(request.gpu)  # invalid names are reported before a large file is read
    files, asked = expand_files(request.traces), request.gpus
    if len(files) > 1:
        return _all_ranks(request, files)
    path = files[0]
    operators = read_last_step(path)
    collectives = any(kind_of(call.name) for call in operators.calls)
    if (asked or told_ranks(operators)) > 1 or (collectives and asked == 1):
        return _one_of_many(request, operators)
    if collectives:
        raise InputError(f"{path}: a rank of a job with collectives; give --gpus, the number of its ranks")
    if (request.nodes or 1) > 1:
        raise InputError(f"--nodes {request.nodes}: the step runs on one GPU; give --gpus, the GPUs of the whole job")
    options = step_options(request)
    step = single_step(operators, single_gpu(load_gpu(request.gpu)), request, options, recorded_switches([operators]))
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


def told_ranks(operators: OperatorTrace) -> int:
    """Number of ranks of the job as far as the trace tells, else 1."""
    return max([operators.world_size, *(len(ranks) for ranks in operators.process_groups.values())])


def _all_ranks(request: Trace, files: Sequence[Path]) -> PreparedStep:
    """Prepare the ranks of a job with matching collectives; kernels and host times are predicted."""
    count, asked = len(files), request.gpus
    if asked not in (None, count):
        raise InputError(f"--gpus {asked}: there are traces of {count} ranks; leave it out")
    cluster = cluster_of(request, count)
    traces = ranks_of_job([read_last_step(path) for path in files])
    source = f"{traces[0].source} and {count - 1} other ranks"
    options = on_machine(step_options(request), cluster.machine, recorded_switches(traces))
    setting = step_setting(request, cluster.machine, options)
    spread = request.speed_spread
    lowered = lower_ranks(traces, {}, source, options)
    traced = {trace.rank: TracedRank(trace, options) for trace in traces}
    warnings = [
        *lowered.warnings,
        f"the {count} ranks are taken to begin together, as execution traces do not tell; where they begin apart, "
        "collectives wait, which no interval here holds: give the profiles of all ranks, too (--kineto)",
    ]
    return PreparedStep(lowered.graph, setting, cluster, lowered.memory, warnings, speed_spread=spread, traced=traced)


def _one_of_many(request: Trace, operators: OperatorTrace) -> PreparedStep:
    """Prepare a job whose other ranks are assumed identical. Older traces do not contain their number."""
    told = told_ranks(operators)
    gpus = request.gpus or told
    if told not in (1, gpus):
        raise InputError(f"{operators.source}: of a job of {told} ranks; --gpus says {gpus}; leave --gpus out")
    cluster = cluster_of(request, gpus)
    trace = replace(operators, world_size=gpus)
    options = on_machine(step_options(request), cluster.machine, recorded_switches([trace]))
    setting = step_setting(request, cluster.machine, options)
    spread = request.speed_spread
    lowered = lower_ranks([trace], {trace.rank: gpus}, operators.source, options)
    warnings = list(lowered.warnings)
    if gpus > 1:
        warnings.append(f"the trace is of one rank; the other {gpus - 1} are taken as alike")
    traced = {trace.rank: TracedRank(trace, options)}
    return PreparedStep(lowered.graph, setting, cluster, lowered.memory, warnings, speed_spread=spread, traced=traced)


_INFLATED = "host times are as recorded, the profiler's share included"
# Largest plausible backlog from earlier steps, in steps: more than a host runs ahead of its GPU in steady training.
_BACKLOG = 1.0


@dataclass(frozen=True)
class _Recorded:
    """Recorded run with its request and machines."""

    run: RecordedRun
    request: Recording
    # GPU of the recording; `None`: unknown, and not needed.
    recorded: Machine | None
    # Requested GPU.
    machine: Machine

    @property
    def moved(self) -> bool:
        return self.request.retarget is not None

    def lower(self, trace: OperatorTrace) -> RankGraph:
        return lower(trace, self.lowering)

    @property
    def lowering(self) -> StepOptions:
        return step_options(self.request)

    def setting(self, overheads: OverheadTable | None = None) -> Setting:
        """Return the setting with the recorded host times, or with ``overheads``.

        The recorded host is known, but another GPU may have another host, with the usual variation of host speeds.
        """
        found = step_setting(self.request, self.machine)
        table = overheads or found.overheads
        assert isinstance(table, OverheadTable)
        return replace(found, overheads=replace(table, factor=found.overheads.factor if self.elsewhere else 1.0))

    @property
    def elsewhere(self) -> bool:
        """True if the step is predicted for a GPU other than the recorded one."""
        return self.recorded is not None and self.recorded.name != self.machine.name

    def host_note(self) -> list[str]:
        """Return a note on the assumed host of another GPU."""
        if not self.elsewhere:
            return []
        return [
            f"the host is the recorded one; in front of {self.machine.name} there may be another (the interval takes "
            f"hosts up to {self.setting().overheads.factor:g} times as fast or slow)"
        ]


def prepare_recording(request: Recording) -> PreparedStep:
    """Prepare one rank's steady step, or one iteration of all ranks of a job.

    Raises ``InputError`` for mismatched files.
    """
    run = read_recorded_run(request.kineto, request.traces)
    if not run.links and not any(profile.device for profile in run.profiles):
        raise InputError(f"{run.profiles[0].source}: no work of a GPU in it; record on one, with ProfilerActivity.CUDA")
    found = _Recorded(run, request, *_machines(run, request))
    if len(run.profiles) > 1 or run.profiles[0].world_size > 1 or not run.links:
        return _several(found)
    return _single(found)


def _single(found: _Recorded) -> PreparedStep:
    """Prepare the trace's graph with host overheads fitted to the profile, and with its kernels if the GPU is the same.

    The last whole step of the execution trace is used, as without a profile.
    """
    profile, machine = found.run.profiles[0], found.machine
    whole = found.run.links[profile.rank]
    linked = whole.part(last_step(whole.trace))
    rank = found.lower(linked.trace)
    require_gpu_work(linked.trace, rank)
    overheads = fitted_overheads(Path(profile.source).name, profile)
    notes = [
        whole.describe(),
        "host overheads are those of the profile, without the profiler's share",
        f"the profiled step took {choose_step(profile).seconds * 1e3:.3f} ms, the profiler's share included",
    ]
    graph = ExecutionGraph((rank,), source=linked.trace.source)
    if found.recorded is not None and (found.moved or found.recorded.name == machine.name):
        measured = with_measured(rank, linked)
        graph = replace(graph, ranks=(measured.graph,))
        kernels = f"{measured.tasks} of {len(rank.tasks)} kernels and copies"
        notes.append(f"{kernels} have their recorded times on {found.recorded.name}")
        if found.moved:
            graph = _scaled(graph, {rank.rank: rank}, found, notes)
    else:
        notes.append(f"kernels are predicted for {machine.name}; the profile is of {profile.gpu or 'an unknown GPU'}")
    memory = {rank.rank: peak_memory(linked.trace)}
    warnings = lowering_warnings(rank)
    if (found.request.nodes or 1) > 1:
        warnings.append("--nodes: without effect, the recorded run is of one GPU")
    notes += found.host_note()
    setting = found.setting(overheads)
    traced = {rank.rank: TracedRank(linked.trace, found.lowering)}
    return PreparedStep(graph, setting, single_gpu(machine), memory, warnings, notes, traced=traced)


def _several(found: _Recorded) -> PreparedStep:
    """Prepare a job with kernels, transfers and host times as recorded.

    On another GPU kernels are scaled, transfers predicted.
    """
    run, machine = found.run, found.machine
    if found.recorded is not None and not found.moved and found.recorded.name != machine.name:
        raise InputError(
            f"--gpu {machine.name}: the run was recorded on {run.gpu}; --retarget {machine.name} moves it there"
        )
    step, warnings = _recorded(run, found.moved)
    if found.request.cuda_graph:
        warnings = [*warnings, "--cuda-graph: without effect, the launches of a job are as recorded"]
    notes = [*_linked(run), _INFLATED]
    graph: ExecutionGraph = step.graph
    cluster: Cluster | RecordedSite = RecordedSite("as recorded", found.request.nodes or 1)
    if found.moved:
        graph, cluster = _elsewhere(found, graph, notes)
        notes += found.host_note()
    else:
        on = machine.name if found.recorded is not None else run.gpu or "a GPU that the profile does not name"
        notes.append(f"kernels and transfers are as recorded on {on}")
        if found.recorded is None:
            warnings = [
                *warnings,
                f"--gpu {machine.name}: the recorded GPU ({run.gpu or 'not told'}) is none of a known name: only its "
                "memory is compared",
            ]
    memory = {rank: peak_memory(linked.trace) for rank, linked in run.links.items()}
    return PreparedStep(
        graph,
        found.setting(),
        cluster,
        memory,
        warnings,
        notes,
        starts=step.starts,
        steady=step.repeated,
        recorded_seconds=None if found.moved else step.recorded_seconds,
        traced={rank: TracedRank(linked.trace, found.lowering) for rank, linked in run.links.items()},
    )


def _linked(run: RecordedRun) -> list[str]:
    """Return a note on the number of operators of the traces that were found in the profiles."""
    if len(run.links) < 2:
        return [linked.describe() for linked in run.links.values()]
    operators = sum(linked.linked_operators for linked in run.links.values())
    total = sum(linked.total_operators for linked in run.links.values())
    return [f"{operators} of {total} operators of {len(run.links)} ranks linked with their profiles"]


def _recorded(run: RecordedRun, moved: bool) -> tuple[RecordedStep, list[str]]:
    """Return the recorded step and warnings.

    ``moved``: to another GPU, where transfers are predicted without waiting.
    """
    if len(run.profiles) > 1:
        recorded = recorded_ranks(run.profiles, links=run.links)
        return recorded, doubts(run.profiles[0], recorded.window)
    profile = run.profiles[0]
    step = recorded_graph(profile, run.links.get(profile.rank))
    warnings = doubts(profile, step.window)
    if step.backlog_seconds > _BACKLOG * step.window.seconds:
        warnings.append(
            f"earlier work runs on for {step.backlog_seconds * 1e3:.1f} ms of the recorded step of "
            f"{step.window.seconds * 1e3:.1f} ms: steps overlap, as in an engine that serves requests from a queue"
        )
    if profile.world_size == 1:
        return step, warnings
    if moved:
        return step, [
            *warnings,
            f"{profile.source} is one of {profile.world_size} ranks; the others are taken as alike",
        ]
    return step, [
        *warnings,
        f"{profile.source} is one of {profile.world_size} ranks: its collectives include the waiting for the others; "
        "give the profiles of all ranks to tell both apart",
    ]


def _elsewhere(found: _Recorded, recorded: ExecutionGraph, notes: list[str]) -> tuple[ExecutionGraph, Cluster]:
    """Convert the recorded graph to the requested GPUs: kernels scaled, transfers priced anew."""
    lowered = {rank: replace(found.lower(linked.trace), rank=rank) for rank, linked in found.run.links.items()}
    graph = _scaled(recorded, lowered, found, notes)
    asked, gpus = found.request, sum(recorded.multiplicity.get(rank.rank, 1) for rank in recorded.ranks)
    assert asked.retarget is not None
    cluster = load_cluster(asked.retarget, gpus, asked.nodes or 1, asked.network)
    notes.append(f"transfers are predicted for {cluster.name}")
    return price_collectives(graph, cluster, collective_cost_model(cluster)), cluster


def _machines(run: RecordedRun, asked: Recording) -> tuple[Machine | None, Machine]:
    """Return the GPU of the recording (``None``: unknown, and not needed) and the requested one."""
    name, source = run.gpu, run.profiles[0].source
    if asked.retarget is not None:
        recorded = recorded_machine(name, source) if asked.gpu is None else load_gpu(asked.gpu)
        return recorded, load_gpu(asked.retarget)
    if asked.gpu is not None:
        return machine_of_gpu(name), load_gpu(asked.gpu)
    machine = recorded_machine(name, source)
    return machine, machine


def _scaled(
    graph: ExecutionGraph, lowered: Mapping[int, RankGraph], found: _Recorded, notes: list[str]
) -> ExecutionGraph:
    recorded, target = found.recorded, found.machine
    assert recorded is not None
    result = retarget(graph, dict(lowered), Scaling(recorded, gpu_cost_model(recorded), gpu_cost_model(target)))
    notes.append(
        f"kernels are the recorded ones times the predicted ratio of {target.name} to {recorded.name}; "
        f"{result.described_fraction:.0%} of their time by operator, the rest as element-wise"
    )
    return result.graph
