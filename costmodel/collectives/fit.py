"""Fits the models of collectives: smoothed curves per system, NCCL version, kind and number of ranks.

Margins come from what a curve says about sizes, and about numbers of ranks, that were left out of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.cluster import Cluster, load_cluster
from costmodel.collectives.calibration import Calibration, Margins, Sweep, version_key, write_calibration
from costmodel.collectives.curve import smooth
from costmodel.collectives.model import NO_MARGINS, CollectiveModel
from costmodel.datasets.collectives import CollectiveRow, CollectiveTable, read_collectives
from costmodel.errors import InputError

LICENCES = "ai-dynamo/aiconfigurator (Apache-2.0), VIA-Research/vTrain (MIT), microsoft/vidur (MIT)"
FOLDS = 3  # every third size is left out in turn
_MARGIN_QUANTILE = 0.8
_LEAST_SIZES = 4  # of a sweep, before leaving every third out says anything


@dataclass(frozen=True)
class Prediction:
    """``row`` as a model predicts it that has not seen it."""

    row: CollectiveRow
    estimate: Any


def fit_collectives(data: Path, output: Path, progress: Callable[[str], None]) -> list[Path]:
    """Writes a calibration per measured machine below ``output``; returns the files. Some seconds."""
    written = []
    for machine, tables in by_machine(read_collectives(data)).items():
        rows = [row for table in tables for row in table.rows]
        progress(f"{machine}: {len(rows)} collectives")
        provenance = {
            "command": "python -m costmodel fit",
            "sources": LICENCES,
            "tables": {str(Path(table.source).relative_to(data)): len(table.rows) for table in tables},
        }
        written.append(write_calibration(calibrate(machine, rows, provenance), output))
    return written


def by_machine(tables: Sequence[CollectiveTable]) -> dict[str, list[CollectiveTable]]:
    """Tables of one machine together, in the order of names."""
    groups: dict[str, list[CollectiveTable]] = defaultdict(list)
    for table in tables:
        groups[table.machine].append(table)
    return dict(sorted(groups.items()))


def cluster_for(machine: str, rows: Sequence[CollectiveRow]) -> Cluster:
    """The cluster ``machine`` with as many GPUs and nodes as ``rows`` use."""
    nodes = max(row.transfer.nodes for row in rows)
    gpus = max(row.transfer.ranks_per_node for row in rows) * nodes
    return load_cluster(machine, gpus, nodes)


def calibrate(machine: str, rows: Sequence[CollectiveRow], provenance: Mapping[str, Any]) -> Calibration:
    """The calibration that ``rows`` make; margins included."""
    cluster = cluster_for(machine, rows)
    calibration = _calibration(machine, cluster, rows, {}, provenance)
    return _calibration(machine, cluster, rows, _margins(machine, rows), calibration.provenance)


def held_out_sizes(machine: str, rows: Sequence[CollectiveRow]) -> list[Prediction]:
    """Every row that lies between the outermost sizes of its sweep, predicted from sweeps without every third size."""
    cluster = cluster_for(machine, rows)
    sweeps = _grouped(rows)
    predictions: list[Prediction] = []
    for fold in range(FOLDS):
        left_out = {key: _fold(members, fold) for key, members in sweeps.items()}
        kept = [
            row for key, members in sweeps.items() for row in members if row.transfer.size_bytes not in left_out[key]
        ]
        wanted = [row for key, members in sweeps.items() for row in members if row.transfer.size_bytes in left_out[key]]
        predictions += _predict(machine, cluster, kept, wanted)
    return predictions


def held_out_ranks(machine: str, rows: Sequence[CollectiveRow]) -> list[Prediction]:
    """The rows of every number of ranks between the outermost ones, predicted without that number."""
    cluster = cluster_for(machine, rows)
    counts: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    for row in rows:
        counts[row.nccl, row.transfer.kind, row.transfer.nodes].add(row.transfer.ranks)
    predictions: list[Prediction] = []
    for (nccl, kind, nodes), known in sorted(counts.items()):
        own = [row for row in rows if (row.nccl, row.transfer.kind, row.transfer.nodes) == (nccl, kind, nodes)]
        for inner in sorted(known)[1:-1]:
            kept = [row for row in own if row.transfer.ranks != inner]
            predictions += _predict(machine, cluster, kept, [row for row in own if row.transfer.ranks == inner])
    return predictions


def _predict(
    machine: str, cluster: Cluster, kept: Sequence[CollectiveRow], wanted: Sequence[CollectiveRow]
) -> Iterator[Prediction]:
    """Each version with a model of its own: a newer one must not stand in for it."""
    for nccl in sorted({row.nccl for row in wanted}):
        rows = [row for row in wanted if row.nccl == nccl]
        model = CollectiveModel(cluster, _calibration(machine, cluster, [r for r in kept if r.nccl == nccl], {}, {}))
        for row, estimate in zip(rows, model.estimate([row.transfer for row in rows]), strict=True):
            yield Prediction(row, estimate)


def _margins(machine: str, rows: Sequence[CollectiveRow]) -> dict[str, Margins]:
    sizes, ranks = _errors(held_out_sizes(machine, rows)), _errors(held_out_ranks(machine, rows))
    margins = {}
    for kind in sorted({row.transfer.kind for row in rows}):
        size = _quantile(sizes.get(kind, []), NO_MARGINS.size)
        margins[kind] = Margins(size, max(size, _quantile(ranks.get(kind, []), NO_MARGINS.ranks)))
    return margins


def _errors(predictions: Sequence[Prediction]) -> dict[str, list[float]]:
    errors: dict[str, list[float]] = defaultdict(list)
    for each in predictions:
        errors[each.row.transfer.kind].append(abs(math.log(each.row.seconds / each.estimate.seconds)))
    return errors


def _quantile(errors: Sequence[float], default: float) -> float:
    return round(float(np.quantile(errors, _MARGIN_QUANTILE)), 4) if len(errors) else default


def _fold(members: Sequence[CollectiveRow], fold: int) -> set[float]:
    """Every third size of a sweep, its outermost ones excepted."""
    sizes = sorted({row.transfer.size_bytes for row in members})
    return set() if len(sizes) < _LEAST_SIZES else set(sizes[1:-1][fold::FOLDS])


def _grouped(rows: Sequence[CollectiveRow]) -> dict[tuple[str, str, int, int], list[CollectiveRow]]:
    groups: dict[tuple[str, str, int, int], list[CollectiveRow]] = defaultdict(list)
    for row in rows:
        transfer = row.transfer
        groups[row.nccl, transfer.kind, transfer.ranks, transfer.nodes].append(row)
    return groups


def _calibration(
    machine: str,
    cluster: Cluster,
    rows: Sequence[CollectiveRow],
    margins: Mapping[str, Margins],
    provenance: Mapping[str, Any],
) -> Calibration:
    sweeps = []
    order = sorted(_grouped(rows).items(), key=lambda item: (version_key(item[0][0]), item[0]))
    for (nccl, kind, ranks, nodes), members in order:
        rising = [row for row in members if row.transfer.size_bytes > 0]
        if rising:
            knots = smooth([row.transfer.size_bytes for row in rising], [row.seconds for row in rising])
            sweeps.append(Sweep(nccl, kind, ranks, nodes, knots))
    if not sweeps:
        raise InputError(f"{machine}: no measured collective with a size above zero; nothing to fit")
    return Calibration(machine, cluster.machine.name, cluster.topology, tuple(sweeps), margins, provenance)
