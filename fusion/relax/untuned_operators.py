"""Lowering of operators that no template covers but that have a kernel of their own, which is not tuned.

- Element-wise operators, resizing and moves of channels on blocked tensors. The result is stored in bfloat16 if all
  its input tensors are; the arithmetic is float32. Lanes beyond the channels hold unspecified finite values. An
  operator qualifies only if it keeps them finite: a kernel that reads them multiplies by packed zeros, and infinity
  times zero is not zero.
- Byte steps (:mod:`fusion.relax.integer_calls`) on plain or blocked tensors.
- Operators along the rows of plain tensors: softmax, layer norm along the last dimension, and products of two
  computed tensors (attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import tvm
from tvm import relax, tirx

from fusion.relax.bindings import is_bytes, is_float32, operator_name, slices_of, static_shape
from fusion.relax.channel_moves import ChannelMove, ChannelMoves
from fusion.relax.integer_calls import BytePair, ByteResize, ByteStep, ByteTable, size_of, step_of
from fusion.relax.kernels.bytes import pack_channel_tables
from fusion.relax.kernels.reductions import (
    BatchedProduct,
    ColumnSoftmax,
    GroupNorm2d,
    RowNorm,
    RowSoftmax,
    RowWork,
    pack_group_norm,
)
from fusion.relax.kernels.resize import MirrorPad2d, PixelTable, Resize2d, Slice2d, resize_tables
from fusion.relax.lowered_module import KernelLibrary, LaidOutValue, Layout, Layouts
from schedules.contract.template import block, blocked_shape

# Operators whose result is finite for every finite input of moderate size.
_BOUNDED = frozenset(
    f"relax.{name}"
    for name in (
        "nn.relu", "sigmoid", "tanh", "nn.silu", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.softplus", "clip",
        "negative", "abs", "erf", "sin", "cos", "add", "subtract", "multiply", "maximum", "minimum",
    )
)  # fmt: skip
# Operators that may divide by zero, overflow or leave their domain in unspecified lanes.
_UNBOUNDED = frozenset(
    f"relax.{name}" for name in ("divide", "exp", "log", "sqrt", "rsqrt", "square", "power", "floor", "ceil")
)
_BYTES = "uint8"
# Operators that compute each output pixel from one or a few input pixels, whose positions are known at compile time.
_PIXEL_TABLES = frozenset({"relax.image.resize2d", "relax.nn.pad", "relax.strided_slice"})


@dataclass(frozen=True, eq=False)
class BlockedOperators:
    """Rewriter of calls on blocked tensors."""

    layouts: Layouts
    library: KernelLibrary
    # Value of an original variable.
    lookup: Callable[[relax.Var], LaidOutValue | None]
    # Array behind an expression, or None.
    constant: Callable[[relax.Expr], np.ndarray | None]
    # Channels of tensors that are copies of channels of others.
    moves: ChannelMoves
    # Value that a variable is bound to, or None.
    bound: Callable[[relax.Expr], relax.Expr | None]
    # True if one of our kernels reads the variable.
    wanted_blocked: Callable[[relax.Var], bool]

    def rewrite(self, binding: relax.VarBinding) -> relax.Expr | None:
        """Return the call of ``binding`` on blocked operands; None if it does not apply or would not help."""
        call, wanted = binding.value, self.wanted_blocked(binding.var)
        shape = static_shape(call)
        name = operator_name(call)
        dtype = "" if shape is None else str(call.ty.dtype)
        if shape is None or len(shape) != 4 or dtype not in ("float32", _BYTES):
            return None
        move = self.moves.of(binding.var)
        if move is not None:
            return self._gather(move, shape, wanted)
        if dtype == _BYTES:
            return self._resize(call, wanted) if name in _PIXEL_TABLES else None
        if name in ("relax.reshape", "relax.permute_dims"):
            return self._from_rows(call, shape) if wanted else None
        if name == "relax.nn.prelu":
            return self._prelu(call, shape, wanted)
        if name == "relax.nn.group_norm":
            return self._group_norm(call, wanted)
        if name in _PIXEL_TABLES:
            found = (take(call, wanted) for take in (self._resize, self._pad, self._images))
            return next((expr for expr in found if expr is not None), None)
        whole = shape[1] % self.layouts.lanes == 0
        if name not in _BOUNDED and not (whole and name in _UNBOUNDED):
            return None
        if not any(self._is_reason(argument, shape, wanted) for argument in call.args):
            return None
        operands = [self._operand(argument, shape) for argument in call.args]
        if any(operand is None for operand in operands):
            return None
        dtype = self._stored(call.args, shape)
        result = relax.Call(call.op, [operand() for operand in operands if operand is not None], call.attrs)
        return self._rounded(result, dtype)

    def _stored(self, arguments: Sequence[relax.Expr], shape: Sequence[int] | None = None) -> str:
        """Return the dtype in which a result of ``arguments`` is stored; with ``shape``, only arguments of that shape
        count.
        """
        computed = (each for each in arguments if isinstance(each, relax.Var) and self.constant(each) is None)
        values = [self.lookup(argument) for argument in computed]
        kept = {
            value.stored("blocked") or value.dtype
            for value in values
            if value is not None and (shape is None or tuple(value.shape) == tuple(shape))
        }
        return kept.pop() if len(kept) == 1 else "float32"

    def _wide(self, value: LaidOutValue) -> relax.Expr:
        """Return ``value`` blocked and in float32 for operators of TVM, each of which converts it as it reads it."""
        stored = value.stored("blocked") or value.dtype
        return self.layouts.cast(self.layouts.blocked(value, stored), value.dtype)

    def _rounded(self, result: relax.Expr, dtype: str) -> relax.Expr:
        """Return the float32 ``result`` converted to its storage ``dtype``."""
        if dtype == "float32":
            return result
        return relax.op.astype(self.layouts.emit(result, "wide"), dtype)

    def _is_reason(self, argument: relax.Expr, shape: Sequence[int] | None, wanted: bool) -> bool:
        """True if ``argument`` has the full ``shape`` and is blocked: only blocked, or also plain if the result is
        wanted blocked.
        """
        value = self.lookup(argument) if isinstance(argument, relax.Var) else None
        if value is None or not value.is_blocked or (value.is_plain and not wanted):
            return False
        return shape is None or tuple(value.shape) == tuple(shape)

    def _operand(self, argument: relax.Expr, shape: tuple[int, ...]) -> Callable[[], relax.Expr] | None:
        """Return a function that emits ``argument`` in a form that broadcasts over the blocked result; None if there is
        no such form.
        """
        if isinstance(argument, tirx.IntImm | tirx.FloatImm):
            return lambda: argument
        array = self.constant(argument)
        if array is not None:
            blocked = _blocked_constant(array, shape, self.layouts.lanes)
            return None if blocked is None else lambda: self.library.constant(blocked)
        value = self.lookup(argument) if isinstance(argument, relax.Var) else None
        if value is None or len(value.shape) != 4:
            return None
        if value.shape[1] == shape[1]:
            return lambda: self._wide(value)
        # A tensor of one channel: a last dimension of one broadcasts over the lanes.
        batch, _, height, width = value.shape
        return lambda: self.layouts.reshape(self.layouts.plain(value), (batch, 1, height, width, 1))

    def _from_rows(self, call: relax.Expr, shape: tuple[int, ...]) -> relax.Expr | None:
        """Rewrite an image made from rows of pixels, channels last, as one kernel that reads the rows without a
        transposition.

        An image of few channels is left plain, the layout in which a convolution reads it.
        """
        batch, channels, height, width = shape
        if 2 * channels < self.layouts.lanes:
            return None
        permuted = call if operator_name(call) == "relax.permute_dims" else self.bound(call.args[0])
        if operator_name(permuted) != "relax.permute_dims" or permuted is None or permuted.attrs.axes is None:
            return None
        order, source = [int(axis) for axis in permuted.attrs.axes], permuted.args[0]
        expected = {
            4: ([0, 3, 1, 2], (batch, height, width, channels)),
            3: ([0, 2, 1], (batch, height * width, channels)),
        }
        value = self.lookup(source) if isinstance(source, relax.Var) else None
        if value is None or expected.get(len(order)) != (order, tuple(value.shape)):
            return None
        rows, plain = (batch, height * width, channels), self.layouts.plain(value)
        image = (batch, channels, height, width)
        arguments = [plain if tuple(value.shape) == rows else self.layouts.reshape(plain, rows)]
        result = relax.TensorType(blocked_shape(image, self.layouts.lanes), "float32")
        return relax.call_tir(self.library.rows(image, blocked=True), arguments, out_ty=result)

    def _prelu(self, call: relax.Expr, shape: tuple[int, ...], wanted: bool) -> relax.Expr | None:
        """Rewrite PReLU as element-wise operators: TVM's own operator reads its slopes along a dimension of the plain
        tensor.
        """
        data, slopes = call.args[0], self.constant(call.args[1])
        value = self.lookup(data) if isinstance(data, relax.Var) else None
        if value is None or slopes is None or not self._is_reason(data, shape, wanted):
            return None
        if slopes.size > 1 and int(call.attrs.axis) % 4 != 1:
            return None
        factor = _blocked_constant(slopes.reshape(1, -1, 1, 1), shape, self.layouts.lanes)
        if factor is None:
            return None
        blocked = self._wide(value)
        negative = relax.op.clip(blocked, float(np.finfo(np.float32).min), 0)
        below = relax.op.multiply(negative, self.library.constant(factor))
        return self._rounded(relax.op.add(relax.op.nn.relu(blocked), below), self._stored([data]))

    def _group_norm(self, call: relax.Expr, wanted: bool) -> relax.Expr | None:
        """Rewrite a group norm as two kernels: the statistics of all channels, then the normalisation."""
        found, data = group_norm_of(call, self.constant), call.args[0]
        value = self.lookup(data) if isinstance(data, relax.Var) else None
        if found is None or value is None or not self._is_reason(data, None, wanted):
            return None
        lanes, (norm, weight, bias) = self.layouts.lanes, found
        if not norm.is_covered(lanes):
            return None
        dtype = self._stored([data])
        statistics, normalise = self.library.group_norm(norm, dtype)
        blocked = self.layouts.blocked(value, dtype)
        shape = self.library.statistics_shape(norm)
        sums = self.layouts.emit(
            relax.call_tir(statistics, [blocked], out_ty=relax.TensorType(shape, "float32")), "statistics"
        )
        constants = self.library.constant(pack_group_norm(norm, weight, bias, lanes))
        result = relax.TensorType(blocked_shape(norm.shape, lanes), dtype)
        return relax.call_tir(normalise, [blocked, sums, constants], out_ty=result)

    def _resize(self, call: relax.Expr, wanted: bool) -> relax.Expr | None:
        """Rewrite a resize as one kernel with tables. An image that fills less than half a block stays plain unless it
        is read blocked.
        """
        data, resize = call.args[0], resize_of(call)
        if resize is None or not (wanted or 2 * resize.shape[1] >= self.layouts.lanes):
            return None
        value = self.lookup(data) if isinstance(data, relax.Var) else None
        if value is None or not self._is_reason(data, None, wanted):
            return None
        positions, weights = resize_tables(resize)
        tables = [self.library.constant(table) for table in (*positions, *weights)]
        result = blocked_shape((*resize.shape[:2], *resize.size), self.layouts.lanes)
        dtype = self._stored([data])
        arguments = [self.layouts.blocked(value, dtype), *tables]
        return relax.call_tir(self.library.resize(resize, dtype), arguments, out_ty=relax.TensorType(result, dtype))

    def _pad(self, call: relax.Call, wanted: bool) -> relax.Expr | None:
        """Rewrite a constant pad of height, width or batch, or after the last channel (in whole blocks), as TVM's
        operator.
        """
        data, attrs, lanes = call.args[0], call.attrs, self.layouts.lanes
        if operator_name(call) != "relax.nn.pad" or attrs.pad_mode != "constant":
            return None
        widths = [int(width) for width in attrs.pad_width]
        value = self.lookup(data) if isinstance(data, relax.Var) else None
        if value is None or widths[2] or min(widths) < 0 or not self._is_reason(data, None, wanted):
            return None
        channels = value.shape[1]
        if not (wanted or 2 * channels >= lanes) or (widths[3] and channels % lanes):
            return None
        around = [*widths[:2], 0, -(-widths[3] // lanes), *widths[4:], 0, 0]
        padded = relax.op.nn.pad(self._wide(value), around, "constant", float(attrs.pad_value))
        return self._rounded(padded, self._stored([data]))

    def _images(self, call: relax.Call, wanted: bool) -> relax.Expr | None:
        """Rewrite a slice of the images of a batch (frames of a volume) as TVM's operator on the blocked tensor."""
        data, slices = call.args[0], slices_of(call) if operator_name(call) == "relax.strided_slice" else None
        value = self.lookup(data) if isinstance(data, relax.Var) else None
        if value is None or slices is None or {axis % 4 for axis in slices} != {0}:
            return None
        if not self._is_reason(data, None, wanted) or not (wanted or 2 * value.shape[1] >= self.layouts.lanes):
            return None
        taken = relax.Call(call.op, [self._wide(value), *call.args[1:]], call.attrs)
        return self._rounded(taken, self._stored([data]))

    def _gather(self, move: ChannelMove, shape: tuple[int, ...], wanted: bool) -> relax.Expr | None:
        """Rewrite a move of channels as one kernel that reads the tensors the channels come from, skipping all tensors
        in between.
        """
        values = [self.lookup(source) for source in move.sources]
        known = [value for value in values if value is not None]
        if len(known) < len(values) or not any(self._is_reason(source, None, wanted) for source in move.sources):
            return None
        dtype = self._stored(move.sources)
        blocks = move.blocks(self.layouts.lanes)
        if blocks is not None and dtype == "float32" and not wanted:
            # TVM's operator: an element-wise operator, unlike our kernels, reads the blocks in place.
            return relax.op.strided_slice(self.layouts.blocked(known[0], dtype), [1], [blocks.start], [blocks.stop])
        kernel = self.library.channel_move([value.shape for value in known], move, dtype)
        result = relax.TensorType(blocked_shape(shape, self.layouts.lanes), dtype)
        return relax.call_tir(kernel, [self.layouts.blocked(value, dtype) for value in known], out_ty=result)


