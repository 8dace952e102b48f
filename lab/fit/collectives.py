"""Fit of the models of collectives to public sweeps: constants of the analytic model, curves per system; constants of
serving engines' own all-reduces, per engine and architecture.

The constants (starts, hops and shares of the protocols) are fitted to sweeps of one node. Every sweep weighs the same;
the loss is robust, for no model of a protocol fits the steps between two of them. What the sweeps of one node cannot
say (hops over the network) stays as NCCL's own model has it (src/graph/tuning.cc).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from packaging.version import Version
from scipy.optimize import least_squares

from costmodel.base.output_files import StagedFiles
from costmodel.collectives.calibration import (
    NAME,
    CollectiveSweep,
    architecture_of,
    forget_calibrations,
    write_calibration,
)
from costmodel.collectives.collective_model import collective_cost_model
from costmodel.collectives.engine_reduce import REFERENCE, EngineReduce, write_engine_reduces
from costmodel.collectives.own_cluster import (
    MeasuredRow,
    calibrate,
    sweeps_of,
)
from costmodel.collectives.physics import Constants, Protocol, analyse, constants, write_constants
from costmodel.collectives.sweep_logs import CollectiveRow
from costmodel.machines.cluster import Cluster, load_cluster, nccl_version
from costmodel.operators.collective_transfer import CollectiveTransfer
from lab.data.collective_sweeps import CollectiveTable, read_collectives, read_engine_reduces
from lab.data.data_folder import Wanted, everything
from lab.data.selection import named_tables

LICENCES = "ai-dynamo/aiconfigurator (Apache-2.0), VIA-Research/vTrain (MIT), microsoft/vidur (MIT)"
_COMMAND = "python -m lab.fit"
_SELECTION = (
    "every row of the files named, all-reduces of int8 and those that hold waiting left out; of a sweep in even steps "
    "128 sizes, evenly over the logarithm; constants from the newest NCCL version of each system"
)
MOST_SIZES = 128


def fit_collectives(
    data: Path, output: Path, progress: Callable[[str], None], wanted: Wanted = everything
) -> list[Path]:
    """Write ``output/collectives.json`` (the constants) and a calibration per machine below; returns the files.

    Some ten seconds; nothing where ``data`` has no wanted sweeps. Each file names the sweeps it came from, the
    constants' all of them.
    """
    tables = read_collectives(data, wanted)
    machines = by_machine(tables)
    if not machines:
        progress(f"{data}: no sweeps of collectives")
        return []
    with StagedFiles(output, "fitted collectives", _provenance(tables, data)) as staged:
        known = constants_of([MeasuredRow(machine, rows_of(tables)) for machine, tables in machines.items()])
        write_constants(known, _provenance(tables, data), staged.folder / NAME)

        def calibrate_machine(machine: str) -> None:
            own = machines[machine]
            rows = rows_of(own)
            progress(f"{machine}: {len(rows)} collectives")
            write_calibration(calibrate(MeasuredRow(machine, rows, known), _provenance(own, data)), staged.folder)

        for machine in machines:
            if not staged.once(f"{machine}/{NAME}", partial(calibrate_machine, machine)):
                progress(f"{machine}: as the run before this one left it")
        written = staged.install([NAME, *(f"{machine}/{NAME}" for machine in machines)])
    forget_calibrations()
    constants.cache_clear()
    return written


def _provenance(tables: Sequence[CollectiveTable], data: Path) -> dict[str, Any]:
    rows = {Path(table.source): len(table.rows) for table in tables}
    return {"command": _COMMAND, "sources": LICENCES, "selection": _SELECTION, **named_tables(rows, data)}


def by_machine(tables: Sequence[CollectiveTable]) -> dict[str, list[CollectiveTable]]:
    """Tables grouped by machine, in the order of names."""
    groups: dict[str, list[CollectiveTable]] = defaultdict(list)
    for table in tables:
        groups[table.machine].append(table)
    return dict(sorted(groups.items()))


def rows_of(tables: Sequence[CollectiveTable]) -> tuple[CollectiveRow, ...]:
    """Rows of ``tables``. From a sweep in even steps of the size, ``MOST_SIZES`` spread evenly over its logarithm: a
    thousand sizes of hundreds of megabytes add little to ten, and would dominate every mean.
    """
    groups: dict[Any, list[CollectiveRow]] = defaultdict(list)
    for row in (row for table in tables for row in table.rows):
        groups[row.nccl, dataclasses.replace(row.transfer, size_bytes=0)].append(row)
    return tuple(row for members in groups.values() for row in _spread(members))


def _spread(members: Sequence[CollectiveRow]) -> list[CollectiveRow]:
    sizes = sorted({row.transfer.size_bytes for row in members})
    if len(sizes) <= MOST_SIZES:
        return list(members)
    wanted = np.geomspace(sizes[0], sizes[-1], MOST_SIZES)
    nearest = np.abs(np.log(sizes)[:, None] - np.log(wanted)[None, :]).argmin(axis=0)
    kept = {sizes[place] for place in nearest}
    return [row for row in members if row.transfer.size_bytes in kept]


def constants_of(machines: Sequence[MeasuredRow]) -> Constants:
    """Constants fitted to the newest sweeps with known NCCL versions: older ones start twice as slowly."""
    systems = [(each.cluster, _newest(sweeps_of(each.rows))) for each in machines]
    return fit_constants([(cluster, sweeps) for cluster, sweeps in systems if sweeps])


def _newest(sweeps: Sequence[CollectiveSweep]) -> list[CollectiveSweep]:
    known = [each for each in sweeps if each.nccl]
    newest: dict[str, Version] = {}
    for each in known:
        newest[each.kind] = max(newest.get(each.kind, Version("0")), nccl_version(each.nccl))
    return [each for each in known if nccl_version(each.nccl) == newest[each.kind]]


# Start of the search. NCCL 2.18, src/graph/tuning.cc: starts of the ring (6.6, 14, 8.4 us), hops over NVLink (0.6, 1.9,
# 3.4 us) in units of the 2 us of the link files. Hops over the network in units of the 14 us of the network files:
# LL128 and Simple those of the tree (8.5, 14 us), LL 7 us, with which public logs of nccl-tests agree (all-reduce of 64
# B: 22 us on two nodes of 4 GH200, 36 us on two of 8 B200; NCCL's own 5 us give too little). Shares: 4 of 8 bytes are
# data in LL, 120 of 128 in LL128 (src/include/device.h).
FIRST_GUESS = Constants(
    protocols=(
        Protocol("LL", 6.6e-6, 0.3, 0.5, 0.5),
        Protocol("LL128", 14e-6, 0.95, 0.6, 0.92, nvlink_only=True),
        Protocol("Simple", 8.4e-6, 1.7, 1.0, 1.0),
    ),
    in_switch=Protocol("Simple", 18e-6, 1.0, 1.0, 0.8, nvlink_only=True),
    # NCCL's primitives (src/device/common_kernel.h) touch memory three times per byte: a reduction reads two and writes
    # one, a copy reads one and writes its own and the neighbour's. Not fitted. On two GPUs, where the own part is half,
    # all-gathers (a part per byte sent) are slower than all-reduces (half of one) by 2.4 (L40S) to 4.5 (H100) of them.
    chunk=3.0,
)
_POINTS = 9  # points of a sweep, evenly over the logarithm of its sizes
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class _Points:
    cluster: Cluster
    transfers: tuple[CollectiveTransfer, ...]
    logs: np.ndarray


def fit_constants(systems: Sequence[tuple[Cluster, Sequence[CollectiveSweep]]]) -> Constants:
    """Fit the constants to the single-node sweeps of ``systems``, NCCL's own without any; takes a few seconds."""
    points = [_points(cluster, each) for cluster, sweeps in systems for each in sweeps if each.nodes == 1]
    if not points:
        return FIRST_GUESS

    def residuals(values: np.ndarray) -> np.ndarray:
        known = _constants(values)
        return np.concatenate([_residuals(each, known) for each in points])

    first = np.log(_values(FIRST_GUESS))
    # Shares are at most 1; the other parameters within a factor of ten of the first guess.
    upper = np.where(_is_share(), 0.0, first + math.log(10))
    found = least_squares(
        residuals,
        np.minimum(first, upper - 1e-6),
        bounds=(first - math.log(10), upper),
        loss="soft_l1",
        f_scale=0.1,
        xtol=_TOLERANCE,
        ftol=_TOLERANCE,
    )
    return _constants(np.array([math.log(float(f"{math.exp(value):.4g}")) for value in found.x]))


