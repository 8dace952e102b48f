"""Communication of divided layers as operators without effect: a capture records their positions and sizes.

The four pairs of tensor parallelism are those of Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3; Korthikanti
et al., arXiv 2205.05198, section 4.2.2): ``f`` copies forward and all-reduces backward, ``g`` the reverse; with
sequence parallelism ``g`` gathers or scatters along the sequence.

:class:`Regathered`: gathered tensors that are not kept for the backward pass; the rank's own part is kept, and gathered
again. So do Megatron-LM's sequence-parallel layers (same section) and Transformer Engine's context-parallel attention.
Imports ``torch``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from e2e.step.collective_names import INSIDE_LAYERS, LIBRARY


def _alike(given: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(given)


def _longer(given: torch.Tensor, ranks: int, dimension: int) -> torch.Tensor:
    shape = list(given.shape)
    shape[dimension] *= ranks
    return given.new_empty(shape)


def _shorter(given: torch.Tensor, ranks: int, dimension: int) -> torch.Tensor:
    shape = list(given.shape)
    shape[dimension] //= ranks
    return given.new_empty(shape)


# Kind of collective -> arguments of its operator, and function that makes its output.
_RESIZING = "Tensor given, int ranks, int dimension"
_OPERATORS: dict[str, tuple[str, Any]] = {
    "all_reduce": ("Tensor given", _alike),
    "all_gather": (_RESIZING, _longer),
    "reduce_scatter": (_RESIZING, _shorter),
    "all_to_all": ("Tensor given, int rows", lambda given, rows: given.new_empty((rows, *given.shape[1:]))),
}
_LIBRARY = torch.library.Library(LIBRARY, "DEF")
for _name, (_kind, _) in INSIDE_LAYERS.items():
    _short = _name.removeprefix(f"{LIBRARY}::")
    _LIBRARY.define(f"{_short}({_OPERATORS[_kind][0]}) -> Tensor")
    _LIBRARY.impl(_short, _OPERATORS[_kind][1], "Meta")
_ops = torch.ops.parallel


class CopyToRanks(torch.autograd.Function):
    """Operator ``f``: copies the input of a column-parallel product; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _ops.all_reduce(gradients[0])


class ReduceFromRanks(torch.autograd.Function):
    """Operator ``g``: sums the partial outputs of a row-parallel product over the ranks."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return _ops.all_reduce(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class _Resized(torch.autograd.Function):
    """``there`` forward and ``back`` backward: operators (tensor, ranks, dimension) with inverse changes of shape."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, there: Any, back: Any, ranks: int, dimension: int) -> torch.Tensor:
        ctx.back, ctx.shape = back, (ranks, dimension)
        return there(given, ranks, dimension)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.back(gradients[0], *ctx.shape), None, None, None, None


def gather_sequence(given: torch.Tensor, ranks: int, dimension: int) -> torch.Tensor:
    """Gather along the sequence (``g`` of sequence parallelism), before a column-parallel product."""
    return _Resized.apply(given, _ops.all_gather, _ops.reduce_scatter, ranks, dimension)


def scatter_sequence(given: torch.Tensor, ranks: int, dimension: int) -> torch.Tensor:
    """Scatter along the sequence, after a row-parallel product."""
    return _Resized.apply(given, _ops.reduce_scatter, _ops.all_gather, ranks, dimension)


def gather_context(given: torch.Tensor, ranks: int, dimension: int) -> torch.Tensor:
    """Gather keys or values of whole sequences from the context-parallel ranks; gradients are scattered back."""
    return _Resized.apply(given, _ops.context_all_gather, _ops.context_reduce_scatter, ranks, dimension)


class ExchangeHeads(torch.autograd.Function):
    """All-to-all of context-parallel ranks, which joins dimension ``joined`` and splits dimension ``split``: tokens for
    heads or back.

    Pieces are copied before and after, since messages must be contiguous.
    """

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, ranks: int, split: int, joined: int) -> torch.Tensor:
        ctx.back = ranks, joined, split
        return _exchanged(given, ranks, split, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradients[0], *ctx.back), None, None, None


