"""Pipeline schedules: the sequence of passes and messages of each stage.

``gpipe``: all forward, then all backward passes (Huang et al., arXiv 1811.06965). ``1f1b``: as few forward passes ahead
as the following stages need, then one of each in turn (Narayanan et al., arXiv 2104.04473, figure 4). ``interleaved``:
every stage has several parts of the model, which divides the bubble by their number (same paper, section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from e2e.parallelism.spec import ParallelSpec

PassDirection = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Command:
    """Pass of ``micro_batch`` through part ``chunk`` of the stage, or its message: of its output (``send``) or its
    input (``receive``).
    """

    direction: PassDirection
    micro_batch: int
    chunk: int = 0
    message: Literal["send", "receive"] | None = None


def commands(spec: ParallelSpec, stage: int) -> tuple[Command, ...]:
    """Return the program of ``stage``: passes with the messages before and after them."""
    return tuple(command for each in passes(spec, stage) for command in _with_messages(each, spec, stage))


def passes(spec: ParallelSpec, stage: int) -> tuple[Command, ...]:
    """Return the passes of ``stage`` in order; in inference the forward passes only."""
    if spec.inference:
        return tuple(Command("forward", micro_batch) for micro_batch in range(spec.micro_batches))
    count = spec.micro_batches * spec.virtual_stages
    forward = [_forward(place, spec) for place in range(count)]
    backward = [_backward(place, spec) for place in range(count)]
    ahead = warm_up(spec, stage)
    steady = zip(forward[ahead:], backward, strict=False)
    return (*forward[:ahead], *(each for pair in steady for each in pair), *backward[count - ahead :])


def warm_up(spec: ParallelSpec, stage: int) -> int:
    """Return the number of forward passes of ``stage`` before its first backward pass.

    Interleaved stages as in Megatron-Core (since its ``microbatch_group_size_per_vp_stage``) and
    torch.distributed.pipelining, also with as many micro-batches as ranks, where Megatron-LM ran all forward passes
    first.
    """
    count = spec.micro_batches * spec.virtual_stages
    if spec.schedule == "gpipe":
        return count
    if spec.schedule == "1f1b":
        return min(spec.pp - stage - 1, count)
    return min(2 * (spec.pp - stage - 1) + (spec.virtual_stages - 1) * spec.pp, count)


def in_flight(spec: ParallelSpec, stage: int) -> int:
    """Return the largest number of forward passes of parts whose backward pass is still to come, for which activations
    are kept.
    """
    return min(warm_up(spec, stage) + 1, spec.micro_batches * spec.virtual_stages)


def stage_parts(spec: ParallelSpec, stage: int) -> tuple[int, ...]:
    """Return the parts of the model on ``stage``, by chunk."""
    return tuple(part_of(spec, stage, chunk) for chunk in range(spec.virtual_stages))


def part_of(spec: ParallelSpec, stage: int, chunk: int) -> int:
    """Return the part of the model that is ``chunk`` of ``stage``."""
    return chunk * spec.pp + stage


def stage_of(spec: ParallelSpec, part: int) -> int:
    """Return the stage that holds ``part``; parts of interleaved stages are assigned round-robin."""
    return part % spec.pp


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


def _with_messages(command: Command, spec: ParallelSpec, stage: int) -> Iterator[Command]:
    part = part_of(spec, stage, command.chunk)
    first, last = part == 0, part == spec.stages - 1
    at = (command.micro_batch, command.chunk)
    if command.direction == "forward":
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