def group_norm_of(
    call: relax.Expr, constant: Callable[[relax.Expr], np.ndarray | None]
) -> tuple[GroupNorm2d, np.ndarray, np.ndarray] | None:
    """Return ``call`` as a group norm of images, its weights and its biases; None for any other call."""
    shape = static_shape(call)
    if operator_name(call) != "relax.nn.group_norm" or shape is None or len(shape) != 4 or not is_float32(call):
        return None
    attrs, weight, bias = call.attrs, constant(call.args[1]), constant(call.args[2])
    axes = sorted(int(axis) % 4 for axis in attrs.axes)
    if weight is None or bias is None or int(attrs.channel_axis) % 4 != 1 or axes != [2, 3]:
        return None
    image = (shape[0], shape[1], shape[2], shape[3])
    return GroupNorm2d(image, int(attrs.num_groups), float(attrs.epsilon)), weight, bias


def resize_of(call: relax.Expr) -> PixelTable | None:
    """Return ``call`` as a table of pixels (a resize, a non-constant pad, or a slice of rows and columns); None for any
    other call and for those without a kernel. Bytes are only moved, never interpolated.
    """
    if operator_name(call) not in _PIXEL_TABLES or not (is_float32(call) or is_bytes(call)):
        return None
    source, result, attrs = static_shape(call.args[0]), static_shape(call), call.attrs
    if source is None or result is None or len(source) != 4 or source[:2] != result[:2]:
        return None
    image = (source[0], source[1], source[2], source[3])
    if operator_name(call) == "relax.nn.pad":
        return _mirror_pad(call, image)
    if operator_name(call) == "relax.strided_slice":
        return _slice(call, image, result)
    if attrs.layout != "NCHW":
        return None
    resize = Resize2d(
        shape=image,
        size=(result[2], result[3]),
        method=str(attrs.method),
        coordinates=str(attrs.coordinate_transformation_mode),
        rounding=str(attrs.rounding_method),
        cubic_alpha=float(attrs.cubic_alpha),
        cubic_exclude=bool(attrs.cubic_exclude),
    )
    return resize if resize.is_known and (is_float32(call) or resize.method == "nearest_neighbor") else None


