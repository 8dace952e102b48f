"""The sections ``dlrm`` and ``replay`` of ``python -m lab.validate``: recorded jobs, replayed with their own times and
predicted without them.

**Replay** takes a job's own kernel, transfer and host times: errors of the scheduler alone.

**Prediction**: the step is given only by operators, its kernels and transfers by models, the host by tables. It is the
papers' own question (Lin et al., HiPC 2022; ISPASS 2025), on the recorded jobs that are public, beside the figures of
the papers. Only the operators of the recording are used, no kernel times. Two tables of host overheads: (a) the job's
own T1 to T5 by operator; (b) those of the other jobs, this one left out. Both as profiled, since the recorded steps are
profiled too; what the operator records of the profiler cost is then predicted once more without them. A job of several
ranks begins as late on each rank as it was recorded to begin: what happened before is no part of the step.

The profiles of ResNet-50 and its execution traces were recorded in different runs of one script, whose operators are
the same one by one; of the job of two ranks one rank is recorded, and the other is assumed equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

from rich.table import Table

from costmodel.base.errors import InputError
from costmodel.machines.cluster import Cluster, load_cluster, single_gpu
from costmodel.machines.machine_file import load_machine
from e2e.explain.predictor import ITERATIONS, Setting, priced_graph
from e2e.explain.rank_figures import collective_figures
from e2e.lowering.lower_trace import lower_ranks
from e2e.price.host_overheads import INFLATION, OverheadTable, fit_table, load_inflation
from e2e.price.overhead_samples import OverheadSamples, extract
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.simulate.timeline import Timeline
from e2e.step.execution_graph import ExecutionGraph
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import StepOptions
from e2e.traces.kineto import KinetoTrace, read_kineto
from e2e.traces.recorded_graph import RecordedStep, recorded_graph, recorded_ranks
from e2e.traces.recorded_run import RecordedRun, expand_files, ranks_of_job, read_recorded_run
from e2e.traces.step_window import read_last_step
from lab.command_line import with_progress
from lab.data.data_folder import BROUGHT
from lab.fit.host_overheads import NOT_SHARED, STACKS
from lab.validate.errors import section_console

# The public job of several ranks: profiles, execution traces.
DLRM_PROFILES = Path("traces/dlrm_8xV100/dlrm_kineto.tar.gz")
DLRM_TRACES = Path("traces/dlrm_8xV100/dlrm_pytorch_et.tar.gz")


@dataclass(frozen=True)
class RankReplay:
    """Step of one rank in seconds. ``linked``: operators of its trace with a profiled one, and their total."""

    rank: int
    recorded_seconds: float
    simulated_seconds: float
    error: float
    linked: tuple[int, int] | None


@dataclass(frozen=True)
class CollectiveReplay:
    """One collective over all ranks."""

    kind: str
    group: str
    sequence: int
    ranks: int
    size_bytes: int
    # Parts into which the recorded kernel times are split.
    transfer_seconds: float
    longest_wait_seconds: float
    # Largest error of its end over the ranks, as a share of their steps.
    end_error: float


@dataclass(frozen=True)
class Replay:
    """Result of a replay. ``source``: the first profile. ``step_error``: of the whole job, first start to last end."""

    source: str
    ranks: Sequence[RankReplay]
    collectives: Sequence[CollectiveReplay]
    step_error: float

    @property
    def worst_rank(self) -> float:
        """Largest error of a rank's step."""
        return max((abs(each.error) for each in self.ranks), default=0.0)

    @property
    def worst_collective(self) -> float:
        """Largest error of a collective's end."""
        return max((each.end_error for each in self.collectives), default=0.0)

    def record(self) -> dict[str, Any]:
        """JSON document of the replay."""
        return {**asdict(self), "worst_rank": self.worst_rank, "worst_collective": self.worst_collective}

    def render(self) -> None:
        """Print every rank and every collective, recorded and simulated."""
        console = section_console()
        console.print(f"replayed with measured kernel, transfer and host times: {self.source}", soft_wrap=True)
        table = Table("rank", "operators linked", "recorded ms", "simulated ms", "error", box=None)
        for rank in self.ranks:
            linked = "" if rank.linked is None else f"{rank.linked[0]} of {rank.linked[1]}"
            recorded, simulated = rank.recorded_seconds * 1e3, rank.simulated_seconds * 1e3
            table.add_row(str(rank.rank), linked, f"{recorded:.3f}", f"{simulated:.3f}", f"{rank.error:+.2%}")
        console.print(table)
        table = Table(
            "collective",
            "sequence",
            "ranks",
            "bytes",
            "transfer us",
            "longest wait us",
            "largest error of its end",
            box=None,
        )
        for each in self.collectives:
            table.add_row(
                each.kind,
                str(each.sequence),
                str(each.ranks),
                f"{each.size_bytes:,}",
                f"{each.transfer_seconds * 1e6:.0f}",
                f"{each.longest_wait_seconds * 1e6:.0f}",
                f"{each.end_error:.2%} of the step",
            )
        console.print(table)
        console.print(
            f"{len(self.ranks)} ranks: largest error of a step {self.worst_rank:.2%}, of a collective's end "
            f"{self.worst_collective:.2%} of the step; whole job {self.step_error:+.2%}"
        )


