"""Products and attention of Transformer Engine over ranks that share weights, sequences or contexts, and products whose
weight gradients are added up in FP32 (``gradient_accumulation_fusion`` of Megatron-LM). Imports ``torch``.

As there, a column-parallel product under sequence parallelism gathers its input, of which only the rank's own part is
kept and gathered again beside the gradient of the input; a row-parallel one sums its output. In 8 bits the casts are
gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from costmodel.base.errors import ModelError
from e2e.capture.cuda_packages.kernels import OPERATORS, attend
from e2e.capture.distributed.zero import gather, scatter_sums
from e2e.capture.models.layer_forms import Caster

_EIGHT = torch.ops.float8


@dataclass(frozen=True)
class Sharing:
    """How the ranks of ``group`` share a weight: by its rows (``column``) or its columns (``row``), and the
    ``sequence`` too.
    """

    group: Any = None
    way: str | None = None
    sequence: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None or self.way is None else dist.get_world_size(self.group)

    def gathered(self, part: torch.Tensor, wait: bool = True) -> tuple[torch.Tensor, Any]:
        """Return the parts of all ranks along the first dimension, and what to wait for."""
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        work = gather(whole, part.contiguous(), group=self.group, async_op=not wait)
        return whole, work

    def summed(self, given: torch.Tensor, wait: bool = True) -> tuple[torch.Tensor, Any]:
        """Return the sum over the ranks, or the own part of it, and what to wait for."""
        if not self.sequence:
            return given, dist.all_reduce(given, group=self.group, async_op=not wait)
        part = given.new_empty((given.shape[0] // self.size, *given.shape[1:]))
        return part, scatter_sums(part, given.contiguous(), group=self.group, async_op=not wait)


Operands = tuple[torch.Tensor, torch.Tensor]


class Product(torch.autograd.Function):
    """Product of input (..., k) and transposed weight (n, k), with its communication.

    ``operands``: the weight in 8 bits, and transposed (None: 16 bits); ``sums``: values to which its gradient is added;
    ``recasts``: the input is kept as it is, and cast again.
    """

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, weight: torch.Tensor, sharing: Sharing, caster: Caster | None,
        operands: Operands | None, sums: torch.Tensor | None, recasts: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.sharing, ctx.caster, ctx.recasts = sharing, caster, recasts and caster is not None
        ctx.sums, ctx.dtype = sums, weight.dtype
        first, kept, wide, turned = given, given, weight, weight
        if caster is not None and operands is not None:
            first, second = caster.activations(given)
            kept, (wide, turned) = first if second is None else second, operands
            kept = given if recasts else kept
        ctx.save_for_backward(kept, turned)
        shared = sharing.size > 1
        if shared and sharing.way == "column" and sharing.sequence:
            first, _ = sharing.gathered(first)
        output = _multiplied(_rows(first), wide.t(), caster, False).view(*first.shape[:-1], weight.shape[0])
        return sharing.summed(output)[0] if shared and sharing.way == "row" else output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sharing, caster, (given, weight) = ctx.sharing, ctx.caster, ctx.saved_tensors
        of_input, of_weight, *_ = ctx.needs_input_grad
        if ctx.recasts and of_weight:
            eight, second = caster.operands(given)
            given = eight if second is None else second
        shared, column = sharing.size > 1, sharing.way == "column"
        gradient = turned = gradients[0]
        if caster is not None:
            gradient, second = caster.operands(gradient, alone=not of_weight)
            turned = gradient if second is None else second
        if shared and not column and sharing.sequence:
            gradient = turned = sharing.gathered(gradient)[0]
        again = summing = None
        if shared and column and sharing.sequence and of_weight:
            given, again = sharing.gathered(given, wait=False)
        found = None
        if of_input:
            found = _multiplied(_rows(gradient), weight, caster, True).view(*gradient.shape[:-1], weight.shape[1])
            if shared and column:
                found, summing = sharing.summed(found, wait=False)
        if again is not None:
            again.wait()
        weights = _gradient(_rows(turned), _rows(given), caster, ctx.sums, ctx.dtype) if of_weight else None
        if summing is not None:
            summing.wait()
        return found, weights, None, None, None, None, None


def _rows(given: torch.Tensor) -> torch.Tensor:
    return given.reshape(-1, given.shape[-1])


def _multiplied(first: torch.Tensor, second: torch.Tensor, caster: Caster | None, gradient: bool) -> torch.Tensor:
    if caster is None:
        return torch.mm(first, second)
    result: torch.Tensor = _EIGHT.mm(first, second, caster.recipe.scaling, gradient)
    return result


def _gradient(
    gradient: torch.Tensor, given: torch.Tensor, caster: Caster | None, sums: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the gradient of a weight of ``dtype``, or one without values if it has been added to ``sums``."""
    if sums is None:
        return _multiplied(gradient.t(), given, caster, True)
    add_product(gradient.t(), given, sums, caster.recipe.scaling if caster else "")
    return torch.empty(sums.shape, dtype=dtype, device=sums.device)


