"""Gathered tensors that are not kept for the backward pass: the rank's own part is kept, and gathered again.

So do Megatron-LM's sequence-parallel layers (Korthikanti et al., arXiv 2205.05198, section 4.2.2) and Transformer
Engine's context-parallel attention. Imports ``torch``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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
    """Hooks for tensors saved by autograd. ``gather`` makes the whole tensor from a part in the backward pass, once for
    all that saved it.
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
