"""The cost model of one kernel family (or a few that share operator types) on one GPU.

Where the GPU, or one of its architecture and power class, was measured and the operator is of the measured kind, the
analytic time times the learned residual (``fitted``). Elsewhere the analytic time at the level of its class of GPUs
(``analytic``), with the interval within which 80 % of the measured rows of that class lie. A few measurements from the
GPU itself (:meth:`KernelModel.fit`) move either to its own level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from costmodel.gpu.families.family import Family, KernelAnalysis
from costmodel.gpu.residuals.adaptation import Adaptation, adapt
from costmodel.gpu.residuals.fitted import Level, LevelTransfer
from costmodel.gpu.residuals.residual import Residual
from costmodel.machines.machine_records import Machine
from costmodel.model.cost_model import CostModel, Estimate, PriceSource
from costmodel.model.measurements import Measurement
from costmodel.operators.any_operator import AnyOperator, dtype_of

# Of a family without any measurement: half to twice the analytic time.
UNKNOWN = Level(0.0, -0.7, 0.7, ())
# How much wider the interval is (log units) where a relative's residual or an extrapolated one is used.
RELATIVE_MARGIN, EXTRAPOLATION_MARGIN = 0.1, 0.2
# Of a GPU without tables the sustained rates are a guess too: measured shares of the datasheet differ by this much.
UNMEASURED_MARGIN = 0.15
ADAPTED_MARGIN = 0.05  # of a level that few measurements were moved to


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

    @property
    def adaptations(self) -> Mapping[str, Adaptation]:
        """How each family and dtype (:func:`adaptation_key`) was moved by measurements from the GPU itself."""
        return self._adaptations

    def fit(self, measurements: Sequence[Measurement]) -> None:
        """Moves each family and dtype measured often enough to ``measurements``; forgets earlier ones."""
        self._adaptations = {}
        groups: dict[tuple[Family[Any], str], list[Measurement]] = {}
        for each in measurements:
            groups.setdefault((self._family_of(each.operator), dtype_of(each.operator)), []).append(each)
        found = {}
        for (family, dtype), members in groups.items():
            operators = [each.operator for each in members]
            analysis = family.analyse(operators, self.machine)
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

        For callers that price arrays of operators without a record of each; ``dtypes`` of the operators.
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
            relative = 0.0 if fitted_on == self.machine.name else RELATIVE_MARGIN
            return np.asarray((upper - lower) / 2 + relative + EXTRAPOLATION_MARGIN * outside)
        level = self._transfer.level(family.name, self.machine) or UNKNOWN
        margin = np.where(points > 0, ADAPTED_MARGIN, UNMEASURED_MARGIN)
        return np.asarray((level.upper - level.lower) / 2 + margin)

    def _estimate_family(self, family: Family[Any], operators: Sequence[AnyOperator]) -> list[Estimate]:
        analysis = family.analyse(operators, self.machine)
        shifts, points = self._shifts(family, np.array([dtype_of(each) for each in operators]), analysis)
        estimates = self._analytic(family, analysis, shifts, points)
        covered = [place for place, each in enumerate(operators) if family.covers(each)]
        if family.name not in self._residuals or not covered:
            return estimates
        fitted_on, residual = self._residuals[family.name]
        features = analysis.matrix()[covered]
        known = fitted_on == self.machine.name
        for place, row, *logs in zip(covered, features, *residual.predict(features), strict=True):
            outside = residual.outside(row)
            wider = (0.0 if known else RELATIVE_MARGIN) + (EXTRAPOLATION_MARGIN if outside else 0.0)
            notes: dict[str, float | str] = {"extrapolates": ", ".join(outside)} if outside else {}
            if not known:
                notes["fitted_on"] = fitted_on
            middle, lower, upper = (float(value) + float(shifts[place]) for value in logs)
            estimates[place] = _record(analysis, place, (middle, lower - wider, upper + wider), "fitted", notes)
        return estimates

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
        self, family: Family[Any], analysis: KernelAnalysis, shifts: np.ndarray, points: np.ndarray
    ) -> list[Estimate]:
        level = self._transfer.level(family.name, self.machine) or UNKNOWN
        shape = self._transfer.shapes.get(family.name)
        moved = shifts if shape is None else shifts + shape.predict(analysis.matrix())
        unmeasured = UNMEASURED_MARGIN if family.name not in self._residuals else 0.0
        estimates = []
        for place, own in enumerate(points):
            margin = ADAPTED_MARGIN if own else unmeasured
            bounds = np.array([level.middle, level.lower - margin, level.upper + margin]) + moved[place]
            notes: dict[str, float | str] = {"fitted_to_points": float(own)} if own else {}
            estimates.append(_record(analysis, place, bounds, "fitted" if own else "analytic", notes))
        return estimates


def adaptation_key(family: Family[Any], dtype: str) -> str:
    """Name of what measurements of one dtype of a family move."""
    return f"{family.name}:{dtype}"


def _record(
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
    return Estimate(middle, min(lower, middle), max(upper, middle), analysis.bound(place), breakdown, source)
