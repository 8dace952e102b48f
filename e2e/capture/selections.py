"""Operators whose output sizes depend on data, decomposed as on CUDA: ``nonzero`` of a mask, which the host waits for,
then an index.

The number of elements selected by a mask is an assumption (:func:`e2e.capture.meta_results.true_share`: all of them by
default), which a prediction of a script states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
# Calls that indicate an assumed size.
ASSUMED = "aten::nonzero"


@dataclass(frozen=True)
class Selection:
    """Decomposition of an operator. ``applies``: predicate of the arguments for a dependence on data; ``apart``: the
    call by other operators.
    """

    applies: Callable[[Sequence[Any]], bool]
    apart: Callable[..., Any]


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta" and value.dtype in (torch.bool, torch.uint8)


def _has_mask(args: Sequence[Any]) -> bool:
    return any(_is_mask(index) for index in args[1])


def _without_masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace every mask by the indices that it selects, one tensor for each of its dimensions."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        found += aten.nonzero(index).unbind(1) if _is_mask(index) else [index]  # type: ignore[union-attr]
    return found


def _index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    return aten.index.Tensor(tensor, _without_masks(indices))


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> Any:
    tensor, mask = torch.broadcast_tensors(tensor, mask)
    return aten.index.Tensor(tensor, _without_masks([mask]))


def _unique(tensor: torch.Tensor, ordered: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    """Decompose ``unique``: sort, comparison with the neighbour, selection; the inverse also takes a running sum and a
    scatter.
    """
    values, places = aten.sort.default(tensor.reshape(-1))
    chosen = aten.nonzero(aten.ne.Tensor(values, values)).unbind(1)
    unique = aten.index.Tensor(values, list(chosen))
    back = aten.scatter.src(places, 0, places, aten.cumsum(places, 0)) if inverse else places.new_empty(0)
    number = aten.diff(chosen[0]) if counts else places.new_empty(0)
    return unique, back.reshape(tensor.shape) if inverse else back, number


def _unique_consecutive(tensor: torch.Tensor, inverse: bool = False, counts: bool = False, dim: Any = None) -> Any:
    """Decompose ``unique_consecutive``: as ``unique`` without the sort."""
    values = tensor.reshape(-1)
    chosen = aten.nonzero(aten.ne.Tensor(values, values)).unbind(1)
    unique = aten.index.Tensor(values, list(chosen))
    places = torch.empty(0, dtype=torch.int64, device=tensor.device)
    back = aten.cumsum(chosen[0], 0).reshape(tensor.shape) if inverse else places
    return unique, back, aten.diff(chosen[0]) if counts else places


SELECTIONS: dict[Any, Selection] = {
    aten.index.Tensor: Selection(_has_mask, _index),
    aten.masked_select.default: Selection(lambda args: _is_mask(args[1]), _masked_select),
    aten._unique2.default: Selection(lambda args: args[0].device.type == "meta", _unique),
    aten.unique_consecutive.default: Selection(lambda args: args[0].device.type == "meta", _unique_consecutive),
}
