"""Predictions of measured collectives by models that have not seen them: for intervals and for validation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from costmodel.collectives.calibration import Calibration, CollectiveSweep, version_key
from costmodel.collectives.collective_model import CollectiveModel
from costmodel.collectives.constants import Constants
from costmodel.collectives.curve import smooth
from costmodel.datasets.collective_rows import CollectiveRow
from costmodel.machines.cluster import Cluster, load_cluster
from costmodel.model.cost_model import Estimate

FOLDS = 3  # every third size is left out in turn
_LEAST_SIZES = 4  # of a sweep, before leaving every third out says anything
CollectiveRows = Sequence[CollectiveRow]


@dataclass(frozen=True)
class RowPrediction:
    """``row``, and what a model says that has not seen it."""

    row: CollectiveRow
    estimate: Estimate


@dataclass(frozen=True)
class MeasuredRow:
    """``rows`` of one machine (a cluster's name, or a GPU's); ``known``: constants of the analytic model."""

    machine: str
    rows: tuple[CollectiveRow, ...]
    known: Constants | None = None

    @cached_property
    def cluster(self) -> Cluster:
        """With as many GPUs and nodes as the rows use."""
        nodes = max(row.transfer.nodes for row in self.rows)
        gpus = max(row.transfer.ranks_per_node for row in self.rows) * nodes
        return load_cluster(self.machine, gpus, nodes)


def sweeps_of(rows: CollectiveRows) -> tuple[CollectiveSweep, ...]:
    """Smoothed sweeps by NCCL version, oldest first, kind and ranks; rows of size 0 are left out."""
    sweeps = []
    for (nccl, kind, ranks, nodes), members in sorted(_grouped(rows).items(), key=_order):
        known = [row for row in members if row.transfer.size_bytes > 0]
        if known:
            knots = smooth([row.transfer.size_bytes for row in known], [row.seconds for row in known])
            sweeps.append(CollectiveSweep(nccl, kind, ranks, nodes, knots))
    return tuple(sweeps)


def held_out_sizes(measured: MeasuredRow) -> list[RowPrediction]:
    """Every row that lies between the outermost sizes of its sweep, predicted from sweeps without every third size."""
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
    """The rows of every number of ranks between the outermost ones, predicted without that number."""
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
    """Each version by a model of its own: another one must not stand in for it."""
    cluster = measured.cluster
    for nccl in sorted({row.nccl for row in wanted}):
        rows = [row for row in wanted if row.nccl == nccl]
        sweeps = sweeps_of([row for row in kept if row.nccl == nccl])
        calibration = Calibration(cluster.name, cluster.machine.name, cluster.topology, sweeps, {}, {})
        model = CollectiveModel(cluster, [[calibration]], measured.known)
        estimates = model.estimate([row.transfer for row in rows])
        yield from (RowPrediction(row, estimate) for row, estimate in zip(rows, estimates, strict=True))


def _fold(members: CollectiveRows, fold: int) -> set[float]:
    """Every third size of a sweep, its outermost ones excepted."""
    sizes = sorted({row.transfer.size_bytes for row in members})
    return set() if len(sizes) < _LEAST_SIZES else set(sizes[1:-1][fold::FOLDS])


_Key = tuple[str, str, int, int]


def _grouped(rows: CollectiveRows) -> dict[_Key, list[CollectiveRow]]:
    groups: dict[_Key, list[CollectiveRow]] = defaultdict(list)
    for row in rows:
        groups[row.nccl, row.transfer.kind, row.transfer.ranks, row.transfer.nodes].append(row)
    return groups


def _order(item: tuple[_Key, list[CollectiveRow]]) -> tuple[tuple[int, ...], _Key]:
    return version_key(item[0][0]), item[0]
