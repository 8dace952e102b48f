"""Regions of a program that ``torch.compile`` compiles, or that CUDA graphs replay: functions and modules, each call of
which is a region of its own, with its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch


@dataclass
class Regions:
    """Regions entered by a program. ``parts``: recorded call -> its region; other calls run eagerly. ``apart``: the
    backward pass of a region is another one. ``hand_on``: what the program gets for what a region returns.
    """

    apart: bool = False
    hand_on: Callable[[Any], Any] = lambda returned: returned
    parts: dict[int, int] = field(default_factory=dict)
    _depth: int = 0
    _count: int = 0
    # Autograd node -> region of its forward operator.
    _of_node: dict[int, int] = field(default_factory=dict)

    @property
    def inside(self) -> bool:
        """True in a region."""
        return self._depth > 0

    @contextmanager
    def region(self) -> Iterator[None]:
        """Context of a region; regions inside it belong to the outermost one."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Context of calls that run eagerly, after which another region begins."""
        depth, self._depth = self._depth, 0
        try:
            yield
        finally:
            self._depth = depth
            self._count += depth > 0

    def enter(self) -> None:
        """Begin a region."""
        self._count += not self._depth
        self._depth += 1

    def leave(self) -> None:
        """End the region that began last."""
        self._depth -= 1

    def note(self, call: int, in_backward: bool, node: int | None) -> None:
        """Assign a recorded ``call``; ``node``: the number of the autograd node that runs it in a backward pass."""
        self.parts.pop(call, None)
        region = (None if node is None else self._of_node.get(node)) if in_backward else self._current
        if region is not None:
            self.parts[call] = 2 * region + in_backward if self.apart else region

    def note_replay(self, calls: Iterable[int]) -> None:
        """Make ``calls`` a region of their own."""
        self._count += 1
        self.parts |= dict.fromkeys(calls, 2 * self._count)

    def note_node(self, node: int) -> None:
        """Assign the autograd node of a forward operator."""
        if self._depth:
            self._of_node[node] = self._count

    def forget(self, begin: int) -> None:
        """Forget the calls from ``begin`` on."""
        self.parts = {call: region for call, region in self.parts.items() if call < begin}

    def cut(self) -> dict[int, int]:
        """Return the parts since the last cut."""
        found, self.parts = self.parts, {}
        return found

    @property
    def _current(self) -> int | None:
        return self._count if self._depth else None


def outside_regions(function: Any, regions: Regions) -> Any:
    """Return ``function``, a module or a function, whose calls are in none of ``regions``."""
    if isinstance(function, torch.nn.Module):
        function.forward = outside_regions(function.forward, regions)
        return function

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with regions.outside():
            return function(*args, **kwargs)

    return run


def in_region(function: Callable[..., Any], regions: Regions) -> Callable[..., Any]:
    """Return ``function``, each call of which is one of ``regions``."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with regions.region():
            returned = function(*args, **kwargs)
        return returned if regions.inside else regions.hand_on(returned)

    return run


class CompiledFunction(torch.autograd.Function):
    """Results of compiled code, which are those of one autograd node: it gets zeros for results without gradients.
    ``alias(new, old)`` notes that tensors share their memory.
    """

    @staticmethod
    def forward(ctx: Any, alias: Callable[[torch.Tensor, torch.Tensor], None], *results: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.forms = [(each.shape, each.dtype) for each in results]
        found = tuple(torch.empty_like(each) for each in results)
        for new, old in zip(found, results, strict=True):
            alias(new, old)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        for (shape, dtype), gradient in zip(ctx.forms, gradients, strict=True):
            if gradient is None:
                torch.zeros(shape, dtype=dtype, device="meta")
        return (None, *gradients)
