"""Calibration of a measured system: curves of its collectives, and margins from the errors on held-out rows.

:func:`fit_logs` calibrates the user's own cluster from logs (:mod:`costmodel.collectives.sweep_logs`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from packaging.version import Version

from costmodel.base.errors import InputError
from costmodel.collectives.calibration import (
    NAME,
    Calibration,
    CollectiveSweep,
    Margins,
    smooth_knots,
    write_calibration,
)
from costmodel.collectives.collective_model import NO_MARGINS, CollectiveModel
from costmodel.collectives.physics import Constants
from costmodel.collectives.sweep_logs import CollectiveRow, Given, read_log, read_own_table
from costmodel.cost_model import Estimate
from costmodel.machines.cluster import Cluster, load_cluster, nccl_version
from costmodel.machines.machine_file import user_directory
from costmodel.operators.collective_transfer import CollectiveKind

FOLDS = 3  # every third size is held out in turn
_LEAST_SIZES = 4  # sizes a sweep needs for holding out every third to be meaningful
CollectiveRows = Sequence[CollectiveRow]


@dataclass(frozen=True)
class RowPrediction:
    """Row and its prediction by a model fitted without it."""

    row: CollectiveRow
    estimate: Estimate


@dataclass(frozen=True)
class MeasuredRow:
    """Measured ``rows`` of one machine (name of a cluster or a GPU); ``known``: constants of the analytic model."""

    machine: str
    rows: tuple[CollectiveRow, ...]
    known: Constants | None = None

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster with as many GPUs and nodes as the rows use."""
        nodes = max(row.transfer.nodes for row in self.rows)
        gpus = max(row.transfer.ranks_per_node for row in self.rows) * nodes
        return load_cluster(self.machine, gpus, nodes)


def sweeps_of(rows: CollectiveRows) -> tuple[CollectiveSweep, ...]:
    """Smoothed sweeps by NCCL version (oldest first), kind and ranks; rows of size 0 are skipped."""
    sweeps = []
    for (nccl, kind, ranks, nodes), members in sorted(_grouped(rows).items(), key=_order):
        known = [row for row in members if row.transfer.size_bytes > 0]
        if known:
            knots = smooth_knots([row.transfer.size_bytes for row in known], [row.seconds for row in known])
            sweeps.append(CollectiveSweep(nccl, kind, ranks, nodes, *knots))
    return tuple(sweeps)


def held_out_sizes(measured: MeasuredRow) -> list[RowPrediction]:
    """Predictions of every row between the outermost sizes of its sweep, from sweeps without every third size."""
    sweeps = _grouped(measured.rows).values()
    predictions: list[RowPrediction] = []
    for fold in range(FOLDS):
        kept: list[CollectiveRow] = []
        wanted: list[CollectiveRow] = []
        for members in sweeps:
            left_out = _fold(members, fold)
            for row in members:
                (wanted if row.transfer.size_bytes in left_out else kept).append(row)
        predictions += _predict(measured, kept, wanted)
    return predictions


def held_out_ranks(measured: MeasuredRow) -> list[RowPrediction]:
    """Predictions of the rows of every rank count between the outermost ones, from rows without that count."""
    groups: dict[tuple[str, str, int], list[CollectiveRow]] = defaultdict(list)
    for row in measured.rows:
        groups[row.nccl, row.transfer.kind, row.transfer.nodes].append(row)
    predictions: list[RowPrediction] = []
    for _, own in sorted(groups.items()):
        for inner in sorted({row.transfer.ranks for row in own})[1:-1]:
            kept = [row for row in own if row.transfer.ranks != inner]
            predictions += _predict(measured, kept, [row for row in own if row.transfer.ranks == inner])
    return predictions


def _predict(measured: MeasuredRow, kept: CollectiveRows, wanted: CollectiveRows) -> Iterator[RowPrediction]:
    """Predict ``wanted`` from ``kept``, each NCCL version by its own model, so that no other version replaces it."""
    cluster = measured.cluster
    for nccl in sorted({row.nccl for row in wanted}):
        rows = [row for row in wanted if row.nccl == nccl]
        sweeps = sweeps_of([row for row in kept if row.nccl == nccl])
        calibration = Calibration(cluster.name, cluster.machine.name, cluster.topology, sweeps, {}, {})
        model = CollectiveModel(cluster, [[calibration]], measured.known)
        estimates = model.estimate([row.transfer for row in rows])
        yield from (RowPrediction(row, estimate) for row, estimate in zip(rows, estimates, strict=True))


def _fold(members: CollectiveRows, fold: int) -> set[float]:
    """Every third size of a sweep, except its outermost ones."""
    sizes = sorted({row.transfer.size_bytes for row in members})
    return set() if len(sizes) < _LEAST_SIZES else set(sizes[1:-1][fold::FOLDS])


_Key = tuple[str, CollectiveKind, int, int]


def _grouped(rows: CollectiveRows) -> dict[_Key, list[CollectiveRow]]:
    groups: dict[_Key, list[CollectiveRow]] = defaultdict(list)
    for row in rows:
        groups[row.nccl, row.transfer.kind, row.transfer.ranks, row.transfer.nodes].append(row)
    return groups


def _order(item: tuple[_Key, list[CollectiveRow]]) -> tuple[Version, _Key]:
    return nccl_version(item[0][0]), item[0]


_MARGIN_QUANTILE = 0.8


def fit_logs(
    logs: Sequence[Path],
    machine: str,
    given: Given,
    output: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the calibration of the user's own ``machine`` (a cluster's name or file, or a GPU's name), by default where
    :func:`calibrations_for` finds it, replacing an earlier one; returns the file. ``logs``: output of nccl-tests, or
    tables (``.csv``) of the collectives suite. ``progress`` receives a summary of each log.
    """
    read = {str(log): _rows_of_log(log, given) for log in logs}
    measured = MeasuredRow(machine, tuple(row for rows in read.values() for row in rows))
    name = measured.cluster.name
    for log, rows in read.items():
        _check_nodes(log, rows, measured.cluster)
        for line in _understood(rows):
            progress(f"{log}: {line}")
    provenance = {
        "command": "python -m costmodel fit --nccl-log",
        "logs": {log: len(rows) for log, rows in read.items()},
    }
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
    """Summary lines, one per sweep: kind, ranks, nodes, number of sizes."""
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


def calibrate(measured: MeasuredRow, provenance: Mapping[str, Any]) -> Calibration:
    """Calibration from the measured rows, margins included; ``InputError`` if no row has a size above 0."""
    sweeps, cluster = sweeps_of(measured.rows), measured.cluster
    if not sweeps:
        raise InputError(
            f"{measured.machine}: no measured collective with a size above zero; nothing to fit; "
            "give a log of a whole sweep"
        )
    margins = _margins(measured)
    return Calibration(measured.machine, cluster.machine.name, cluster.topology, sweeps, margins, provenance)


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
