"""DualPipe: micro-batches enter a pipeline at both ends (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).

Rank i of p holds two parts of the model, i and p - 1 - i; half of the micro-batches go in each direction. The order of
passes is that of the authors' program (github.com/deepseek-ai/DualPipe, dualpipe.py), with the same number of steps of
each kind. The forward and the backward pass of an overlapped pair run in sequence here; both results are sent at its
end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

# (pass, direction of the pipeline, micro-batch of that direction, True if its results are sent with those of the next
# pass)
Pass = tuple[Literal["forward", "backward", "weights"], int, int, bool]


@dataclass
class _Order:
    """Order of passes of a rank. ``turned``: True for the second half of the ranks, where the two directions are
    exchanged.
    """

    turned: bool
    _counts: dict[tuple[str, int], int] = field(default_factory=dict)
    _late: deque[tuple[int, int]] = field(default_factory=deque)

    def forward(self, way: int, paired: bool = False) -> Iterator[Pass]:
        """Yield a forward pass. ``paired``: together with the following backward pass."""
        way ^= self.turned
        yield "forward", way, self._next("forward", way), paired

    def backward(self, way: int, apart: bool = False) -> Iterator[Pass]:
        """Yield a backward pass. ``apart``: gradients of weights are deferred."""
        way ^= self.turned
        micro_batch = self._next("backward", way)
        yield "backward", way, micro_batch, not apart
        if apart:
            self._late.append((way, micro_batch))
        else:
            yield "weights", way, micro_batch, False

    def weights(self) -> Iterator[Pass]:
        """Yield the oldest deferred gradients of weights."""
        way, micro_batch = self._late.popleft()
        yield "weights", way, micro_batch, False

    def _next(self, kind: str, way: int) -> int:
        number = self._counts.get((kind, way), 0)
        self._counts[kind, way] = number + 1
        return number


def dualpipe_order(ranks: int, rank: int, micro_batches: int) -> tuple[Pass, ...]:
    """Return the passes of ``rank``; ``ranks`` and ``micro_batches`` are even, the latter at least twice the former."""
    order = _Order(rank >= ranks // 2)
    return tuple(_steps(order, ranks, min(rank, ranks - 1 - rank), micro_batches // 2))


def _steps(order: _Order, ranks: int, place: int, each_way: int) -> Iterator[Pass]:
    """Yield the passes of a rank; ``place``: its index from its end of the pipeline."""
    inner = ranks // 2 - place - 1
    for _ in range(2 * inner):
        yield from order.forward(0)
    for _ in range(place + 1):
        yield from order.forward(0)
        yield from order.forward(1)
    for _ in range(inner):
        yield from order.backward(1, apart=True)
        yield from order.weights()
        yield from order.forward(1)
    for _ in range(each_way - ranks + place + 1):
        yield from order.forward(0, paired=True)
        yield from order.backward(1)
        yield from order.forward(1, paired=True)
        yield from order.backward(0)
    for _ in range(inner):
        yield from order.backward(1)
        yield from order.forward(1, paired=True)
        yield from order.backward(0)
    # The later half of these passes defers the gradients of weights.
    for step in range(place + 1):
        half = (place + 1) // 2
        yield from order.backward(1, apart=step > half or (step == half and place % 2 == 1))
        yield from order.backward(0, apart=step >= half)
    for _ in range(inner):
        yield from order.weights()
        yield from order.backward(0, apart=True)
    for _ in range(place + 1):
        yield from order.weights()