def _points(cluster: Cluster, sweep: CollectiveSweep) -> _Points:
    sizes, seconds = np.log(sweep.sizes), np.log(sweep.seconds)
    wanted = np.linspace(sizes[0], sizes[-1], _POINTS)
    transfers = tuple(CollectiveTransfer(_kind(sweep), math.exp(size), sweep.ranks) for size in wanted)
    return _Points(cluster, transfers, np.interp(wanted, sizes, seconds))


def _kind(sweep: CollectiveSweep) -> Any:
    return sweep.kind


def _residuals(points: _Points, known: Constants) -> np.ndarray:
    times = [analyse(each, points.cluster, known).seconds for each in points.transfers]
    return np.asarray(np.log(times) - points.logs)


def _values(known: Constants) -> np.ndarray:
    """Fitted values in a fixed order: start, hop and share of each protocol (Simple's share is 1)."""
    rows = [(each.start, each.gpu_hop, each.share) for each in (*known.protocols[:-1], known.in_switch)]
    simple = known.protocols[-1]
    return np.array([*(value for row in rows for value in row), simple.start, simple.gpu_hop])


def _is_share() -> np.ndarray:
    count = len(_values(FIRST_GUESS))
    return np.array([place % 3 == 2 and place < count - 2 for place in range(count)])


