"""The cost model of one kernel family (or a few that share operator types) on one GPU.

Where the GPU, or one of its architecture and power class, was measured and the operator is of the measured kind, the
analytic time times the learned residual (``fitted``). Elsewhere the analytic time at the level of its class of GPUs
(``analytic``), with the interval within which 80 % of the measured rows of that class lie. A few measurements from the
GPU itself (:meth:`KernelModel.fit`) move either to its own level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from costmodel.gpu.family import Analysis, Family
from costmodel.gpu.fitted import Fitted, Level, Transfer
from costmodel.interface import CostModel, Estimate
from costmodel.machine_records import Machine
from costmodel.measurements import Measurement

# Of a family without any measurement: half to twice the analytic time.
UNKNOWN = Level(0.0, -0.7, 0.7, ())
# How much wider the interval is (log units) where a relative's residual or an extrapolated one is used.
RELATIVE_MARGIN, EXTRAPOLATION_MARGIN = 0.1, 0.2
MIN_CALIBRATION_POINTS = 3  # of a family, before they say more about the GPU than about themselves


class KernelModel(CostModel):
    """``family_of`` names the family of an operator; ``fitted``: of the machine or a relative, or ``None``."""

    def __init__(
        self, machine: Machine, family_of: Callable[[Any], Family], fitted: Fitted | None, transfer: Transfer
    ) -> None:
        self.machine = machine
        self._family_of = family_of
        self._fitted = fitted
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

    def _estimate_family(self, family: Family, operators: Sequence[Any]) -> list[Estimate]:
        analysis = family.analyse(operators, self.machine)
        estimates = self._analytic(family, analysis)
        residual = self._fitted.families.get(family.name) if self._fitted else None
        covered = [place for place, each in enumerate(operators) if family.covers(each)]
        if residual is None or self._fitted is None or not covered:
            return estimates
        features = analysis.matrix()[covered]
        known = self._fitted.machine == self.machine.name
        for place, row, *logs in zip(covered, features, *residual.predict(features), strict=True):
            outside = residual.outside(row)
            wider = (0.0 if known else RELATIVE_MARGIN) + (EXTRAPOLATION_MARGIN if outside else 0.0)
            notes: dict[str, float | str] = {"extrapolates": ", ".join(outside)} if outside else {}
            if not known:
                notes["fitted_on"] = self._fitted.machine
            middle, lower, upper = (float(value) + self._offsets.get(family.name, 0.0) for value in logs)
            estimates[place] = _record(analysis, place, (middle, lower - wider, upper + wider), "fitted", notes)
        return estimates

    def _analytic(self, family: Family, analysis: Analysis) -> list[Estimate]:
        level = self._transfer.level(family.name, self.machine) or UNKNOWN
        offset = self._offsets.get(family.name)
        source = "analytic" if offset is None else "fitted"
        logs = tuple(each + (offset or 0.0) for each in (level.middle, level.lower, level.upper))
        return [_record(analysis, place, logs, source, {}) for place in range(len(analysis.seconds))]


def _record(
    analysis: Analysis, place: int, logs: tuple[float, ...], source: Any, notes: dict[str, float | str]
) -> Estimate:
    seconds = float(analysis.seconds[place])
    middle, lower, upper = (seconds * float(np.exp(each)) for each in logs)
    terms = {f"{name}_seconds": float(values[place]) for name, values in analysis.terms.items()}
    breakdown: dict[str, float | str] = {"analytic_seconds": seconds, **terms, **notes}
    return Estimate(middle, min(lower, middle), max(upper, middle), analysis.bound(place), breakdown, source)
