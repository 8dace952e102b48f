"""Interface of a cost model: operators in, one :class:`Estimate` each out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from costmodel.model.measurements import Measurement
    from costmodel.operators.any_operator import AnyOperator

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
    """Prices of operators on one machine. Analytic models have nothing to fit or save: the defaults do nothing."""

    @abstractmethod
    def estimate(self, operators: Sequence[AnyOperator]) -> list[Estimate]:
        """One estimate per operator, in order; ``UnsupportedOperatorError`` for one that the model does not know."""

    def settle(self, estimates: Sequence[Estimate], counts: Sequence[int]) -> list[Estimate]:
        """Adjust ``estimates`` of this model to a mixture in which each runs ``counts`` times; unchanged if the
        machine's rates do not depend on the mixture.
        """
        return list(estimates)

    def fit(self, measurements: Sequence[Measurement]) -> None:  # noqa: B027
        """Replace what the model has learned by ``measurements``."""

    def save(self, directory: Path) -> None:  # noqa: B027
        """Write the model's learned state into ``directory`` (created if missing); ``OutputError`` on failure."""

    def load(self, directory: Path) -> None:  # noqa: B027
        """Restore the state written by :meth:`save`; ``InputError`` names a missing or corrupt file."""
