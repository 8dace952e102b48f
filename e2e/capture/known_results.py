"""Cache of the results of operators without data, which depend only on shapes: each distinct call is computed once per
capture.

Identical layers repeat the same calls, and PyTorch computes shapes in Python. Only calls that create all of their
results are cached, and only if a new tensor of the same shape and strides is the same in every respect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from e2e.capture.meta_results import run

# (shape, stride, dtype) of each result, and True if the operator returns one tensor, not a tuple of them.
_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_Results = tuple[tuple[_Layout, ...], bool]


class _UnfitError(Exception):
    """Raised for an argument that cannot be part of a cache key."""


class KnownResults:
    """Cached execution of operators on tensors without data; ``hits`` counts the calls that were not computed again."""

    def __init__(self) -> None:
        self.hits = 0
        self._known: dict[Any, _Results | None] = {}
        self._pure: dict[Any, bool] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run ``func`` as :func:`e2e.capture.meta_results.run` does."""
        if not self._makes_results(func):
            return run(func, args, kwargs)
        try:
            key = (func, _signature(args), _signature(tuple(kwargs.items())) if kwargs else ())
        except _UnfitError:
            return run(func, args, kwargs)
        if key in self._known:
            known = self._known[key]
            if known is not None:
                self.hits += 1
                return _new_tensors(known)
            return run(func, args, kwargs)
        result = run(func, args, kwargs)
        self._known[key] = _results(result, (*args, *kwargs.values()))
        return result

    def _makes_results(self, func: Any) -> bool:
        """True if, by its schema, the operator writes nothing and returns no view."""
        known = self._pure.get(func)
        if known is None:
            schema = func._schema
            values = (*schema.arguments, *schema.returns)
            known = func.namespace == "aten" and bool(schema.returns) and all(v.alias_info is None for v in values)
            # Results that depend on values, or on the settings of the session, are excluded.
            known = known and torch.Tag.data_dependent_output not in func.tags
            self._pure[func] = known = known and torch.Tag.dynamic_output_shape not in func.tags
        return known


def _signature(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key of all arguments that results depend on; types are included, since 1, 1.0 and ``True`` are equal."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(_of_tensor(value))
        elif isinstance(value, (tuple, list)):
            found.append(_signature(value))
        elif value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            found.append((type(value), value))
        elif isinstance(value, (torch.memory_format, torch.layout)):
            found.append(value)
        else:
            raise _UnfitError
    return tuple(found)


def _of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if not plain or tensor.device.type != "meta" or tensor.layout is not torch.strided or tensor.is_complex():
        raise _UnfitError
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _results(result: Any, arguments: Sequence[Any]) -> _Results | None:
    """Return the layout of ``result``; None if one of its tensors is not new, dense and with its own storage."""
    alone = isinstance(result, torch.Tensor)
    found = (result,) if alone else tuple(result) if isinstance(result, tuple) else ()
    if not found or not all(isinstance(tensor, torch.Tensor) and _is_plain(tensor) for tensor in found):
        return None
    memory = [tensor.untyped_storage()._cdata for tensor in (*found, *_tensors(arguments))]
    if len(set(memory[: len(found)])) < len(found) or set(memory[: len(found)]) & set(memory[len(found) :]):
        return None
    known = tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in found), alone
    made = _new_tensors(known)
    alike = all(
        first.untyped_storage().nbytes() == second.untyped_storage().nbytes() and not vars(first)
        for first, second in zip(found, (made,) if alone else made, strict=True)
    )
    return known if alike else None


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.device.type == "meta" and tensor.layout is torch.strided


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found


def _new_tensors(known: _Results) -> Any:
    layouts, alone = known
    made = tuple(torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in layouts)
    return made[0] if alone else made
