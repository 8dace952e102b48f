"""Cost model of one kernel family (or a few that share operator types) on one GPU.

If the GPU, or one of its architecture and power class, was measured and the operator is of a measured kind: the
analytic time times the learned residual (``fitted``). Otherwise the analytic time at the level of its class of GPUs
(``analytic``), with the interval that holds 80 % of the measured rows of that class. A few measurements of the GPU
itself (:meth:`KernelModel.fit`) move either to the GPU's own level.

The residual is evaluated for the operator *on the GPU it was learned on*, as its file stands in the package, and
multiplies the analytic time on the actual GPU: a lower rate raises the analytic time and changes nothing else, so that
no estimate falls when a rate does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from costmodel.cost_model import CostModel, Estimate, Measurement, PriceSource
from costmodel.gpu.families.family import Family, Gridded, KernelAnalysis
from costmodel.gpu.families.rates import benchmark_clock, burst_clock, kernel_floor, long_load_share
from costmodel.gpu.fitted import Level, LevelTransfer, known_as, nominal_features, packaged_machine
from costmodel.gpu.power import BURST_CLOCK, LONG_LOAD, PRICED_CLOCK
from costmodel.gpu.residual import Adaptation, Lattice, Residual, adapt
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator, dtype_of

# For a family without any measurement: half to twice the analytic time.
UNKNOWN = Level(0.0, -0.7, 0.7, ())
# Widening of the interval (log units) for a relative's residual and for an extrapolated one; like the two constants
# below a judgement, used where no grade was measured.
RELATIVE_MARGIN, EXTRAPOLATION_MARGIN = 0.1, 0.2
# For a GPU without tables the sustained rates are a guess too: measured shares of the datasheet differ by this much.
UNMEASURED_MARGIN = 0.15
# Of the shortest kernel: how well the time is known that does not depend on sizes. 80 % of 28 memory-bound kernels of
# less than 5 us lie within 0.9 us of what is predicted for H200 (lab/bench/measured/h200-sxm/kernels.csv.gz).
FLOOR_MARGIN = 0.35
ADAPTED_MARGIN = 0.05  # for a level adapted to few measurements
_NO_TIME = 1e-12  # seconds; of operators without a kernel
FACTOR_OF_THREE = float(np.log(3))  # for unidentified operators


class KernelModel(CostModel):
    """Cost model of the operators of several families. ``family_of``: function from operator to family. ``residuals``:
    of the machine or its relatives, by family.
    """

    def __init__(
        self,
        machine: Machine,
        family_of: Callable[[AnyOperator], Family[Any]],
        residuals: Mapping[str, tuple[str, Residual]],
        transfer: LevelTransfer,
        adaptations: Mapping[str, Adaptation] | None = None,
    ) -> None:
        self.machine = machine
        self._family_of = family_of
        self._residuals = residuals
        self._transfer = transfer
        self._adaptations: Mapping[str, Adaptation] = adaptations or {}
        # Adaptations are learned on the GPU itself: on its packaged file, or on the given machine if there is none.
        self._clocks: dict[str, tuple[float, float]] = {}
        self._lattices: dict[str, Lattice] = {}
        self._name = known_as(machine)
        self._own = packaged_machine(self._name) or machine

    @property
    def adaptations(self) -> Mapping[str, Adaptation]:
        """Adaptations of families and dtypes (:func:`adaptation_key`) to measurements of the GPU itself."""
        return self._adaptations

    def adaptation_name(self, operator: AnyOperator) -> str:
        """Key in :attr:`adaptations` for measurements of operators like ``operator``."""
        return adaptation_key(self._family_of(operator), dtype_of(operator))

    def is_learned(self, operator: AnyOperator) -> bool:
        """True if tables of this GPU or of a relative hold kernels like ``operator``, or what it follows."""
        family = self._family_of(operator)
        return family.name in self._residuals and family.follows(operator)

    def feature_names(self, operator: AnyOperator) -> tuple[str, ...]:
        """Names of the features of the family of ``operator``, in order."""
        return tuple(self._family_of(operator).analyse([operator], self._own).features)

    def fit(self, measurements: Sequence[Measurement]) -> None:
        """Adapt each family and dtype with enough ``measurements``; replaces earlier adaptations."""
        self._adaptations = {}
        groups: dict[tuple[Family[Any], str], list[Measurement]] = {}
        for each in measurements:
            groups.setdefault((self._family_of(each.operator), dtype_of(each.operator)), []).append(each)
        found = {}
        for (family, dtype), members in groups.items():
            operators = [each.operator for each in members]
            analysis = family.analyse(operators, self._own)
            predicted = np.array([each.seconds for each in self._estimate_family(family, operators)])
            errors = np.log(np.array([each.seconds for each in members]) / predicted)
            found[adaptation_key(family, dtype)] = adapt(tuple(analysis.features), analysis.matrix(), errors)
        self._adaptations = {key: each for key, each in found.items() if each is not None}

    def estimate(self, operators: Sequence[AnyOperator]) -> list[Estimate]:
        results: list[Estimate | None] = [None] * len(operators)
        families = [self._family_of(each) for each in operators]
        for family in dict.fromkeys(families):
            places = [place for place, each in enumerate(families) if each is family]
            group = [operators[place] for place in places]
            for place, estimate in zip(places, self._estimate_family(family, group), strict=True):
                results[place] = estimate
        return [result for result in results if result is not None]

    def middles(self, family: Family[Any], analysis: KernelAnalysis, dtypes: Sequence[str]) -> np.ndarray:
        """Factor by which :meth:`estimate` multiplies the analytic seconds, (operators,), for operators covered by
        ``family``.

        For callers that price arrays of operators without a record of each; ``dtypes`` of the operators. A residual
        learned on another GPU is evaluated at the features of ``analysis``.
        """
        shifts, _ = self._shifts(family, np.array(dtypes), analysis)
        if family.name in self._residuals:
            middle, _, _ = self._residuals[family.name][1].predict(analysis.matrix())
            return np.asarray(np.exp(middle + shifts))
        level = self._transfer.level(family.name, self.machine) or UNKNOWN
        shape = self._transfer.shapes.get(family.name)
        moved = shifts if shape is None else shifts + shape.predict(analysis.matrix())
        return np.asarray(np.exp(level.middle + moved))

    def half_widths(self, family: Family[Any], analysis: KernelAnalysis, dtypes: Sequence[str]) -> np.ndarray:
        """Half of the interval of :meth:`estimate`, in log units, (operators,); for the callers of :meth:`middles`."""
        _, points = self._shifts(family, np.array(dtypes), analysis)
        if family.name in self._residuals:
            fitted_on, residual = self._residuals[family.name]
            features = analysis.matrix()
            _, lower, upper = residual.predict(features)
            outside = np.array([bool(residual.outside(row)) for row in features], dtype=bool)
            relative = 0.0 if fitted_on == self._name else RELATIVE_MARGIN
            return np.asarray((upper - lower) / 2 + relative + EXTRAPOLATION_MARGIN * outside)
        level = self._transfer.level(family.name, self.machine) or UNKNOWN
        margin = np.where(points > 0, ADAPTED_MARGIN, UNMEASURED_MARGIN)
        return np.asarray((level.upper - level.lower) / 2 + margin)

    def _estimate_family(self, family: Family[Any], operators: Sequence[AnyOperator]) -> list[Estimate]:
        analysis = family.analyse(operators, self.machine)
        own = analysis if self._own == self.machine else family.analyse(operators, self._own)
        dtypes = np.array([dtype_of(each) for each in operators])
        shifts, points = self._shifts(family, dtypes, own)
        followed = [place for place, each in enumerate(operators) if family.follows(each)]
        learned = followed if family.name in self._residuals else []
        estimates = self._analytic(family, operators, analysis, shifts, points)
        least = family.least(operators, self.machine)
        if family.name not in self._residuals:
            return no_less(estimates, least)
        fitted_on, residual = self._residuals[family.name]
        there = packaged_machine(fitted_on) or self.machine
        expected = np.zeros(len(operators))
        if residual.lattice is not None and isinstance(family, Gridded):
            sizes = family.sizes(operators)
            plain = self._lattice(family, residual.lattice, there).at(sizes)
            seconds = family.from_lattice(operators, plain, self.machine)
            expected = np.log(seconds / analysis.seconds)
        if learned:
            seen = own if there == self._own else family.analyse(operators, there)
            for place, estimate in self._learned(family, operators, analysis, seen, learned, expected + shifts):
                estimates[place] = estimate
        return no_less(estimates, least)

    def _lattice(self, family: Gridded, known: Lattice, there: Machine) -> Lattice:
        """Lattice ``known`` of the GPU ``there``, scaled to the actual GPU by the ratio of the analytic times."""
        if there == self.machine:
            return known
        if family.name not in self._lattices:
            points = known.points()
            here, seconds = (family.at_sizes(points, each).seconds for each in (self.machine, there))
            self._lattices[family.name] = known.scaled(here / seconds)
        return self._lattices[family.name]

    def _learned(
        self,
        family: Family[Any],
        operators: Sequence[AnyOperator],
        analysis: KernelAnalysis,
        seen: KernelAnalysis,
        places: Sequence[int],
        moved: np.ndarray,
    ) -> Iterator[tuple[int, Estimate]]:
        """Estimates of the operators at ``places`` by the residual, evaluated at the analysis ``seen`` on the GPU on
        which it was learned; ``moved`` (operators,) is added to its logarithms.
        """
        fitted_on, residual = self._residuals[family.name]
        features = seen.matrix()[places]
        known = fitted_on == self._name
        for place, row, *logs in zip(places, features, *residual.predict(features), strict=True):
            outside = list(residual.outside(row))
            if not family.covers(operators[place]):
                outside.append("dtype")
            notes: dict[str, float | str] = {"extrapolates": ", ".join(outside)} if outside else {}
            if not known:
                notes["fitted_on"] = fitted_on
            bounds = self._learned_bounds(family, np.array(logs, dtype=float), known, bool(outside)) + moved[place]
            yield place, self._record(family, operators[place], analysis, place, bounds, "fitted", notes)

    def _learned_bounds(self, family: Family[Any], logs: np.ndarray, known: bool, outside: bool) -> np.ndarray:
        """Middle, lower and upper log ratio from those of a residual: for the GPU's own tables, widened by the spread
        between laboratories (grade ``source``); for a relative, by the grade of relatives, but never narrower than for
        the measured GPU.
        """
        own = logs + np.array([0.0, *self._transfer.grades.get(family.name, {}).get("source", (0.0, 0.0))])
        range_ = self._transfer.grade(family.name, "relative") if not known else None
        if range_ is not None:
            logs = logs[0] + np.array([0.0, min(range_[0], own[1] - logs[0]), max(range_[1], own[2] - logs[0])])
        elif not known:
            logs = own + np.array([0.0, -RELATIVE_MARGIN, RELATIVE_MARGIN])
        else:
            logs = own
        margin = EXTRAPOLATION_MARGIN if outside else 0.0
        return np.asarray(logs + np.array([0.0, -margin, margin]))

    def _shifts(
        self, family: Family[Any], dtypes: np.ndarray, analysis: KernelAnalysis
    ) -> tuple[np.ndarray, np.ndarray]:
        """Shift of log times by measurements of the GPU itself, and the number of measurements of each dtype."""
        shifts, points = np.zeros(len(dtypes)), np.zeros(len(dtypes), dtype=int)
        for dtype in dict.fromkeys(dtypes.tolist()):
            adaptation = self._adaptations.get(adaptation_key(family, dtype))
            if adaptation is not None:
                mask = dtypes == dtype
                shifts[mask], points[mask] = adaptation.shift(analysis.matrix()[mask]), adaptation.points
        return shifts, points

    def _analytic(
        self,
        family: Family[Any],
        operators: Sequence[AnyOperator],
        analysis: KernelAnalysis,
        shifts: np.ndarray,
        points: np.ndarray,
    ) -> list[Estimate]:
        level = self._transfer.level(family.name, self.machine) or UNKNOWN
        shape = self._transfer.shapes.get(family.name)
        moved = shifts if shape is None else shifts + shape.predict(nominal_features(family, operators, self._own))
        estimates = []
        short = FLOOR_MARGIN * kernel_floor(self.machine) / np.maximum(analysis.seconds, _NO_TIME)
        for place, own in enumerate(points):
            bounds = self._level_bounds(family, operators[place], level, bool(own)) + moved[place]
            if family.name not in self._residuals and not own:
                bounds = _at_least_around(bounds, short[place])
            notes: dict[str, float | str] = {"fitted_to_points": float(own)} if own else {}
            source: PriceSource = "fitted" if own else "analytic"
            estimates.append(self._record(family, operators[place], analysis, place, bounds, source, notes))
        return estimates

    def _level_bounds(self, family: Family[Any], operator: AnyOperator, level: Level, adapted: bool) -> np.ndarray:
        """Middle, lower and upper log ratio of an analytic estimate, by the grade of the operator."""
        grade = family.grade(operator)
        if grade == "unknown":
            return np.array([level.middle, level.middle - FACTOR_OF_THREE, level.middle + FACTOR_OF_THREE])
        if family.name in self._transfer.levels and family.name not in self._transfer.grades and not adapted:
            # Without left-out measurements of this family: the spread of its level, whatever GPUs it was learned on.
            half = float(np.hypot((level.upper - level.lower) / 2, UNMEASURED_MARGIN))
            return np.array([level.middle, level.middle - half, level.middle + half])
        measured = family.name in self._transfer.levels
        names: list[str] = ["points"] if adapted else [grade] if grade in ("dtype", "kind") else []
        if names == ["dtype"] and "dtype" not in self._transfer.grades.get(family.name, {}):
            names = []  # physics alone, as for a GPU without measurements
        if not adapted and (family.name not in self._residuals or not names):
            names.append("physics")
        known = [self._transfer.grade(family.name, each) for each in names] if measured else []
        ranges = np.array([each for each in known if each is not None])
        if not len(ranges):
            margin = ADAPTED_MARGIN if adapted else UNMEASURED_MARGIN if family.name not in self._residuals else 0.0
            return np.array([level.middle, level.lower - margin, level.upper + margin])
        # Biases of several causes add up, their spreads as independent ones do.
        centres, halves = ranges.mean(axis=1), (ranges[:, 1] - ranges[:, 0]) / 2
        centre, half = float(centres.sum()), float(np.hypot.reduce(halves))
        return level.middle + np.array([0.0, min(centre - half, 0.0), max(centre + half, 0.0)])

    def _record(
        self,
        family: Family[Any],
        operator: AnyOperator,
        analysis: KernelAnalysis,
        place: int,
        logs: Sequence[float] | np.ndarray,
        source: PriceSource,
        notes: dict[str, float | str],
    ) -> Estimate:
        seconds = float(analysis.seconds[place])
        middle, lower, upper = (seconds * float(np.exp(each)) for each in logs)
        terms = {f"{name}_seconds": float(values[place]) for name, values in analysis.terms.items()}
        breakdown: dict[str, float | str] = {"analytic_seconds": seconds, **terms, **notes}
        if family.clock_bound:
            breakdown |= self._clock(dtype_of(operator), middle)
        return Estimate(middle, min(lower, middle), max(upper, middle), analysis.bound(place), breakdown, source)

    def _clock(self, dtype: str, seconds: float) -> dict[str, float | str]:
        """Clock data of arithmetic kernels for :mod:`costmodel.gpu.power`; empty if the clock never drops."""
        if all(each.burst is None for each in self.machine.compute.values()):
            return {}
        if dtype not in self._clocks:
            self._clocks[dtype] = long_load_share(self.machine, dtype), burst_clock(self.machine, dtype)
        share, burst = self._clocks[dtype]
        priced = float(benchmark_clock(np.array([seconds]), share, self.machine)[0])
        return {LONG_LOAD: share, BURST_CLOCK: burst, PRICED_CLOCK: priced}


def _at_least_around(logs: np.ndarray, share: float) -> np.ndarray:
    """Middle, lower and upper log ratio, with the bounds at least ``share`` of the analytic time away from the middle
    (by its inverse below, as for a time that is half or twice as long).
    """
    wide = np.log1p(share)
    return np.array([logs[0], min(logs[1], logs[0] - wide), max(logs[2], logs[0] + wide)])


def no_less(estimates: Sequence[Estimate], least: np.ndarray) -> list[Estimate]:
    """Scale ``estimates`` up, interval included, where they are below their ``least`` seconds (estimates,)."""
    kept = []
    for each, seconds in zip(estimates, least.tolist(), strict=True):
        if each.seconds < seconds:
            share = seconds / each.seconds
            # A bound equal to the time itself stays so despite rounding of products.
            lower, upper = min(each.lower * share, seconds), max(each.upper * share, seconds)
            each = replace(each, seconds=seconds, lower=lower, upper=upper)
        kept.append(each)
    return kept


def adaptation_key(family: Family[Any], dtype: str) -> str:
    """Key of the adaptation of one dtype of a family."""
    return f"{family.name}:{dtype}"