def _slice(call: relax.Call, shape: tuple[int, int, int, int], result: Sequence[int]) -> Slice2d | None:
    slices = {axis % 4: along for axis, along in (slices_of(call) or {}).items()}
    if not slices or min(slices) < 2:
        return None
    rows, columns = (range(shape[axis])[slices.get(axis, slice(None))] for axis in (2, 3))
    return Slice2d(shape, rows, columns) if (len(rows), len(columns)) == tuple(result[2:]) else None


def _mirror_pad(call: relax.Call, shape: tuple[int, int, int, int]) -> MirrorPad2d | None:
    widths = [int(width) for width in call.attrs.pad_width]
    if call.attrs.pad_mode not in ("reflect", "replicate") or any(widths[:4]) or min(widths) < 0:
        return None
    top, bottom, left, right = widths[4:]
    reflects = call.attrs.pad_mode == "reflect"
    if reflects and (max(top, bottom) >= shape[2] or max(left, right) >= shape[3]):
        return None
    return MirrorPad2d(shape, (top, left, bottom, right), call.attrs.pad_mode)


def _blocked_constant(array: np.ndarray, shape: tuple[int, ...], lanes: int) -> np.ndarray | None:
    """Return ``array``, which broadcasts over the NCHW ``shape``, in a form that broadcasts over the blocked result, or
    None.
    """
    if array.size == 1:
        return array.reshape(())
    if array.ndim > 4 or array.dtype != np.float32:
        return None
    aligned = array.reshape((1,) * (4 - array.ndim) + array.shape)
    if aligned.shape[1] == 1 and shape[1] != 1:
        return aligned.reshape((*aligned.shape, 1))
    return block(aligned, lanes)


