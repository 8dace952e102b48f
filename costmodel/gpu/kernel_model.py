"""The cost model of one kernel family (or a few that share operator types) on one GPU.

Where the GPU, or one of its architecture and power class, was measured and the operator is of the measured kind, the
analytic time times the learned residual (``fitted``). Elsewhere the analytic time at the level of its class of GPUs
(``analytic``), with the interval within which 80 % of the measured rows of that class lie. A few measurements from the
GPU itself (:meth:`KernelModel.fit`) move either to its own level.

What is learned is asked for the operator *on the GPU it was learned on*, as its file stands in the package, and
multiplies the analytic time on the GPU at hand: a rate that is lowered raises the analytic time and moves nothing else,
so that no estimate falls when a rate does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from costmodel.gpu.families.clock import benchmark_clock, burst_clock, long_load_share
from costmodel.gpu.families.family import Family, Gridded, KernelAnalysis
from costmodel.gpu.power import BURST_CLOCK, LONG_LOAD, PRICED_CLOCK
from costmodel.gpu.residuals.adaptation import Adaptation, adapt
from costmodel.gpu.residuals.fitted import Level, LevelTransfer
from costmodel.gpu.residuals.lattice import Lattice
from costmodel.gpu.residuals.references import known_as, nominal_features, packaged_machine
from costmodel.gpu.residuals.residual import Residual
from costmodel.machines.machine_records import Machine
from costmodel.model.cost_model import CostModel, Estimate, PriceSource
from costmodel.model.measurements import Measurement
from costmodel.operators.any_operator import AnyOperator, dtype_of

# Of a family without any measurement: half to twice the analytic time.
UNKNOWN = Level(0.0, -0.7, 0.7, ())
# How much wider the interval is (log units) where a relative's residual or an extrapolated one is used; like the two
# below a judgement, which counts where no grade was measured.
RELATIVE_MARGIN, EXTRAPOLATION_MARGIN = 0.1, 0.2
# Of a GPU without tables the sustained rates are a guess too: measured shares of the datasheet differ by this much.
UNMEASURED_MARGIN = 0.15
ADAPTED_MARGIN = 0.05  # of a level that few measurements were moved to
FACTOR_OF_THREE = float(np.log(3))  # of operators that nobody knows


class KernelModel(CostModel):
    """``family_of``: the family of an operator. ``residuals``: of the machine or relatives, by family."""

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
        # Adaptations are learned on the GPU itself: on its packaged file, or on what stands here if there is none.
        self._clocks: dict[str, tuple[float, float]] = {}
        self._lattices: dict[str, Lattice] = {}
        self._name = known_as(machine)
        self._own = packaged_machine(self._name) or machine

    @property
    def adaptations(self) -> Mapping[str, Adaptation]:
        """How each family and dtype (:func:`adaptation_key`) was moved by measurements from the GPU itself."""
        return self._adaptations

    def adaptation_name(self, operator: AnyOperator) -> str:
        """Under which name of :attr:`adaptations` measurements of the like of ``operator`` are kept."""
        return adaptation_key(self._family_of(operator), dtype_of(operator))

    def is_learned(self, operator: AnyOperator) -> bool:
        """Whether tables of this GPU or of a relative hold kernels like ``operator``."""
        family = self._family_of(operator)
        return family.name in self._residuals and family.covers(operator)

    def feature_names(self, operator: AnyOperator) -> tuple[str, ...]:
        """Features of the family of ``operator``, in their order."""
        return tuple(self._family_of(operator).analyse([operator], self._own).features)

    def fit(self, measurements: Sequence[Measurement]) -> None:
        """Moves each family and dtype measured often enough to ``measurements``; forgets earlier ones."""
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
        """What :meth:`estimate` multiplies the analytic seconds by, (operators,), for operators that ``family`` covers.

        For callers that price arrays of operators without a record of each; ``dtypes`` of the operators. What was
        learned elsewhere is asked at the features of ``analysis``.
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
        """Half of the interval that :meth:`estimate` gives, in log units, (operators,); for the callers of
        :meth:`middles`.
        """
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
        covered = [place for place, each in enumerate(operators) if family.covers(each)]
        learned = covered if family.name in self._residuals else []
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
        """What is ``known`` of the GPU ``there``, moved to the one at hand as the analytic times differ."""
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
        """Estimates of the operators at ``places`` by the residual, asked at what is ``seen`` on the GPU that it was
        learned on; ``moved`` (operators,) is added to its logarithms.
        """
        fitted_on, residual = self._residuals[family.name]
        features = seen.matrix()[places]
        known = fitted_on == self._name
        for place, row, *logs in zip(places, features, *residual.predict(features), strict=True):
            outside = residual.outside(row)
            notes: dict[str, float | str] = {"extrapolates": ", ".join(outside)} if outside else {}
            if not known:
                notes["fitted_on"] = fitted_on
            bounds = self._learned_bounds(family, np.array(logs, dtype=float), known, bool(outside)) + moved[place]
            yield place, self._record(family, operators[place], analysis, place, bounds, "fitted", notes)

    def _learned_bounds(self, family: Family[Any], logs: np.ndarray, known: bool, outside: bool) -> np.ndarray:
        """Middle, lower and upper log ratio from those of a residual: of the GPU's own tables, as far as other
        laboratories find the same (grade ``source``), of a relative by the grade of relatives, but never surer than of
        the GPU that was measured.
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
        """What measurements of the GPU itself add to log times, and how many there are of each dtype."""
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
        for place, own in enumerate(points):
            bounds = self._level_bounds(family, operators[place], level, bool(own)) + moved[place]
            notes: dict[str, float | str] = {"fitted_to_points": float(own)} if own else {}
            source: PriceSource = "fitted" if own else "analytic"
            estimates.append(self._record(family, operators[place], analysis, place, bounds, source, notes))
        return estimates

    def _level_bounds(self, family: Family[Any], operator: AnyOperator, level: Level, adapted: bool) -> np.ndarray:
        """Middle, lower and upper log ratio of an estimate by physics, by the grade of what is known of it."""
        grade = family.grade(operator)
        if grade == "unknown":
            return np.array([level.middle, level.middle - FACTOR_OF_THREE, level.middle + FACTOR_OF_THREE])
        if family.name in self._transfer.levels and family.name not in self._transfer.grades and not adapted:
            # Nothing was left out for this family: the spread that its level tells, whatever GPUs taught it.
            half = float(np.hypot((level.upper - level.lower) / 2, UNMEASURED_MARGIN))
            return np.array([level.middle, level.middle - half, level.middle + half])
        measured = family.name in self._transfer.levels
        names: list[str] = ["points"] if adapted else [grade] if grade in ("dtype", "kind") else []
        if names == ["dtype"] and "dtype" not in self._transfer.grades.get(family.name, {}):
            names = []  # physics alone, as of a GPU that was not measured
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
        """What :mod:`costmodel.gpu.power` asks of arithmetic; nothing where the clock holds."""
        if all(each.burst is None for each in self.machine.compute.values()):
            return {}
        if dtype not in self._clocks:
            self._clocks[dtype] = long_load_share(self.machine, dtype), burst_clock(self.machine, dtype)
        share, burst = self._clocks[dtype]
        priced = float(benchmark_clock(np.array([seconds]), share, self.machine)[0])
        return {LONG_LOAD: share, BURST_CLOCK: burst, PRICED_CLOCK: priced}


def no_less(estimates: Sequence[Estimate], least: np.ndarray) -> list[Estimate]:
    """``estimates``, each with its interval moved so far that it takes its ``least`` seconds (estimates,)."""
    kept = []
    for each, seconds in zip(estimates, least.tolist(), strict=True):
        if each.seconds < seconds:
            share = seconds / each.seconds
            # A bound that is the time itself stays so: products round.
            lower, upper = min(each.lower * share, seconds), max(each.upper * share, seconds)
            each = replace(each, seconds=seconds, lower=lower, upper=upper)
        kept.append(each)
    return kept


def adaptation_key(family: Family[Any], dtype: str) -> str:
    """Name of what measurements of one dtype of a family move."""
    return f"{family.name}:{dtype}"