def _exchanged(given: torch.Tensor, ranks: int, split: int, joined: int) -> torch.Tensor:
    pieces = torch.stack(given.chunk(ranks, split))
    return torch.cat(_ops.context_heads(pieces, ranks).unbind(0), joined)


ExpertRanks = Literal["all", "inside", "across"]


def exchange_rows(given: torch.Tensor, received: int, group: ExpertRanks = "all") -> torch.Tensor:
    """Exchange rows, ``received`` of them incoming: among all expert-parallel ranks, those inside a node, or those at
    the same place in every node.
    """
    names = {"all": _ops.expert_all_to_all, "inside": _ops.expert_inside, "across": _ops.expert_across}
    result: torch.Tensor = names[group](given, received)
    return result


class ExchangeTokens(torch.autograd.Function):
    """Exchange rows for the experts of other ranks, ``received`` of them incoming."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, received: int) -> torch.Tensor:
        ctx.sent = given.shape[0]
        return exchange_rows(given, received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return exchange_rows(gradients[0], ctx.sent), None


class LossOverRanks(torch.autograd.Function):
    """Cross entropy of scores with split classes: maximum, sum of exponentials and the label's score are reduced over
    the ranks, one FP32 number per token each (``vocab_parallel_cross_entropy`` of Megatron-LM).
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            _ops.all_reduce(scores.new_empty(scores.shape[:-1], dtype=torch.float32))
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class ParallelCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of FP32 scores (tokens, classes of this rank), operator by operator as in DTensor's
    ``loss_parallel`` (torch/distributed/tensor/parallel/loss.py).

    Log-softmax values are kept, and the gradient is built from -1 at the labels and their exponentials.
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shifted = scores - _ops.all_reduce(scores.amax(-1, keepdim=True))
        summed = _ops.all_reduce(shifted.exp().sum(-1, keepdim=True))
        logarithms = shifted - summed.log()
        of_labels = _ops.all_reduce(logarithms.gather(1, labels.unsqueeze(1)))
        ctx.save_for_backward(logarithms, labels)
        return -of_labels.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        logarithms, labels = ctx.saved_tensors
        made = torch.zeros_like(logarithms)
        made[torch.arange(len(labels), device=labels.device), labels] = made.new_full((len(labels),), -1.0)
        return (made + logarithms.exp()) * gradients[0], None


Gather = Callable[[torch.Tensor], torch.Tensor]


@dataclass(eq=False)
class _Whole:
    """Gathered tensor: the rank's ``part``, and the whole tensor ``again`` while the backward pass uses it."""

    part: torch.Tensor
    kept: int = 0
    used: int = 0
    again: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class _View:
    """View of the whole tensor saved by autograd."""

    whole: _Whole
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Regathered:
    """Hooks for tensors saved by autograd, of which only this rank's part is kept. In the backward pass ``gather``
    makes the whole tensor from it, once for all nodes that saved it.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._wholes: dict[int, _Whole] = {}

    def know(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Register ``whole``, gathered from ``part`` and others; it must live as long as the hooks are set."""
        self._wholes[whole.untyped_storage()._cdata] = _Whole(part)

    def hooks(self) -> Any:
        """Return the context in which gathered tensors are not kept."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        whole = self._wholes.get(tensor.untyped_storage()._cdata)
        if whole is None:
            return tensor
        whole.kept += 1
        return _View(whole, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: torch.Tensor | _View) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        whole = saved.whole
        again = self._gather(whole.part) if whole.again is None else whole.again
        whole.used += 1
        whole.again = None if whole.used % whole.kept == 0 else again
        if tuple(again.shape) == saved.shape and again.stride() == saved.stride:
            return again
        return again.as_strided(saved.shape, saved.stride, saved.offset)
