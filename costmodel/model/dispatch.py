"""Cost model composed of several, selected by the operator's type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.errors import UnsupportedOperatorError
from costmodel.model.cost_model import CostModel, Estimate
from costmodel.model.measurements import Measurement

if TYPE_CHECKING:
    from costmodel.operators.any_operator import AnyOperator


class Dispatch(CostModel):
    """Dispatch of operators to ``models``, a mapping from operator type to model; subclasses use the model of their
    base.

    Raises :class:`UnsupportedOperatorError` for an operator without a model: there is no silent default.
    """

    def __init__(self, models: Mapping[type, CostModel]) -> None:
        self._models = dict(models)

    def estimate(self, operators: Sequence[AnyOperator]) -> list[Estimate]:
        keys = [self._key(operator) for operator in operators]
        results: list[Estimate | None] = [None] * len(operators)
        for key in dict.fromkeys(keys):
            places = [place for place, each in enumerate(keys) if each is key]
            estimates = self._models[key].estimate([operators[place] for place in places])
            for place, estimate in zip(places, estimates, strict=True):
                results[place] = estimate
        return [result for result in results if result is not None]

    def fit(self, measurements: Sequence[Measurement]) -> None:
        keys = [self._key(measurement.operator) for measurement in measurements]
        for model, types in self._distinct():
            model.fit([each for each, key in zip(measurements, keys, strict=True) if key in types])

    def model_of(self, operator: AnyOperator) -> CostModel:
        """Model that prices ``operator``."""
        return self._models[self._key(operator)]

    def save(self, directory: Path) -> None:
        for model, types in self._distinct():
            model.save(directory / types[0].__name__)

    def load(self, directory: Path) -> None:
        for model, types in self._distinct():
            model.load(directory / types[0].__name__)

    def _key(self, operator: AnyOperator) -> type:
        for cls in type(operator).__mro__:
            if cls in self._models:
                return cls
        known = ", ".join(cls.__name__ for cls in self._models)
        raise UnsupportedOperatorError(f"no cost model for operator {type(operator).__name__} (known: {known})")

    def _distinct(self) -> list[tuple[CostModel, list[type]]]:
        """Each model once, with all types it serves: one model may serve several."""
        groups: dict[int, tuple[CostModel, list[type]]] = {}
        for cls, model in self._models.items():
            groups.setdefault(id(model), (model, []))[1].append(cls)
        return list(groups.values())