def replay_public(data: Path) -> Replay:
    """Replay the 8-rank DLRM run of the data folder. ``InputError`` if it does not exist."""
    for path in (data / DLRM_PROFILES, data / DLRM_TRACES):
        if not path.is_file():
            raise InputError(f"{path}: no recorded ranks there; {BROUGHT}")
    return replay(read_recorded_run([data / DLRM_PROFILES], [data / DLRM_TRACES]))


def replay(run: RecordedRun) -> Replay:
    """Simulate and compare every rank and every collective of ``run``."""
    step = recorded_ranks(run.profiles, links=run.links)
    return compare(step, simulate(step.graph, step.starts), run)


def compare(step: RecordedStep, timeline: Timeline, run: RecordedRun) -> Replay:
    """Compare the ``timeline`` of a replay with the recording."""
    ranks = []
    for graph in step.graph.ranks:
        times = step.ranks[graph.rank]
        simulated = timeline.rank_ends(graph.rank)[0] - times.start
        linked = run.links.get(graph.rank)
        counts = None if linked is None else (linked.linked_operators, linked.total_operators)
        error = simulated / times.seconds - 1.0
        ranks.append(RankReplay(graph.rank, times.seconds, simulated, error, counts))
    ends = _end_errors(step, timeline)
    collectives = [
        CollectiveReplay(
            each.kind,
            each.group,
            each.sequence,
            len(each.waiting_seconds),
            each.size_bytes,
            each.transfer_seconds,
            each.skew_seconds,
            ends[each.group, each.sequence],
        )
        for each in collective_figures(step.graph, timeline)
    ]
    return Replay(run.profiles[0].source, ranks, collectives, timeline.step_seconds / step.span_seconds - 1.0)


def _end_errors(step: RecordedStep, timeline: Timeline) -> Mapping[tuple[str, int], float]:
    """Largest distance of simulated and recorded end over the ranks, as a share of each rank's step."""
    found: dict[tuple[str, int], float] = {}
    for graph in step.graph.ranks:
        times = step.ranks[graph.rank]
        for task in graph.tasks:
            if task.collective is not None:
                key = (task.collective.group, task.collective.sequence)
                off = abs(timeline.task(graph.rank, task.id).end - times.tasks[task.id]) / times.seconds
                found[key] = max(off, found.get(key, 0.0))
    return found


@dataclass(frozen=True)
class PredictedJob:
    """Recorded job. ``name``: that of the stack in :data:`lab.fit.host_overheads.STACKS` with its profiles; ``traces``:
    its execution traces; ``ranks``: of the job.
    """

    name: str
    gpu: str
    traces: str
    ranks: int = 1
    tf32: bool = False


