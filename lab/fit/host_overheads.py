"""Fit of the shared tables of host overheads to the public profiles: ``python -m lab.fit.host_overheads``.

With ``-o FOLDER`` it writes the tables (``costmodel/calibration/host_overheads``, which also holds the inflation model
that they use). Without, it shows what the choice of the table for an unknown host rests on: for every recorded workload
tables are fitted to the others, and the host of its iteration is priced with them; kernels keep their measured times.
Profiled runs are compared with profiled runs, so that the profiler's overhead is on both sides.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from costmodel.base.errors import InputError
from costmodel.base.input_files import read_text
from costmodel.cost_model import CostModel, Estimate
from e2e.price.host_overheads import (
    INFLATION,
    KINDS,
    SHARED,
    Mean,
    OverheadPart,
    OverheadTable,
    complete_table,
    fit_table,
    level_of,
    load_inflation,
    load_overheads,
    load_table,
    merge_tables,
    of_other_jobs,
    profiler_ratio,
    save_table,
    scaled,
)
from e2e.price.overhead_samples import OverheadSample, OverheadSamples, extract
from e2e.price.pricing import price
from e2e.simulate.simulator import simulate_iterations
from e2e.step.execution_graph import Action, ExecutionGraph, HostWork, Launch, RankGraph
from e2e.step.operator_trace import MARKED_GAPS, is_multi_tensor
from e2e.traces.host_time import nest
from e2e.traces.json_stream import archive_members
from e2e.traces.kineto import KinetoTrace, read_kineto
from e2e.traces.recorded_graph import recorded_graph
from e2e.traces.step_window import iterations
from lab.command_line import program, run
from lab.data.data_folder import FETCH, data_folder

# Name of the table of all public profiles, for an unknown host.
SHARED_NAME = "shared"
# Name of the table of servers for GPUs of 2022 and later (Ada, Hopper, Blackwell).
NEWER_NAME = "newer-servers"
# Name of the host of the H200 that we measured (`--measured`).
H200_NAME = "h200-server"
INFLATION_FILE = "profiler_inflation.json"
# Not the time of a host: the A100's takes seven times as long per ResNet-50 operator as the V100's (220 ms a step
# against 31 ms), which no GPU explains; it was recorded with stacks or on a debugging build.
RECORDING_SLOWED = "a100-resnet50-ddp"
# Excluded from the shared table, which stands for an unknown host. The host of the RTX 2080 Ti takes three times as
# long as both V100 servers' and twice as long as NeuSight's; without it each left-out server is predicted better
# (`python -m lab.fit.host_overheads`).
NOT_SHARED = frozenset({RECORDING_SLOWED, "rtx-2080-ti-linear"})
# Inference of three models on one H100, recorded with stacks: these lengthen Python's time between operators (T1), not
# the time inside them, so that T1 stays the shared one at the level of the rest.
WITH_STACKS = (
    "tracelens/h100__gaunernst_bert-small-uncased__1016001.json.gz",
    "tracelens/h100__Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "tracelens/h100__Falconsai_nsfw_image_detection__1016002.json.gz",
)
# Share of a step that its GPU works, above which the host may wait for it.
_LIMITED_BY_GPU = 0.7
_GENERATED = ("## Call CompiledFxGraph", "triton_")  # names of compiled code
_LONGEST_GAP = 2e-5  # between two operators without much Python; the median is 4 us
GENERATED = "inductor::triton"  # stands for the family of kernels in :mod:`e2e.lowering.torch_compile`
# Table -> profiles of one software stack on one kind of host; an archive stands for all its members.
STACKS = {
    "rtx-2080-ti-linear": ("traces/linear_2080Ti/linear_kineto.json.gz",),
    "v100-resnet50": ("traces/resnet50_V100/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",),
    "a100-resnet50-ddp": ("traces/resnet50_A100_ddp/nccl_data.json.gz",),
    "v100-torchrec-dlrm": ("traces/dlrm_8xV100/dlrm_kineto.tar.gz",),
}


def fit_shared_tables(data: Path, output: Path) -> list[OverheadTable]:
    """Write one table per stack, the shared one of all but ``NOT_SHARED`` and that of newer servers to ``output`` as
    ``<name>.json``; it holds the table :data:`H200_NAME`.

    :class:`InputError` names a missing profile, table or inflation model.
    """
    inflation = load_inflation(output / INFLATION_FILE)
    profiles = {name: [_extract(data, file) for file in _files(data, stack)] for name, stack in STACKS.items()}
    tables = [fit_table(name, samples, inflation) for name, samples in profiles.items()]
    everything = [samples for name, group in profiles.items() if name not in NOT_SHARED for samples in group]
    servers = fit_table(SHARED_NAME, everything, inflation)
    measured = load_table(output / f"{H200_NAME}.json")
    recorded = fit_table("h100", [_extract(data, file) for file in _files(data, WITH_STACKS)], inflation)
    tables.append(replace(with_operators_of(servers, recorded), factor=hosts_differ(data, tables, servers)))
    newer = newer_servers(servers, recorded, measured)
    tables.append(replace(newer, factor=hosts_differ(data, [*tables[:-1], measured], servers)))
    for table in tables:
        save_table(table, output / f"{table.name}.json")
    return tables


def with_operators_of(servers: OverheadTable, recorded: OverheadTable) -> OverheadTable:
    """``servers`` with the operators that only ``recorded`` has, at the level of ``servers``; without its T1, for its
    profiles have stacks.
    """
    level = level_of(recorded, servers)
    means: dict[OverheadPart, dict[str, Mean]] = {"T1": {}}
    for kind in KINDS[1:]:
        means[kind] = {name: _scaled(mean, 1 / level) for name, mean in recorded.means[kind].items()}
    means = {kind: {**means[kind], **servers.means[kind]} for kind in KINDS}
    return complete_table(SHARED_NAME, means, (*servers.sources, *recorded.sources), servers.inflation)


def newer_servers(servers: OverheadTable, recorded: OverheadTable, measured: OverheadTable) -> OverheadTable:
    """Table of the operators of ``measured``, else ``recorded`` (without T1), else ``servers``, at the geometric mean
    of the levels of the first two over the third.
    """
    levels = level_of(measured, servers), level_of(recorded, servers)
    level = round(math.sqrt(math.prod(levels)), 4)
    means: dict[OverheadPart, dict[str, Mean]] = {kind: {} for kind in KINDS}
    tables = (measured, level / levels[0]), (recorded, level / levels[1]), (servers, level)
    for table, factor in tables:
        for kind, entries in scaled(table, factor).means.items():
            means[kind] = {**({} if table is recorded and kind == "T1" else entries), **means[kind]}
    sources = tuple(source for table, _ in tables for source in table.sources)
    return replace(complete_table(NEWER_NAME, means, sources, None), level=level)


def measured_host(folder: Path) -> OverheadTable:
    """Table of the host on which the overheads suite and ``lab.bench.measured_programs`` wrote ``folder``.

    Each profile is shortened to the time of its step without the profiler; a step that its GPU limits by the median
    factor of the others.
    """
    tables = [load_overheads(path) for path in sorted(folder.glob("overheads-*.json.gz"))]
    inflation, ratios, limited = load_inflation(INFLATION), [], []
    for row in csv.DictReader(io.StringIO(read_text(folder / "programs.csv", "table"))):
        if not (folder / row["trace"]).is_file():  # a program that ended early
            continue
        profile, seconds = read_kineto(folder / row["trace"]), float(row["median_s"])
        samples = extract(profile)
        named = {
            key: [_without_python(key, each) for each in values]
            for key, values in samples.values.items()
            if not key[1].startswith(_GENERATED)
        }
        generated = {("T1", GENERATED): found} if (found := generated_launches(profile)) else {}
        own = replace(samples, values=named | generated, source=row["trace"])
        table = fit_table(H200_NAME, [own], inflation, others=load_table(SHARED))
        profiled = sum(window.seconds for window in iterations(profile)) / samples.steps
        if sum(span.seconds for span in profile.device) / samples.steps > _LIMITED_BY_GPU * seconds:
            limited.append(table)
        else:
            ratios.append(profiler_ratio(samples, profiled, seconds, inflation))
            tables.append(scaled(table, ratios[-1]))
    if not ratios:
        raise InputError(f"{folder / 'programs.csv'}: no program that its host limits, with its trace")
    tables += [scaled(table, statistics.median(ratios)) for table in limited]
    merged = merge_tables(H200_NAME, tables)
    sources = tuple(replace(each, file=Path(each.file).name) for each in merged.sources)
    return of_other_jobs(replace(merged, sources=sources))


def _without_python(key: tuple[str, str], sample: OverheadSample) -> OverheadSample:
    """``sample`` without Python of its own job between two operators, which a capture of another job counts itself."""
    kind, name = key
    if kind != "T1" or name in MARKED_GAPS or is_multi_tensor(name):
        return sample
    return replace(sample, seconds=min(sample.seconds, _LONGEST_GAP))


def generated_launches(profile: KinetoTrace) -> list[OverheadSample]:
    """Samples of the way of compiled code from one of its calls to the launch of a Triton kernel, and back from it."""
    nesting, samples = nest(profile), []
    in_operator: dict[int | None, float] = defaultdict(float)
    for call in profile.runtime:
        in_operator[nesting.parent[call.id]] += call.seconds
    ends: dict[int | None, float] = {}
    for span in profile.operators:
        around = nesting.parent[span.id]
        if span.name.startswith(_GENERATED[1]) and around in ends:
            samples.append(OverheadSample(span.end - ends[around] - in_operator[span.id], 1.0, 1.0))
        ends[around] = span.end
    return samples


def hosts_differ(data: Path, tables: Sequence[OverheadTable], servers: OverheadTable) -> float:
    """Factor around ``servers`` within which 80 % of the known hosts lie: one small operator on the hosts of ``tables``
    and, as the floor of its timings, on those of NeuSight.
    """
    hosts = (table for table in tables if table.name != RECORDING_SLOWED)
    known = [*map(small_operator_seconds, hosts), *neusight_floors(data).values()]
    ratios = [abs(math.log(each / small_operator_seconds(servers))) for each in known]
    return round(math.exp(float(np.quantile(ratios, 0.8))), 2)


def small_operator_seconds(table: OverheadTable) -> float:
    """Host seconds of one ``aten::add``, its launch included, without the profiler."""
    parts: list[tuple[OverheadPart, str]] = [("T1", "aten::add"), ("T2", "aten::add"), ("T3", "aten::add")]
    return math.fsum(table.seconds(kind, name) for kind, name in [*parts, ("T4", "cudaLaunchKernel")])


def neusight_floors(data: Path) -> dict[str, float]:
    """Seconds by GPU of NeuSight's additions of small tensors, which are host-bound: the hundredth smallest."""
    floors = {}
    for path in sorted((data / "neusight" / "op_latency" / "add").glob("*.csv.gz")):
        with gzip.open(path, "rt") as file:
            times = sorted(float(row["Latency"]) * 1e-3 for row in csv.DictReader(file))
        floors[path.name.removesuffix(".csv.gz")] = times[len(times) // 100]
    return floors


def _scaled(mean: Mean, factor: float) -> Mean:
    """``mean`` on a host that takes ``factor`` times as long; the profiler's share scales too."""
    return replace(mean, seconds=mean.seconds * factor, operators=mean.operators * factor, calls=mean.calls * factor)


def _files(data: Path, stack: tuple[str, ...]) -> list[str]:
    files: list[str] = []
    for file in stack:
        if not (data / file).is_file():
            raise InputError(f"{data / file}: missing; {FETCH} brings it, or give the folder that holds traces/")
        members = sorted(archive_members(data / file)) if ".tar" in file else []
        files += [f"{file}/{member}" for member in members] or [file]
    return files


def _extract(data: Path, file: str) -> OverheadSamples:
    return replace(extract(read_kineto(data / file)), source=file)


# --- choice of the table for an unknown host -----------------------------------------------------------
RANKS = 2  # of the eight similar ranks of DLRM
ITERATIONS = 4
# Steps in steady state, host-bound or not; `None`: the middle one.
WORKLOADS = {
    "rtx-2080-ti-linear": None,
    "v100-resnet50": 3,
    "v100-torchrec-dlrm": None,
    "a100-resnet50-ddp": None,
}


class _NoModel(CostModel):
    """Cost model that prices nothing: kernels keep their recorded times."""

    def estimate(self, operators: Sequence[Any]) -> list[Estimate]:
        assert not operators
        return []


@dataclass(frozen=True)
class Recorded:
    """Recorded step: seconds of its host, and of an iteration in steady state."""

    graph: ExecutionGraph
    host_seconds: float
    period_seconds: float


def compare_tables(data: Path) -> None:
    """Print host time and step time of every workload by every table fitted without it."""
    files = {name: [data / file for file in _files(data, STACKS[name])[:RANKS]] for name in WORKLOADS}
    tables = {name: fit_table(name, [extract(read_kineto(path)) for path in paths]) for name, paths in files.items()}
    errors: dict[str, list[float]] = {}
    print(f"{'workload':22} {'table':28} {'host ms':>9} {'predicted':>9} {'error':>8} {'step error':>10}")
    for name, paths in files.items():
        step = _recorded(paths[0], WORKLOADS[name])
        for title, table in _candidates({key: table for key, table in tables.items() if key != name}).items():
            host, period = _priced(step, table)
            ratio = host / step.host_seconds
            errors.setdefault(title, []).append(abs(math.log(ratio)))
            print(
                f"{name:22} {title:28} {step.host_seconds * 1e3:9.2f} {host * 1e3:9.2f} {ratio - 1:+8.0%} "
                f"{period / step.period_seconds - 1:+10.0%}"
            )
    print("mean factor by which host time is wrong, over all workloads and without the A100's slow host:")
    for title, found in errors.items():
        print(f"  {title:28} {len(found)} {math.exp(sum(found) / len(found)):.2f}", end="")
        print(f"   {math.exp(sum(found[:3]) / len(found[:3])):.2f}" if len(found) > 3 else "")
    _floors(data, tables)


def _floors(data: Path, tables: Mapping[str, OverheadTable]) -> None:
    """Print NeuSight's floors: it timed single calls by events, and small ones take the host's time, on four other
    hosts.
    """
    print("host's time for one aten::add, us, without the profiler: by each table, and the floor of NeuSight's hosts")
    shipped = {name: load_overheads(Path(name)) for name in (SHARED_NAME, NEWER_NAME, H200_NAME)}
    inflation = load_inflation(INFLATION)
    for name, table in {**tables, **shipped}.items():
        print(f"  {name:28} {small_operator_seconds(replace(table, inflation=inflation)) * 1e6:5.1f}")
    for name, seconds in neusight_floors(data).items():
        print(f"  {name:28} {seconds * 1e6:5.1f}")
    shared = shipped[SHARED_NAME]
    print(f"80 % of these hosts lie within a factor of {shared.factor:g} of the shared table")
    for name, table in tables.items():
        print(
            f"  inside operators that both have seen, {name} over {NEWER_NAME}: {level_of(table, shipped[NEWER_NAME])}"
        )


def _candidates(others: Mapping[str, OverheadTable]) -> dict[str, OverheadTable]:
    """Candidate tables: each other one alone; all pooled with equal weight per sample, and per workload; the same
    without the A100.
    """
    found = dict(others)
    usual = {name: table for name, table in others.items() if name != "a100-resnet50-ddp"}
    found["pooled by sample"] = merge_tables("pooled", list(usual.values()))
    found["pooled by workload"] = merge_tables("balanced", [_balanced(table) for table in usual.values()])
    servers = [table for name, table in usual.items() if name not in NOT_SHARED]
    found["pooled servers (shared)"] = merge_tables("servers", servers)
    return found


def _balanced(table: OverheadTable) -> OverheadTable:
    """``table`` with the same means and 10,000 samples of each kind in all."""
    means = {}
    for kind in KINDS:
        total = sum(mean.count for mean in table.means[kind].values())
        means[kind] = {
            name: Mean(mean.seconds, max(round(mean.count * 10_000 / total), 1), mean.operators, mean.calls)
            for name, mean in table.means[kind].items()
        }
    return replace(table, means=means)


def _recorded(path: Path, step: int | None) -> Recorded:
    found = recorded_graph(read_kineto(path), step=step)
    rank = found.graph.ranks[0]
    return Recorded(found.graph, _host(rank), simulate_iterations(found.graph, ITERATIONS).period_seconds)


def _host(rank: RankGraph) -> float:
    return math.fsum(
        action.duration.seconds
        for action in rank.actions()
        if isinstance(action, HostWork | Launch) and action.duration
    )


def _priced(step: Recorded, table: OverheadTable) -> tuple[float, float]:
    rank = step.graph.ranks[0]
    threads = {
        name: tuple(_without_price(action, rank) for action in actions) for name, actions in rank.threads.items()
    }
    bare = replace(step.graph, ranks=(replace(rank, threads=threads),))
    priced = price(bare, _NoModel(), table)
    return _host(priced.ranks[0]), simulate_iterations(priced, ITERATIONS).period_seconds


def _without_price(action: Action, rank: RankGraph) -> Action:
    """``action``, without its time if tables price it: launches, and pieces of known operators (the rest of a step is
    the script's own).
    """
    if isinstance(action, Launch) or (
        isinstance(action, HostWork) and action.kind != "host" and action.call in rank.calls
    ):
        return replace(action, duration=None)
    return action


def overheads_command(
    data: Annotated[Path | None, typer.Option(help="Folder of the measurements, which holds traces/.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder of the tables to write.")] = None,
    measured: Annotated[Path | None, typer.Option(help="Folder of a run on the H200: writes its host's table.")] = None,
) -> None:
    """Write the tables of host overheads, or compare candidates for that of an unknown host."""
    if measured is not None:
        if output is None:
            raise InputError("--measured writes a table; say where with -o")
        save_table(measured_host(measured), output / f"{H200_NAME}.json")
    if output is None:
        compare_tables(data_folder(data))
        return
    for table in fit_shared_tables(data_folder(data), output):
        means = ", ".join(f"{kind} {mean.seconds * 1e6:.1f}" for kind, mean in table.defaults.items())
        print(f"{table.name}: {len(table.sources)} profiles; mean us {means}")


if __name__ == "__main__":
    sys.exit(run(program(overheads_command), "lab.fit.host_overheads"))
