"""``--price``: cost of one GPU hour, as a number of dollars or from a YAML file::

    currency: USD                        # optional
    date: 2026-11-01                     # date of the prices
    origin: our contract with ...        # vendor or contract
    per_gpu_hour:
      h100-sxm: 2.49                     # names of machines and clusters (`python -m costmodel machines`)
      a100-sxm-80gb: 1.50

The project contains no prices: they differ by contract, region and month.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from costmodel.base.errors import InputError
from costmodel.machines.cluster import load_gpu
from costmodel.machines.record_file import StrictModel, convert_record, read_mapping
from e2e.explain.utilisation import GpuPrice, cost_of
from e2e.sources.requests import Request

if TYPE_CHECKING:
    from e2e.explain.predictor import PredictionResult

MOST_DOLLARS = 1e6  # upper limit: a whole rack costs less
_Amount = Annotated[float, Field(gt=0, le=MOST_DOLLARS, strict=False)]
_SUFFIXES = (".yaml", ".yml")


class _PriceFile(StrictModel):
    date: datetime.date
    origin: Annotated[str, Field(min_length=1)]
    per_gpu_hour: Annotated[dict[str, _Amount], Field(min_length=1)]
    currency: Annotated[str, Field(min_length=1)] = "USD"


@dataclass(frozen=True)
class GpuPrices:
    """Prices of GPUs by name; ``path``: of their file. A single price for any GPU has the name ``""``."""

    prices: Mapping[str, GpuPrice]
    path: str = ""

    def of(self, *names: str) -> GpuPrice:
        """Return the price of the first of ``names`` that has one; raises ``InputError`` if none has."""
        found = next((self.prices[name] for name in (*names, "") if name in self.prices), None)
        if found is None:
            known = ", ".join(self.prices)
            raise InputError(f"{self.path}: per_gpu_hour has no price of {names[-1]} (it has {known}); add it")
        return found


def read_prices(text: str) -> GpuPrices:
    """Parse ``text``, a number or the name of a file; raises ``InputError`` for invalid contents."""
    if not text.endswith(_SUFFIXES):
        return GpuPrices({"": GpuPrice(_number(text), "USD", "given on the command line")})
    path = Path(text)
    otherwise = "expected date, origin and per_gpu_hour (docs/utilisation.md)"
    file = convert_record(read_mapping(path, InputError, otherwise), _PriceFile, path, InputError)
    day = file.date.isoformat()
    return GpuPrices(
        {name: GpuPrice(price, file.currency, file.origin, day) for name, price in file.per_gpu_hour.items()}, text
    )


def asked_price(text: str, request: Request) -> GpuPrices:
    """Read prices as :func:`read_prices`, and check that the GPU named by ``request``, if any, has one."""
    prices = read_prices(text)
    name = getattr(request, "retarget", None) or getattr(request, "gpu", None)
    if name is None:
        return prices  # a recorded run determines its GPU
    return GpuPrices({"": prices.of(name, load_gpu(name).name)}, text)


def with_cost(answer: PredictionResult, prices: GpuPrices) -> PredictionResult:
    """Return ``answer`` with the cost of its step."""
    old = answer.prediction
    cost = cost_of(prices.of(old.machine), old.iteration_seconds, old.gpus)
    return replace(answer, prediction=replace(old, cost=cost))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"--price {text}: expected dollars per GPU and hour, such as 2.49, or a .yaml file") from None
    if not 0 < value <= MOST_DOLLARS:
        raise InputError(
            f"--price {text}: must be more than 0 and at most {MOST_DOLLARS:,.0f} dollars per GPU and hour"
        )
    return value