JOBS = (
    PredictedJob("v100-torchrec-dlrm", "v100-sxm2-32gb", "traces/dlrm_8xV100/dlrm_pytorch_et.tar.gz", 8),
    PredictedJob("rtx-2080-ti-linear", "rtx-2080-ti", "traces/linear_2080Ti/linear_et.json.gz"),
    PredictedJob(
        "v100-resnet50", "v100-sxm2-32gb", "traces/execution_traces/1.0.3-chakra.0.0.4/resnet_1gpu_et.json.gz"
    ),
    PredictedJob(
        "a100-resnet50-ddp",
        "a100-sxm-40gb",
        "traces/execution_traces/1.1.0-chakra.0.0.4/resnet_2gpu_et.json.gz",
        ranks=2,
        tf32=True,  # its recorded kernels use it (tf32f32, s1688)
    ),
)


@dataclass(frozen=True)
class RankResult:
    """Seconds of one rank's step. ``own`` and ``left_out``: predicted with the two tables, as profiled;
    ``profiler_seconds``: overhead of the profiler's operator records in the former.
    """

    job: str
    gpu: str
    rank: int
    recorded_seconds: float
    own_seconds: float
    left_out_seconds: float
    profiler_seconds: float

    @property
    def own_error(self) -> float:
        """Relative error with the job's own table."""
        return self.own_seconds / self.recorded_seconds - 1.0

    @property
    def left_out_error(self) -> float:
        """Relative error with the other jobs' table."""
        return self.left_out_seconds / self.recorded_seconds - 1.0


@dataclass(frozen=True)
class PredictedJobs:
    """Results of all ranks of all jobs."""

    results: Sequence[RankResult]

    def of(self, job: str) -> list[RankResult]:
        """Results of the ranks of one job."""
        return [each for each in self.results if each.job == job]

    def record(self) -> dict[str, Any]:
        """JSON document of the jobs."""
        rows = [
            {**asdict(each), "own_error": each.own_error, "left_out_error": each.left_out_error}
            for each in self.results
        ]
        jobs = dict.fromkeys(each.job for each in self.results)
        summary = {
            job: {
                "own": mean(abs(each.own_error) for each in self.of(job)),
                "left_out": mean(abs(each.left_out_error) for each in self.of(job)),
            }
            for job in jobs
        }
        return {"ranks": rows, "mean_errors": summary, "published": dict(PUBLISHED)}

    def render(self) -> None:
        """Print every rank, every job's mean, and the figures of the papers."""
        console = section_console()
        console.print(
            "recorded jobs predicted from their operators alone: (a) host overheads of the job's own profile, by "
            "operator; (b) of the other jobs', this one left out. Both as profiled, beside profiled steps",
            soft_wrap=True,
        )
        table = Table("job", "GPU", "rank", "recorded ms", "(a) ms", "error", "(b) ms", "error", box=None)
        table.add_column("profiler's operator records ms")
        for each in self.results:
            table.add_row(each.job, each.gpu, str(each.rank), *_times(each))
        console.print(table)
        console.print(self._means())
        published = "; ".join(f"{name} {figure}" for name, figure in PUBLISHED)
        console.print(f"papers, geometric means over their own cells: {published}", soft_wrap=True)
        console.print(
            "the profiler's share counts its operator records only: what its records of runtime calls cost is not "
            "measured (it needs a GPU) and stays in both sides",
            soft_wrap=True,
        )

    def _means(self) -> Table:
        table = Table("job", "ranks", "(a) mean", "geometric", "worst", "(b) mean", "geometric", "worst", box=None)
        for job in dict.fromkeys(each.job for each in self.results):
            ranks = self.of(job)
            own, left_out = [abs(each.own_error) for each in ranks], [abs(each.left_out_error) for each in ranks]
            figures = [*_figures(own), *_figures(left_out)]
            table.add_row(job, str(len(ranks)), *(f"{value:.1%}" for value in figures))
        return table


def jobs_section(data: Path, only: str = "") -> PredictedJobs | None:
    """Predict every job whose ``gpu/name`` contains ``only``, ``None`` if there is none; ``InputError`` if ``data`` has
    no recordings.
    """
    wanted = [job for job in JOBS if only in f"{job.gpu}/{job.name}"]
    if not wanted:
        return None
    samples = {job.name: _samples(data, job.name) for job in JOBS}
    return PredictedJobs(
        [result for job in with_progress(wanted, lambda job: job.name) for result in _predict(data, job, samples)]
    )