@dataclass(frozen=True, eq=False)
class ByteOperators:
    """Rewriter of the calls of byte steps in ``module``."""

    module: tvm.IRModule
    layouts: Layouts
    library: KernelLibrary
    # Value of an original variable.
    lookup: Callable[[relax.Var], LaidOutValue | None]
    # Array behind an expression, or None.
    constant: Callable[[relax.Expr], np.ndarray | None]

    def rewrite(self, binding: relax.VarBinding) -> LaidOutValue | None:
        """Return the value of ``binding`` computed by a kernel; None if it is not a byte step, or too small for a
        vector.
        """
        found = step_of(self.module, binding.value)
        if found is None:
            return None
        step, arguments = found
        if isinstance(step, ByteResize):
            return self._resized(step, arguments, binding.var.name)
        *data, last = arguments
        numbers = self.constant(last)
        values = [self.lookup(each) if isinstance(each, relax.Var) else None for each in data]
        known = [value for value in values if value is not None]
        if numbers is None or len(known) < len(data):
            return None
        name = binding.var.name
        if isinstance(step, ByteTable) and step.per_channel:
            packed = pack_channel_tables(numbers, self.layouts.lanes)
            return self._blocked(known, [self.library.constant(packed)], step, name)
        given = self.library.constant(numbers)
        if isinstance(step, ByteTable):
            return self._flat(known, given, step, name)
        if isinstance(step, BytePair) and not step.per_channel:
            return self._flat(known, given, step, name) if size_of(step) >= self.layouts.lanes else None
        return self._blocked(known, [given], step, name)

    def _resized(self, step: ByteResize, arguments: list[relax.Expr], name: str) -> LaidOutValue | None:
        data, *tables = arguments
        value = self.lookup(data) if isinstance(data, relax.Var) else None
        arrays = [array for array in map(self.constant, tables) if array is not None]
        if value is None or len(arrays) < len(tables):
            return None
        return self._blocked([value], [self.library.constant(array) for array in arrays], step, name)

    def _flat(
        self, values: list[LaidOutValue], given: relax.Expr, step: ByteTable | BytePair, name: str
    ) -> LaidOutValue:
        """Compute byte by byte: blocked if all tensors exist blocked, or one exists only blocked; else plain."""
        layout: Layout = "blocked" if any(value.is_blocked for value in values) else "plain"
        if all(value.is_plain for value in values) and not all(value.is_blocked for value in values):
            layout = "plain"
        tensors = [getattr(self.layouts, layout)(value, _BYTES) for value in values]
        shape = blocked_shape(step.shape, self.layouts.lanes) if layout == "blocked" else step.shape
        count = int(np.prod(shape))
        flat = [self.layouts.reshape(tensor, (count,)) for tensor in tensors]
        kernel = self.library.byte_step(step, count)
        call = relax.call_tir(kernel, [*flat, given], out_ty=relax.TensorType((count,), _BYTES))
        result = self.layouts.reshape(self.layouts.emit(call, name), shape)
        return LaidOutValue(step.shape, layout, result, _BYTES)

    def _blocked(self, values: list[LaidOutValue], given: list[relax.Expr], step: ByteStep, name: str) -> LaidOutValue:
        tensors = [self.layouts.blocked(value, _BYTES) for value in values]
        result = relax.TensorType(blocked_shape(step.result, self.layouts.lanes), _BYTES)
        call = relax.call_tir(self.library.byte_step(step), [*tensors, *given], out_ty=result)
        return LaidOutValue(step.result, "blocked", self.layouts.emit(call, name), _BYTES)


