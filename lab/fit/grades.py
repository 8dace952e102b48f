"""Errors of estimates by knowledge of the kernel and the GPU: the intervals of everything except a GPU's own tables.

=============  ==========================================================================================
``points``     the model of other GPUs adapted to a few measurements
``relative``   the learned model of a relative, times the ratio of the analytic times
``physics``    the analytic time at the level of other GPUs
``dtype``      kernels of a measured kind in another dtype
``kind``       kernels of a family of which another kind was measured
``unknown``    unidentified kernels: a factor of three
=============  ==========================================================================================

A grade is the range of log(measured / predicted) that holds 80 % of the rows of each GPU that was left out, averaged
over the GPUs, all weighing the same, and wider where they are few. ``source`` is no grade: by how much (log units) the
intervals of a GPU's own tables must be wider to hold 80 % of what other laboratories measured on the same GPU, in
whole layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from costmodel.gpu.families.family import Family
from costmodel.gpu.kernel_model import KernelModel
from costmodel.gpu.residuals.fitted import ANY_FAMILY, Fitted, LevelTransfer, is_relative
from costmodel.gpu.residuals.residual import Residual
from costmodel.machines.machine_records import Machine
from costmodel.model.measurements import Measurement
from lab.fit.kernel_rows import KernelRows, left_out_machine, levels_of

_ROWS, _POINTS, _SEED = 400, 20, 0  # of each GPU: rows predicted, points drawn
_SHARE = 0.8
# Quantile 0.9 of Student's distribution with 1, 1, 2, 3 ... degrees of freedom (groups less one), and of the normal.
_STUDENT = (3.078, 3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.282)
_NORMAL = 1.2816


def with_grades(
    transfer: LevelTransfer,
    rows: Sequence[KernelRows],
    fitted: Mapping[str, Fitted] | None = None,
    layers: Sequence[KernelRows] = (),
) -> LevelTransfer:
    """Extend ``transfer`` of ``rows`` by its grades, from leaving each GPU out in turn.

    ``fitted``: models of relatives; ``layers``: kernels measured in whole layers, to which no model is fitted.
    """
    errors: dict[tuple[str, str], list[np.ndarray]] = {}
    for each in rows:
        for grade, found in _left_out_errors(each, rows, transfer).items():
            errors.setdefault((each.family.name, grade), []).append(found)
    for each in rows:
        for found in _relative_errors(each, fitted or {}, transfer):
            errors.setdefault((each.family.name, "relative"), []).append(found)
    missed: dict[str, list[np.ndarray]] = {}
    for each in layers:
        for grade, found in _layer_errors(each, fitted or {}, transfer).items():
            errors.setdefault((each.family.name, grade), []).append(found)
        own = _own_misses(each, fitted or {}, transfer)
        if own is not None:
            missed.setdefault(each.family.name, []).append(own)
    grades: dict[str, dict[str, tuple[float, float]]] = {}
    for (family, grade), groups in sorted(errors.items()):
        grades.setdefault(family, {})[grade] = _range(groups)
    for grade in sorted({grade for _, grade in errors}):
        together = [found for (_, name), groups in sorted(errors.items()) if name == grade for found in groups]
        grades.setdefault(ANY_FAMILY, {})[grade] = _range(together)
    for known in grades.values():
        if "kind" in known and "dtype" in known:
            # Another kind is often another dtype too.
            known["kind"] = (min(known["kind"][0], known["dtype"][0]), max(known["kind"][1], known["dtype"][1]))
    for family, misses in sorted(missed.items()):
        margin = max(0.0, float(np.quantile(_pooled(misses), _SHARE)))
        grades.setdefault(family, {})["source"] = (-round(margin, 4), round(margin, 4))
    return dataclasses.replace(transfer, grades=grades)


def _range(groups: Sequence[np.ndarray]) -> tuple[float, float]:
    """Range that holds 80 % of ``groups``, equally weighted."""
    values, weights = _weighted(groups)
    order = np.argsort(values)
    share = np.cumsum(weights[order])
    low, high = np.interp([(1 - _SHARE) / 2, (1 + _SHARE) / 2], share / share[-1], values[order])
    centre, half = (low + high) / 2, (high - low) / 2 * student_widening(len(groups))
    return round(float(centre - half), 4), round(float(centre + half), 4)


def student_widening(groups: int) -> float:
    """Widening of a range from few groups: Student's quantile over the normal one."""
    return _STUDENT[min(groups, len(_STUDENT)) - 1] / _NORMAL


