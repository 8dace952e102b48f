"""Tensor sizes as functions of the batch: a dimension is a product of parts, each fixed or growing with the batch.

A view that merges the batch with the tokens of a sequence keeps both parts in order, so that a later view can split
them again, even if other sizes happen to equal the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod


@dataclass(frozen=True, slots=True)
class Part:
    """Factor of a dimension: ``size`` now, plus ``slope`` for every additional sample of the batch."""

    size: int
    slope: Fraction = Fraction(0)

    @property
    def grows(self) -> bool:
        """True if it depends on the batch."""
        return self.slope != 0

    def at(self, more: int) -> int:
        """Return its size with ``more`` additional samples, at least 1 (0 stays 0)."""
        return max(round(self.size + self.slope * more), 1) if self.size else 0


Extent = tuple[Part, ...]
Extents = tuple[Extent, ...]


class SplitError(ValueError):
    """Raised if a dimension that contains the batch is split where it is unknown which part the batch is."""


def fixed(sizes: Iterable[int]) -> Extents:
    """Make dimensions that do not depend on the batch."""
    return tuple((Part(size),) for size in sizes)


def proportional(size: int, batch: int) -> Extent:
    """Make a dimension that is a multiple of the batch, or a multiple plus one (offsets of bags)."""
    remainder = 1 if size % batch and (size - 1) % batch == 0 else 0
    return (Part(size, Fraction(size - remainder, batch)),)


def grows(extent: Extent) -> bool:
    """True if the dimension depends on the batch."""
    return any(part.grows for part in extent)


def any_grows(extents: Extents) -> bool:
    """True if any dimension depends on the batch."""
    return any(grows(extent) for extent in extents)


def size_at(extent: Extent, more: int) -> int:
    """Return the dimension with ``more`` additional samples."""
    return prod(part.at(more) for part in extent)


def joined(extents: Sequence[Extent]) -> Extent:
    """Concatenate ``extents`` along one dimension (``cat``)."""
    parts = [part for extent in extents for part in extent]
    if not any(part.grows for part in parts):
        return (Part(sum(prod(part.size for part in extent) for extent in extents)),)
    if len(extents) == 1:
        return extents[0]
    size = sum(prod(part.size for part in extent) for extent in extents)
    return (Part(size, sum((_slope(extent) for extent in extents), Fraction(0))),)


def _slope(extent: Extent) -> Fraction:
    """Return the slope of a dimension as one part; exact for products with a single growing part."""
    whole = prod(part.size for part in extent)
    return sum((part.slope * Fraction(whole, part.size) for part in extent if part.size), Fraction(0))


def share(extent: Extent, size: int) -> Extent:
    """Return a piece of ``size`` of the dimension, with a proportional part of the batch."""
    whole = prod(part.size for part in extent)
    if size == whole or not grows(extent):
        return extent if size == whole else (Part(size),)
    if whole % size and _slope(extent) * size % whole:
        raise SplitError(f"a piece of {size} is cut from {whole}")
    return (Part(size, _slope(extent) * Fraction(size, whole)),)


def reshaped(extents: Extents, shape: Sequence[int], batch: int) -> Extents:
    """Return the extents of the same elements, row-major, in another ``shape``.

    Raises :class:`SplitError` where the batch would be split.
    """
    parts = [part for extent in extents for part in extent if part.size != 1 or part.grows]
    if 0 in shape or any(part.size == 0 for part in parts):
        return fixed(shape)
    found: list[list[Part]] = []
    for size in shape:
        taken: list[Part] = []
        left = size
        while parts and (left > 1 or (parts[0].grows and parts[0].size == 1 and not taken)):
            part = parts.pop(0)
            if left % part.size == 0:
                taken.append(part)
                left //= part.size
                continue
            if part.size % left:
                raise SplitError(f"{part.size} elements do not go into {size}")
            first, rest = _cut(part, left, batch)
            taken.append(first)
            parts.insert(0, rest)
            left = 1
        found.append(taken)
    if parts and found:
        found[-1] += parts
    return tuple(_whole(taken, size) for taken, size in zip(found, shape, strict=True))


def _whole(parts: list[Part], size: int) -> Extent:
    """Merge adjacent parts that do not grow."""
    merged: list[Part] = []
    for part in parts:
        if merged and not part.grows and not merged[-1].grows:
            merged[-1] = Part(merged[-1].size * part.size)
        else:
            merged.append(part)
    return tuple(merged) or (Part(size),)


def _cut(part: Part, outer: int, batch: int) -> tuple[Part, Part]:
    """Split a part into ``outer`` times the rest; in a part that grows, the batch is the outer factor if possible."""
    inner = part.size // outer
    if not part.grows:
        return Part(outer), Part(inner)
    if part.slope * batch != part.size:
        raise SplitError(f"{part.size} is no multiple of the batch, and is split into {outer} x {inner}")
    if outer % batch == 0:
        return Part(outer, Fraction(outer, batch)), Part(inner)
    if inner % batch == 0:
        return Part(outer), Part(inner, Fraction(inner, batch))
    raise SplitError(f"{part.size} is split into {outer} x {inner}, and neither is a multiple of the batch {batch}")


def stride_at(shape: Sequence[int], stride: Sequence[int], resized: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of the same layout for other sizes: same order of dimensions, dense or with the same gaps."""
    found = [0] * len(shape)
    before = after = 1  # elements that the next dimension steps over, before and after resizing
    for place in sorted(range(len(shape)), key=lambda each: (stride[each], shape[each] != 1, -each)):
        if stride[place] == 0:
            continue
        found[place] = stride[place] if before == after else -(-stride[place] * after // before)
        before = max(before, stride[place] * shape[place])
        after = max(after, found[place] * resized[place])
    return tuple(found)
