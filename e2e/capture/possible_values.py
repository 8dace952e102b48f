"""What elements of tensors can be where the data is not known: how many of them a mask can find.

Detectors label boxes by comparison with data, draw a sample of at most so many positive and negative ones, and later
select "all positive ones" of the sample. Each of these selections could find everything, but not both of them. So a
tensor may have *contents*: groups of at most so many elements, in no order, each within bounds (:class:`Some`). A
comparison with a number finds those groups that can fulfil it. What ``nonzero`` returns for a mask remembers which
tensor was compared and its groups there, so ``labels[places]`` has these contents. ``cat``, samples of places and
writes of a number at some places change the groups; any other write, which the tensor's counter of writes shows, makes
the tensor unknown again.

A comparison that may be true or false is taken as true everywhere, or for the share of :func:`true_share`. Whole
numbers in known bounds, such as the level of each box or the expert of each token, are taken as equally frequent
instead.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from e2e.capture.known_values import LIMIT, known, version_of

aten = torch.ops.aten

_SHARE: ContextVar[float] = ContextVar("share of elements that are true", default=1.0)
_CERTAIN: ContextVar[bool] = ContextVar("masks are true everywhere", default=False)
_FACTS = "_possible_values"
# Groups of one tensor; more are joined to one.
_GROUPS = 12


@contextmanager
def true_share(share: float) -> Iterator[None]:
    """Context in which a comparison of unknown values is true for this fraction of the elements."""
    token = _SHARE.set(share)
    try:
        yield
    finally:
        _SHARE.reset(token)


@contextmanager
def all_true() -> Iterator[None]:
    """Context in which masks are known to be true everywhere."""
    token = _CERTAIN.set(True)
    try:
        yield
    finally:
        _CERTAIN.reset(token)


def is_certain() -> bool:
    """True inside :func:`all_true`."""
    return _CERTAIN.get()


@dataclass(frozen=True)
class Bounds:
    """Numbers from ``low`` to ``high``, both included, less those in ``without``."""

    low: float = -math.inf
    high: float = math.inf
    without: frozenset[float] = frozenset()

    def both(self, other: Bounds) -> Bounds | None:
        """Return the numbers within both; None if there are none."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        without = frozenset(each for each in self.without | other.without if low <= each <= high)
        return None if low > high or (low == high and without) else Bounds(low, high, without)

    def shifted(self, by: float) -> Bounds:
        return Bounds(self.low + by, self.high + by, frozenset(each + by for each in self.without))

    def whole_numbers(self) -> int:
        """Return how many whole numbers are within finite bounds."""
        return max(math.floor(self.high) - math.ceil(self.low) + 1 - len(self.without), 1)

    def all_in(self, other: Bounds) -> bool:
        """True if all these numbers are within ``other``."""
        inside = other.low <= self.low and self.high <= other.high
        return inside and all(self.both(Bounds(each, each)) is None for each in other.without)


@dataclass(frozen=True)
class Some:
    """At most ``most`` elements with values within ``bounds``. ``group``: place of their group in the contents of the
    compared tensor, if a comparison found them; else -1.
    """

    most: int
    bounds: Bounds = Bounds()
    group: int = -1


Groups = tuple[Some, ...]


@dataclass(frozen=True)
class Facts:
    """What is known of a tensor at its ``version``. ``contents``: groups that all its elements belong to, or None;
    ``found``, of a mask or of a list of places: the groups of ``source`` (at its version ``at``) that it selects;
    ``source`` is None if they are of no single tensor. ``possible``: a mask on the CPU that is true where this mask may
    be true.
    """

    version: int
    contents: Groups | None = None
    found: Groups | None = None
    source: Callable[[], torch.Tensor | None] | None = field(default=None, repr=False)
    at: int = 0
    possible: torch.Tensor | None = field(default=None, repr=False)
    # As many elements are found as ``found`` says, such as one for each index of a scatter.
    exact: bool = False


