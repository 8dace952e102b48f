"""Pipeline schedules: the sequence of passes and messages of each stage.

``gpipe``: all forward, then all backward passes (Huang et al., arXiv 1811.06965). ``1f1b``: as few forward passes ahead
as the following stages need, then one of each in turn (Narayanan et al., arXiv 2104.04473, figure 4). ``interleaved``:
every stage has several parts of the model, which divides the bubble by their number (same paper, section 2.2).
``zero-bubble``: as ``1f1b``, with gradients of weights separate (ZB-H1 of Qi et al., arXiv 2401.10241, figure 3): stage
i computes those of a micro-batch i backward passes later, and the remaining ones where it would wait at the end.

``dualpipe``: micro-batches enter a pipeline at both ends (DeepSeek-V3, arXiv 2412.19437, section 3.2.1). Rank i of p
holds two parts of the model, i and p - 1 - i; half of the micro-batches go in each direction. The order of passes is
that of the authors' program (github.com/deepseek-ai/DualPipe, dualpipe.py), with the same number of steps of each kind.
The forward and the backward pass of an overlapped pair run in sequence here; both results are sent at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from e2e.parallelism.spec import ParallelSpec

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


PassDirection = Literal["forward", "backward", "weights"]


@dataclass(frozen=True, slots=True)
class Command:
    """Pass of ``micro_batch`` through part ``chunk`` of the stage, or its message: of its output (``send``) or its
    input (``receive``).

    ``weights``: gradients of weights, if separate from the backward pass.
    """

    direction: PassDirection
    micro_batch: int
    chunk: int = 0
    message: Literal["send", "receive"] | None = None


def commands(spec: ParallelSpec, stage: int) -> tuple[Command, ...]:
    """Return the program of ``stage``: passes with the messages before and after them."""
    if spec.both_ways:
        return tuple(_with_joint_messages(spec, stage))
    return tuple(command for each in passes(spec, stage) for command in _with_messages(each, spec, stage))


def passes(spec: ParallelSpec, stage: int) -> tuple[Command, ...]:
    """Return the passes of ``stage`` in order; in inference the forward passes only."""
    if spec.inference:
        return tuple(Command("forward", micro_batch) for micro_batch in range(spec.micro_batches))
    if spec.both_ways:
        order = dualpipe_order(spec.pp, stage, spec.micro_batches)
        return tuple(Command(direction, micro_batch, way) for direction, way, micro_batch, _ in order)
    count = spec.micro_batches * spec.virtual_stages
    forward = [_forward(place, spec) for place in range(count)]
    backward = [_backward(place, spec) for place in range(count)]
    ahead = warm_up(spec, stage)
    if spec.splits_backward:
        return tuple(_with_weights(forward, backward, ahead, stage))
    steady = zip(forward[ahead:], backward, strict=False)
    return (*forward[:ahead], *(each for pair in steady for each in pair), *backward[count - ahead :])


def _with_weights(forward: list[Command], backward: list[Command], ahead: int, stage: int) -> Iterator[Command]:
    """Yield ``ahead`` forward passes, then one of each in turn, with gradients of weights ``stage`` backward passes
    late.
    """
    yield from forward[:ahead]
    late = 0
    for place, each in enumerate(backward):
        following = forward[ahead + place : ahead + place + 1]
        yield from following
        yield each
        if place >= stage or not following:
            yield Command("weights", late)
            late += 1
    for micro_batch in range(late, len(backward)):
        yield Command("weights", micro_batch)


def warm_up(spec: ParallelSpec, stage: int) -> int:
    """Return the number of forward passes of ``stage`` before its first backward pass.

    Interleaved stages as in Megatron-Core (since its ``microbatch_group_size_per_vp_stage``) and
    torch.distributed.pipelining, also with as many micro-batches as ranks, where Megatron-LM ran all forward passes
    first.
    """
    count = spec.micro_batches * spec.virtual_stages
    if spec.schedule == "gpipe":
        return count
    if spec.schedule in ("1f1b", "zero-bubble"):
        return min(spec.pp - stage - 1, count)
    return min(2 * (spec.pp - stage - 1) + (spec.virtual_stages - 1) * spec.pp, count)


def in_flight(spec: ParallelSpec, stage: int) -> int:
    """Return the largest number of forward passes of parts whose backward pass is still to come, for which activations
    are kept.

    Inputs of products are kept until their weights' gradients are computed, counted as all activations.
    """
    if spec.both_ways:
        kept = {"forward": 1, "backward": 0, "weights": -1}
        return max(accumulate(kept[each.direction] for each in passes(spec, stage)))
    if spec.splits_backward:
        return min(spec.pp, spec.micro_batches)
    return min(warm_up(spec, stage) + 1, spec.micro_batches * spec.virtual_stages)


def parts_of(spec: ParallelSpec, stage: int) -> tuple[int, ...]:
    """Return the parts of the model on ``stage``, by chunk."""
    return tuple(part_of(spec, stage, chunk) for chunk in range(2 if spec.both_ways else spec.virtual_stages))


def part_of(spec: ParallelSpec, stage: int, chunk: int) -> int:
    """Return the part of the model that is ``chunk`` of ``stage``."""
    if spec.both_ways:
        return spec.pp - 1 - stage if chunk else stage
    return chunk * spec.pp + stage


def stage_of(spec: ParallelSpec, part: int, chunk: int) -> int:
    """Return the stage that holds ``part`` as its ``chunk``; parts of interleaved stages are assigned round-robin."""
    return spec.pp - 1 - part if spec.both_ways and chunk else part % spec.pp


def _forward(place: int, spec: ParallelSpec) -> Command:
    """Return the ``place``-th forward pass: groups of ``pp`` micro-batches go through the parts in turn."""
    chunk = place // spec.pp % spec.virtual_stages
    group = place // (spec.pp * spec.virtual_stages)
    return Command("forward", group * spec.pp + place % spec.pp, chunk) if _cut(spec) else Command("forward", place)


def _backward(place: int, spec: ParallelSpec) -> Command:
    forward = _forward(place, spec)
    chunk = spec.virtual_stages - 1 - forward.chunk
    return Command("backward", forward.micro_batch, chunk)


def _cut(spec: ParallelSpec) -> bool:
    return spec.virtual_stages > 1


def _with_joint_messages(spec: ParallelSpec, stage: int) -> Iterator[Command]:
    """Yield the program of a bidirectional pipeline: joint passes receive before the first and send after the last of
    them.
    """
    together: list[Command] = []
    for direction, way, micro_batch, goes_on in dualpipe_order(spec.pp, stage, spec.micro_batches):
        together += _with_messages(Command(direction, micro_batch, way), spec, stage)
        if not goes_on:
            for message in ("receive", None, "send"):
                yield from (each for each in together if each.message == message)
            together = []


def _with_messages(command: Command, spec: ParallelSpec, stage: int) -> Iterator[Command]:
    part = part_of(spec, stage, command.chunk)
    first, last = part == 0, part == spec.stages - 1
    at = (command.micro_batch, command.chunk)
    if command.direction == "weights":
        yield command
    elif command.direction == "forward":
        if not first:
            yield Command("forward", *at, "receive")
        yield command
        if not last:
            yield Command("forward", *at, "send")
    else:
        if not last:
            yield Command("backward", *at, "receive")
        yield command
        if not first:
            yield Command("backward", *at, "send")
