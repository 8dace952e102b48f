"""Sizes of tensors as functions of the batch: a dimension is a product of parts, each fixed or growing with the batch.

A view that joins the batch with the tokens of a sequence keeps both parts in their order, so that a later view takes
them apart as they were put together, whatever other sizes happen to be as large as the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod


@dataclass(frozen=True, slots=True)
class Part:
    """A factor of a dimension: ``size`` now, ``slope`` more for every further sample of the batch."""

    size: int
    slope: Fraction = Fraction(0)

    @property
    def grows(self) -> bool:
        """Whether it depends on the batch."""
        return self.slope != 0

    def at(self, more: int) -> int:
        """Its size with so many samples ``more``; one at least."""
        return max(round(self.size + self.slope * more), 1) if self.size else 0


Extent = tuple[Part, ...]
Extents = tuple[Extent, ...]


class SplitError(ValueError):
    """A dimension that holds the batch is cut where it is not said which part the batch is."""


def fixed(sizes: Iterable[int]) -> Extents:
    """Dimensions that do not depend on the batch."""
    return tuple((Part(size),) for size in sizes)


def proportional(size: int, batch: int) -> Extent:
    """A dimension that is a multiple of the batch, or as many more by one (offsets of bags)."""
    remainder = 1 if size % batch and (size - 1) % batch == 0 else 0
    return (Part(size, Fraction(size - remainder, batch)),)


def grows(extent: Extent) -> bool:
    """Whether the dimension depends on the batch."""
    return any(part.grows for part in extent)


def any_grows(extents: Extents) -> bool:
    """Whether any dimension depends on the batch."""
    return any(grows(extent) for extent in extents)


def size_at(extent: Extent, more: int) -> int:
    """The dimension with so many samples ``more``."""
    return prod(part.at(more) for part in extent)


def joined(extents: Sequence[Extent]) -> Extent:
    """Of ``extents`` side by side along one dimension: ``cat``."""
    parts = [part for extent in extents for part in extent]
    if not any(part.grows for part in parts):
        return (Part(sum(prod(part.size for part in extent) for extent in extents)),)
    if len(extents) == 1:
        return extents[0]
    size = sum(prod(part.size for part in extent) for extent in extents)
    return (Part(size, sum((_slope(extent) for extent in extents), Fraction(0))),)


def _slope(extent: Extent) -> Fraction:
    """Of a dimension as one part; exact for products with one part that grows."""
    whole = prod(part.size for part in extent)
    return sum((part.slope * Fraction(whole, part.size) for part in extent if part.size), Fraction(0))


def share(extent: Extent, size: int) -> Extent:
    """A piece of ``size`` of the dimension: as much of the batch as it has of the size."""
    whole = prod(part.size for part in extent)
    if size == whole or not grows(extent):
        return extent if size == whole else (Part(size),)
    if whole % size and _slope(extent) * size % whole:
        raise SplitError(f"a piece of {size} is cut from {whole}")
    return (Part(size, _slope(extent) * Fraction(size, whole)),)


def reshaped(extents: Extents, shape: Sequence[int], batch: int) -> Extents:
    """The same elements, row by row, in another ``shape``; :class:`SplitError` where the batch is cut in two."""
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
    """Neighbours that do not grow are one."""
    merged: list[Part] = []
    for part in parts:
        if merged and not part.grows and not merged[-1].grows:
            merged[-1] = Part(merged[-1].size * part.size)
        else:
            merged.append(part)
    return tuple(merged) or (Part(size),)


def _cut(part: Part, outer: int, batch: int) -> tuple[Part, Part]:
    """``outer`` times the rest. Of a part that grows the batch is the outer factor, where it can be."""
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
    """Strides of the same layout for other sizes: dimensions lie in the same order, as dense or with the same gaps."""
    found = [0] * len(shape)
    before = after = 1  # of the elements that the next dimension steps over, now and resized
    for place in sorted(range(len(shape)), key=lambda each: (stride[each], shape[each] != 1, -each)):
        if stride[place] == 0:
            continue
        found[place] = stride[place] if before == after else -(-stride[place] * after // before)
        before = max(before, stride[place] * shape[place])
        after = max(after, found[place] * resized[place])
    return tuple(found)
