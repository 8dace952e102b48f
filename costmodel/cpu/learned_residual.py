"""Residual of the analytic model, learned from measurements while tuning, and files of trees.

The target is log(measured / analytic) of each measured (operator, configuration). A family of kernels without enough
measurements is priced by the analytic model alone; every estimate records which of the two it came from. Models can
be stacked: a model trained on many networks provides the guess that another corrects while it tunes.

Files hold trees trained beforehand (:func:`train_together`).
"""

from __future__ import annotations

import gzip
import json
import math
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError, OutputError
from costmodel.base.input_files import MALFORMED, decoded, read_bytes
from costmodel.base.output_files import write_whole
from costmodel.cost_model import (
    Config,
    ConfigKey,
    CostModel,
    Estimate,
    Measurement,
    config_key,
)
from costmodel.cpu.boosted_trees import (
    FOR_UNSEEN,
    BoostedResidual,
    column_names,
    feature_matrix,
    operator_family,
    tunable,
    xgboost_available,
)
from costmodel.operators.any_operator import AnyOperator, dtype_of
from costmodel.operators.layers import Operator

MIN_MEASUREMENTS = 8  # measurements of a family needed to trust its trees more than the analytic order
RETRAIN_GROWTH = 1.15  # growth of a family's measurements that triggers retraining
MIN_OPERATORS = 3  # measured operators of a family needed to predict the best time of an unmeasured one

# Names of the feature columns (knobs, and dtype columns), and the trees of one family.
FamilyTrees = tuple[tuple[str, ...], BoostedResidual]


