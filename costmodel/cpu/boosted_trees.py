"""Gradient-boosted trees over (operator, configuration): their features, their training, and the ranking they give.

Trees predict the logarithm of measured / analytic time, with a calibrated interval, and rank the configurations of
an operator.

Features are generic over knob names, one matrix per operator, no loop over rows. Trees split on one column at a
time, so ratios that decide a kernel's speed are columns of their own: the product of every two knobs (register and
cache tiles are products) and, for each knob and dimension, the work wasted when the knob does not divide the
dimension. Kernels of all dtypes are one family: what differs (bytes of a value, multiply-adds of an instruction) is
in the analytic cost, and in two columns where a family has operators of several.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from costmodel.base.errors import UnsupportedOperatorError
from costmodel.cost_model import Config, Estimate
from costmodel.operators.any_operator import AnyOperator, dtype_of
from costmodel.operators.layers import (
    ChannelNorm,
    Conv2d,
    Dense,
    FusedConvs,
    Operator,
    Pool2d,
    conv_kind,
    element_bytes,
)

# Columns of families with operators of several dtypes, beside their knobs: bytes of a stored value, and the logarithm
# of the rate at which the machine computes the operator.
DTYPE_COLUMNS = ("dtype bytes", "dtype rate")


def tunable(operator: AnyOperator) -> Operator:
    """Return ``operator`` if kernels are tuned for its type, else raise :class:`UnsupportedOperatorError`."""
    if not isinstance(operator, Operator):
        raise UnsupportedOperatorError(
            f"no kernels are tuned for operator {type(operator).__name__}; give a convolution, pool or dense layer"
        )
    return operator


def operator_family(operator: AnyOperator) -> str:
    """Family name shared by operators of one kernel template, hence the same knobs: one learned model each, for all
    dtypes.
    """
    if isinstance(operator, FusedConvs):
        return operator.kind
    if isinstance(operator, Conv2d):
        return conv_kind(operator)
    if isinstance(operator, Pool2d):
        return "global-pool" if operator.is_global else "pool"
    return type(operator).__name__.lower()


def knob_names(configs: Sequence[Config]) -> tuple[str, ...]:
    """Names of all knobs in ``configs``, sorted."""
    return tuple(sorted({knob for config in configs for knob in config}))


def column_names(operators: Sequence[Operator], configs: Sequence[Config]) -> tuple[str, ...]:
    """Names of all knobs of ``configs``, and :data:`DTYPE_COLUMNS` if ``operators`` have several dtypes."""
    several = len({dtype_of(operator) for operator in operators}) > 1
    return (*knob_names(configs), *(DTYPE_COLUMNS if several else ()))


def feature_matrix(
    operator: Operator, configs: Sequence[Config], estimate: Estimate, knobs: Sequence[str]
) -> np.ndarray:
    """Features of each configuration, shape (len(configs), features), float32; a missing knob is NaN.

    ``estimate`` is the analytic one of ``operator``; ``knobs`` those of :func:`column_names`. Rows of one family and
    one ``knobs`` have equal length.
    """
    of_dtype = _dtype_values(operator, estimate) if set(DTYPE_COLUMNS) <= set(knobs) else []
    knobs = [knob for knob in knobs if knob not in DTYPE_COLUMNS]
    values = np.array([[config.get(knob, math.nan) for knob in knobs] for config in configs], dtype=np.float64)
    values = values.reshape(len(configs), len(knobs))
    dimensions = _dimensions(operator)
    fixed = np.array([*_logs(dimensions), *_scalars(operator, estimate), *of_dtype])
    positive = np.maximum(values, 1.0)
    logs = np.log2(positive)
    pairs = [logs[:, a] + logs[:, b] for a, b in combinations(range(len(knobs)), 2)]
    waste = [np.ceil(size / positive) * positive / size for size in _tiled_dimensions(operator)]
    columns = [np.broadcast_to(fixed, (len(configs), fixed.size)), values, logs, *waste]
    if pairs:
        columns.append(np.stack(pairs, axis=1))
    return np.concatenate(columns, axis=1).astype(np.float32)


def _dtype_values(operator: Operator, estimate: Estimate) -> list[float]:
    """Values of the columns :data:`DTYPE_COLUMNS`, in their order."""
    seconds = _number(estimate.breakdown.get("compute_seconds"))
    rate = operator.flops / seconds if seconds > 0 else math.nan
    return [float(element_bytes(dtype_of(operator))), math.log2(rate) if rate > 0 else math.nan]


def _dimensions(operator: Operator) -> list[int]:
    """All extents that define the operator; the same number for each operator of a family."""
    if isinstance(operator, FusedConvs):
        return [size for conv in operator.convs for size in _dimensions(conv)]
    if isinstance(operator, Dense):
        return [operator.rows, operator.in_features, operator.out_features]
    if isinstance(operator, Pool2d):
        shape = (operator.batch, operator.channels, operator.height, operator.width)
        return [*shape, *operator.kernel, *operator.stride, operator.out_height, operator.out_width]
    if isinstance(operator, ChannelNorm):
        return [*operator.input_shape]
    return [
        *operator.input_shape,
        *operator.output_shape,
        *operator.kernel,
        *operator.stride,
        *operator.dilation,
        operator.groups,
    ]


def _tiled_dimensions(operator: Operator) -> list[int]:
    """Extents that knobs are likely to tile: channels and image of every output, channels of the input."""
    if isinstance(operator, FusedConvs):
        first = operator.convs[0].in_channels
        return [first, *(size for conv in operator.convs for size in conv.output_shape[1:])]
    if isinstance(operator, Dense):
        return [operator.rows, operator.in_features, operator.out_features]
    return [operator.input_shape[1], *operator.output_shape[1:]]


def _scalars(operator: Operator, estimate: Estimate) -> list[float]:
    terms = ("compute_seconds", "operand_seconds", "memory_seconds", "rho")
    shares = [_number(estimate.breakdown.get(term)) for term in terms]
    size = [operator.flops, operator.input_bytes, operator.weight_bytes, operator.output_bytes, operator.residual_bytes]
    return [math.log2(max(estimate.seconds, 1e-12)), *_logs(size), *shares]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _logs(sizes: Sequence[float]) -> list[float]:
    return [math.log2(max(size, 1)) for size in sizes]


INTERVAL = (0.1, 0.9)
_ROUNDS = 120
_PARAMETERS = {"max_depth": 6, "eta": 0.12, "min_child_weight": 0.5, "subsample": 0.9, "tree_method": "hist", "seed": 0}
# For predicting networks absent from the training data: shallow trees that sample half of the features. Chosen by
# leaving networks out (`python -m lab.validate.ranking`); trees of one tuning run see the very operators they rank.
FOR_UNSEEN = {"max_depth": 4, "min_child_weight": 3.0, "colsample_bytree": 0.5}
# Statistics that xgboost keeps of every node besides its split and its value.
_STATISTICS = ("base_weights", "loss_changes", "sum_hessian")
_HELD_OUT = 5  # every fifth row is held out to calibrate the interval


def xgboost_available() -> bool:
    """True if the optional package xgboost is installed."""
    from importlib.util import find_spec

    return find_spec("xgboost") is not None


@dataclass
class BoostedResidual:
    """Trees for one kernel family. The interval's trees are trained when an interval is first requested.

    With ``groups``, separate trees are trained to rank the configurations of one operator: differences between its
    configurations are small against differences between operators, which dominate the trees for the targets when each
    operator has few configurations.
    """

    features: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    threads: int = 1
    # Parameters of xgboost that override the defaults.
    parameters: Mapping[str, float] = field(default_factory=dict)
    # Number of consecutive rows of each operator.
    groups: Sequence[int] | None = None
    # Guessed log times of all rows, to which the targets are relative.
    guesses: np.ndarray | None = None
    _mean: Any = field(default=None, init=False, repr=False)
    _order: Any = field(default=None, init=False, repr=False)
    _interval: tuple[Any, float] | None = field(default=None, init=False, repr=False)

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Expected target of each row, shape (rows,)."""
        if self._mean is None:
            self._mean = self._train(np.ones(len(self.targets), dtype=bool), {"objective": "reg:squarederror"})
        return np.asarray(self._mean.inplace_predict(features))

    def scores(self, features: np.ndarray, guesses: np.ndarray) -> np.ndarray:
        """Ranking scores of rows of one operator, whose targets are relative to ``guesses``; the lowest is the
        fastest.
        """
        if self._order is None and self.groups is not None:
            self._order = self._train_order()
        if self._order is None:
            return np.asarray(guesses + self.predict(features))
        return np.asarray(guesses - self._order.inplace_predict(features, predict_type="margin"))

    def to_record(self) -> dict[str, Any]:
        """The trees of :meth:`predict` and :meth:`scores` as xgboost JSON, reduced to what :meth:`from_record`
        needs.
        """
        self.scores(self.features[:1], np.zeros(1))
        self.predict(self.features[:1])
        boosters = {"residual": self._mean, "order": self._order}
        return {name: _record_of(booster) for name, booster in boosters.items() if booster is not None}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> BoostedResidual:
        """Trees from :meth:`to_record`: they predict and rank, but have no interval. ``ValueError`` for an invalid
        record.
        """
        trees = cls(np.empty((0, 0)), np.empty(0), np.empty(0))
        trees._mean = _booster_of(record["residual"])
        trees._order = _booster_of(record["order"]) if "order" in record else None
        return trees

    def interval(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper target of each row: the quantiles :data:`INTERVAL`, widened by the errors of held-out
        rows.
        """
        if self._interval is None:
            self._interval = self._train_interval()
        booster, margin = self._interval
        quantiles = np.sort(booster.inplace_predict(features), axis=1)
        return quantiles[:, 0] - margin, quantiles[:, 1] + margin

    def _train_interval(self) -> tuple[Any, float]:
        rng = np.random.default_rng(0)
        held_out = rng.permutation(len(self.targets)) % _HELD_OUT == 0
        booster = self._train(~held_out, {"objective": "reg:quantileerror", "quantile_alpha": list(INTERVAL)})
        quantiles = np.sort(booster.inplace_predict(self.features[held_out]), axis=1)
        truth = self.targets[held_out]
        missed = np.maximum(quantiles[:, 0] - truth, truth - quantiles[:, 1])
        # The finite-sample rank of the conformal quantile; few held-out rows give the widest margin seen.
        level = min((INTERVAL[1] - INTERVAL[0]) * (1 + 1 / len(missed)), 1.0)
        return booster, max(float(np.quantile(missed, level, method="higher")), 0.0)

    def _train(self, rows: np.ndarray, objective: dict[str, Any]) -> Any:
        import xgboost

        data = xgboost.QuantileDMatrix(
            self.features[rows], self.targets[rows], weight=self.weights[rows], nthread=self.threads
        )
        return xgboost.train(self._parameters(objective), data, num_boost_round=_ROUNDS)

    def _train_order(self) -> Any:
        """Train ranking trees on pairs of rows of one operator with the logistic loss of their score difference
        (RankNet: Burges et al., ICML 2005), starting from the order of the guesses.
        """
        import xgboost

        assert self.groups is not None and self.guesses is not None
        ends = np.cumsum(self.groups)
        times = self.guesses + self.targets
        # Higher is better; rows of different operators are not compared.
        ranks = np.concatenate([np.argsort(np.argsort(-part)) for part in np.split(times, ends[:-1])])
        data = xgboost.DMatrix(self.features, ranks.astype(np.float32), nthread=self.threads)
        data.set_group(list(self.groups))
        least = np.repeat([part.min() for part in np.split(self.guesses, ends[:-1])], self.groups)
        data.set_base_margin(least - self.guesses)
        parameters = self._parameters({"objective": "rank:pairwise", "base_score": 0.0})
        return xgboost.train(parameters, data, num_boost_round=_ROUNDS)

    def _parameters(self, objective: Mapping[str, Any]) -> dict[str, Any]:
        return {**_PARAMETERS, **self.parameters, **objective, "nthread": self.threads, "verbosity": 0}


def _record_of(booster: Any) -> dict[str, Any]:
    model = json.loads(bytes(booster.save_raw("json")))
    for tree in model["learner"]["gradient_booster"]["model"]["trees"]:
        for statistic in _STATISTICS:
            tree[statistic] = [0.0] * len(tree[statistic])
        # For a leaf this is the value, a step of a logarithm: five digits are far finer than the repeatability of
        # measurements.
        tree["split_conditions"] = [
            float(f"{value:.5g}") if child < 0 else value
            for value, child in zip(tree["split_conditions"], tree["left_children"], strict=True)
        ]
    return dict(model)


def _booster_of(record: dict[str, Any]) -> Any:
    import xgboost

    booster = xgboost.Booster({"nthread": 1})
    try:
        booster.load_model(bytearray(json.dumps(record).encode()))
    except xgboost.core.XGBoostError as error:
        raise ValueError(f"no trees of xgboost: {str(error).splitlines()[0]}") from None
    return booster