def facts(tensor: torch.Tensor) -> Facts | None:
    """Return what is known of ``tensor`` now."""
    held: Facts | None = getattr(tensor, _FACTS, None)
    return held if held is not None and held.version == version_of(tensor) else None


def most_true(mask: torch.Tensor) -> int:
    """Return how many elements of ``mask`` are true, or differ from zero: all that can, or a share of these."""
    values = known(mask)
    if values is not None:
        return int(values.count_nonzero())
    if is_certain():
        return mask.numel()
    held = facts(mask)
    found = held.found if held is not None and _is_mask(mask) else None
    if found is None:
        found = _compared(_contents(mask), _others(0))
    return min(_sum(found), mask.numel())


def true_for_certain(mask: torch.Tensor) -> int | None:
    """Return how many elements of ``mask`` are true, if that is known though not which."""
    held = facts(mask) if _is_mask(mask) and known(mask) is None else None
    return _sum(held.found) if held is not None and held.exact and held.found is not None else None


def note(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Note what is known of ``result``, returned by ``func`` on tensors without data, and of what it wrote."""
    rule = _RULES.get(func)
    if rule is None:
        return
    rest = func._schema.arguments[len(args) :]
    args = (*args, *(kwargs.get(each.name, each.default_value) for each in rest))
    for tensor, found in rule(func, args, result):
        # A view shares its counter of writes with what it views, a write is counted at the end of its call.
        counted = version_of(args[0] if func.is_view else tensor)
        if found is not None and counted is not None and tensor.device.type == "meta":
            setattr(tensor, _FACTS, replace(found, version=counted + func._schema.is_mutable))


_Noted = Iterator[tuple[torch.Tensor, Facts | None]]


def _contents(tensor: torch.Tensor) -> Groups:
    held = facts(tensor)
    if held is not None and held.contents is not None:
        return held.contents
    values = known(tensor)
    if values is None or not values.numel() or values.is_complex():
        return (Some(tensor.numel()),)
    found, counts = values.unique(return_counts=True)
    if len(found) > _GROUPS:
        return (Some(values.numel(), Bounds(found[0].item(), found[-1].item())),)
    return tuple(Some(most, Bounds(value, value)) for value, most in zip(found.tolist(), counts.tolist(), strict=True))


def _of_value(value: Any, elements: int) -> Groups:
    """Return the contents of ``elements`` elements that are written with ``value``, a number or a tensor."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            return tuple(Some(elements if value.numel() == 1 else each.most, each.bounds) for each in _contents(value))
        value = value.item()
    if not isinstance(value, (bool, int, float)) or math.isnan(value):
        return (Some(elements),)
    return (Some(elements, Bounds(value, value)),)


def _compared(groups: Groups, wanted: Bounds, whole: bool = False) -> Groups:
    """Return the elements of ``groups`` that are ``wanted``: all, none or, where both are possible, a share; ``whole``:
    they are whole numbers, of which each that is possible is taken to be as frequent.
    """
    found = ((place, each, each.bounds.both(wanted)) for place, each in enumerate(groups))
    return tuple(
        Some(math.ceil(each.most * _share(each.bounds, both, wanted, whole)), both, place)
        for place, each, both in found
        if both is not None
    )


def _share(bounds: Bounds, both: Bounds, wanted: Bounds, whole: bool) -> float:
    """Return the share of elements within ``bounds`` that are within ``both``, of a comparison for ``wanted``."""
    if bounds.all_in(wanted):
        return 1.0
    if whole and math.isfinite(bounds.high - bounds.low):
        return min(both.whole_numbers() / bounds.whole_numbers(), 1.0)
    return _SHARE.get()


def _joined(*groups: Groups) -> Groups:
    """Return the groups together, those with equal bounds as one."""
    counts: dict[tuple[Bounds, int], int] = {}
    for each in (each for some in groups for each in some if each.most):
        counts[each.bounds, each.group] = counts.get((each.bounds, each.group), 0) + each.most
    if len(counts) > _GROUPS:
        return (Some(sum(counts.values()), _around(bounds for bounds, _ in counts)),)
    return tuple(Some(most, bounds, group) for (bounds, group), most in counts.items())


def _around(several: Iterable[Bounds]) -> Bounds:
    """Return the closest bounds around ``several``."""
    several = list(several)
    without = {each for bounds in several for each in bounds.without}
    outside = (each for each in without if all(bounds.both(Bounds(each, each)) is None for bounds in several))
    whole = Bounds(min(bounds.low for bounds in several), max(bounds.high for bounds in several))
    return whole.both(Bounds(without=frozenset(outside))) or whole


def _capped(groups: Groups, most: int) -> Groups:
    return tuple(each if each.most <= most else replace(each, most=most) for each in groups)


def _cut(bounds: Bounds) -> Bounds:
    """Return the bounds of numbers that may have been cut to whole ones."""
    low, high = (math.trunc(each) if math.isfinite(each) else each for each in (bounds.low, bounds.high))
    whole = frozenset() if low < bounds.low or bounds.high < high else bounds.without
    return Bounds(low, high, whole)


def _in_proportion(groups: Groups | None, part: torch.Tensor, whole: torch.Tensor) -> Groups | None:
    """Return the groups of some elements of a tensor; of none is more drawn than of another."""
    if groups is None or part.numel() == whole.numel():
        return groups
    factor = part.numel() / max(whole.numel(), 1)
    return tuple(replace(each, most=math.ceil(each.most * factor)) for each in groups)


def _sum(groups: Groups) -> int:
    return sum(each.most for each in groups)


def _mask(tensor: torch.Tensor) -> Facts | None:
    """Return what is known of a mask if it says how many elements are true."""
    values = known(tensor)
    if values is not None:
        return Facts(0, found=(Some(int(values.count_nonzero())),), possible=values != 0)
    held = facts(tensor)
    return held if held is not None and held.found is not None else None


def _same_source(first: Facts, second: Facts) -> bool:
    if first.source is None or second.source is None:
        return False
    return first.source() is second.source() is not None and first.at == second.at


def _compare(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Find elements by comparison with a number. Of real numbers compared with fewer others, such as their maxima, one
    is equal to each.
    """
    tensor, other = args[:2]
    if not isinstance(tensor, torch.Tensor):
        return
    if isinstance(other, torch.Tensor):
        if other.numel() > 1 and func is aten.eq.Tensor and tensor.is_floating_point():
            fewer = min(tensor.numel(), other.numel())
            if fewer < result.numel():
                yield result, Facts(0, found=(Some(fewer),))
        return
    version = version_of(tensor)
    if version is not None and not math.isnan(other):
        found = _compared(_contents(tensor), _WANTED[func](other), _is_whole(tensor))
        yield result, Facts(0, found=found, source=weakref.ref(tensor), at=version)


def _both(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Join two masks by "and": as many as the smaller one, of a common source only what both can find."""
    held = [_mask(each) for each in args[:2] if isinstance(each, torch.Tensor)]
    masks = [each for each in held if each is not None]
    if not masks or not _is_mask(result):
        return
    least = min(masks, key=lambda each: _sum(each.found or ()))
    found = least.found or ()
    if len(masks) == 2 and _same_source(*masks):
        pairs = product(*(each.found or () for each in masks))
        both = ((one, two, one.bounds.both(two.bounds)) for one, two in pairs if one.group == two.group)
        found = tuple(Some(min(one.most, two.most), each, one.group) for one, two, each in both if each is not None)
    possible = [each.possible for each in masks if each.possible is not None]
    where = _broadcast(possible, result.shape)
    if where is not None:
        found = _capped(found, int(where.count_nonzero()))
    yield result, replace(least, found=found, possible=where)


def _broadcast(masks: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor | None:
    """Return where all of ``masks`` are true, in the shape of a result."""
    if not masks or shape.numel() > LIMIT:
        return None
    return torch.stack([mask.expand(shape) for mask in masks]).all(0)


def _any(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Find rows of a mask that can be true somewhere."""
    held = _mask(args[0])
    if held is not None and held.possible is not None:
        where = held.possible.any(*args[1:])
        yield result, Facts(0, found=(Some(int(where.count_nonzero())),), possible=where)


def _either(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Join two masks by "or"."""
    yield from _together(func, (args[:2],), result)


def _together(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Join masks, places or contents of several tensors."""
    tensors = [each for each in args[0] if isinstance(each, torch.Tensor)]
    held = [_mask(each) if _is_mask(result) else facts(each) for each in tensors]
    contents = None
    if func in _LISTS and any(each is not None and each.contents is not None for each in held):
        contents = _joined(*(_contents(each) for each in tensors))
    # Places in a list of several are others than in one of them; a list of places is of the same tensor still.
    moved = func in _LISTS and _is_mask(result)
    found, first = None, next((each for each in held if each is not None and each.found), None)
    if len(held) == len(args[0]) and all(each is not None and each.found is not None for each in held):
        found = _joined(*(each.found or () for each in held if each is not None))
    one = first is not None and all(each is not None and (not each.found or _same_source(each, first)) for each in held)
    if contents is not None or found is not None:
        source, at = (first.source, first.at) if one and first is not None and not moved else (None, 0)
        yield result, Facts(0, contents, found, source, at)


def _same(func: Any, args: Sequence[Any], result: Any) -> _Noted:
    """Keep what is known of all elements, in another shape or type, or of a part of them."""
    tensor = args[0]
    held, version = facts(tensor), version_of(tensor)
    if held is None:
        return
    for each in result if isinstance(result, (tuple, list)) else (result,):
        if each.dtype is torch.bool and tensor.dtype is not torch.bool and held.found is None and version is not None:
            found = _compared(_contents(tensor), _others(0))
            exact = held.exact and each.numel() == tensor.numel()
            yield each, Facts(0, found=found, source=weakref.ref(tensor), at=version, exact=exact)
        else:
            yield each, _part(held, tensor, each)


def _part(held: Facts, tensor: torch.Tensor, part: torch.Tensor) -> Facts:
    """Return what is known of ``part``, elements of ``tensor`` of which ``held`` is."""
    contents = held.contents
    if contents is not None and part.dtype is not tensor.dtype:
        contents = None if part.dtype is torch.bool else tuple(Some(each.most, _cut(each.bounds)) for each in contents)
    contents, found = (_in_proportion(groups, part, tensor) for groups in (contents, held.found))
    moved = _is_mask(tensor) and part.numel() != tensor.numel()
    if found is not None and _is_mask(tensor) and not _is_mask(part):
        contents = (Some(_sum(found), Bounds(1, 1)), Some(part.numel(), Bounds(0, 0)))
        return Facts(0, contents)
    where = held.possible if part.shape == tensor.shape else None
    source, exact = None if moved else held.source, held.exact and part.numel() == tensor.numel()
    return replace(held, contents=contents, found=found, source=source, possible=where, exact=exact)


def _places(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Note for the places found of a mask what the compared tensor has there."""
    mask = args[0]
    held, version = facts(mask), version_of(mask)
    if mask.dim() != 1 or version is None:
        return
    if held is None or held.found is None:
        held = Facts(0, found=_compared(_contents(mask), _others(0)), source=weakref.ref(mask), at=version)
    found, rows = held.found or (), result.shape[0]
    if _sum(found) > rows:  # some of these groups are smaller than they could be
        found = (Some(rows, _around(each.bounds for each in found)),)
    yield result, Facts(0, found=found, source=held.source, at=held.at)


def _gather(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Note what the gathered elements of a list can be."""
    tensor, indices = args[:2]
    index = indices[0] if isinstance(indices, (tuple, list)) else args[-1]
    if tensor.dim() != 1 or not isinstance(index, torch.Tensor):
        return
    held, places = facts(tensor), facts(index)
    part = Facts(0) if held is None else _part(held, tensor, result)
    if (
        places is not None
        and places.source is not None
        and places.source() is tensor
        and places.at == version_of(tensor)
    ):
        part = replace(part, contents=places.found)
    elif held is None and known(tensor) is not None:
        part = _part(Facts(0, contents=_contents(tensor)), tensor, result)
    if _is_mask(tensor):
        part = replace(part, source=None)
    if part.contents is not None or part.found is not None:
        yield result, part


def _ordered(func: Any, args: Sequence[Any], result: Any) -> _Noted:
    """Note that numbers of places are below the size of the dimension."""
    tensor, dim = args[0], args[_DIMENSIONS[func]]
    size = tensor.numel() if dim is None else tensor.shape[dim] if tensor.dim() else 1
    order = result[1] if isinstance(result, tuple) else result
    yield order, Facts(0, (Some(order.numel(), Bounds(0, max(size - 1, 0))),))


def _clamped(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    ends = {aten.clamp_min.default: (args[1], None), aten.clamp_max.default: (None, args[1])}.get(func, args[1:3])
    if all(each is None or isinstance(each, (int, float)) for each in ends):
        low, high = (
            default if each is None else each for each, default in zip(ends, (-math.inf, math.inf), strict=True)
        )
        yield result, Facts(0, (Some(result.numel(), Bounds(low, high)),))


def _shifted(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Note the contents of a tensor plus or minus a number."""
    tensor, number, factor = args
    held = facts(tensor) if isinstance(tensor, torch.Tensor) else None
    if held is None or held.contents is None or not isinstance(number, (int, float)):
        return
    by = factor * (number if func is aten.add.Tensor else -number)
    yield result, Facts(0, tuple(Some(each.most, each.bounds.shifted(by)) for each in held.contents))


def _filled(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Note the contents of a tensor that has one value, and what a write of it leaves in the tensor that it views."""
    value = _FILLS[func]
    number = args[value] if isinstance(value, int) else value[0]
    contents = _of_value(number, result.numel())
    nothing = _is_mask(result) and contents == (Some(result.numel(), Bounds(0, 0)),)
    yield result, Facts(0, contents, found=() if nothing else None)
    if func._schema.is_mutable:
        yield from _viewed(result, contents)


def _copied(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Note the contents of a tensor written as a whole with those of another."""
    contents = _of_value(args[1], result.numel())
    if contents != (Some(result.numel()),):
        yield result, Facts(0, contents)
    yield from _viewed(result, contents)


def _viewed(view: torch.Tensor, written: Groups) -> _Noted:
    """Note what a tensor can have after the view of a part of it was written."""
    base = view._base
    if base is not None and base.numel() > view.numel():
        held = facts(base)
        if held is not None and held.contents is not None:
            yield base, Facts(0, _joined(held.contents, written))


def _written(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Note the contents of a tensor, and the places found by a mask, after a value was written at some places."""
    tensor = args[0]
    mask: torch.Tensor | None = None
    if func is aten.index_put_.default:
        indices, value = args[1:3]
        if not indices or any(index is None for index in indices):
            return
        if len(indices) == 1 and _is_mask(indices[0]):
            mask = indices[0]
            elements = tensor.numel() if mask.dim() < tensor.dim() else most_true(mask)
        else:
            number = torch.broadcast_shapes(*(index.shape for index in indices)).numel()
            elements = number * math.prod(tensor.shape[len(indices) :])
    elif func in (aten.masked_fill_.Scalar, aten.masked_fill_.Tensor):
        mask, value = args[1:3]
        indices, elements = (), most_true(mask) if mask.shape == tensor.shape else tensor.numel()
    else:
        indices, value = (args[2],), args[3]
        elements = args[2].numel() if tensor.dim() == 1 or func not in _ROWS else tensor.numel()
    held = facts(tensor)
    contents = _of_value(value, min(elements, tensor.numel()))
    found, source, at = None, None, 0
    if held is not None and held.found is not None and mask is None and _is_mask(tensor):
        places = facts(indices[0]) if len(indices) == 1 else None
        if (
            places is not None
            and places.found is not None
            and places.source is not None
            and (not held.found or _same_source(held, places))
        ):
            found, source, at = _joined(held.found, _capped(places.found, elements)), places.source, places.at
        else:
            found = _joined(held.found, (Some(elements),))
    yield tensor, Facts(0, _joined(_contents(tensor), contents), found, source, at)
    yield from _viewed(tensor, contents)


def _scattered(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Note the contents of zeros with a value at places, such as ones for the experts of each token, all of which are
    others.
    """
    tensor, _, index, value = args[:4]
    held = facts(tensor)
    contents = _joined(_contents(tensor), _of_value(value, index.numel()))
    zeros = held is not None and held.contents == (Some(tensor.numel(), Bounds(0, 0)),)
    yield result, Facts(0, contents, exact=zeros and isinstance(value, (int, float)) and value != 0)


def _chosen(func: Any, args: Sequence[Any], result: torch.Tensor) -> _Noted:
    """Note the contents of ``torch.where(mask, first, second)``."""
    parts = [_of_value(each, result.numel()) for each in args[1:3]]
    yield result, Facts(0, _joined(*parts))


def _is_mask(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.bool, torch.uint8)


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool


def _others(value: float) -> Bounds:
    return Bounds(without=frozenset({value}))


# Comparison with a number -> what fulfils it. Bounds are part of it, so "below" ends at the next number.
_WANTED: dict[Any, Callable[[float], Bounds]] = {
    aten.eq.Scalar: lambda value: Bounds(value, value),
    aten.ne.Scalar: _others,
    aten.lt.Scalar: lambda value: Bounds(high=math.nextafter(value, -math.inf)),
    aten.le.Scalar: lambda value: Bounds(high=value),
    aten.gt.Scalar: lambda value: Bounds(low=math.nextafter(value, math.inf)),
    aten.ge.Scalar: lambda value: Bounds(low=value),
}
_LISTS = frozenset({aten.cat.default, aten.stack.default})
# Writes at an index that may name whole rows.
_ROWS = frozenset({aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor})
# Operator that fills a tensor -> place of its argument with the value, or the value.
_FILLS: dict[Any, int | tuple[float]] = {
    aten.zeros.default: (0,),
    aten.zeros_like.default: (0,),
    aten.new_zeros.default: (0,),
    aten.zero_.default: (0,),
    aten.ones.default: (1,),
    aten.ones_like.default: (1,),
    aten.new_ones.default: (1,),
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.fill_.Scalar: 1,
    aten.fill_.Tensor: 1,
}
# Place of the argument that names the dimension of which places are numbered.
_DIMENSIONS = {
    aten.topk.default: 2,
    aten.sort.default: 1,
    aten.sort.stable: 2,
    aten.argsort.default: 1,
    aten.argmax.default: 1,
    aten.argmin.default: 1,
    aten.max.dim: 1,
    aten.min.dim: 1,
}
_RULES: dict[Any, Callable[[Any, Sequence[Any], Any], _Noted]] = {
    **dict.fromkeys(_WANTED, _compare),
    aten.eq.Tensor: _compare,
    **dict.fromkeys(_FILLS, _filled),
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), _both),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), _either),
    **dict.fromkeys(_LISTS, _together),
    **dict.fromkeys((aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default), _same),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default), _same),
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.t.default), _same),
    **dict.fromkeys((aten.select.int, aten.slice.Tensor, aten.unbind.int, aten.split.Tensor), _same),
    **dict.fromkeys((aten.split_with_sizes.default, aten.permute.default, aten.transpose.int), _same),
    aten.nonzero.default: _places,
    **dict.fromkeys(_DIMENSIONS, _ordered),
    **dict.fromkeys((aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default), _clamped),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), _shifted),
    **dict.fromkeys((aten.index.Tensor, aten.index_select.default), _gather),
    aten.copy_.default: _copied,
    **dict.fromkeys((aten.index_put_.default, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor), _written),
    **dict.fromkeys((aten.scatter_.value, aten.scatter_.src, *_ROWS), _written),
    **dict.fromkeys((aten.scatter.value, aten.scatter.src), _scattered),
    aten.where.self: _chosen,
    aten.any.dim: _any,
}  # fmt: skip
