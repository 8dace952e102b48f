"""Known values of small tensors written by the script itself: sizes, masks of ones, positions, flags.

A capture has no data, but ``torch.tensor([[1, 16, 16]])`` or ``torch.ones(2, 128)`` on the GPU is known all the same,
and so is everything computed from such tensors alone. A CPU copy of the values is attached to the meta tensor, so that
``.item()``, ``.tolist()``, a boolean mask or the end of a loop follows from it as on a GPU. A tensor written with
unknown values, or through a view, is no longer known (detected by its version counter).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten
# Largest tensor with known values: a mask of 64 sequences of 4,096 tokens, or of the blocks of one of 65,536. Values of
# larger ones never decide sizes.
LIMIT = 1 << 18
_PLACE = "_known_values"


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of ``tensor`` on the CPU, or None if they are not known."""
    held = getattr(tensor, _PLACE, None)
    if held is None:
        return None
    values, version = held
    return values if version == version_of(tensor) else None


def know(tensor: torch.Tensor, values: torch.Tensor, viewed: torch.Tensor | None = None) -> None:
    """Set the known values of ``tensor``, valid until it is written; ``viewed``: the tensor of which it will be a view,
    whose counter of writes it then shares.
    """
    version = version_of(tensor if viewed is None else viewed)
    if version is not None and tensor.device.type == "meta" and values.numel() <= LIMIT:
        setattr(tensor, _PLACE, (values, version))


def follow(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Note the values of ``result``, returned by ``func`` on tensors without data, as far as they are known."""
    if isinstance(result, torch.Tensor):
        if result.device.type != "meta" or result.numel() > LIMIT or result.layout is not torch.strided:
            return
    elif not isinstance(result, (tuple, list)):
        return
    if func._schema.is_mutable:
        _write(func, args, kwargs, result)
        return
    if func in _SELF_COMPARED and args[0] is args[1] and args[0].dim() == 0:  # as in `loss != loss`, true of NaN only
        know(result, torch.full(result.shape, func is aten.eq.Tensor, dtype=torch.bool, device="cpu"))
        return
    if func in _COMPARED and isinstance(args[1], float) and math.isnan(args[1]):
        know(result, torch.full(result.shape, func is aten.ne.Scalar, dtype=torch.bool, device="cpu"))
        return
    if func in _COPIES and getattr(args[0], "_any_of", False):
        result._any_of = True  # type: ignore[union-attr]
    if func in _NOTHING_FOUND:
        if not _follows(func, args, kwargs, result):
            know(result, torch.zeros(result.shape, dtype=torch.bool, device="cpu"))
        return
    if func in _WHOLE_NUMBERS:
        # Random integers within bounds belong to the script, such as token ids: any draw will do.
        bounds = args if func is aten.randint.low else (0, *args)
        generator = torch.Generator(device="cpu").manual_seed(0)
        know(result, aten.randint.low_generator(*bounds, generator=generator, dtype=result.dtype, device="cpu"))
        return
    if func in _FILLED:
        _fill(func, args, result)
        return
    if _follows(func, args, kwargs, result):
        return
    if func is aten.index.Tensor:
        _draw(args[0], args[1], result)
    if func in _DECIDED_BY:
        decisive = _DECIDED_BY[func]
        for argument in args:
            values = known(argument) if isinstance(argument, torch.Tensor) else None
            if values is not None and values.dtype is torch.bool and bool((values == decisive).all()):
                know(result, torch.full(result.shape, decisive, dtype=torch.bool, device="cpu"))


def _follows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Compute the result on the CPU if all inputs are known; return False otherwise."""
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
        return False
    found: list[bool] = []
    values = [_on_cpu(argument, found) for argument in args]
    named = {name: _on_cpu(argument, found) for name, argument in kwargs.items()}
    if not all(found) or not (found or func in _FACTORIES):
        return False
    if kwargs.get("device") is not None:
        named["device"] = torch.device("cpu")
    elif func in _FACTORIES:
        return False
    try:
        computed = func(*values, **named)
    except (RuntimeError, NotImplementedError):  # no CPU kernel
        return False
    viewed = args[0] if func.is_view else None
    for tensor, value in zip(_listed(result), _listed(computed), strict=False):
        if isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor) and tensor.shape == value.shape:
            know(tensor, value, viewed)
    return True