def _profiles(data: Path, name: str) -> list[KinetoTrace]:
    for file in STACKS[name]:
        if not (data / file).is_file():
            raise InputError(f"{data / file}: no recorded job there; {BROUGHT}")
    return [read_kineto(path) for path in expand_files([data / file for file in STACKS[name]])]


def _samples(data: Path, name: str) -> list[OverheadSamples]:
    return [extract(profile) for profile in _profiles(data, name)]


def _predict(data: Path, job: PredictedJob, samples: Mapping[str, Sequence[OverheadSamples]]) -> list[RankResult]:
    others = [each for name, found in samples.items() if name != job.name and name not in NOT_SHARED for each in found]
    tables = {
        "own": fit_table(job.name, samples[job.name], of_job=True),
        "without": fit_table(job.name, samples[job.name], load_inflation(INFLATION), of_job=True),
        "left out": fit_table("other jobs", others),
    }
    profiles = _profiles(data, job.name)
    traces = _traces(data, job)
    cluster = load_cluster(job.gpu, job.ranks) if job.ranks > 1 else single_gpu(load_machine(job.gpu))
    alike = {} if len(traces) == job.ranks else {traces[0].rank: job.ranks}
    graph = lower_ranks(traces, alike, job.name, StepOptions(dtype="tf32" if job.tf32 else "float32")).graph
    step = recorded_ranks(profiles) if len(traces) > 1 else recorded_graph(profiles[0])
    seconds = {name: _seconds(graph, table, job, cluster, step) for name, table in tables.items()}
    return [
        RankResult(
            job.name,
            job.gpu,
            rank,
            step.ranks[rank].seconds if step.ranks else step.period_seconds,
            seconds["own"][rank],
            seconds["left out"][rank],
            seconds["own"][rank] - seconds["without"][rank],
        )
        for rank in (each.rank for each in graph.ranks)
    ]


def _traces(data: Path, job: PredictedJob) -> Sequence[OperatorTrace]:
    if not (data / job.traces).exists():
        raise InputError(f"{data / job.traces}: no execution traces there; {BROUGHT}")
    traces = [read_last_step(path) for path in expand_files([data / job.traces])]
    return ranks_of_job(traces) if len(traces) > 1 else [replace(traces[0], world_size=job.ranks)]


def _seconds(
    graph: ExecutionGraph, table: OverheadTable, job: PredictedJob, cluster: Cluster, step: RecordedStep
) -> dict[int, float]:
    """Step seconds by rank: several ranks from their recorded starts, a single GPU in steady state."""
    priced = priced_graph(graph, Setting(load_machine(job.gpu), replace(table, factor=1.0)), cluster)
    if not step.ranks:
        return {graph.ranks[0].rank: simulate_iterations(priced, ITERATIONS).period_seconds}
    timeline = simulate(priced, step.starts)
    return {rank.rank: timeline.rank_ends(rank.rank)[0] - step.starts[rank.rank] for rank in graph.ranks}


# Lin et al., HiPC 2022 and their multi-GPU work of 2024: geometric means over their cells.
PUBLISHED = (
    ("DLRM on one GPU, own overheads", "7.96 %"),
    ("DLRM on one GPU, shared overheads", "10.15 %"),
    ("DLRM on several GPUs", "5.21 %"),
    ("language models", "3.00 %"),
    ("embedding lookups", "3-6 %"),
    ("all-to-all, all-reduce", "5-6 %"),
)
# Floor of errors, since an error of 0 would make a geometric mean 0.
_LEAST = 1e-4


def _times(each: RankResult) -> list[str]:
    return [
        f"{each.recorded_seconds * 1e3:.2f}",
        f"{each.own_seconds * 1e3:.2f}",
        f"{each.own_error:+.1%}",
        f"{each.left_out_seconds * 1e3:.2f}",
        f"{each.left_out_error:+.1%}",
        f"{each.profiler_seconds * 1e3:.2f}",
    ]


def _figures(errors: list[float]) -> tuple[float, float, float]:
    return mean(errors), geometric_mean(max(each, _LEAST) for each in errors), max(errors)
