"""Errors of the GPU models by split, family and machine, on rows not used in any fit.

``held-out shapes``       the shipped model of a GPU on the report split of its own tables
``..., >= 0.4 TFLOP``     of them those of products of so much work
``..., disturbed``        those that a twin's table shows to be disturbed, excluded from all other lines and fits
``left-out GPU``          the same rows as if that GPU had never been measured: no residual, levels of the other GPUs;
                          sustained rates and DRAM bandwidth are its datasheet x what the others reach of theirs
``..., 20 points``        as before, after twenty measurements of the GPU, drawn at random, have moved the family to it
                          (:mod:`costmodel.gpu.residuals.adaptation`), as a small table of a new GPU does in `costmodel
                          fit`

What a left-out GPU keeps is its datasheet and the tile shapes that libraries have for its architecture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.families.family import Gridded
from costmodel.gpu.kernel_model import KernelModel
from costmodel.gpu.residuals.fitted import DIRECTORY
from costmodel.machines.machine_records import Machine
from costmodel.model.cost_model import Estimate
from costmodel.model.measurements import Measurement
from lab.data.kernel_table import KernelTable
from lab.data.named_files import Wanted, everything
from lab.fit.grades import with_grades
from lab.fit.kernel_rows import KernelRows, left_out_machine, transfer_of
from lab.fit.kernels import read_tables, rows_by_family, told_apart
from lab.validate.accuracy import Accuracy, accuracy


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


HELD_OUT, LEFT_OUT, CALIBRATED = "held-out shapes", "left-out GPU", "left-out GPU, 20 points"
CALIBRATION_POINTS, _SEED = 20, 0
DISTURBED = "held-out shapes, disturbed"
SIZES = (("< 0.1 TFLOP", 0.0, 0.1), ("0.1-0.4 TFLOP", 0.1, 0.4), (">= 0.4 TFLOP", 0.4, np.inf))
ReadTables = Callable[[Path, Wanted], list[KernelTable]]


def validate(
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
    every = Predicted(HELD_OUT, rows.family.name, rows.machine.name, estimates, report.seconds)
    if not isinstance(rows.family, Gridded):
        return [every]
    work = np.array([getattr(each, "flops", 0) for each in report.operators]) / 1e12
    parts = [every]
    for name, low, high in SIZES:
        places = np.flatnonzero((work >= low) & (work < high))
        if len(places):
            chosen = [estimates[place] for place in places]
            parts.append(replace(every, split=f"{HELD_OUT}, {name}", estimates=chosen, seconds=report.seconds[places]))
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
        Predicted(LEFT_OUT, *names, blind, report.seconds),
        Predicted(CALIBRATED, *names, calibrated, report.seconds),
    ]