def _weighted(groups: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate(groups), np.concatenate([np.full(len(each), 1 / len(each)) for each in groups])


def _pooled(groups: Sequence[np.ndarray]) -> np.ndarray:
    """The same number of values of each group."""
    return np.concatenate([np.quantile(each, np.linspace(0, 1, 101)) for each in groups])


def _thinned(rows: KernelRows, count: int) -> KernelRows:
    places = np.unique(np.linspace(0, len(rows.operators) - 1, count).astype(int))
    operators = tuple(rows.operators[place] for place in places)
    return KernelRows(rows.family, rows.machine, operators, rows.seconds[places], rows.splits[places])


def _errors(rows: KernelRows, model: KernelModel) -> np.ndarray:
    predicted = np.array([each.seconds for each in model.estimate(rows.operators)])
    return np.asarray(np.log(rows.seconds / predicted))


def _left_out_errors(rows: KernelRows, every: Sequence[KernelRows], transfer: LevelTransfer) -> dict[str, np.ndarray]:
    """Errors of ``rows`` with their GPU treated as unknown; the shape correction is still that of all GPUs."""
    others = [each for each in every if each.family.name == rows.family.name and each is not rows]
    if not others:
        return {}
    machines = list({each.machine.name: each.machine for each in every}.values())
    machine = left_out_machine(rows.machine, [each.machine for each in others], machines)
    model = _model(machine, rows.family, {}, dataclasses.replace(transfer, levels=levels_of(others, transfer.shapes)))
    asked = _thinned(rows.of("select"), _ROWS)
    found = {"physics": _errors(asked, model)}
    seen = rows.of("fit")
    drawn = np.random.default_rng(_SEED).permutation(len(seen.operators))[:_POINTS]
    model.fit([Measurement(seen.operators[place], seconds=float(seen.seconds[place])) for place in drawn])
    return found | {"points": _errors(asked, model)}


def _relative_errors(rows: KernelRows, fitted: Mapping[str, Fitted], transfer: LevelTransfer) -> list[np.ndarray]:
    """Errors of ``rows`` by the model of each relative of their GPU."""
    asked, found = _thinned(rows.of("select"), _ROWS), []
    for name, known in sorted(fitted.items()):
        residual = known.families.get(rows.family.name)
        if name != rows.machine.name and residual is not None and is_relative(known, rows.machine):
            learned = {rows.family.name: (name, residual)}
            found.append(_errors(asked, _model(rows.machine, rows.family, learned, transfer)))
    return found


def _layer_errors(rows: KernelRows, fitted: Mapping[str, Fitted], transfer: LevelTransfer) -> dict[str, np.ndarray]:
    """Errors on kernels of layers that the family does not cover, by their grade."""
    grades = np.array([rows.family.grade(each) for each in rows.operators])
    model = _model(rows.machine, rows.family, _own(rows, fitted), transfer)
    errors = _errors(rows, model)
    return {str(grade): errors[grades == grade] for grade in np.unique(grades) if grade in ("dtype", "kind")}


def _own_misses(rows: KernelRows, fitted: Mapping[str, Fitted], transfer: LevelTransfer) -> np.ndarray | None:
    """Distance (log units, below zero inside) of rows from the interval of the GPU's own tables; ``None`` without
    tables.
    """
    own = _own(rows, fitted)
    if not own or not all(rows.family.covers(each) for each in rows.operators):
        return None
    bare = dataclasses.replace(transfer, grades={})
    estimates = _model(rows.machine, rows.family, own, bare).estimate(rows.operators)
    lower, upper = (np.log([getattr(each, name) for each in estimates]) for name in ("lower", "upper"))
    measured = np.log(rows.seconds)
    return np.asarray(np.maximum(lower - measured, measured - upper))


def _own(rows: KernelRows, fitted: Mapping[str, Fitted]) -> dict[str, tuple[str, Residual]]:
    known = fitted.get(rows.machine.name)
    residual = known.families.get(rows.family.name) if known else None
    return {} if residual is None else {rows.family.name: (rows.machine.name, residual)}


def _model(
    machine: Machine, family: Family[Any], learned: Mapping[str, tuple[str, Residual]], transfer: LevelTransfer
) -> KernelModel:
    return KernelModel(machine, lambda operator: family, learned, transfer)
