"""Numbers given by users: quantities with units (``"160 GFLOP/s"`` <-> ``1.6e11``), whole numbers and counts.

All internal values are SI (seconds, bytes).
"""

from __future__ import annotations

import math
import re

from costmodel.base.errors import InputError

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SMALL = {"": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

UNITS: dict[str, dict[str, float]] = {
    "FLOP/s": {f"{prefix}FLOP/s": scale for prefix, scale in _DECIMAL.items()},
    "B/s": {f"{prefix}B/s": scale for prefix, scale in (_DECIMAL | _BINARY).items()},
    "B": {f"{prefix}B": scale for prefix, scale in (_DECIMAL | _BINARY).items()},
    "s": {f"{prefix}s": scale for prefix, scale in _SMALL.items()},
    "Hz": {f"{prefix}Hz": scale for prefix, scale in _DECIMAL.items()},
    "W": {f"{prefix}W": scale for prefix, scale in _DECIMAL.items()},
}

_WHOLE = re.compile(r"[0-9]{1,18}")
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]\S*)\s*")


def whole_number(text: str) -> int | None:
    r"""Parse ``text`` as a whole number from 0 to below 10**18 in ASCII digits; ``None`` for anything else.

    ``str.isdigit`` and ``int`` disagree about digits (``"\u00b2"``), and ``int`` refuses thousands of them.
    """
    digits = text.strip()
    return int(digits) if _WHOLE.fullmatch(digits) else None


def parse_quantity(text: object, base_unit: str) -> float:
    """Value of ``text`` in ``base_unit`` (a key of :data:`UNITS`).

    Raises ``ValueError`` for a bare number, another unit or a value that is not finite and non-negative.
    """
    units = UNITS[base_unit]
    example = f"write a number and a unit, such as '1.5 {list(units)[2]}'"
    if not isinstance(text, str):
        raise ValueError(f"{text!r} has no unit; {example}")
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity; {example}")
    if match[2] not in units:
        raise ValueError(f"{text!r} is not in {base_unit}; known units: {', '.join(units)}")
    value = float(match[1]) * units[match[2]]
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not finite; write a finite number")
    return value


def read_seconds(option: str, value: str | float) -> float:
    """Seconds of ``500ms`` or ``2 s``, or of a number of seconds. ``InputError`` naming the ``option`` for anything
    else, and for text without a unit: it might mean milliseconds.
    """
    try:
        found = parse_quantity(value, "s") if isinstance(value, str) else float(value)
    except ValueError as error:
        raise InputError(f"--{option} {value}: {error}") from None
    if not (math.isfinite(found) and found > 0):
        raise InputError(f"--{option} {value}: give a finite time above zero, such as 500ms")
    return found


def format_quantity(value: float, base_unit: str, digits: int = 4) -> str:
    """``value`` with the largest unit that keeps it at or above 1; bytes in powers of 1024 where exact."""
    units = UNITS[base_unit]
    if base_unit == "B":
        exact = [(scale, unit) for unit, scale in units.items() if "i" in unit and value and value % scale == 0]
        if exact:
            scale, unit = max(exact)
            return f"{value / scale:.0f} {unit}"
        if value == int(value):
            return f"{value:.0f} B"
    candidates = [(scale, unit) for unit, scale in units.items() if "i" not in unit and value >= scale]
    smallest = min((scale, unit) for unit, scale in units.items())
    scale, unit = max(candidates, default=(1.0, base_unit) if value == 0 else smallest)
    return f"{value / scale:.{digits}g} {unit}"


MOST_COUNT = 2**31 - 1  # libraries hold counts and sizes in 64 bits, and multiply them with one another


def check_count(option: str, number: int | None) -> None:
    """Raise ``InputError`` unless ``number`` is a whole number from 1 to :data:`MOST_COUNT` or ``None`` (not given)."""
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputError(f"--{option} {number}: must be a whole number, 1 or more")
    if number > MOST_COUNT:
        raise InputError(f"--{option} {number}: must be at most {MOST_COUNT:,}")


def check_number(option: str, number: float | None, least: float, most: float) -> None:
    """Raise ``InputError`` unless ``number`` is from ``least`` to ``most`` or ``None`` (not given)."""
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise InputError(f"--{option} {number}: give a finite number")
    if not least <= number <= most:
        raise InputError(f"--{option} {number}: must be from {least:g} to {most:g}")
