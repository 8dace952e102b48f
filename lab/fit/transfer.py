"""What transfers from measured GPUs to others: levels and shape corrections of a family, and the errors of estimates.

A grade is a kind of knowledge of the kernel and the GPU; its range is the interval of everything except estimates by a
GPU's own tables:

=============  ==========================================================================================
``points``     the model of other GPUs adapted to a few measurements
``relative``   the learned model of a relative, times the ratio of the analytic times
``physics``    the analytic time at the level of other GPUs
``dtype``      kernels of a measured kind in another dtype
``kind``       kernels of a family of which another kind was measured
``unknown``    unidentified kernels: a factor of three
=============  ==========================================================================================

The range of log(measured / predicted) holds 80 % of the rows of each GPU that was left out, averaged over the GPUs, all
weighing the same, and is wider where they are few. ``source`` is no grade: by how much (log units) the intervals of a
GPU's own tables must be wider to hold 80 % of what other laboratories measured on the same GPU, in whole layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.cost_model import Measurement
from costmodel.gpu.families.family import Family
from costmodel.gpu.fitted import (
    ANY_FAMILY,
    ANY_POWER,
    Fitted,
    Level,
    LevelTransfer,
    is_relative,
    nominal_features,
    power_class,
)
from costmodel.gpu.kernel_model import KernelModel
from costmodel.gpu.residual import Forest, Residual
from costmodel.machines.machine_records import ComputeRate, Machine, PerThreads
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import ENGINES
from lab.fit.trees import boost

# Families whose deviation from the analytic model depends on the shape equally on all GPUs: on the select split,
# predictions of left-out GPUs improve with it. GEMM's does not.
SHAPED = (
    *("convolution", "normalization", "softmax"),
    *(f"{kernel}-{phase}" for kernel in ("flash2", "flash3") for phase in ("encoder", "paged", "decode")),
    *(f"{engine}-{phase}" for engine in ENGINES for phase in ("paged", "decode")),
)
_SHAPE_DEPTH, _SHAPE_ROUNDS = 2, 60
# A row is disturbed if it took this much longer (log units) than its twin's, beyond their usual difference at its size,
# for sizes within this factor of each other. Of H100's and H200's 8,760 common products in BF16 half lie within 0.04;
# noise only slows, so the faster of the two is right.
_DISTURBED, _SIZE = 0.2, 4.0
# Largest ratio of rates between files of the same chip (a judgement): H100's and H200's differ by 3.6 %, as samples do,
# those of B200 and of a laboratory's slower one by 17 %.
_SAME_RATE = 1.05


@dataclass(frozen=True)
class KernelRows:
    """Rows of one family on one machine, of one or more tables."""

    family: Family[Any]
    machine: Machine
    operators: tuple[AnyOperator, ...]
    seconds: np.ndarray
    splits: np.ndarray

    def log_ratio(self, shape: Forest | None = None) -> np.ndarray:
        """log(measured / analytic), minus the prediction of ``shape``."""
        analysis = self.family.analyse(self.operators, self.machine)
        ratio: np.ndarray = np.log(self.seconds / analysis.seconds)
        return (
            ratio
            if shape is None
            else ratio - shape.predict(nominal_features(self.family, self.operators, self.machine))
        )

    def of(self, *names: str) -> KernelRows:
        """The rows of the given splits."""
        return self.only(np.isin(self.splits, names))

    def only(self, mask: np.ndarray) -> KernelRows:
        """The rows where ``mask`` (rows,) is true."""
        kept = tuple(each for each, keep in zip(self.operators, mask, strict=True) if keep)
        return KernelRows(self.family, self.machine, kept, self.seconds[mask], self.splits[mask])


def are_twins(first: Machine, second: Machine) -> bool:
    """True if two GPUs have the same chip at the same clock, power limit and rates; their memories may differ."""
    chips = (first.chip(), second.chip())
    alike = [(each.architecture, each.sm_count, each.lanes, each.clock_hz, each.power_watts) for each in chips]
    rates = [
        (first.compute[name].short_load, second.compute[name].short_load)
        for name in first.compute & second.compute.keys()
    ]
    same = alike[0] == alike[1] and all(max(pair) <= _SAME_RATE * min(pair) for pair in rates)
    return first.name != second.name and same


def twins_of(rows: KernelRows, every: Sequence[KernelRows]) -> list[KernelRows]:
    """Rows of the same family on twins of the GPU of ``rows``."""
    return [each for each in every if each.family.name == rows.family.name and are_twins(each.machine, rows.machine)]


def disturbed(rows: KernelRows, twins: Sequence[KernelRows]) -> np.ndarray:
    """Mask (rows,) of the rows slowed by a disturbance, judged by the same operators on ``twins``."""
    found = np.zeros(len(rows.operators), dtype=bool)
    if not twins:
        return found
    analytic = rows.family.analyse(rows.operators, rows.machine).seconds
    sizes = np.floor(np.log(analytic) / np.log(_SIZE))
    for twin in twins:
        there = dict(zip(twin.operators, twin.log_ratio(), strict=True))
        late = np.log(rows.seconds / analytic) - np.array([there.get(each, np.nan) for each in rows.operators])
        for size in np.unique(sizes):
            near = (sizes == size) & np.isfinite(late)
            if near.any():
                found |= near & (late > np.median(late[near]) + _DISTURBED)
    return found


def transfer_of(rows: Sequence[KernelRows]) -> LevelTransfer:
    """Levels and shape corrections that transfer from the machines of ``rows`` to others; machines weigh equally in a
    level.
    """
    shapes = {family: shape for family in SHAPED if (shape := _shape([r for r in rows if r.family.name == family]))}
    return LevelTransfer(levels_of(rows, shapes), shapes, {})


def _shape(members: Sequence[KernelRows]) -> Forest | None:
    """Dependence of the log ratio on the shape, without each machine's own level; ``None`` without rows."""
    if not members:
        return None
    seen = [each.of("fit", "select") for each in members]
    features = np.concatenate([nominal_features(each.family, each.operators, each.machine) for each in seen])
    ratios = [each.log_ratio() for each in seen]
    targets = np.concatenate([ratio - np.median(ratio) for ratio in ratios])
    return boost(features, targets, _SHAPE_DEPTH, _SHAPE_ROUNDS, {"objective": "reg:absoluteerror"})


