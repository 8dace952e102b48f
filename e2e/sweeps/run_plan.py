"""Training run: duration and cost for every row of a sweep, and the deadline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from costmodel.base.errors import InputError
from e2e.sweeps.sweep_results import SweepRow

if TYPE_CHECKING:
    from e2e.sources.gpu_prices import GpuPrices

DAY = 86_400.0
_LARGE = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_TIMES = {"h": 3600.0, "d": DAY, "w": 7 * DAY}


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run; ``None``: not requested."""

    # Tokens to train on.
    tokens: float | None = None
    # Limit of the duration, in seconds.
    deadline: float | None = None
    prices: GpuPrices | None = None

    def seconds(self, row: SweepRow) -> float | None:
        """Seconds of the whole run at the predicted rate, without stops, checkpoints and failures."""
        if self.tokens is None or not row.tokens_per_second_per_gpu:
            return None
        return self.tokens / (row.tokens_per_second_per_gpu * row.gpus)

    def cost(self, row: SweepRow) -> float | None:
        """Cost of the whole run, or of a million tokens without a number of tokens, in the currency of the prices."""
        if self.prices is None or not row.tokens_per_second_per_gpu:
            return None
        hours = (self.tokens or 1e6) / row.tokens_per_second_per_gpu / 3600.0
        return hours * self._price(row.gpu)

    def late(self, row: SweepRow) -> bool:
        """True if the run takes longer than the deadline."""
        seconds = self.seconds(row)
        return self.deadline is not None and (seconds is None or seconds > self.deadline)

    def amount(self, row: SweepRow) -> float:
        """Sort key of rows in time: cost, else GPU hours if there is a deadline, else 0."""
        cost = self.cost(row)
        if cost is not None:
            return cost
        return 0.0 if self.deadline is None else 1.0 / (row.tokens_per_second_per_gpu or 1e-9)

    def check(self, machines: Sequence[str]) -> None:
        """Raise ``InputError`` for a machine without a price."""
        for name in machines if self.prices is not None else ():
            self._price(name)

    def _price(self, gpu: str) -> float:
        from e2e.sources.request_parts import gpu_machine

        assert self.prices is not None
        return self.prices.of(gpu, gpu_machine(gpu).name).per_gpu_hour


def run_plan(
    tokens: str | float | None, deadline: str | float | None, price: str | float | os.PathLike[str] | None
) -> RunPlan:
    """Parse texts such as ``1T``, ``30d`` and ``2.5``; raises ``InputError`` naming an invalid one."""
    from e2e.sources.gpu_prices import read_prices

    if deadline is not None and tokens is None:
        raise InputError(f"--deadline {deadline}: of how many tokens? give --tokens, such as 1T")
    return RunPlan(
        None if tokens is None else _number("--tokens", tokens, _LARGE, "1T or 300e9"),
        None if deadline is None else _number("--deadline", deadline, _TIMES, "30d, 12h or 2w"),
        None if price is None else read_prices(os.fspath(price) if isinstance(price, os.PathLike) else str(price)),
    )


def _number(option: str, value: str | float, units: dict[str, float], such: str) -> float:
    text = str(value).strip()
    unit = units.get(text[-1:], 0.0)
    try:
        number = float(text[:-1]) * unit if unit else float(text) * (DAY if units is _TIMES else 1.0)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e30:
        raise InputError(f"{option} {value}: expected a number such as {such}")
    return number
