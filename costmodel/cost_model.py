"""Interface of a cost model: operators in, one :class:`Estimate` each out; measured kernels to adapt one to.

:class:`Dispatch` is a cost model composed of several, selected by the operator's type.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from costmodel.base.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from costmodel.operators.any_operator import AnyOperator


# Knob -> value: one way to build a kernel; JSON-able. Its key is hashable.
Config = Mapping[str, int]
ConfigKey = tuple[tuple[str, int], ...]


def config_key(config: Config) -> ConfigKey:
    """Hashable key of a configuration, independent of the order of its knobs."""
    return tuple(sorted(config.items()))


@dataclass(frozen=True)
class Measurement:
    """Time of ``operator`` in seconds with the knob values ``config`` (empty: the implementation has none)."""

    operator: AnyOperator
    config: Config = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"a measured time must be finite and above zero, got {self.seconds}")
        object.__setattr__(self, "config", MappingProxyType(dict(self.config)))

    def __hash__(self) -> int:
        return hash((self.operator, config_key(self.config), self.seconds))

    def __reduce__(self) -> tuple[Any, ...]:
        return Measurement, (self.operator, dict(self.config), self.seconds)


PriceSource = Literal["measured", "fitted", "analytic"]


@dataclass(frozen=True)
class Estimate:
    """Time of one operator in seconds with its interval ``lower <= seconds <= upper``.

    ``bound``: limiting resource (such as ``compute`` or ``memory:L2``); ``breakdown``: terms of the total; ``source``:
    origin of the number: a measurement, a fitted or an analytic model.
    """

    seconds: float
    lower: float
    upper: float
    bound: str
    breakdown: Mapping[str, float | str] = field(default_factory=dict)
    source: PriceSource = "analytic"

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) for value in (self.lower, self.seconds, self.upper)):
            raise ValueError(f"estimate is not finite: {self.lower}, {self.seconds}, {self.upper}")
        if not 0 <= self.lower <= self.seconds <= self.upper:
            raise ValueError(f"need 0 <= lower <= seconds <= upper, got {self.lower}, {self.seconds}, {self.upper}")
        if self.source not in get_args(PriceSource):
            raise ValueError(f"source must be one of {', '.join(get_args(PriceSource))}, got {self.source!r}")
        object.__setattr__(self, "breakdown", MappingProxyType(dict(self.breakdown)))

    @property
    def memory_bound(self) -> bool:
        """True if a memory level is the limit: ``bound`` is ``memory:`` and the level's name."""
        return self.bound.partition(":")[0] == "memory"

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled; estimates are sent to worker processes.
        return Estimate, (
            self.seconds,
            self.lower,
            self.upper,
            self.bound,
            dict(self.breakdown),
            self.source,
        )


class CostModel(ABC):
    """Prices of operators on one machine."""

    @abstractmethod
    def estimate(self, operators: Sequence[AnyOperator]) -> list[Estimate]:
        """One estimate per operator, in order; ``UnsupportedOperatorError`` for one that the model does not know."""

    def settle(self, estimates: Sequence[Estimate], counts: Sequence[int]) -> list[Estimate]:
        """Adjust ``estimates`` of this model to a mixture in which each runs ``counts`` times; unchanged if the
        machine's rates do not depend on the mixture.
        """
        return list(estimates)


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

    def model_of(self, operator: AnyOperator) -> CostModel:
        """Model that prices ``operator``."""
        return self._models[self._key(operator)]

    def _key(self, operator: AnyOperator) -> type:
        for cls in type(operator).__mro__:
            if cls in self._models:
                return cls
        known = ", ".join(cls.__name__ for cls in self._models)
        raise UnsupportedOperatorError(f"no cost model for operator {type(operator).__name__} (known: {known})")
