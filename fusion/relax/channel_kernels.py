"""Kernel that gathers the channels of a blocked tensor from other blocked tensors.

It copies whole vectors where blocks stay together, and shuffles vector registers where they do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.contract.blocked_layout import blocked_shape
from schedules.contract.template import Signature, TensorSpec
from schedules.loops import emit

# Starting a parallel region costs about as much as moving this many values on one core.
_SERIAL_VALUES = 8192
_TASKS = 16
_LEAST_PIXELS = 8


@dataclass(frozen=True)
class _Vector:
    """One vector of the result, gathered from blocks of the sources."""

    # (source, block) pairs in the order of first use.
    blocks: tuple[tuple[int, int], ...]
    # For each lane the index into ``blocks`` and the lane there.
    lanes: tuple[tuple[int, int], ...]

    @property
    def is_copy(self) -> bool:
        return self.lanes == tuple((0, lane) for lane in range(len(self.lanes)))

    def follows(self, before: _Vector, distance: int) -> bool:
        """True if both copy whole blocks of one source, this one ``distance`` blocks further on."""
        if not (self.is_copy and before.is_copy):
            return False
        (source, block), (other, first) = self.blocks[0], before.blocks[0]
        return source == other and block == first + distance


@dataclass
class _Run:
    """``count`` consecutive blocks of the result from ``first`` on."""

    first: int
    count: int
    # Vectors of the first block, by row and column.
    phases: list[list[_Vector]]


def channel_move(
    sources: Sequence[tuple[int, ...]], phases: np.ndarray, lanes: int, dtype: str = "float32"
) -> tirx.PrimFunc:
    """Build the kernel of a :class:`ChannelMove` between blocked tensors of ``dtype``.

    ``sources``: their NCHW shapes; ``phases``: as in ChannelMove. Lanes beyond the channels of the result hold copies
    of other lanes.
    """
    rows, columns, channels, _ = phases.shape
    batch, _, height, width = sources[0]
    shape = (batch, channels, height * rows, width * columns)
    specs = [TensorSpec(blocked_shape(each, lanes), "blocked", dtype) for each in sources]
    signature = Signature(specs[0], tuple(specs[1:]), None, TensorSpec(blocked_shape(shape, lanes), "blocked", dtype))
    runs = _runs(phases, lanes)
    pixels = height * width
    size = max(_LEAST_PIXELS, -(-pixels // _TASKS))
    chunks = -(-pixels // size)

    def body(*buffers: Any) -> None:
        *data, output = buffers
        number = batch * chunks
        with emit.loop(number) if math.prod(shape) < _SERIAL_VALUES else emit.tasks(number) as task:
            image, chunk = emit.quotient(task, chunks), emit.remainder(task, chunks)
            first = emit.bind(chunk * size)
            last = emit.bind(emit.smaller(first + size, pixels))
            for run in runs:
                with emit.loop(run.count) as offset, emit.span(first, last) as pixel:
                    _move(run, data, output, (image, offset, pixel), width, lanes)

    return emit.kernel("channel_move", signature, body)


def _runs(phases: np.ndarray, lanes: int) -> list[_Run]:
    """Return the blocks of the result; adjacent blocks that are copied from adjacent blocks form one run."""
    runs: list[_Run] = []
    for block in range(-(-phases.shape[2] // lanes)):
        vectors = [[_vector(phase[block * lanes : (block + 1) * lanes], lanes) for phase in row] for row in phases]
        last = runs[-1] if runs else None
        if last is not None and all(
            vector.follows(before, last.count)
            for row, others in zip(vectors, last.phases, strict=True)
            for vector, before in zip(row, others, strict=True)
        ):
            last.count += 1
        else:
            runs.append(_Run(block, 1, vectors))
    return runs


def _vector(channels: np.ndarray, lanes: int) -> _Vector:
    """Return the vector of at most ``lanes`` ``channels``, given as pairs (source, channel)."""
    known: dict[tuple[int, int], int] = {}
    found = []
    for source, channel in channels.tolist():
        block, lane = divmod(channel, lanes)
        found.append((known.setdefault((source, block), len(known)), lane))
    # Lanes beyond the channels must be finite: where a block is copied, its rest is copied too.
    is_start = found == [(0, lane) for lane in range(len(found))]
    rest = [(0, lane if is_start else found[0][1]) for lane in range(len(found), lanes)]
    return _Vector(tuple(known), tuple(found + rest))


def _move(
    run: _Run, data: Sequence[Any], output: Any, place: tuple[Any, Any, Any], width: int, lanes: int
) -> None:  # fmt: skip
    """Emit one pixel of one block of ``run``, in all phases; ``width``: of the sources."""
    image, offset, pixel = place
    rows, columns = len(run.phases), len(run.phases[0])
    target = run.first + offset
    for y, row in enumerate(run.phases):
        for x, vector in enumerate(row):
            value = _gather(vector, data, image, offset, pixel, lanes)
            if rows == columns == 1:
                emit.store(output, value, image, target, 0, pixel, lanes=lanes)
            else:
                at = emit.quotient(pixel, width) * rows + y, emit.remainder(pixel, width) * columns + x
                emit.store(output, value, image, target, *at, lanes=lanes)


def _gather(vector: _Vector, data: Sequence[Any], image: Any, offset: Any, pixel: Any, lanes: int) -> Any:
    """Emit ``vector`` at ``pixel``: load its blocks one by one and put their lanes in place."""
    (source, block), *others = vector.blocks
    value = T.bind(emit.load(data[source], image, block + offset, 0, pixel, lanes=lanes))
    if not vector.is_copy:
        value = T.bind(emit.shuffle([value], [lane if index == 0 else 0 for index, lane in vector.lanes]))
    for number, (source, block) in enumerate(others, start=1):
        loaded = T.bind(emit.load(data[source], image, block, 0, pixel, lanes=lanes))
        wanted = [lanes + lane if index == number else at for at, (index, lane) in enumerate(vector.lanes)]
        value = T.bind(emit.shuffle([value, loaded], wanted))
    return value