# Shorter rows do not fill a vector; smaller products take less time than the call of a kernel.
_SHORTEST_ROW = 4
_FEWEST_FLOPS = 20_000


Constants: TypeAlias = Callable[[relax.Expr], np.ndarray | None]


def row_work(call: relax.Expr, constant: Constants) -> RowWork | None:
    """Return ``call`` as work along rows; None if there is no kernel for it. ``constant``: the array of an
    expression.
    """
    shape, name = static_shape(call), operator_name(call)
    if name not in _READERS or shape is None or not shape or not is_float32(call) or 0 in shape:
        return None
    return _READERS[name](call, shape, constant)


def _softmax(call: relax.Call, shape: tuple[int, ...], constant: Constants) -> RowWork | None:
    axis = int(call.attrs.axis) % len(shape)
    outer, width, columns = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    if columns == 1:
        return RowSoftmax(outer, width) if width >= _SHORTEST_ROW else None
    return ColumnSoftmax(outer, width, columns) if columns >= _SHORTEST_ROW else None


def _norm(call: relax.Call, shape: tuple[int, ...], constant: Constants) -> RowWork | None:
    width = shape[-1]
    along = [int(axis) % len(shape) for axis in call.attrs.axes] == [len(shape) - 1]
    known = [constant(arg) for arg in call.args[1:]]
    if not along or width < _SHORTEST_ROW or any(array is None or array.shape != (width,) for array in known):
        return None
    return RowNorm(math.prod(shape[:-1]), width, float(call.attrs.epsilon))


