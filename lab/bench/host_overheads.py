"""Choice of the table of host overheads for an unknown host: leave one workload out, predict its host.

For every recorded workload, tables are fitted to the others, and the host of its iteration is priced with them; kernels
keep their measured times. Profiled runs are compared with profiled runs, so that the profiler's overhead is on both
sides. python -m lab.bench.host_overheads [DATA]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from costmodel.cost_model import CostModel
from e2e.price.host_overheads import (
    INFLATION,
    KINDS,
    Mean,
    OverheadTable,
    fit_table,
    load_inflation,
    load_overheads,
    merge,
)
from e2e.price.overhead_samples import extract
from e2e.price.pricing import price
from e2e.simulate.simulator import simulate_iterations
from e2e.step.execution_graph import ExecutionGraph, HostWork, Launch, RankGraph
from e2e.traces.kineto import read_kineto
from e2e.traces.recorded_graph import recorded_graph
from lab.data.data_folder import data_folder
from lab.fit.host_overheads import (
    H100_NAME,
    NOT_SHARED,
    SHARED_NAME,
    STACKS,
    level_of,
    neusight_floors,
    small_operator_seconds,
)

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

    def estimate(self, operators):  # type: ignore[no-untyped-def]
        assert not operators
        return []


@dataclass(frozen=True)
class Recorded:
    graph: ExecutionGraph
    host_seconds: float
    period_seconds: float


def main(data: Path) -> None:
    """Print host time and step time of every workload by every table fitted without it."""
    files = {name: _files(data, STACKS[name]) for name in WORKLOADS}
    tables = {name: _table(name, paths) for name, paths in files.items()}
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
    shipped = {name: load_overheads(Path(name)) for name in (SHARED_NAME, H100_NAME)}
    inflation = load_inflation(INFLATION)
    for name, table in {**tables, **shipped}.items():
        print(f"  {name:28} {small_operator_seconds(replace(table, inflation=inflation)) * 1e6:5.1f}")
    for name, seconds in neusight_floors(data).items():
        print(f"  {name:28} {seconds * 1e6:5.1f}")
    shared = shipped[SHARED_NAME]
    print(f"80 % of these hosts lie within a factor of {shared.factor:g} of the shared table")
    for name, table in tables.items():
        print(f"  inside operators that both have seen, {name} over {H100_NAME}: {level_of(table, shipped[H100_NAME])}")


def _files(data: Path, stack: Sequence[str]) -> list[Path]:
    from e2e.traces.json_stream import archive_members

    (file,) = stack
    if ".tar" not in file:
        return [data / file]
    return [data / file / member for member in sorted(archive_members(data / file))[:RANKS]]


def _table(name: str, paths: Sequence[Path]) -> OverheadTable:
    return fit_table(name, [extract(read_kineto(path)) for path in paths])


def _candidates(others: Mapping[str, OverheadTable]) -> dict[str, OverheadTable]:
    """Candidate tables: each other one alone; all pooled with equal weight per sample, and per workload; the same
    without the A100.
    """
    found = dict(others)
    usual = {name: table for name, table in others.items() if name != "a100-resnet50-ddp"}
    found["pooled by sample"] = merge("pooled", list(usual.values()))
    found["pooled by workload"] = merge("balanced", [_balanced(table) for table in usual.values()])
    servers = [table for name, table in usual.items() if name not in NOT_SHARED]
    found["pooled servers (shared)"] = merge("servers", servers)
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
        name: tuple(replace(action, duration=None) if _has_name(action, rank) else action for action in actions)
        for name, actions in rank.threads.items()
    }
    bare = replace(step.graph, ranks=(replace(rank, threads=threads),))
    priced = price(bare, _NoModel(), table)
    return _host(priced.ranks[0]), simulate_iterations(priced, ITERATIONS).period_seconds


def _has_name(action: object, rank: RankGraph) -> bool:
    """True for actions priced by a table: launches, and pieces of known operators (the rest of a step is the script's
    own).
    """
    if isinstance(action, HostWork):
        return action.kind != "host" and action.call in rank.calls
    return isinstance(action, Launch)


if __name__ == "__main__":
    main(data_folder(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
