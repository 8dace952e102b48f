"""Operators that only move channels, traced to the tensors that the channels come from, and their kernel.

Concatenation, slices, splits and look-ups of channels, channel shuffles (reshape, permute_dims, reshape) and their
chains are one :class:`ChannelMove`; so is depth-to-space, which spreads channels over pixels. The kernel gathers the
channels of a blocked tensor from other blocked tensors: it copies whole vectors where blocks stay together, and
shuffles vector registers where they do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from fusion.relax.bindings import Program, is_bytes, is_float32, operator_name, slices_of, static_shape
from schedules.contract.template import Signature, TensorSpec, blocked_shape
from schedules.loops import emit

# Limit of the sources of a move: a kernel with more arguments would be slow to call. Step-by-step concatenations (dense
# blocks) reach it.
_MOST_SOURCES = 24

Channel: TypeAlias = tuple[relax.Var, int]


@dataclass(frozen=True, eq=False)
class ChannelMove:
    """Source of every channel of a tensor (N, C, H, W)."""

    # Tensors (N, C_i, H / rows, W / columns).
    sources: tuple[relax.Var, ...]
    # Shape (rows, columns, C, 2); channel c of pixel (rows h + y, columns w + x) is that of pixel (h, w) in channel
    # ``phases[y, x, c, 1]`` of source ``phases[y, x, c, 0]``.
    phases: np.ndarray

    def blocks(self, lanes: int) -> slice | None:
        """Return the blocks of ``lanes`` channels if the move takes consecutive whole blocks of a single source; else
        None.
        """
        shape = static_shape(self.sources[0])
        if len(self.sources) > 1 or self.phases.shape[:2] != (1, 1) or shape is None:
            return None
        channels = self.phases[0, 0, :, 1]
        first, end = int(channels[0]), int(channels[-1]) + 1
        whole = first % lanes == 0 and (end % lanes == 0 or end == shape[1])
        in_order = np.array_equal(channels, np.arange(first, end))
        return slice(first // lanes, -(-end // lanes)) if whole and in_order else None


class ChannelMoves:
    """Finder of the moves in ``program``."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[relax.Var, tuple[Channel, ...]] = {}

    def of(self, result: relax.Var) -> ChannelMove | None:
        """Return the move that ``result`` is bound to; None if it is computed in any other way."""
        if static_shape(result) is None or not (is_float32(result) or is_bytes(result)):
            return None
        channels = self._spread(result)
        if channels is None:
            own = self._moved(result)
            channels = None if own is None else [[own]]
        if channels is None:
            return None
        sources = tuple(dict.fromkeys(source for row in channels for phase in row for source, _ in phase))
        number = {source: index for index, source in enumerate(sources)}
        phases = [[[(number[source], channel) for source, channel in phase] for phase in row] for row in channels]
        return ChannelMove(sources, np.array(phases))

    def _channels(self, tensor: relax.Expr) -> tuple[Channel, ...] | None:
        """Return the source of each channel of ``tensor``: the tensor itself if it is computed."""
        shape = static_shape(tensor)
        if not isinstance(tensor, relax.Var) or shape is None or len(shape) != 4:
            return None
        if tensor not in self._known:
            # The result of a dataflow block may be read where the tensors inside the block are not visible.
            moved = self._moved(tensor) if isinstance(tensor, relax.DataflowVar) else None
            if moved is None or len({source for source, _ in moved}) > _MOST_SOURCES:
                moved = tuple((tensor, channel) for channel in range(shape[1]))
            self._known[tensor] = moved
        return self._known[tensor]

    def _moved(self, tensor: relax.Var) -> tuple[Channel, ...] | None:
        """Return the source of each channel of ``tensor`` if its call moves channels, else None."""
        value, name = self._value(tensor)
        if value is None:
            return None
        if name == "relax.concat":
            return self._concatenated(value)
        if name == "relax.take":
            return self._taken(value)
        if name == "relax.strided_slice":
            return self._sliced(value)
        if name == "TupleGetItem":
            return self._split(value, tensor)
        return self._shuffled(value) if name == "relax.reshape" else None

    def _value(self, tensor: relax.Expr) -> tuple[relax.Expr | None, str | None]:
        """Return the bound value behind ``tensor`` and the name of its operator."""
        value = self._program.value(tensor)
        return value, "TupleGetItem" if isinstance(value, relax.TupleGetItem) else operator_name(value)

    def _concatenated(self, call: relax.Call) -> tuple[Channel, ...] | None:
        fields = self._program.value(call.args[0])
        if not isinstance(fields, relax.Tuple) or call.attrs.axis is None or int(call.attrs.axis) % 4 != 1:
            return None
        parts = [self._channels(part) for part in fields.fields]
        known = [part for part in parts if part is not None]
        return tuple(channel for part in known for channel in part) if len(known) == len(parts) else None

    def _taken(self, call: relax.Call) -> tuple[Channel, ...] | None:
        """Return the channels of a look-up with constant indices, or None."""
        channels, numbers = self._channels(call.args[0]), self._program.constant(call.args[1])
        if channels is None or numbers is None or numbers.ndim != 1 or call.attrs.axis is None:
            return None
        if int(call.attrs.axis) % 4 != 1 or not numbers.size or not 0 <= numbers.min() <= numbers.max() < len(channels):
            return None
        return tuple(channels[number] for number in numbers.tolist())

    def _sliced(self, call: relax.Call) -> tuple[Channel, ...] | None:
        channels, shape = self._channels(call.args[0]), static_shape(call)
        slices = slices_of(call)
        if channels is None or shape is None or slices is None or [axis % 4 for axis in slices] != [1]:
            return None
        (along,) = slices.values()
        taken = channels[along]
        return taken if len(taken) == shape[1] else None

    def _split(self, item: relax.TupleGetItem, result: relax.Var) -> tuple[Channel, ...] | None:
        call = self._program.value(item.tuple_value)
        shape = static_shape(result)
        if call is None or operator_name(call) != "relax.split" or shape is None or len(shape) != 4:
            return None
        channels = self._channels(call.args[0])
        if channels is None or int(call.attrs.axis) % 4 != 1:
            return None
        sizes = [int(part.shape.values[1]) for part in call.ty.fields]
        begin = sum(sizes[: item.index])
        return channels[begin : begin + sizes[item.index]]

    def _shuffled(self, call: relax.Call) -> tuple[Channel, ...] | None:
        """Return the channels of ``reshape(permute_dims(reshape(x)))`` that permutes factors of the
        channels, or None.
        """
        found = self._permuted(call)
        if found is None:
            return None
        channels, factors, axes = found
        last = len(axes) - 2
        if axes[0] != 0 or axes[last:] != [last, last + 1] or static_shape(call) != _merged(channels):
            return None
        order = np.arange(len(channels)).reshape(factors).transpose([axis - 1 for axis in axes[1:last]])
        return tuple(channels[index] for index in order.reshape(-1))

    def _spread(self, result: relax.Var) -> list[list[tuple[Channel, ...]]] | None:
        """Return the channels of a depth-to-space by phase: two factors of the channels become rows and columns. Else
        None.
        """
        value, name = self._value(result)
        found = self._permuted(value) if name == "relax.reshape" and value is not None else None
        shape = static_shape(result)
        if found is None or shape is None or len(shape) != 4:
            return None
        channels, factors, axes = found
        height = len(factors) + 1
        if axes[0] != 0 or axes[-4:-3] != [height] or axes[-2:-1] != [height + 1]:
            return None
        order = [axis - 1 for axis in (*axes[1:-4], axes[-3], axes[-1])]
        if len(axes) < 6 or max(order) >= len(factors):
            return None
        spread = np.arange(len(channels)).reshape(factors).transpose(order)
        rows, columns = spread.shape[-2:]
        if shape[1] * rows * columns != len(channels):
            return None
        spread = spread.reshape(shape[1], rows, columns)
        return [[tuple(channels[index] for index in spread[:, y, x]) for x in range(columns)] for y in range(rows)]

    def _permuted(self, call: relax.Call) -> tuple[tuple[Channel, ...], tuple[int, ...], list[int]] | None:
        """Return channels, the factors that they are split into, and the order of all axes of the permutation; else
        None.
        """
        permuted, name = self._value(call.args[0])
        if permuted is None or name != "relax.permute_dims" or permuted.attrs.axes is None:
            return None
        parted, name = self._value(permuted.args[0])
        if parted is None or name != "relax.reshape":
            return None
        channels, apart, source = self._channels(parted.args[0]), static_shape(parted), static_shape(parted.args[0])
        if channels is None or apart is None or source is None or len(apart) < 5:
            return None
        factors = apart[1:-2]
        if apart[0] != source[0] or apart[-2:] != source[2:] or math.prod(factors) != len(channels):
            return None
        return channels, factors, [int(axis) % len(apart) for axis in permuted.attrs.axes]


def _merged(channels: tuple[Channel, ...]) -> tuple[int, ...] | None:
    """Return the shape of a tensor of these ``channels``, with images of the size of the first source."""
    source = static_shape(channels[0][0])
    return None if source is None else (source[0], len(channels), *source[2:])


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