def _write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Keep a tensor known if it is written as a whole with known values; tensors that share its memory are no longer
    known.
    """
    if not args or result is not args[0] or torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
        return
    found: list[bool] = []
    values = [_on_cpu(argument, found) for argument in args]
    named = {name: _on_cpu(argument, found) for name, argument in kwargs.items()}
    version = version_of(result)
    if not found or not all(found) or version is None:
        return
    values[0] = values[0].clone()
    try:
        func(*values, **named)
    except (RuntimeError, NotImplementedError):
        return
    # The counter is incremented at the end of the call.
    setattr(result, _PLACE, (values[0], version + 1))


def _fill(func: Any, args: Sequence[Any], result: torch.Tensor) -> None:
    """Note the values of a result that depends only on the shape of the first argument."""
    value = _FILLED[func]
    if value is None:
        value = args[2] if func is aten.new_full.default else args[1]
    if isinstance(value, (bool, int, float)):
        know(result, torch.full(result.shape, value, dtype=result.dtype, device="cpu"))


def _draw(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], result: torch.Tensor) -> None:
    """Take an unknown index, such as that of each box's object, to name every row of a known list as often."""
    values, index = known(tensor), indices[0]
    if values is None or len(indices) != 1 or index is None or index.dim() != 1 or index.dtype is not torch.int64:
        return
    if tensor.shape[0]:
        know(result, values[torch.arange(index.shape[0], device="cpu") % tensor.shape[0]])


def _on_cpu(argument: Any, found: list[bool]) -> Any:
    """Return ``argument`` with known values in place of tensors; append to ``found`` for every tensor whether it has
    them.
    """
    if isinstance(argument, torch.Tensor):
        values = argument if _is_host_number(argument) else known(argument)
        found.append(values is not None)
        return values
    if isinstance(argument, (tuple, list)):
        return [_on_cpu(item, found) for item in argument]
    return argument


def _is_host_number(tensor: torch.Tensor) -> bool:
    """True for a scalar on the CPU, which has a value, beside tensors of the GPU."""
    return tensor.device.type == "cpu" and tensor.dim() == 0


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often ``tensor`` was written; None in inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def _listed(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else (result,)


# Tests of data that usually find nothing: values are finite, and no generated token ends a sequence.
_NOTHING_FOUND = frozenset(
    {aten.isnan.default, aten.isinf.default, aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor}
)
# Copies of a flag of ``any()``, such as the one that sharded tensors reduce over all ranks.
_COPIES = frozenset({aten.clone.default, aten._to_copy.default, aten.detach.default, aten.view.default})
_SELF_COMPARED = frozenset({aten.eq.Tensor, aten.ne.Tensor})
# Comparisons with a number, which are false of any value where that is NaN, but for ``ne``.
_COMPARED = frozenset(getattr(aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge"))
# Flags that decide alone, whatever the other operand: ``False and`` anything is ``False``.
_DECIDED_BY = {
    aten.bitwise_and.Tensor: False,
    aten.logical_and.default: False,
    aten.bitwise_or.Tensor: True,
    aten.logical_or.default: True,
}
_WHOLE_NUMBERS = frozenset({aten.randint.default, aten.randint.low})
_FACTORIES = frozenset(
    {
        aten.full.default,
        aten.zeros.default,
        aten.ones.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.linspace.default,
        aten.eye.default,
        aten.hann_window.default,
        aten.hann_window.periodic,
        aten.hamming_window.default,
        aten.hamming_window.periodic,
        aten.scalar_tensor.default,
    }
)
# Value written, whatever the content of the first argument; ``None``: given by an argument.
_FILLED: dict[Any, float | None] = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.full_like.default: None,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_full.default: None,
}