def _constants(logs: np.ndarray) -> Constants:
    """Inverse of the logarithm of :func:`_values`."""
    values = np.exp(logs).tolist()
    guesses = (*FIRST_GUESS.protocols[:-1], FIRST_GUESS.in_switch)
    fitted = [
        dataclasses.replace(guess, start=values[3 * place], gpu_hop=values[3 * place + 1], share=values[3 * place + 2])
        for place, guess in enumerate(guesses)
    ]
    simple = dataclasses.replace(FIRST_GUESS.protocols[-1], start=values[-2], gpu_hop=values[-1])
    return Constants((*fitted[:-1], simple), fitted[-1], FIRST_GUESS.chunk)


# Larger messages are NCCL's in every engine; in vLLM's tables too from 64 MiB on.
_LARGEST_OWN = 1 << 25
_OWN_SELECTION = (
    "rows in CUDA graphs up to 32 MiB, but for those that take longer than a larger message; of two ranks alone where "
    "GPUs are linked through the host"
)
_FIRST_REDUCE = EngineReduce(start=3e-6, doubling=5e-7, second=3e-6, one_shot=0.9, two_shot=0.9)
_REDUCE_FIELDS = ("start", "doubling", "second", "one_shot", "two_shot")


def fit_engine_reduces(
    data: Path, output: Path, progress: Callable[[str], None], wanted: Wanted = everything
) -> list[Path]:
    """Write the constants of serving engines' all-reduces to the file ``output``; returns it."""
    tables = read_engine_reduces(data, wanted)
    if not tables:
        progress(f"{data}: no all-reduces of serving engines")
        return []
    engines: dict[str, dict[str, EngineReduce]] = defaultdict(dict)
    for (engine, architecture), rows in rows_by_engine(tables).items():
        progress(f"{engine} on {architecture}: {len(rows)} all-reduces")
        engines[engine][architecture] = fit_reduce(rows)
    margins = {engine: _margin(engine, tables) for engine in engines}
    engines = {
        engine: {name: dataclasses.replace(each, margin=margins[engine]) for name, each in members.items()}
        for engine, members in engines.items()
    }
    counted = {Path(table.source): len(table.rows) for table in tables}
    licence = "ai-dynamo/aiconfigurator (Apache-2.0)"
    provenance = {"command": _COMMAND, "sources": licence, "selection": _OWN_SELECTION, **named_tables(counted, data)}
    return [write_engine_reduces(engines, provenance, output)]