class ResidualModel(CostModel):
    """The tuner's ranking model: ``analytic`` corrected by trees over operator, knobs and analytic terms.

    ``threads``: used for training. Without the optional package ``xgboost`` the analytic model is used alone.

    ``config_terms(operator, configs)``, shape (configs, terms): the first column is an analytic guess, positive and in
    any unit, that ranks configurations of one operator and that the trees correct; the others are features. ``before``:
    an earlier model with the same terms, which provides the guesses for the families it has learned.
    """

    def __init__(
        self,
        analytic: CostModel,
        *,
        threads: int = 1,
        config_terms: Callable[[Operator, Sequence[Config]], np.ndarray] | None = None,
        before: ResidualModel | None = None,
    ) -> None:
        self.analytic = analytic
        self._config_terms = config_terms
        self._before = before
        self._known_terms: dict[Operator, dict[ConfigKey, np.ndarray]] = {}
        self._trained_on: dict[str, int] = {}
        self._threads = threads
        self._measured: dict[Operator, dict[ConfigKey, Measurement]] = {}
        self._bases: dict[Operator, Estimate] = {}
        self._trees: dict[str, FamilyTrees | None] = {}
        self._available = xgboost_available()
        if not self._available:
            warnings.warn("xgboost is not installed: kernels are ranked by the analytic model alone", stacklevel=2)

    @property
    def measurements(self) -> list[Measurement]:
        """All measurements learned from; the fastest of repeated ones."""
        return [each for configs in self._measured.values() for each in configs.values()]

    def update(self, measurements: Iterable[Measurement]) -> None:
        """Add measurements; their families are retrained on next use."""
        measurements = list(measurements)
        for each in measurements:
            known = self._measured.setdefault(tunable(each.operator), {})
            config = config_key(each.config)
            if config not in known or each.seconds < known[config].seconds:
                known[config] = each
        for family in {operator_family(each.operator) for each in measurements}:
            if self._count(family) > RETRAIN_GROWTH * self._trained_on.get(family, 0):
                self._trees.pop(family, None)

    def rank(self, operator: Operator, configs: Sequence[Config]) -> list[int]:
        """Indices into ``configs``, fastest first. Keeps the given order if nothing is learned, and among ties."""
        if not configs or not self.knows(operator):
            return list(range(len(configs)))
        return [int(index) for index in np.argsort(self.scores(operator, configs), kind="stable")]

    def knows(self, operator: Operator) -> bool:
        """True if the operator's family has been learned, here or in ``before``."""
        return self._family(operator) is not None or (self._before is not None and self._before.knows(operator))

    def seconds(self, operator: Operator, configs: Sequence[Config]) -> np.ndarray:
        """Expected seconds of each configuration; the analytic guess in its own unit if nothing is learned."""
        guesses = self._priors(operator, configs)
        family = self._family(operator)
        if family is None or not configs:
            return guesses
        knobs, trees = family
        return np.asarray(guesses * np.exp(trees.predict(self._features(operator, configs, knobs))))

    def scores(self, operator: Operator, configs: Sequence[Config]) -> np.ndarray:
        """Ranking score of each configuration of one operator, lowest first; not comparable between operators.

        With trees trained for ranking (:func:`train_together`) the order may differ from that of :meth:`seconds`.
        """
        family = self._family(operator)
        if family is None and self._before is not None and self._before.knows(operator):
            return self._before.scores(operator, configs)
        guesses = np.asarray(np.log(self._priors(operator, configs)))
        if family is None or not configs:
            return guesses
        knobs, trees = family
        return trees.scores(self._features(operator, configs, knobs), guesses)

    def predict(self, operator: Operator, configs: Sequence[Config]) -> list[Estimate]:
        """Time of each configuration with an 80 % interval; analytic (the same for all) if nothing is learned."""
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
        """Time of each operator with the best configuration that tuning would find.

        Source ``measured`` for a measured operator; ``fitted`` from the best times of its family and dtype; else
        ``analytic``.
        """
        return [self._estimate(tunable(operator)) for operator in operators]

    def install(self, trees: Mapping[str, FamilyTrees]) -> None:
        """Use ``trees`` made by :func:`train_together` from models with the same terms, for the families they cover."""
        self._trees.update(trees)

    def _estimate(self, operator: Operator) -> Estimate:
        base = self._base(operator)
        measured = self._measured.get(operator)
        if measured:
            best = min(each.seconds for each in measured.values())
            return Estimate(best, best, best, base.bound, base.breakdown, "measured")
        family, dtype = operator_family(operator), dtype_of(operator)
        ratios = [
            math.log(min(each.seconds for each in configs.values()) / self._base(other).seconds)
            for other, configs in self._measured.items()
            if (operator_family(other), dtype_of(other)) == (family, dtype) and self._base(other).seconds > 0
        ]
        if len(ratios) < MIN_OPERATORS:
            return base
        return _scaled(base, *(float(value) for value in np.quantile(ratios, (0.5, 0.1, 0.9))))

    def _priors(self, operator: Operator, configs: Sequence[Config]) -> np.ndarray:
        """Guessed seconds of each configuration, up to one factor per family that the trees learn."""
        if self._before is not None and self._before.knows(operator):
            return self._before.seconds(operator, configs)
        return self._terms(operator, configs)[:, 0]

    def _terms(self, operator: Operator, configs: Sequence[Config]) -> np.ndarray:
        """Values of ``config_terms``, cached per configuration, since templates take time to evaluate."""
        if self._config_terms is None:
            return np.full((len(configs), 1), self._base(operator).seconds)
        known = self._known_terms.setdefault(operator, {})
        keys = [config_key(config) for config in configs]
        new = [index for index, key in enumerate(keys) if key not in known]
        if new:
            rows = self._config_terms(operator, [configs[index] for index in new])
            known.update(zip((keys[index] for index in new), rows, strict=True))
        return np.array([known[key] for key in keys]).reshape(len(keys), -1)

    def _features(self, operator: Operator, configs: Sequence[Config], knobs: Sequence[str]) -> np.ndarray:
        base = self._base(operator)
        matrix = feature_matrix(operator, configs, base, knobs)
        terms = self._terms(operator, configs)
        relative = [np.log(terms[:, :1] / base.seconds), terms[:, 1:]]
        if self._before is not None:
            relative.append(np.log(self._priors(operator, configs) / base.seconds)[:, None])
            relative.append(self._before.scores(operator, configs)[:, None])
        return np.concatenate([matrix, *(part.astype(np.float32) for part in relative)], axis=1)

    def _count(self, family: str) -> int:
        return sum(len(known) for operator, known in self._measured.items() if operator_family(operator) == family)

    def _base(self, operator: Operator) -> Estimate:
        if operator not in self._bases:
            self._bases[operator] = self.analytic.estimate([operator])[0]
        return self._bases[operator]

    def _family(self, operator: Operator) -> FamilyTrees | None:
        """Knob names and trees of the operator's family; ``None`` with too few measurements."""
        family = operator_family(operator)
        if family not in self._trees:
            self._trees[family] = self._prepare(family)
        return self._trees[family]

    def _prepare(self, family: str) -> FamilyTrees | None:
        groups = self._groups(family)
        if not self._available or sum(len(group) for _, group in groups) < MIN_MEASUREMENTS:
            return None
        self._trained_on[family] = self._count(family)
        return _train([self], family, self._threads)

    def _groups(self, family: str) -> list[tuple[Operator, list[Measurement]]]:
        """Measurements of every operator of ``family``."""
        return [
            (operator, list(configs.values()))
            for operator, configs in self._measured.items()
            if operator_family(operator) == family and self._base(operator).seconds > 0
        ]

    def _rows(self, family: str, knobs: Sequence[str]) -> list[tuple[np.ndarray, ...]]:
        """Features, targets, weights and log guesses of every operator of ``family``."""
        found: list[tuple[np.ndarray, ...]] = []
        for operator, group in self._groups(family):
            configs = [each.config for each in group]
            seconds = np.array([each.seconds for each in group])
            guesses = np.log(self._priors(operator, configs))
            # Accuracy on the fast configurations decides what is measured next.
            weights = seconds.min() / seconds
            found.append((self._features(operator, configs, knobs), np.log(seconds) - guesses, weights, guesses))
        return found