def add_product(first: torch.Tensor, second: torch.Tensor, sums: torch.Tensor, scaling: str = "") -> None:
    """Add a product to ``sums`` in its kernel; ``scaling``: that of operands in 8 bits."""
    OPERATORS.add_mm_(first, second, sums, scaling)


class ExpertProducts(torch.autograd.Function):
    """Products of the rows of each expert, of ``counts`` rows, with its own weight (n, k), whose gradient is added to
    its ``sums``, if there are any.
    """

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, counts: Sequence[int], caster: Caster | None,
        sums: Sequence[torch.Tensor | None], *weights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.counts, ctx.caster, ctx.sums = list(counts), caster, sums
        ctx.save_for_backward(given, *weights)
        output = given.new_empty((given.shape[0], weights[0].shape[0]))
        for rows, part, weight in zip(given.split(ctx.counts), output.split(ctx.counts), weights, strict=True):
            _into(part, rows, weight.t(), caster, False)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        given, *weights = ctx.saved_tensors
        found = torch.empty_like(given)
        of_weights: list[torch.Tensor] = []
        parts = zip(gradients[0].split(ctx.counts), given.split(ctx.counts), found.split(ctx.counts), strict=True)
        for (gradient, rows, part), weight, sums in zip(parts, weights, ctx.sums, strict=True):
            _into(part, gradient, weight, ctx.caster, True)
            if ctx.caster is not None:
                gradient, rows = (ctx.caster.operands(each)[1] for each in (gradient, rows))
            of_weights.append(_gradient(gradient, rows, ctx.caster, sums, weight.dtype))
        return found, None, None, None, *of_weights


def _into(output: torch.Tensor, first: torch.Tensor, second: torch.Tensor, caster: Caster | None, last: bool) -> None:
    if not output.shape[0]:
        return
    if caster is None:
        torch.mm(first, second, out=output)
        return
    eight, wide = caster.operands(first)[0], caster.operands(second)[0]
    _multiplied(eight, wide, caster, last)


def sums_of(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the FP32 values to which the gradient of ``weight`` is added, if the program keeps them; it is told so."""
    sums = getattr(weight, "main_grad", None)
    if sums is not None and hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return sums


class _Passed(torch.autograd.Function):
    """Keys and values of the rank before in a ring; their gradient goes back, with them, as they are passed again."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(both)
        return _exchanged(both, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (both,) = ctx.saved_tensors
        _exchanged(both, ctx.group)
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(given: torch.Tensor, group: Any) -> torch.Tensor:
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    received, sent = torch.empty_like(given), given.contiguous()
    ways = [
        dist.P2POp(dist.isend, sent, ranks[(own + 1) % len(ranks)], group),
        dist.P2POp(dist.irecv, received, ranks[own - 1], group),
    ]
    for work in dist.batch_isend_irecv(ways):
        work.wait()
    return received


def attend_in_ring(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, causal: bool, **how: Any
) -> torch.Tensor:
    """Return attention (batch, length, heads, width) over the contexts of all ranks, whose keys and values go round.

    With a causal mask each rank has an early and a late half, so that all have as much work.
    """
    if key.shape != value.shape:
        raise ModelError("context parallelism over keys and values of different widths has no model")
    both, own = torch.stack((key, value), -3), dist.get_rank(group)
    half = query.shape[1] // 2
    output = attend(query, key, value, causal=causal, **how)
    for step in range(1, dist.get_world_size(group)):
        both = _Passed.apply(both, group)
        keys, values = both.unbind(-3)
        if not causal:
            output = output + attend(query, keys, values, **how)
        elif step <= own:
            output = output + attend(query, keys[:, :half], values[:, :half], **how)
        else:
            late = attend(query[:, half:], keys, values, **how)
            output = torch.cat((output[:, :half], output[:, half:] + late), 1)
    return output
