"""Axes of charts: positions and labels of ticks, positions of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
# With fewer decades a logarithmic axis has ticks at 2 and 5 too.
_FEW_DECADES = 3
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))

Told = Callable[[float], str]


@dataclass(frozen=True)
class Axis:
    """One axis of a chart, from ``low`` to ``high``. ``ticks``: positions; ``None``: round values.

    ``told``: function that formats a tick's text. A logarithmic axis needs ``low`` above 0.
    """

    label: str
    low: float
    high: float
    logarithmic: bool = False
    ticks: Sequence[float] | None = None
    told: Told | None = None

    def place(self, value: float) -> float:
        """Relative position of ``value``: 0 at ``low``, 1 at ``high``."""
        if self.logarithmic:
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(max(value, 1e-300)) - low) / ((high - low) or 1.0)
        return (value - self.low) / ((self.high - self.low) or 1.0)

    def marks(self, count: int = 6) -> list[tuple[float, str]]:
        """Ticks within the axis and their texts; by default about ``count`` of them."""
        values = self.ticks if self.ticks is not None else self._round(count)
        told = self.told or plain_number
        return [(value, told(value)) for value in values if -1e-9 <= self.place(value) <= 1 + 1e-9]

    def _round(self, count: int) -> list[float]:
        return logarithmic_ticks(self.low, self.high) if self.logarithmic else linear_ticks(self.low, self.high, count)


def linear_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """At most about ``count`` round values from ``low`` to ``high``."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(each * scale for each in _STEPS if each * scale >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def logarithmic_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from ``low`` to ``high``; for few decades also 2 and 5 times these."""
    if not 0 < low < high:
        return [low]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1.0, 2.0, 5.0) if math.log10(high / low) < _FEW_DECADES else (1.0,)
    return [factor * 10.0**decade for decade in decades for factor in factors if low <= factor * 10.0**decade <= high]


def around(values: Sequence[float], logarithmic: bool = False, from_zero: bool = False) -> tuple[float, float]:
    """Ends of an axis that shows all of ``values`` with some margin."""
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    if logarithmic:
        room = max((high / low) ** 0.06, 1.15)
        return low / room, high * room
    if from_zero:
        return 0.0, high * 1.06 or 1.0
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - room, high + room


def plain_number(value: float) -> str:
    """Short number with a decimal prefix: ``2.5k``."""
    size = abs(value)
    scale, prefix = next(((scale, prefix) for scale, prefix in _PREFIXES if size >= scale), (1.0, ""))
    return f"{value / scale:.4g}{prefix}"


def with_prefix(value: float, unit: str) -> str:
    """Number with a decimal prefix of its unit: ``236 GFLOP/s``."""
    size = abs(value)
    scale, prefix = next(((scale, prefix) for scale, prefix in _PREFIXES if size >= scale), (1.0, ""))
    return f"{value / scale:.3g} {prefix}{unit}"


def seconds_text(value: float, digits: int = 3) -> str:
    """Seconds in a suitable unit: ``1.23 ms``."""
    return _with_unit(value, _SECONDS, digits)


def bytes_text(value: float, digits: int = 3) -> str:
    """Bytes in a suitable unit: ``1.5 GiB``."""
    return _with_unit(value, _BYTES, digits)


def unit_of_seconds(longest: float) -> tuple[float, str]:
    """Time unit for an axis up to ``longest``: its length in seconds, and its name."""
    return next((unit for unit in _SECONDS if longest >= unit[0]), _SECONDS[-1])


def _with_unit(value: float, units: Sequence[tuple[float, str]], digits: int) -> str:
    if value == 0:
        return f"0 {next(name for scale, name in units if scale == 1.0)}"
    scale, name = next((unit for unit in units if abs(value) >= unit[0] * (1 - 1e-12)), units[-1])
    shown = value / scale
    return f"{shown:.0f} {name}" if abs(shown) >= 10**digits else f"{shown:.{digits}g} {name}"
