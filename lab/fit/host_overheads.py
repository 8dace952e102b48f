"""Fit of the shared tables of host overheads to the public profiles: ``python -m lab.fit.host_overheads DATA OUT``.

``DATA`` holds ``traces/`` as described in the data folder's README; ``OUT`` is
``costmodel/calibration/host_overheads``, which also holds the inflation model used by the tables.
"""

from __future__ import annotations

import csv
import gzip
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from costmodel.base.errors import InputError, ProjectError
from e2e.price.host_overheads import (
    KINDS,
    Mean,
    OverheadPart,
    OverheadTable,
    complete_table,
    fit_table,
    load_inflation,
    save_table,
)
from e2e.price.overhead_samples import OverheadSamples, extract
from e2e.step.operator_trace import is_multi_tensor
from e2e.traces.json_stream import archive_members
from e2e.traces.kineto import read_kineto
from lab.data.data_folder import FETCH

# Name of the table of all public profiles, for an unknown host.
SHARED_NAME = "shared"
# Name of the table of a server for GPUs of 2022 and later (Ada, Hopper, Blackwell): the shared one at the level of the
# host of the H100 that TraceLens recorded, and its own operators (fused attention, linear layers by cuBLASLt).
H100_NAME = "h100-server"
INFLATION_FILE = "profiler_inflation.json"
# Excluded from the shared table, which stands for an unknown host. The A100's host takes seven times as long per
# ResNet-50 operator as the V100's (220 ms a step against 31 ms), which no GPU explains; it was recorded with stacks or
# on a debugging build. The host of the RTX 2080 Ti takes three times as long as both V100 servers' and twice as long as
# NeuSight's; without it each left-out server is predicted better (`python -m lab.bench.host_overheads`).
NOT_SHARED = frozenset({"a100-resnet50-ddp", "rtx-2080-ti-linear"})
# Inference of three models on one H100, recorded with stacks: these lengthen Python's time between operators (T1), not
# the time inside them, so that T1 stays the shared one at the level of the rest.
WITH_STACKS = (
    "tracelens/h100__gaunernst_bert-small-uncased__1016001.json.gz",
    "tracelens/h100__Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "tracelens/h100__Falconsai_nsfw_image_detection__1016002.json.gz",
)
# Samples of an operator required for its mean to count for the level of a host.
_LEAST_SAMPLES = 3
# Table -> profiles of one software stack on one kind of host; an archive stands for all its members.
STACKS = {
    "rtx-2080-ti-linear": ("traces/linear_2080Ti/linear_kineto.json.gz",),
    "v100-resnet50": ("traces/resnet50_V100/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",),
    "a100-resnet50-ddp": ("traces/resnet50_A100_ddp/nccl_data.json.gz",),
    "v100-torchrec-dlrm": ("traces/dlrm_8xV100/dlrm_kineto.tar.gz",),
}


def fit_shared_tables(data: Path, output: Path) -> list[OverheadTable]:
    """Write one table per stack, the shared one of all but ``NOT_SHARED`` and that of H100 servers to ``output`` as
    ``<name>.json``.

    :class:`InputError` names a missing profile or inflation model.
    """
    inflation = load_inflation(output / INFLATION_FILE)
    profiles = {name: [_extract(data, file) for file in _files(data, stack)] for name, stack in STACKS.items()}
    tables = [fit_table(name, samples, inflation) for name, samples in profiles.items()]
    everything = [samples for name, group in profiles.items() if name not in NOT_SHARED for samples in group]
    servers = fit_table(SHARED_NAME, everything, inflation)
    factor = hosts_differ(data, tables, servers)
    recorded = fit_table(H100_NAME, [_extract(data, file) for file in _files(data, WITH_STACKS)], inflation)
    tables += [replace(each, factor=factor) for each in with_newer_host(servers, recorded)]
    for table in tables:
        save_table(table, output / f"{table.name}.json")
    return tables


def with_newer_host(servers: OverheadTable, recorded: OverheadTable) -> tuple[OverheadTable, OverheadTable]:
    """``servers`` with the operators only in the newer host's ``recorded`` table, at the level of ``servers``; and the
    newer host's table with those only in ``servers``, at its own level. T1 comes only from ``servers``.
    """
    level = level_of(recorded, servers)
    theirs: dict[OverheadPart, dict[str, Mean]] = {}
    newer: dict[OverheadPart, dict[str, Mean]] = {}
    for kind in KINDS:
        old, new = servers.means[kind], {} if kind == "T1" else recorded.means[kind]
        theirs[kind] = {**{name: _scaled(mean, 1 / level) for name, mean in new.items()}, **old}
        newer[kind] = {**{name: _scaled(mean, level) for name, mean in old.items()}, **new}
    sources = (*servers.sources, *recorded.sources)
    shared = complete_table(SHARED_NAME, theirs, sources, servers.inflation)
    return shared, replace(complete_table(H100_NAME, newer, sources, servers.inflation), level=level)


def level_of(host: OverheadTable, other: OverheadTable) -> float:
    """Ratio of the times of ``host`` to those of ``other`` inside operators that both contain: the ratio of the sums
    over the samples of ``host``, without profiler overhead.
    """
    sums = [0.0, 0.0]
    for kind in KINDS:
        if kind == "T1":
            continue
        for name, mean in host.means[kind].items():
            if min(mean.count, other.count(kind, name)) >= _LEAST_SAMPLES and not is_multi_tensor(name):
                sums[0] += mean.count * host.without_profiler(mean)
                sums[1] += mean.count * other.without_profiler(other.means[kind][name])
    return round(sums[0] / sums[1], 4)


def hosts_differ(data: Path, tables: Sequence[OverheadTable], servers: OverheadTable) -> float:
    """Factor around ``servers`` within which 80 % of the known hosts lie: one small operator on the hosts of ``tables``
    and, as the floor of its timings, on those of NeuSight.
    """
    known = [*(small_operator_seconds(table) for table in tables), *neusight_floors(data).values()]
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


def main(arguments: list[str]) -> int:
    """Run the command line; exit status 2 and one line for a user error."""
    if len(arguments) != 2:
        print("usage: python -m lab.fit.host_overheads DATA OUT", file=sys.stderr)
        return 2
    try:
        tables = fit_shared_tables(Path(arguments[0]), Path(arguments[1]))
    except ProjectError as error:
        print(error, file=sys.stderr)
        return 2
    for table in tables:
        means = ", ".join(f"{kind} {mean.seconds * 1e6:.1f}" for kind, mean in table.defaults.items())
        print(f"{table.name}: {len(table.sources)} profiles; mean us {means}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