def levels_of(rows: Sequence[KernelRows], shapes: Mapping[str, Forest]) -> dict[str, dict[str, Level]]:
    """Levels by family and power class of the machines of ``rows``, equally weighted."""
    groups: dict[tuple[str, str], list[KernelRows]] = {}
    for each in rows:
        power = power_class(each.machine) if each.family.clock_bound else ANY_POWER
        groups.setdefault((each.family.name, power), []).append(each)
    levels: dict[str, dict[str, Level]] = {}
    for (family, name), members in sorted(groups.items()):
        levels.setdefault(family, {})[name] = _level(members, shapes.get(family))
    return levels


def _level(members: Sequence[KernelRows], shape: Forest | None) -> Level:
    ratios = [each.of("fit", "select").log_ratio(shape) for each in members]
    middle = float(np.median([np.median(ratio) for ratio in ratios]))
    lower = min(float(np.quantile(ratio, 0.1)) for ratio in ratios)
    upper = max(float(np.quantile(ratio, 0.9)) for ratio in ratios)
    names = tuple(each.machine.name for each in members)
    return Level(round(middle, 5), round(lower, 5), round(upper, 5), names)


def left_out_machine(machine: Machine, others: Sequence[Machine], memories: Sequence[Machine] = ()) -> Machine:
    """``machine`` as its datasheet and other GPUs describe it: sustained = datasheet x the others' median share.

    ``others`` were measured in the same family and give the compute rates, those of the same power class if there are
    any; ``memories`` (default: ``others``) give the DRAM bandwidth. Other cards with the same chip are excluded.
    """
    others = _foreign(machine, others)
    compute = {}
    for dtype, rate in machine.compute.items():
        compute[dtype] = _left_out_rate(rate, [each.compute[dtype] for each in others if dtype in each.compute])
    level = machine.memory[-1]
    known_memories = [each.memory[-1] for each in _foreign(machine, memories or others)]
    shares = [each.bandwidth.at(1) / each.datasheet for each in known_memories if each.datasheet is not None]
    sustained = PerThreads(((1, float((level.datasheet or np.nan) * np.median(shares))),))
    memory = (*machine.memory[:-1], dataclasses.replace(level, bandwidth=sustained))
    return dataclasses.replace(machine, compute=compute, memory=memory)


def _foreign(machine: Machine, others: Sequence[Machine]) -> list[Machine]:
    """Those of ``others`` with another chip, of the power class of ``machine`` if there are any."""
    chip = machine.chip()
    foreign = [
        each
        for each in others
        if (each.chip().architecture, each.chip().sm_count) != (chip.architecture, chip.sm_count)
    ] or list(others)
    return [each for each in foreign if power_class(each) == power_class(machine)] or foreign


def _left_out_rate(rate: ComputeRate, others: Sequence[ComputeRate]) -> ComputeRate:
    """Datasheet rate of ``rate`` times the median shares that ``others`` reach of theirs, in a burst and a long
    load.
    """
    known = [each for each in others if each.datasheet is not None]
    if rate.datasheet is None or not known:
        return dataclasses.replace(rate, origin="left out")
    burst = rate.datasheet * float(np.median([each.short_load / (each.datasheet or np.nan) for each in known]))
    sustained = burst * float(np.median([each.sustained.at(1) / each.short_load for each in known]))
    return ComputeRate(PerThreads(((1, sustained),)), "left out", rate.datasheet, burst)


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
