"""What the analytic model misses, learned from measurements while tuning.

The target is log(measured / analytic) of each measured (operator, configuration). A family of kernels without enough
measurements is priced by the analytic model alone, and every estimate says which of the two it came from.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from costmodel.cpu.boosted_trees import BoostedResidual, xgboost_available
from costmodel.cpu.configuration_features import feature_matrix, knob_names, operator_family, tunable
from costmodel.cpu.residual_file import read_measurements, write_measurements
from costmodel.model.cost_model import CostModel, Estimate
from costmodel.model.measurements import Config, ConfigKey, Measurement, config_key
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.layers import Operator

MIN_MEASUREMENTS = 8  # of a family, before its trees are trusted more than the analytic order
RETRAIN_GROWTH = 1.15  # of a family's measurements, before its trees are trained again
MIN_OPERATORS = 3  # of a family, before its best times say something about an operator never measured


class ResidualModel(CostModel):
    """The tuner's ranking model: ``analytic`` corrected by trees over operator, knobs and analytic terms.

    ``key`` identifies what was measured on (CPU, threads); :meth:`load` refuses what was learned under another key.
    ``threads``: of the training itself. Without the optional package ``xgboost`` the analytic model answers alone.
    ``config_cost(operator, config)``, positive and in any unit, is an analytic guess that tells configurations of one
    operator apart; the trees then learn what it gets wrong.
    """

    def __init__(
        self,
        analytic: CostModel,
        *,
        key: str = "",
        threads: int = 1,
        config_cost: Callable[[Operator, Config], float] | None = None,
    ) -> None:
        self.analytic = analytic
        self.key = key
        self._config_cost = config_cost
        self._trained_on: dict[str, int] = {}
        self._threads = threads
        self._measured: dict[Operator, dict[ConfigKey, Measurement]] = {}
        self._bases: dict[Operator, Estimate] = {}
        self._trees: dict[str, tuple[tuple[str, ...], BoostedResidual] | None] = {}
        self._available = xgboost_available()
        if not self._available:
            warnings.warn("xgboost is not installed: kernels are ranked by the analytic model alone", stacklevel=2)

    @property
    def measurements(self) -> list[Measurement]:
        """Everything learned from; of repeated measurements the fastest."""
        return [each for configs in self._measured.values() for each in configs.values()]

    def update(self, measurements: Iterable[Measurement]) -> None:
        """Adds measurements; their families are retrained when next asked."""
        measurements = list(measurements)
        for each in measurements:
            known = self._measured.setdefault(tunable(each.operator), {})
            config = config_key(each.config)
            if config not in known or each.seconds < known[config].seconds:
                known[config] = each
        for family in {operator_family(each.operator) for each in measurements}:
            if self._count(family) > RETRAIN_GROWTH * self._trained_on.get(family, 0):
                self._trees.pop(family, None)

    def fit(self, measurements: Sequence[Measurement]) -> None:
        """Forgets everything and learns from ``measurements``."""
        self._measured.clear()
        self._trees.clear()
        self._trained_on.clear()
        self.update(measurements)

    def rank(self, operator: Operator, configs: Sequence[Config]) -> list[int]:
        """Indices into ``configs``, fastest first. The given order where nothing is learned, as among equals."""
        logs = self._log_residuals(operator, configs)
        if logs is None:
            return list(range(len(configs)))
        logs = logs + np.log(self._priors(operator, configs))
        return [int(index) for index in np.argsort(logs, kind="stable")]

    def predict(self, operator: Operator, configs: Sequence[Config]) -> list[Estimate]:
        """Time of each configuration with an 80 % interval; analytic (the same for all) where nothing is learned."""
        base = self._base(operator)
        family = self._family(operator)
        if family is None or not configs:
            return [base] * len(configs)
        knobs, trees = family
        matrix = self._features(operator, configs, knobs)
        shift = np.log(self._priors(operator, configs) / base.seconds)
        middle = trees.predict(matrix) + shift
        lower, upper = (bound + shift for bound in trees.interval(matrix))
        rows = zip(middle, np.minimum(lower, middle), np.maximum(upper, middle), strict=True)
        return [_scaled(base, *(float(value) for value in row)) for row in rows]

    def estimate(self, operators: Sequence[AnyOperator]) -> list[Estimate]:
        """Time of each operator with the best configuration tuning would find.

        ``measured`` for a measured operator; ``fitted`` from the best times of its family; else ``analytic``.
        """
        return [self._estimate(tunable(operator)) for operator in operators]

    def save(self, directory: Path) -> None:
        """Writes measurements and provenance; training again from them is exact and takes well under a second."""
        write_measurements(directory, self.key, self.measurements)

    def load(self, directory: Path) -> None:
        """Restores :meth:`save`; ``InputError`` for a missing or corrupt file, or one of another key."""
        self.fit(read_measurements(directory, self.key))

    def _estimate(self, operator: Operator) -> Estimate:
        base = self._base(operator)
        measured = self._measured.get(operator)
        if measured:
            best = min(each.seconds for each in measured.values())
            return Estimate(best, best, best, base.bound, base.breakdown, "measured")
        family = operator_family(operator)
        ratios = [
            math.log(min(each.seconds for each in configs.values()) / self._base(other).seconds)
            for other, configs in self._measured.items()
            if operator_family(other) == family and self._base(other).seconds > 0
        ]
        if len(ratios) < MIN_OPERATORS:
            return base
        return _scaled(base, *(float(value) for value in np.quantile(ratios, (0.5, 0.1, 0.9))))

    def _log_residuals(self, operator: Operator, configs: Sequence[Config]) -> np.ndarray | None:
        family = self._family(operator)
        if family is None or not configs:
            return None
        knobs, trees = family
        return trees.predict(self._features(operator, configs, knobs))

    def _priors(self, operator: Operator, configs: Sequence[Config]) -> np.ndarray:
        """Analytic seconds of each configuration, up to one factor per family that the trees learn."""
        base = self._base(operator).seconds
        if self._config_cost is None:
            return np.full(len(configs), base)
        return np.array([self._config_cost(operator, config) for config in configs])

    def _features(self, operator: Operator, configs: Sequence[Config], knobs: Sequence[str]) -> np.ndarray:
        base = self._base(operator)
        matrix = feature_matrix(operator, configs, base, knobs)
        relative = np.log(self._priors(operator, configs) / base.seconds)
        return np.concatenate([matrix, relative[:, None].astype(np.float32)], axis=1)

    def _count(self, family: str) -> int:
        return sum(len(known) for operator, known in self._measured.items() if operator_family(operator) == family)

    def _base(self, operator: Operator) -> Estimate:
        if operator not in self._bases:
            self._bases[operator] = self.analytic.estimate([operator])[0]
        return self._bases[operator]

    def _family(self, operator: Operator) -> tuple[tuple[str, ...], BoostedResidual] | None:
        """Knob names and trees of the operator's family; ``None`` with too few measurements."""
        family = operator_family(operator)
        if family not in self._trees:
            self._trees[family] = self._prepare(family)
        return self._trees[family]

    def _prepare(self, family: str) -> tuple[tuple[str, ...], BoostedResidual] | None:
        groups = [
            (operator, list(configs.values()))
            for operator, configs in self._measured.items()
            if operator_family(operator) == family and self._base(operator).seconds > 0
        ]
        if not self._available or sum(len(group) for _, group in groups) < MIN_MEASUREMENTS:
            return None
        knobs = knob_names([each.config for _, group in groups for each in group])
        features, targets, weights = [], [], []
        for operator, group in groups:
            configs = [each.config for each in group]
            seconds = np.array([each.seconds for each in group])
            features.append(self._features(operator, configs, knobs))
            targets.append(np.log(seconds / self._priors(operator, configs)))
            # Being right about the fast ones decides what is measured next.
            weights.append(seconds.min() / seconds)
        trees = BoostedResidual(
            np.concatenate(features), np.concatenate(targets), np.concatenate(weights), self._threads
        )
        self._trained_on[family] = self._count(family)
        return knobs, trees


def _scaled(base: Estimate, middle: float, lower: float, upper: float) -> Estimate:
    """``base`` times exp of the residual and of its interval."""
    low, mid, high = (base.seconds * math.exp(value) for value in (lower, middle, upper))
    breakdown = {**base.breakdown, "analytic_seconds": base.seconds}
    return Estimate(mid, min(low, mid), max(high, mid), base.bound, breakdown, "fitted")
