"""Validation of counts and sizes given by users: whole numbers from 1 that do not overflow 64 bits when multiplied."""

from __future__ import annotations

from costmodel.base.errors import InputError

MOST_COUNT = 2**31 - 1  # libraries hold counts and sizes in 64 bits, and multiply them with one another


def check_count(option: str, number: int | None) -> None:
    """Raise ``InputError`` unless ``number`` is a whole number from 1 to :data:`MOST_COUNT` or ``None`` (not given)."""
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputError(f"--{option} {number}: must be a whole number, 1 or more")
    if number > MOST_COUNT:
        raise InputError(f"--{option} {number}: must be at most {MOST_COUNT:,}")
