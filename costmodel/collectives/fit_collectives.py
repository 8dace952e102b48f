"""Fits the models of collectives from measured sweeps: constants of the analytic model, curves per system.

Margins of the intervals come from what the curves say about sizes, and numbers of ranks, that were left out of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.base.staged_files import StagedFiles
from costmodel.collectives.calibration import (
    NAME,
    Calibration,
    CollectiveSweep,
    Margins,
    forget_calibrations,
    version_key,
    write_calibration,
)
from costmodel.collectives.collective_model import NO_MARGINS
from costmodel.collectives.constants import Constants, constants, write_constants
from costmodel.collectives.fit_constants import fit_constants
from costmodel.collectives.held_out import MeasuredRow, RowPrediction, held_out_ranks, held_out_sizes, sweeps_of
from costmodel.datasets.collective_rows import CollectiveRow, CollectiveTable, read_collectives, read_own_table
from costmodel.datasets.named_files import Wanted, everything, named_tables
from costmodel.datasets.nccl_log import Given, read_log
from costmodel.machines.cluster import Cluster
from costmodel.machines.machine_catalog import user_directory

LICENCES = "ai-dynamo/aiconfigurator (Apache-2.0), VIA-Research/vTrain (MIT), microsoft/vidur (MIT)"
_COMMAND = "python -m costmodel fit"
_SELECTION = (
    "every row of the files named, all-reduces of int8 and those that hold waiting left out; of a sweep in even steps "
    "128 sizes, evenly over the logarithm; constants from the newest NCCL version of each system"
)
MOST_SIZES = 128
_MARGIN_QUANTILE = 0.8


def fit_collectives(
    data: Path, output: Path, progress: Callable[[str], None], wanted: Wanted = everything
) -> list[Path]:
    """Writes ``output/collectives.json`` (the constants) and a calibration per machine below; returns the files.

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


def fit_logs(
    logs: Sequence[Path],
    machine: str,
    given: Given,
    output: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Writes the calibration of the user's own ``machine`` (a cluster's name or file, or a GPU's name), by default
    where :func:`calibrations_for` finds it, instead of the one before; returns the file. ``logs``: output of nccl-tests
    or PARAM, or tables (``.csv``) of the collectives suite. ``progress`` hears what was understood of each.
    """
    read = {str(log): _rows_of_log(log, given) for log in logs}
    measured = MeasuredRow(machine, tuple(row for rows in read.values() for row in rows))
    name = measured.cluster.name
    for log, rows in read.items():
        _check_nodes(log, rows, measured.cluster)
        for line in _understood(rows):
            progress(f"{log}: {line}")
    provenance = {"command": "python -m costmodel fit --nccl-log", "logs": {log: len(rows) for log, rows in read.items()}}
    calibration = dataclasses.replace(calibrate(measured, provenance), machine=name)
    directory = output or user_directory() / "calibration"
    if (directory / name / NAME).exists():
        progress(f"{directory / name / NAME}: replaced; to keep what was in it, give its logs in the same command")
    return write_calibration(calibration, directory)


def _check_nodes(log: str, rows: Sequence[CollectiveRow], cluster: Cluster) -> None:
    for transfer in (row.transfer for row in rows):
        if transfer.ranks_per_node > cluster.node_gpus:
            raise InputError(
                f"{log}: {transfer.ranks} ranks on {transfer.nodes} node(s), but a node of {cluster.name} has "
                f"{cluster.node_gpus} GPUs; give --nodes where the log does not say it, or the cluster that it is of"
            )


def _understood(rows: Sequence[CollectiveRow]) -> list[str]:
    """A line per sweep: what ran, among whom, how many sizes."""
    sizes: dict[tuple[str, int, int, str], set[float]] = defaultdict(set)
    for row in rows:
        transfer = row.transfer
        sizes[transfer.kind, transfer.ranks, transfer.nodes, row.nccl].add(transfer.size_bytes)
    return [
        f"{kind} among {ranks} ranks on {nodes} node(s), NCCL {nccl or 'unknown'}: {len(found)} sizes"
        for (kind, ranks, nodes, nccl), found in sizes.items()
    ]


def _rows_of_log(log: Path, given: Given) -> list[CollectiveRow]:
    return read_own_table(log) if ".csv" in log.suffixes else read_log(log, given)


def by_machine(tables: Sequence[CollectiveTable]) -> dict[str, list[CollectiveTable]]:
    """Tables of one machine together, in the order of names."""
    groups: dict[str, list[CollectiveTable]] = defaultdict(list)
    for table in tables:
        groups[table.machine].append(table)
    return dict(sorted(groups.items()))


def rows_of(tables: Sequence[CollectiveTable]) -> tuple[CollectiveRow, ...]:
    """The rows of ``tables``. Of a sweep in even steps of the size, ``MOST_SIZES`` spread evenly over its logarithm: a
    thousand sizes of hundreds of megabytes say little more than ten, and would drown the others in every mean.
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
    """Constants fitted to the newest sweeps whose NCCL version is known: older ones start twice as slowly."""
    systems = [(each.cluster, _newest(sweeps_of(each.rows))) for each in machines]
    return fit_constants([(cluster, sweeps) for cluster, sweeps in systems if sweeps])


def calibrate(measured: MeasuredRow, provenance: Mapping[str, Any]) -> Calibration:
    """The calibration that the rows make, margins included; ``InputError`` where there are none of a size above 0."""
    sweeps, cluster = sweeps_of(measured.rows), measured.cluster
    if not sweeps:
        raise InputError(
            f"{measured.machine}: no measured collective with a size above zero; nothing to fit; "
            "give a log of a whole sweep"
        )
    margins = _margins(measured)
    return Calibration(measured.machine, cluster.machine.name, cluster.topology, sweeps, margins, provenance)


def _newest(sweeps: Sequence[CollectiveSweep]) -> list[CollectiveSweep]:
    known = [each for each in sweeps if each.nccl]
    newest: dict[str, tuple[int, ...]] = {}
    for each in known:
        newest[each.kind] = max(newest.get(each.kind, ()), version_key(each.nccl))
    return [each for each in known if version_key(each.nccl) == newest[each.kind]]


def _margins(measured: MeasuredRow) -> dict[str, Margins]:
    sizes, ranks = _errors(held_out_sizes(measured)), _errors(held_out_ranks(measured))
    margins: dict[str, Margins] = {}
    for kind in sorted({row.transfer.kind for row in measured.rows}):
        size = _quantile(sizes.get(kind, []), NO_MARGINS.size)
        margins[kind] = Margins(size, max(size, _quantile(ranks.get(kind, []), NO_MARGINS.ranks)))
    return margins


def _errors(predictions: Sequence[RowPrediction]) -> dict[str, list[float]]:
    errors: dict[str, list[float]] = defaultdict(list)
    for each in predictions:
        errors[each.row.transfer.kind].append(abs(math.log(each.row.seconds / each.estimate.seconds)))
    return errors


def _quantile(errors: Sequence[float], default: float) -> float:
    return round(float(np.quantile(errors, _MARGIN_QUANTILE)), 4) if len(errors) else default
