"""Products that compute gradients of weights: separated from those of activations, for zero-bubble schedules (Qi et
al., arXiv 2401.10241), or accumulating in place.

A backward pass is split into two parts that may be computed at different times: the gradients of activations, which the
previous stage waits for, and the products of weight gradients, which are needed only by the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from costmodel.operators.device_work import Elementwise, Gemm
from costmodel.operators.scaled_work import ScaledGemm
from e2e.parallelism.layers.pieces import Item, Name, Part, Pieces, Ready, Work
from e2e.step.execution_graph import HostWork

Product = Gemm | ScaledGemm


def apart(pieces: Pieces, element_bytes: int) -> Pieces:
    """Return ``pieces`` with gradients of weights moved from the backward parts to ``weights`` and, added to those of
    earlier passes, ``added_weights``.

    ``element_bytes``: bytes of a gradient's element.
    """

    def parts(given: Mapping[Name, Part]) -> tuple[dict[Name, Part], dict[Name, Part]]:
        cut = {name: split(part.items, element_bytes) for name, part in given.items()}
        return (
            {name: replace(given[name], items=activations) for name, (activations, _) in cut.items()},
            {name: Part(weights) for name, (_, weights) in cut.items()},
        )

    backward, weights = parts(pieces.backward)
    accumulate, added = parts(pieces.accumulate)
    return replace(pieces, backward=backward, accumulate=accumulate, weights=weights, added_weights=added)


def split(items: Sequence[Item], element_bytes: int) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Split the items of a backward pass: gradients of weights with their dependent items, and all other items
    (returned first).

    The product of a weight's gradient is the last one before the gradient is complete whose output has its size.
    """
    moved: set[int] = set()
    for place, item in enumerate(items):
        if isinstance(item, Ready):
            moved.add(place)
            moved.update(_making(items, place, item.size_bytes // element_bytes, moved))
    weights: list[Item] = []
    for place in sorted(moved):
        item = items[place]
        if isinstance(item, Work):
            weights.append(HostWork("T5", item.call))
        weights.append(item)
    return tuple(item for place, item in enumerate(items) if place not in moved), tuple(weights)


def _making(items: Sequence[Item], ready: int, elements: int, moved: set[int]) -> list[int]:
    """Return the indices of the product of a gradient with ``elements``, and of its addition to the gradient of earlier
    passes.
    """
    added: list[int] = []
    for place in range(ready - 1, -1, -1):
        item = items[place]
        if not isinstance(item, Work) or place in moved or len(item.operators) != 1:
            continue
        operator = item.operators[0]
        if isinstance(operator, Gemm) and operator.batch * operator.m * operator.n == elements:
            return [*added, place]
        if isinstance(operator, Elementwise) and operator.kind == "add" and operator.elements == elements and not added:
            added = [place]
    return []


def added_in_place(pieces: Pieces, element_bytes: int, dtype: str) -> Pieces:
    """Return ``pieces`` whose products add gradients of weights to values of ``dtype``, in every pass, as in
    Megatron-LM (``gradient_accumulation_fusion``).

    ``element_bytes``: bytes of a gradient's element in the capture.
    """
    backward = {
        name: replace(part, items=_accumulating(part.items, element_bytes, dtype))
        for name, part in pieces.backward.items()
    }
    return replace(pieces, backward=backward, accumulate=backward)


def _accumulating(items: Sequence[Item], element_bytes: int, dtype: str) -> tuple[Item, ...]:
    found = list(items)
    taken: set[int | None] = set()
    for place, item in enumerate(items):
        if not isinstance(item, Ready):
            continue
        for each in _products_of(items, place, item.size_bytes // element_bytes, taken):
            work = items[each]
            assert isinstance(work, Work)
            adding = tuple(replace(one, accumulates=dtype) for one in work.operators if isinstance(one, Product))
            found[each] = replace(work, operators=adding)
    return tuple(found)


def _products_of(items: Sequence[Item], ready: int, elements: int, taken: set[int | None]) -> list[int]:
    """Return the indices of the products of the last call before ``ready`` whose outputs have ``elements`` together, as
    those of all experts of a layer; calls in ``taken`` belong to other gradients.
    """
    made: dict[int | None, list[int]] = {}
    sizes: dict[int | None, int] = {}
    for place in range(ready - 1, -1, -1):
        item = items[place]
        if not isinstance(item, Work) or item.call in taken:
            continue
        products = [each for each in item.operators if isinstance(each, Product)]
        if not products or len(products) < len(item.operators):
            continue
        made.setdefault(item.call, []).append(place)
        size = sum(each.m * each.n * (each.batch if isinstance(each, Gemm) else 1) for each in products)
        sizes[item.call] = sizes.get(item.call, 0) + size
        if sizes[item.call] == elements:
            taken.add(item.call)
            return made[item.call]
    return []
