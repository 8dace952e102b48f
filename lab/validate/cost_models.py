"""Errors of the models of GPU kernels and of collectives, by split, family and machine, on rows not used in any fit.

Kernels:

``held-out shapes``       the shipped model of a GPU on the report split of its own tables
``..., >= 0.4 TFLOP``     of them those of products of so much work
``..., disturbed``        those that a twin's table shows to be disturbed, excluded from all other lines and fits
``left-out GPU``          the same rows as if that GPU had never been measured: no residual, levels of the other GPUs;
                          sustained rates and DRAM bandwidth are its datasheet x what the others reach of theirs
``..., 20 points``        as before, after twenty measurements of the GPU, drawn at random, have moved the family to it
                          (:mod:`costmodel.gpu.residual`), as a small table of a new GPU does in
                          `costmodel fit`

What a left-out GPU keeps is its datasheet and the tile shapes that libraries have for its architecture.

Attention and linear attention besides, beyond their training rows:

``lengths from 16k left out``   trees trained only on a GPU's shorter queries and keys, tested on longer
``published, longest left out``  kernels known from a few published figures (training's forward and backward): pace
                                and level fitted without the lengths from 8k on, or without every third row where all
                                lengths are equal
``lengths from 8k left out``    linear attention: trees trained only on a GPU's shorter sequences, tested on longer
``one width left out``          linear attention: trees that saw every size of a model but one (heads x widths), on
                                that one, each in turn

Constants of :mod:`costmodel.gpu.families.attention` are fitted to measured rows of one kernel and phase by least
soft absolute error of log times (scale 0.1), within bounds that physics sets: no more than 1.05 of the GEMM rate,
up to 300 cycles per 1,000 scores, the launches of one or two kernels (four where an engine writes its cache besides).

Collectives, on sizes, numbers of ranks and systems:

``held-out sizes``   every third size of each sweep left out in turn, its outermost ones excepted
``held-out ranks``   the inner numbers of ranks (4 of 2, 4, 8) left out: curves of the others, by the analytic model
``left-out system``  constants fitted to the other systems, no curves of its own; the system's datasheet and files.
                     Others with the same GPU stay: a log of two nodes is a system, sweeps of one node are another

Their intervals are those of an estimate whose margins are not fitted yet. ``nccl-tests`` sizes, from 1 MiB up and
below, apart; each kind of a system before all of its kinds together.

Errors are relative to the measured time: ``(predicted - measured) / measured``.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.collectives.calibration import Calibration, tiers_of
from costmodel.collectives.collective_model import CollectiveModel
from costmodel.collectives.own_cluster import MeasuredRow, RowPrediction, held_out_ranks, held_out_sizes, sweeps_of
from costmodel.collectives.sweep_logs import CollectiveRow
from costmodel.cost_model import Estimate, Measurement
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.families.attention import FusedAttention, KernelPace
from costmodel.gpu.families.family import Gridded
from costmodel.gpu.fitted import DIRECTORY
from costmodel.gpu.kernel_model import KernelModel
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import Attention, CausalConvolution, LinearAttention
from lab.data.aiconfigurator import read_attention
from lab.data.collective_sweeps import read_collectives
from lab.data.data_folder import Wanted, everything
from lab.data.kernel_table import KernelTable
from lab.fit.collectives import by_machine, constants_of, rows_of
from lab.fit.kernels import read_engines, read_points, read_scans, read_tables, rows_by_family, told_apart
from lab.fit.transfer import KernelRows, left_out_machine, transfer_of, with_grades
from lab.fit.trees import train
from lab.validate.errors import Accuracy, accuracy, error_table, section_console


@dataclass(frozen=True)
class KernelErrors:
    """Accuracy of one split, family and machine (``all``: the rows of all machines together)."""

    split: str
    family: str
    machine: str
    accuracy: Accuracy


@dataclass(frozen=True)
class Predicted:
    """Predictions ``estimates`` of rows of one family on one machine, with their measured ``seconds`` (rows,)."""

    split: str
    family: str
    machine: str
    estimates: list[Estimate]
    seconds: np.ndarray


def result_record(result: KernelErrors) -> dict[str, Any]:
    """JSON-able content, errors as fractions."""
    content = {field.name: getattr(result.accuracy, field.name) for field in dataclasses.fields(result.accuracy)}
    return {"split": result.split, "family": result.family, "machine": result.machine, **content}


@dataclass(frozen=True)
class KernelSection:
    """Errors of the models of kernels, or of collectives."""

    results: Sequence[KernelErrors]

    def record(self) -> dict[str, Any]:
        """JSON document of the section."""
        return {"results": [result_record(each) for each in self.results]}

    def render(self) -> None:
        """Print a line of errors for each split, family and machine."""
        rows = [((each.split, each.family, each.machine), each.accuracy) for each in self.results]
        section_console(1000).print(error_table(("split", "family", "machine"), rows))


def results_of(predicted: Sequence[Predicted]) -> list[KernelErrors]:
    """Errors by split and family in the order of ``predicted``: every machine, then all of them together."""
    groups: dict[tuple[str, str], list[Predicted]] = {}
    for each in predicted:
        groups.setdefault((each.split, each.family), []).append(each)
    results = []
    for (split, family), members in groups.items():
        results += [
            KernelErrors(split, family, each.machine, accuracy(each.estimates, each.seconds.tolist()))
            for each in members
        ]
        together = [estimate for each in members for estimate in each.estimates]
        seconds = [float(value) for each in members for value in each.seconds]
        results.append(KernelErrors(split, family, "all", accuracy(together, seconds)))
    return results


def joined(predicted: list[Predicted]) -> list[Predicted]:
    """Predictions concatenated by split, family and machine."""
    groups: dict[tuple[str, str, str], list[Predicted]] = {}
    for each in predicted:
        groups.setdefault((each.split, each.family, each.machine), []).append(each)
    return [
        Predicted(
            *key, [one for each in members for one in each.estimates], np.concatenate([e.seconds for e in members])
        )
        for key, members in groups.items()
    ]


HELD_OUT_SHAPES, LEFT_OUT_GPU, CALIBRATED = "held-out shapes", "left-out GPU", "left-out GPU, 20 points"
CALIBRATION_POINTS, _SEED = 20, 0
DISTURBED = "held-out shapes, disturbed"
PRODUCT_SIZES = (("< 0.1 TFLOP", 0.0, 0.1), ("0.1-0.4 TFLOP", 0.1, 0.4), (">= 0.4 TFLOP", 0.4, np.inf))
ReadTables = Callable[[Path, Wanted], list[KernelTable]]


def validate_kernels(
    data: Path, directory: Path = DIRECTORY, wanted: Wanted = everything, read: ReadTables = read_tables
) -> list[KernelErrors]:
    """All results of the tables from ``read``, machines of a family before their total; ``InputError`` if ``data`` has
    no wanted ones.
    """
    rows, aside = told_apart(rows_by_family(read(data, wanted)))
    if not rows:
        raise InputError(f"{data}: no rows to validate on; give the folder of the data with --data")
    predicted = [each for one in rows for each in _held_out(one, directory)]
    predicted += [replace(each, split=DISTURBED) for one in aside for each in _held_out(one, directory)[:1]]
    machines = list({each.machine.name: each.machine for each in rows}.values())
    for each in rows:
        others = [other for other in rows if other.family.name == each.family.name and other is not each]
        if others:
            predicted += _left_out(each, others, machines)
    return results_of([each for each in predicted if each.estimates])


def _held_out(rows: KernelRows, directory: Path) -> list[Predicted]:
    """Predictions of all rows of the report split, then of each size of :data:`SIZES`."""
    report = rows.of("report")
    estimates = gpu_cost_model(rows.machine, directory).estimate(report.operators)
    every = Predicted(HELD_OUT_SHAPES, rows.family.name, rows.machine.name, estimates, report.seconds)
    if not isinstance(rows.family, Gridded):
        return [every]
    work = np.array([getattr(each, "flops", 0) for each in report.operators]) / 1e12
    parts = [every]
    for name, low, high in PRODUCT_SIZES:
        places = np.flatnonzero((work >= low) & (work < high))
        if len(places):
            chosen = [estimates[place] for place in places]
            parts.append(
                replace(every, split=f"{HELD_OUT_SHAPES}, {name}", estimates=chosen, seconds=report.seconds[places])
            )
    return parts


def _left_out(rows: KernelRows, others: Sequence[KernelRows], machines: Sequence[Machine]) -> list[Predicted]:
    report, seen = rows.of("report"), rows.of("fit")
    machine = left_out_machine(rows.machine, [each.machine for each in others], machines)
    model = KernelModel(machine, lambda operator: rows.family, {}, with_grades(transfer_of(others), others))
    blind = model.estimate(report.operators)
    drawn = np.random.default_rng(_SEED).permutation(len(seen.operators))
    places = drawn[:CALIBRATION_POINTS]
    model.fit([Measurement(seen.operators[place], seconds=float(seen.seconds[place])) for place in places])
    calibrated = model.estimate(report.operators)
    names = (rows.family.name, rows.machine.name)
    return [
        Predicted(LEFT_OUT_GPU, *names, blind, report.seconds),
        Predicted(CALIBRATED, *names, calibrated, report.seconds),
    ]


LONG = "lengths from 16k left out"
PUBLISHED = "published, longest left out"
LONG_TOKENS, _LONG_PUBLISHED = 16384, 8192
_LEAST_ROWS, _LEAST_POINTS = 60, 8


def validate_attention(data: Path, wanted: Wanted = everything) -> list[KernelErrors]:
    """All results; empty if ``data`` has no tables of attention."""
    return results_of([*_without_long(rows_by_family(read_attention(data, wanted))), *_published()])


def validate_serving(data: Path, directory: Path = DIRECTORY, wanted: Wanted = everything) -> list[KernelErrors]:
    """All results for kernels only in serving engines; empty if ``data`` has no tables of them."""
    rows = rows_by_family(read_engines(data, wanted))
    if not rows:
        return []
    return [*validate_kernels(data, directory, wanted, read_engines), *results_of(_without_long(rows))]


def _without_long(rows: Sequence[KernelRows]) -> list[Predicted]:
    found = (without_rows(each, LONG, np.array([_is_long(one) for one in _attentions(each)], bool)) for each in rows)
    return [each for each in found if each is not None]


def _attentions(rows: KernelRows) -> list[Attention]:
    return [each for each in rows.operators if isinstance(each, Attention)]


def _is_long(operator: Attention) -> bool:
    return max(operator.query_length, operator.keys_seen) >= LONG_TOKENS


def without_rows(rows: KernelRows, name: str, out: np.ndarray, least: int = _LEAST_ROWS) -> Predicted | None:
    """Predict the rows marked by ``out`` with trees trained on the others; ``None`` if fewer than ``least`` are marked,
    or few are left.
    """
    if out.sum() < least or (~out).sum() < _LEAST_ROWS:
        return None
    seen, asked = rows.only(~out), rows.only(out)
    analysis = rows.family.analyse(seen.operators, rows.machine)
    held = seen.splits != "fit"
    residual = train(analysis.features, np.log(seen.seconds / analysis.seconds), held)
    residuals = {rows.family.name: (rows.machine.name, residual)}
    model = KernelModel(rows.machine, lambda operator: rows.family, residuals, transfer_of([seen]))
    return Predicted(name, rows.family.name, rows.machine.name, model.estimate(asked.operators), asked.seconds)


def _published() -> list[Predicted]:
    own = [each for each in read_points() if isinstance(each.operators[0], Attention)]
    return [found for each in rows_by_family(own) if (found := _refitted(each)) is not None]


def _refitted(rows: KernelRows) -> Predicted | None:
    """Predict the longest sequences, or every third row if all lengths are equal, by a pace fitted to the other
    rows.
    """
    lengths = np.array([each.query_length for each in _attentions(rows)])
    out = lengths >= _LONG_PUBLISHED if lengths.max() > lengths.min() else np.arange(len(lengths)) % 3 == 2
    if (~out).sum() < _LEAST_POINTS or not isinstance(rows.family, FusedAttention):
        return None
    seen, asked = rows.only(~out), rows.only(out)
    family = rows.family.with_pace(fit_pace([seen]))
    level = transfer_of([KernelRows(family, seen.machine, seen.operators, seen.seconds, seen.splits)])
    model = KernelModel(rows.machine, lambda operator: family, {}, level)
    return Predicted(PUBLISHED, family.name, rows.machine.name, model.estimate(asked.operators), asked.seconds)


_START = (0.7, 30.0, 3000.0, 1.5)
_LEAST, _MOST = (0.15, 0.5, 50.0, 0.99), (1.05, 300.0, 20000.0, 2.0)
_ENGINE_LAUNCHES = 4.0
_SCALE = 0.1


def fit_pace(rows: Sequence[KernelRows]) -> KernelPace:
    """Pace with the best fit of ``rows`` (machines of one generation); all of one family of attention."""
    from scipy.optimize import least_squares

    family = rows[0].family
    if not isinstance(family, FusedAttention):
        raise TypeError(f"no attention: {family.name}")
    most = (*_MOST[:3], _ENGINE_LAUNCHES if family.phase in ("paged", "decode") else _MOST[3])

    cases = [([one for one in each.operators if isinstance(one, Attention)], each.machine) for each in rows]
    measured = np.log(np.concatenate([each.seconds for each in rows]))

    def errors(logs: np.ndarray) -> np.ndarray:
        with_pace = family.with_pace(KernelPace(*np.exp(logs)))
        analysed = [with_pace.analyse(each, machine).seconds for each, machine in cases]
        missed: np.ndarray = np.log(np.concatenate(analysed)) - measured
        return missed

    bounds = (np.log(_LEAST), np.log(most))
    solution = least_squares(errors, np.log(_START), loss="soft_l1", f_scale=_SCALE, bounds=bounds)
    return KernelPace(*(float(value) for value in np.exp(solution.x)))


LONG_SCANS, ONE_WIDTH = "lengths from 8k left out", "one width left out"
LONG_SCAN_TOKENS = 8192


def validate_scans(data: Path, directory: Path = DIRECTORY, wanted: Wanted = everything) -> list[KernelErrors]:
    """All results; empty if ``data`` has no tables of linear attention."""
    rows = rows_by_family(read_scans(data, wanted))
    if not rows:
        return []
    predicted = [found for each in rows if (found := without_rows(each, LONG_SCANS, _are_long(each))) is not None]
    for each in rows:
        sizes = [_size(operator) for operator in each.operators]
        for size in dict.fromkeys(sizes):
            out = np.array([one == size for one in sizes])
            found = without_rows(each, ONE_WIDTH, out, least=1)
            predicted += [] if found is None else [found]
    return [*validate_kernels(data, directory, wanted, read_scans), *results_of(joined(predicted))]


def _are_long(rows: KernelRows) -> np.ndarray:
    return np.array([getattr(each, "length", 0) >= LONG_SCAN_TOKENS for each in rows.operators])


def _size(operator: AnyOperator) -> int:
    """Model size: states of a sequence, or channels."""
    if isinstance(operator, CausalConvolution):
        return operator.channels
    return operator.states // operator.batch if isinstance(operator, LinearAttention) else 0


HELD_OUT_SIZES, HELD_OUT_RANKS, LEFT_OUT_SYSTEM = "held-out sizes", "held-out ranks", "left-out system"
LARGE_BYTES = 1 << 20


def validate_collectives(
    data: Path, splits: Sequence[str] = (HELD_OUT_SIZES, HELD_OUT_RANKS, LEFT_OUT_SYSTEM), wanted: Wanted = everything
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
            predicted = {HELD_OUT_SIZES: held_out_sizes, HELD_OUT_RANKS: held_out_ranks}.get(
                split, partial(_left_out_system, others=others)
            )(own)
            results += _collective_results(split, machine.machine, predicted)
    return results


def _left_out_system(machine: MeasuredRow, others: Sequence[MeasuredRow]) -> list[RowPrediction]:
    """Predict ``machine`` as if it had never been measured, from ``others``, selected as for any other system."""
    tiers = tiers_of([_calibration(each) for each in others], machine.cluster)
    model = CollectiveModel(machine.cluster, tiers, constants_of(others))
    estimates = model.estimate([row.transfer for row in machine.rows])
    return [RowPrediction(row, each) for row, each in zip(machine.rows, estimates, strict=True)]


def _calibration(measured: MeasuredRow) -> Calibration:
    cluster = measured.cluster
    return Calibration(measured.machine, cluster.machine.name, cluster.topology, sweeps_of(measured.rows), {}, {})


def _collective_results(split: str, machine: str, predictions: Sequence[RowPrediction]) -> list[KernelErrors]:
    groups: dict[str, list[RowPrediction]] = defaultdict(list)
    for each in predictions:
        size = _size_class(each.row)
        groups[f"{each.row.transfer.kind}, {size}"].append(each)
        groups[f"~all kinds, {size}"].append(each)  # sorts after every kind
    return [
        KernelErrors(split, name.removeprefix("~"), machine, _collective_accuracy(members))
        for name, members in sorted(groups.items())
    ]


def _size_class(row: CollectiveRow) -> str:
    transfer = row.transfer
    whole = transfer.size_bytes * (transfer.ranks if transfer.kind == "all_gather" else 1)
    return "from 1 MiB" if whole >= LARGE_BYTES else "below 1 MiB"


def _collective_accuracy(predictions: Sequence[RowPrediction]) -> Accuracy:
    return accuracy([each.estimate for each in predictions], [each.row.seconds for each in predictions])
