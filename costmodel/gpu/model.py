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

from costmodel.gpu.family import Analysis, Family
from costmodel.gpu.fitted import Level, Transfer
from costmodel.gpu.residual import Residual
from costmodel.interface import CostModel, Estimate
from costmodel.machine_records import Machine
from costmodel.measurements import Measurement

# Of a family without any measurement: half to twice the analytic time.
UNKNOWN = Level(0.0, -0.7, 0.7, ())
# How much wider the interval is (log units) where a relative's residual or an extrapolated one is used.
RELATIVE_MARGIN, EXTRAPOLATION_MARGIN = 0.1, 0.2
# Of a GPU without tables the sustained rates are a guess too: measured shares of the datasheet differ by this much.
UNMEASURED_MARGIN = 0.15
MIN_CALIBRATION_POINTS = 3  # of a family, before they say more about the GPU than about themselves


class KernelModel(CostModel):
    """``family_of``: the family of an operator. ``residuals``: of the machine or relatives, by family."""

    def __init__(
        self,
        machine: Machine,
        family_of: Callable[[Any], Family],
        residuals: Mapping[str, tuple[str, Residual]],
        transfer: Transfer,
    ) -> None:
        self.machine = machine
        self._family_of = family_of
        self._residuals = residuals
        self._transfer = transfer
        self._offsets: dict[str, float] = {}

    def fit(self, measurements: Sequence[Measurement]) -> None:
        """Moves each family measured often enough to the level of ``measurements``; forgets earlier ones."""
        self._offsets.clear()
        if not measurements:
            return
        operators = [each.operator for each in measurements]
        logs: dict[str, list[float]] = {}
        for each, estimate in zip(measurements, self.estimate(operators), strict=True):
            name = self._family_of(each.operator).name
            logs.setdefault(name, []).append(float(np.log(each.seconds / estimate.seconds)))
        enough = {name: each for name, each in logs.items() if len(each) >= MIN_CALIBRATION_POINTS}
        self._offsets = {name: float(np.median(each)) for name, each in enough.items()}

    def estimate(self, operators: Sequence[Any]) -> list[Estimate]:
        results: list[Estimate | None] = [None] * len(operators)
        families = [self._family_of(each) for each in operators]
        for family in dict.fromkeys(families):
            places = [place for place, each in enumerate(families) if each is family]
            group = [operators[place] for place in places]
            for place, estimate in zip(places, self._estimate_family(family, group), strict=True):
                results[place] = estimate
        return [result for result in results if result is not None]

    def middles(self, family: Family, analysis: Analysis) -> np.ndarray:
        """What :meth:`estimate` multiplies the analytic seconds by, (operators,), for operators that ``family`` covers.

        For callers that price arrays of operators without a record of each.
        """
        offset = self._offsets.get(family.name, 0.0)
        if family.name in self._residuals:
            middle, _, _ = self._residuals[family.name][1].predict(analysis.matrix())
            return np.asarray(np.exp(middle + offset))
        level = self._transfer.level(family.name, self.machine) or UNKNOWN
        shape = self._transfer.shapes.get(family.name)
        shifts = np.zeros(len(analysis.seconds)) if shape is None else shape.predict(analysis.matrix())
        return np.asarray(np.exp(level.middle + shifts + offset))

    def _estimate_family(self, family: Family, operators: Sequence[Any]) -> list[Estimate]:
        analysis = family.analyse(operators, self.machine)
        estimates = self._analytic(family, analysis)
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
            middle, lower, upper = (float(value) + self._offsets.get(family.name, 0.0) for value in logs)
            estimates[place] = _record(analysis, place, (middle, lower - wider, upper + wider), "fitted", notes)
        return estimates

    def _analytic(self, family: Family, analysis: Analysis) -> list[Estimate]:
        level = self._transfer.level(family.name, self.machine) or UNKNOWN
        offset = self._offsets.get(family.name)
        source = "analytic" if offset is None else "fitted"
        shape = self._transfer.shapes.get(family.name)
        shifts = np.zeros(len(analysis.seconds)) if shape is None else shape.predict(analysis.matrix())
        margin = UNMEASURED_MARGIN if not self._residuals and offset is None else 0.0
        bounds = np.array([level.middle, level.lower - margin, level.upper + margin]) + (offset or 0.0)
        return [_record(analysis, place, bounds + shift, source, {}) for place, shift in enumerate(shifts)]


def _record(
    analysis: Analysis, place: int, logs: Sequence[float] | np.ndarray, source: Any, notes: dict[str, float | str]
) -> Estimate:
    seconds = float(analysis.seconds[place])
    middle, lower, upper = (seconds * float(np.exp(each)) for each in logs)
    terms = {f"{name}_seconds": float(values[place]) for name, values in analysis.terms.items()}
    breakdown: dict[str, float | str] = {"analytic_seconds": seconds, **terms, **notes}
    return Estimate(middle, min(lower, middle), max(upper, middle), analysis.bound(place), breakdown, source)