def train_together(models: Sequence[ResidualModel], threads: int = 1) -> dict[str, FamilyTrees]:
    """Trees for every family with enough measurements, from all ``models``, such as one CPU with several thread counts.

    Includes trees for ranking an operator's configurations besides those for its time. The models must have the same
    terms; their own trees are not used. :meth:`ResidualModel.install` adds the result to a model.
    """
    counts: Counter[str] = Counter()
    for model in models:
        counts.update(operator_family(each.operator) for each in model.measurements)
    known = sorted(family for family, count in counts.items() if count >= MIN_MEASUREMENTS)
    return {family: _train(models, family, threads, FOR_UNSEEN, ordered=True) for family in known}


def _train(
    models: Sequence[ResidualModel],
    family: str,
    threads: int,
    parameters: Mapping[str, float] | None = None,
    ordered: bool = False,
) -> FamilyTrees:
    groups = [group for model in models for group in model._groups(family)]
    configs = [each.config for _, group in groups for each in group]
    knobs = column_names([operator for operator, _ in groups], configs)
    rows = [row for model in models for row in model._rows(family, knobs)]
    features, targets, weights, guesses = (np.concatenate(part) for part in zip(*rows, strict=True))
    sizes = [len(row[1]) for row in rows] if ordered else None
    return knobs, BoostedResidual(features, targets, weights, threads, parameters or {}, sizes, guesses)


def _scaled(base: Estimate, middle: float, lower: float, upper: float) -> Estimate:
    """``base`` multiplied by exp of the residual and of its interval."""
    low, mid, high = (base.seconds * math.exp(value) for value in (lower, middle, upper))
    breakdown = {**base.breakdown, "analytic_seconds": base.seconds}
    return Estimate(mid, min(low, mid), max(high, mid), base.bound, breakdown, "fitted")


_TREES_FORMAT = 2


def write_trees(path: Path, key: str, trees: Mapping[str, FamilyTrees], provenance: Mapping[str, Any]) -> None:
    """Write ``path`` atomically; ``key`` identifies the platform of the training data. ``OutputError`` on failure."""
    families = {family: {"knobs": list(knobs), "trees": each.to_record()} for family, (knobs, each) in trees.items()}
    content = {"format": _TREES_FORMAT, "key": key, "provenance": dict(provenance), "families": families}
    try:
        write_whole(path, gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place, or free some") from None


def read_trees(path: Path, key: str) -> dict[str, FamilyTrees]:
    """Read trees written by :func:`write_trees` for ``key``; ``InputError`` names the file and the remedy."""
    try:
        content = decoded(read_bytes(path, "record"))
        if not isinstance(content, dict) or content.get("format") != _TREES_FORMAT:
            raise ValueError("unknown format")
        if content.get("key") != key:
            raise InputError(f"{path}: was trained for {content.get('key')!r}, not for {key!r}; train it again")
        return {
            family: (tuple(entry["knobs"]), BoostedResidual.from_record(entry["trees"]))
            for family, entry in content["families"].items()
        }
    except FileNotFoundError:
        raise InputError(f"{path}: missing; train it with `python -m lab.records train`") from None
    except (OSError, EOFError, zlib.error, *MALFORMED) as error:
        raise InputError(f"{path}: damaged ({error}); train it again") from None