def _product(call: relax.Call, shape: tuple[int, ...], constant: Constants) -> RowWork | None:
    left, right = (static_shape(arg) for arg in call.args)
    if left is None or right is None or len(left) < 2 or len(left) != len(right) or left[:-2] != right[:-2]:
        return None
    work = BatchedProduct(math.prod(left[:-2]), left[-2], left[-1], right[-1])
    flops = 2 * work.batch * work.rows * work.inner * work.columns
    computed = constant(call.args[0]) is None and constant(call.args[1]) is None
    float32 = all(is_float32(arg) for arg in call.args)
    return work if computed and float32 and work.columns >= _SHORTEST_ROW and flops >= _FEWEST_FLOPS else None


_READERS: dict[str, Callable[[relax.Call, tuple[int, ...], Constants], RowWork | None]] = {
    "relax.nn.softmax": _softmax,
    "relax.nn.layer_norm": _norm,
    "relax.matmul": _product,
}


@dataclass(frozen=True, eq=False)
class RowOperators:
    """Rewriter of calls."""

    layouts: Layouts
    library: KernelLibrary
    # Value of an original variable.
    lookup: Callable[[relax.Var], LaidOutValue | None]
    # Array behind an expression, or None.
    constant: Constants
    # Value that a variable is bound to, or None.
    bound: Callable[[relax.Expr], relax.Expr | None]

    def rewrite(self, binding: relax.VarBinding) -> relax.Expr | None:
        """Return a call of a kernel on plain operands, in the shape of the kernel; None if none applies."""
        call = binding.value
        if operator_name(call) == "relax.permute_dims":
            return self._image_rows(call)
        work = row_work(call, self.constant)
        if work is None:
            return None
        if isinstance(work, BatchedProduct):
            operands = [self._plain(arg) for arg in call.args]
            shapes: list[tuple[int, ...]] = [
                (work.batch, work.rows, work.inner),
                (work.batch, work.inner, work.columns),
            ]
            result: tuple[int, ...] = (work.batch, work.rows, work.columns)
        else:
            operands, shapes, result = [self._plain(call.args[0])], [work.shape], work.shape
        values = [operand for operand in operands if operand is not None]
        if len(values) < len(operands):
            return None
        arguments = [
            tensor if static_shape(tensor) == shape else self.layouts.reshape(tensor, shape)
            for tensor, shape in zip(values, shapes, strict=True)
        ]
        if isinstance(work, RowNorm):
            scale, shift = (self.constant(arg) for arg in call.args[1:])
            arguments.append(self.library.constant(np.stack([np.asarray(scale), np.asarray(shift)])))
        return relax.call_tir(self.library.row_kernel(work), arguments, out_ty=relax.TensorType(result, "float32"))

    def _image_rows(self, call: relax.Call) -> relax.Expr | None:
        """Return the pixels of a blocked image as rows, channels last, or None."""
        axes = [int(axis) for axis in call.attrs.axes or ()]
        image = call.args[0]
        if axes == [0, 2, 1]:
            flat = self.bound(image)
            image = flat.args[0] if flat is not None and operator_name(flat) == "relax.reshape" else None
        elif axes != [0, 2, 3, 1]:
            return None
        value = self.lookup(image) if isinstance(image, relax.Var) else None
        stored = None if value is None else value.stored("blocked")
        if value is None or stored is None or len(value.shape) != 4 or not is_float32(call):
            return None
        batch, channels, height, width = value.shape
        rows = (batch, height * width, channels)
        if static_shape(call) not in (rows, (batch, height, width, channels)):
            return None
        kernel = self.library.rows((batch, channels, height, width), blocked=False, source=stored)
        arguments = [self.layouts.blocked(value, stored)]
        return relax.call_tir(kernel, arguments, out_ty=relax.TensorType(rows, "float32"))

    def _plain(self, argument: relax.Expr) -> relax.Expr | None:
        value = self.lookup(argument) if isinstance(argument, relax.Var) else None
        return None if value is None else self.layouts.plain(value)
