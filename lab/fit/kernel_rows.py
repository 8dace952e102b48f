"""Measured kernels of one family on one GPU, and levels that transfer from several GPUs to others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.gpu.families.family import Family
from costmodel.gpu.residuals.fitted import ANY_POWER, Level, LevelTransfer, power_class
from costmodel.gpu.residuals.forest import Forest
from costmodel.gpu.residuals.references import nominal_features
from costmodel.machines.machine_records import ComputeRate, Machine, PerThreads
from costmodel.operators.any_operator import AnyOperator
from lab.fit.trees import boost

# Families whose deviation from the analytic model depends on the shape equally on all GPUs: on the select split,
# predictions of left-out GPUs improve with it. GEMM's does not.
SHAPED = (
    *("convolution", "normalization", "softmax"),
    *(f"{kernel}-{phase}" for kernel in ("flash2", "flash3") for phase in ("encoder", "paged", "decode")),
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