Measured = tuple[Cluster, CollectiveRow]


def rows_by_engine(tables: Sequence[CollectiveTable], without: str = "") -> dict[tuple[str, str], list[Measured]]:
    """Rows of ``tables`` by engine and architecture, but for those of the GPU ``without``."""
    found: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for table in tables:
        cluster = load_cluster(table.machine, 8, 1)
        for row in table.rows if table.machine != without else ():
            own = row.transfer.ranks == 2 or cluster.topology == "switch"
            if row.transfer.size_bytes <= _LARGEST_OWN and own:
                found[row.transfer.engine, cluster.machine.chip().architecture].append((cluster, row))
    return dict(found)


def fit_reduce(rows: Sequence[Measured]) -> EngineReduce:
    """Constants that bring the times of ``rows`` nearest, NCCL's where these are less."""
    library = [_by_library(cluster, row.transfer) for cluster, row in rows]
    measured = np.log([row.seconds for _, row in rows])
    first = np.log([getattr(_FIRST_REDUCE, name) for name in _REDUCE_FIELDS])

    def made(logs: np.ndarray) -> EngineReduce:
        return EngineReduce(
            **{name: float(f"{math.exp(each):.4g}") for name, each in zip(_REDUCE_FIELDS, logs, strict=True)}
        )

    def residuals(logs: np.ndarray) -> np.ndarray:
        kernel = EngineReduce(**dict(zip(_REDUCE_FIELDS, np.exp(logs).tolist(), strict=True)))
        own = [kernel.seconds(row.transfer, cluster) for cluster, row in rows]
        return np.asarray(np.log(np.minimum(own, library)) - measured)

    # Within a factor of eight: no kernel of which NCCL's is always the faster one says more.
    bounds = (first - math.log(8), first + math.log(8))
    return made(least_squares(residuals, first, bounds=bounds, loss="soft_l1", f_scale=0.1).x)


def _by_library(cluster: Cluster, transfer: CollectiveTransfer) -> float:
    return collective_cost_model(cluster).estimate([dataclasses.replace(transfer, engine="")])[0].seconds


def left_out_errors(engine: str, tables: Sequence[CollectiveTable]) -> dict[str, np.ndarray]:
    """Log of measured over predicted times of the all-reduces of ``engine`` by GPU, each GPU with a switch left out of
    the fit in turn: its architecture's constants by its relatives, else Hopper's.
    """
    found = {}
    for machine in sorted({table.machine for table in tables}):
        rows = [
            each
            for (name, _), members in rows_by_engine([t for t in tables if t.machine == machine]).items()
            for each in members
            if name == engine
        ]
        others = rows_by_engine(tables, machine)
        architecture = rows[0][0].machine.chip().architecture
        kernel = fit_reduce(others.get((engine, architecture)) or others[engine, REFERENCE])
        predicted = [
            min(kernel.seconds(row.transfer, cluster), _by_library(cluster, row.transfer)) for cluster, row in rows
        ]
        found[machine] = np.log([row.seconds for _, row in rows]) - np.log(predicted)
    return found


def _margin(engine: str, tables: Sequence[CollectiveTable]) -> float:
    """Half of the interval that holds 80 % of the errors of a GPU whose relative was fitted to (H100, H200)."""
    found = left_out_errors(engine, tables)
    architectures = Counter(architecture_of(machine) for machine in found)
    errors = [np.abs(each) for name, each in found.items() if architectures[architecture_of(name)] > 1]
    return round(float(np.mean([np.quantile(each, 0.8) for each in errors or [np.full(1, 0.2)]])), 3)
