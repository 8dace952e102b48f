"""Errors of the models of collectives on sizes, numbers of ranks and systems not used in their fit.

``held-out sizes``   every third size of each sweep left out in turn, its outermost ones excepted
``held-out ranks``   the inner numbers of ranks (4 of 2, 4, 8) left out: curves of the others, by the analytic model
``left-out system``  constants fitted to the other systems, no curves of its own; the system's datasheet and files.
                     Others with the same GPU stay: a log of two nodes is a system, sweeps of one node are another

Intervals are those of an estimate whose margins are not fitted yet.
``nccl-tests`` sizes, from 1 MiB up and below, apart; each kind of a system before all of its kinds together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from costmodel.collectives.calibration import Calibration, tiers_of
from costmodel.collectives.collective_model import CollectiveModel
from costmodel.collectives.own_cluster import MeasuredRow, RowPrediction, held_out_ranks, held_out_sizes, sweeps_of
from costmodel.collectives.sweep_logs import CollectiveRow
from lab.data.collective_sweeps import read_collectives
from lab.data.named_files import Wanted, everything
from lab.fit.collectives import by_machine, constants_of, rows_of
from lab.validate.accuracy import Accuracy, accuracy
from lab.validate.kernels import KernelErrors

SIZES, RANKS, SYSTEM = "held-out sizes", "held-out ranks", "left-out system"
LARGE_BYTES = 1 << 20


def validate_collectives(
    data: Path, splits: Sequence[str] = (SIZES, RANKS, SYSTEM), wanted: Wanted = everything
) -> list[KernelErrors]:
    """All results of ``splits``, by split and machine; empty if ``data`` has no wanted sweeps."""
    tables = by_machine(read_collectives(data, wanted))
    measured = [MeasuredRow(machine, rows_of(own)) for machine, own in tables.items()]
    if not measured:
        return []
    known = constants_of(measured)
    results: list[KernelErrors] = []
    for split in splits:
        for machine in measured:
            own = MeasuredRow(machine.machine, machine.rows, known)
            others = [each for each in measured if each is not machine]
            predicted = {SIZES: held_out_sizes, RANKS: held_out_ranks}.get(split, partial(_left_out, others=others))(
                own
            )
            results += _results(split, machine.machine, predicted)
    return results


def _left_out(machine: MeasuredRow, others: Sequence[MeasuredRow]) -> list[RowPrediction]:
    """Predict ``machine`` as if it had never been measured, from ``others``, selected as for any other system."""
    tiers = tiers_of([_calibration(each) for each in others], machine.cluster)
    model = CollectiveModel(machine.cluster, tiers, constants_of(others))
    estimates = model.estimate([row.transfer for row in machine.rows])
    return [RowPrediction(row, each) for row, each in zip(machine.rows, estimates, strict=True)]


def _calibration(measured: MeasuredRow) -> Calibration:
    cluster = measured.cluster
    return Calibration(measured.machine, cluster.machine.name, cluster.topology, sweeps_of(measured.rows), {}, {})


def _results(split: str, machine: str, predictions: Sequence[RowPrediction]) -> list[KernelErrors]:
    groups: dict[str, list[RowPrediction]] = defaultdict(list)
    for each in predictions:
        size = _size_class(each.row)
        groups[f"{each.row.transfer.kind}, {size}"].append(each)
        groups[f"~all kinds, {size}"].append(each)  # sorts after every kind
    return [
        KernelErrors(split, name.removeprefix("~"), machine, _accuracy(members))
        for name, members in sorted(groups.items())
    ]


def _size_class(row: CollectiveRow) -> str:
    transfer = row.transfer
    whole = transfer.size_bytes * (transfer.ranks if transfer.kind == "all_gather" else 1)
    return "from 1 MiB" if whole >= LARGE_BYTES else "below 1 MiB"


def _accuracy(predictions: Sequence[RowPrediction]) -> Accuracy:
    return accuracy([each.estimate for each in predictions], [each.row.seconds for each in predictions])
