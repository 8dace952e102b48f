"""Helpers for emitting TIR: vectors, loops, row and column borders, epilogues.

The templates emit TIR directly instead of scheduling a naive loop nest. A border is then a shorter loop or a separate
tile, never a predicate, and register allocation is decided here: a ``local`` buffer of one vector with constant indices
is one register after LLVM's promotion of memory to registers (larger ``local`` buffers would exceed TVM's 1 KiB stack
limit and stay in memory).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import SELU_SCALE, SELU_SLOPE, Epilogue
from schedules.contract.kernel_compilation import VECTOR_ATTRIBUTE
from schedules.contract.template import Signature, TensorSpec
from schedules.contract.tile_operations import TILE_ATTRIBUTE
from schedules.contract.vector_operations import (
    POWER_OF_TWO,
    RECIPROCAL,
    ROUND_BFLOAT16,
    ROUND_INT32,
    ROUND_PAIR_BFLOAT16,
    VectorOperation,
)

Expr = Any  # a TIR expression or a Python int


def kernel(
    name: str,
    signature: Signature,
    body: Callable[..., None],
    more: Sequence[TensorSpec] = (),
    tiles: bool = False,
) -> tirx.PrimFunc:
    """Create a PrimFunc with the parameters of ``signature`` and ``more`` results; ``body`` gets their buffers in
    order.

    ``tiles``: the kernel uses the tile registers of AMX.
    """
    residual = () if signature.residual is None else ("residual",)
    gate = () if signature.gate is None else ("gate",)
    names = ("data", *gate, *(f"constant_{i}" for i in range(len(signature.constants))), *residual, "output")
    names = (*names, *(f"result_{i}" for i in range(len(more))))
    with IRBuilder() as builder, T.prim_func():
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        specs = (*signature.arguments, *more)
        body(*[T.arg(label, T.buffer(spec.shape, spec.dtype)) for label, spec in zip(names, specs, strict=True)])
    function = builder.get()
    narrow = sorted({spec.dtype for spec in specs} - {"float32"}) + ([TILE_ATTRIBUTE] if tiles else [])
    return function.with_attr(VECTOR_ATTRIBUTE, ",".join(narrow)) if narrow else function


# --- vectors -------------------------------------------------------------------------------------

# Arithmetic is FP32; narrower values are widened when loaded and rounded when stored.
_BFLOAT16, _UINT8 = "bfloat16", "uint8"


def load(buffer: Any, *indices: Expr, lanes: int) -> Any:
    """Load one vector at ``indices`` of the outer dimensions, from the start of the last one, as FP32."""
    return load_at(buffer, *indices, tirx.Ramp(0, 1, lanes), lanes=lanes)


def load_at(buffer: Any, *indices: Any, lanes: int) -> Any:
    """Load one vector as :func:`load`, with a ramp as the last index."""
    value = buffer[indices]
    return widened(value, lanes) if buffer.dtype in (_BFLOAT16, _UINT8) else value


def widened(vector: Any, lanes: int) -> Any:
    """Vector of bytes or bfloat16 as FP32; a bfloat16 is the upper half of a float32."""
    if str(vector.ty.dtype).startswith(_UINT8):
        return vector.astype(f"int32x{lanes}").astype(f"float32x{lanes}")
    bits = tirx.reinterpret(f"uint16x{lanes}", vector).astype(f"uint32x{lanes}")
    sixteen = tirx.Broadcast(tirx.const(16, "uint32"), lanes)
    return tirx.reinterpret(f"float32x{lanes}", tirx.shift_left(bits, sixteen))


def interleaved(buffer: Any, *indices: Expr, lanes: int) -> Any:
    """32-bit words of the bfloat16 vector at ``indices`` (the last is a position) and that at the next position.

    The first vector is in the lower halves.
    """
    both = tirx.reinterpret(f"uint16x{2 * lanes}", buffer[(*indices, tirx.Ramp(0, 1, 2 * lanes))])
    order = [each for lane in range(lanes) for each in (lane, lanes + lane)]
    return tirx.reinterpret(f"int32x{lanes}", tirx.Shuffle([both], order))


def lower_halves(vector: Any, lanes: int) -> Any:
    """Words with a bfloat16 vector, given as FP32 (:func:`widened`), in the lower halves and zeros above."""
    bits = tirx.reinterpret(f"uint32x{lanes}", vector)
    sixteen = tirx.Broadcast(tirx.const(16, "uint32"), lanes)
    return tirx.reinterpret(f"int32x{lanes}", tirx.shift_right(bits, sixteen))


def upper_halves(words: Any, lanes: int) -> Any:
    """32-bit words or FP32 values with the lower halves set to zero."""
    words = tirx.reinterpret(f"uint32x{lanes}", words)
    mask = tirx.Broadcast(tirx.const(0xFFFF0000, "uint32"), lanes)
    return tirx.reinterpret(f"int32x{lanes}", tirx.bitwise_and(words, mask))


def rounded(vector: Any, lanes: int) -> Any:
    """Round an FP32 vector to bfloat16, to nearest, ties to even."""
    return tirx.reinterpret(f"bfloat16x{lanes}", operation(ROUND_BFLOAT16, lanes, vector))


def nearest(vector: Any, lanes: int) -> Any:
    """Round an FP32 vector to int32, to nearest, ties to even."""
    return operation(ROUND_INT32, lanes, vector)


def operation(of: VectorOperation, lanes: int, *operands: Any) -> Any:
    """Call a vector operation that TIR lacks."""
    return tirx.call_pure_extern(of.result_type(lanes), of.symbol(lanes), *operands)


def ask_ahead(buffer: Any, *indices: Expr, ahead: int) -> None:
    """Prefetch the vector ``ahead`` vectors after that at ``indices`` (0: no prefetch).

    For weights from L3 that are used few times: the hardware prefetcher stops at page boundaries. Prefetching beyond
    the end of the buffer is harmless.
    """
    if ahead:
        address = T.address_of(buffer[(*indices[:-1], indices[-1] + ahead, 0)])
        T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", address, 0, 3, 1))


def store(buffer: Any, value: Any, *indices: Expr, lanes: int) -> None:
    """Store a vector of ``lanes`` at ``indices`` of ``buffer``, rounding FP32 to the dtype of the buffer."""
    store_at(buffer, value, *indices, tirx.Ramp(0, 1, lanes), lanes=lanes)


def store_at(buffer: Any, value: Any, *indices: Any, lanes: int) -> None:
    """Store as :func:`store`, with a ramp as the last index."""
    if buffer.dtype == _BFLOAT16:
        value = rounded(value, lanes)
    elif buffer.dtype == _UINT8 and "float" in str(value.ty.dtype):
        value = nearest(value, lanes).astype(f"uint8x{lanes}")
    T.buffer_store(buffer, value, [*indices])


def store_pair(buffer: Any, first: Any, second: Any, *indices: Expr, lanes: int) -> None:
    """Store two FP32 vectors, concatenated, as bfloat16."""
    value = tirx.reinterpret(f"bfloat16x{2 * lanes}", operation(ROUND_PAIR_BFLOAT16, lanes, first, second))
    T.buffer_store(buffer, value, [*indices, tirx.Ramp(0, 1, 2 * lanes)])


def splat(value: Any, lanes: int) -> Any:
    """Broadcast a scalar, expression or number, to all lanes; for one lane return the scalar."""
    if isinstance(value, (int, float)):
        value = tirx.FloatImm("float32", float(value))
    return tirx.Broadcast(value, lanes) if lanes > 1 else value


def first_lanes(vector: Any, lanes: int, used: int) -> Any:
    """First ``used`` of ``lanes`` lanes. If ``vector`` is a load, LLVM loads only these."""
    return vector if used == lanes else tirx.Shuffle([vector], list(range(used)))


def zero_extended(vector: Any, used: int, lanes: int, dtype: str = "float32") -> Any:
    """Extend a vector of ``used`` lanes with zeros; ``dtype``: of a lane."""
    if used == lanes:
        return vector
    assert lanes == 2 * used, "a shuffle joins vectors of one length"
    return tirx.Shuffle([vector, splat(tirx.const(0, dtype), used)], list(range(lanes)))


def shuffle(vectors: Sequence[Any], lanes: Sequence[int]) -> Any:
    """Vector of the given ``lanes`` of the concatenated ``vectors``."""
    return tirx.Shuffle(list(vectors), [tirx.const(lane, "int32") for lane in lanes])


def total(vector: Any, lanes: int, group: int | None = None) -> Any:
    """Sum over all lanes, or over each ``group`` of neighbours (a power of two), in every lane."""
    return across(vector, lanes, lambda left, right: left + right, group)


def across(vector: Any, lanes: int, combine: Callable[[Any, Any], Any], group: int | None = None) -> Any:
    """Reduction over lanes by ``combine``, as :func:`total`: exchange halves of each group, then quarters, and so
    on.
    """
    step = (group or lanes) // 2
    while step:
        vector = T.bind(vector)
        vector = combine(vector, tirx.Shuffle([vector], [lane ^ step for lane in range(lanes)]))
        step //= 2
    return T.bind(vector)


def registers(rows: int, columns: int, lanes: int, dtype: str = "float32") -> list[list[Any]]:
    """Allocate ``rows`` x ``columns`` vector registers."""
    return [[_register(lanes, dtype) for _ in range(columns)] for _ in range(rows)]


def _register(lanes: int, dtype: str) -> Any:
    # Without the annotation TVM allocates even these few bytes from the workspace pool: the sums would then be in
    # memory between two loops, and every task would call the allocator for each.
    return T.alloc_buffer((lanes,), dtype, scope="local", annotations={"disable_lower_builtin": True})


# --- loops ---------------------------------------------------------------------------------------


@contextmanager
def loop(extent: int) -> Iterator[Expr]:
    """Serial loop; no loop for one iteration."""
    if extent == 1:
        yield 0
    else:
        with T.serial(0, extent) as index:
            yield index


@contextmanager
def span(begin: Expr, end: Expr) -> Iterator[Expr]:
    """Serial loop over [begin, end)."""
    if isinstance(begin, int) and isinstance(end, int) and end - begin == 1:
        yield begin
    else:
        with T.serial(begin, end) as index:
            yield index


@contextmanager
def tasks(count: int) -> Iterator[Expr]:
    """Parallel loop of a kernel; no parallel region for a single task."""
    if count == 1:
        yield 0
    else:
        with T.parallel(0, count) as index:
            yield index


def bind(value: Expr) -> Expr:
    """Bind an expression to a variable so that it is computed once; numbers are returned as they are."""
    return value if isinstance(value, int) else T.bind(value)


def smaller(left: Expr, right: Expr) -> Expr:
    """The smaller of two index expressions."""
    return min(left, right) if isinstance(left, int) and isinstance(right, int) else tirx.min(left, right)


def larger(left: Expr, right: Expr) -> Expr:
    """The larger of two index expressions."""
    return max(left, right) if isinstance(left, int) and isinstance(right, int) else tirx.max(left, right)


def quotient(value: Expr, divisor: int) -> Expr:
    """``value // divisor`` of numbers or index expressions."""
    if divisor == 1:
        return value
    return value // divisor if isinstance(value, int) else tirx.floordiv(value, divisor)


def remainder(value: Expr, divisor: int) -> Expr:
    """``value % divisor`` of numbers or index expressions."""
    if divisor == 1:
        return 0
    return value % divisor if isinstance(value, int) else tirx.floormod(value, divisor)


# --- borders -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution or pooling window."""

    size: int
    kernel: int
    stride: int
    before: int  # padding before the data
    dilation: int = 1

    def source(self, output: Expr, tap: Expr) -> Expr:
        """Input position read by ``tap`` for ``output``; outside [0, size) in the padding."""
        return output * self.stride + tap * self.dilation - self.before

    def inside(self, output: int, tap: int) -> bool:
        """True if the input of ``output`` and ``tap`` is in the data, not in the padding."""
        return 0 <= self.source(output, tap) < self.size

    def taps(self, output: Expr, outputs: int) -> tuple[Expr, Expr]:
        """Taps [lo, hi) that read inside the input, for a row known at run time.

        Python numbers if all ``outputs`` rows read all taps.
        """
        rows = range(outputs)
        if all(self.inside(row, tap) for row in (rows[0], rows[-1]) for tap in range(self.kernel)):
            return 0, self.kernel
        start = output * self.stride - self.before
        low = larger(0, quotient(self.dilation - 1 - start, self.dilation))
        high = smaller(self.kernel, quotient(self.size - 1 - start, self.dilation) + 1)
        return bind(low), bind(high)


@dataclass(frozen=True)
class ColumnSegment:
    """``count`` tiles of ``width`` columns from ``start``; border tiles are separate segments."""

    start: int
    width: int
    count: int
    border: bool


def segments(extent: int, width: int, axis: Axis | None = None) -> list[ColumnSegment]:
    """Split ``extent`` columns into tiles of ``width`` and a remainder; tiles that touch the padding are separate."""
    found: list[ColumnSegment] = []
    for start in range(0, extent, width):
        size = min(width, extent - start)
        border = axis is not None and not all(
            axis.inside(start + column, tap) for column in (0, size - 1) for tap in (0, axis.kernel - 1)
        )
        last = found[-1] if found else None
        if last and not border and not last.border and last.width == size:
            found[-1] = ColumnSegment(last.start, size, last.count + 1, False)
        else:
            found.append(ColumnSegment(start, size, 1, border))
    return found


@contextmanager
def column_tile(segment: ColumnSegment) -> Iterator[Expr]:
    """First column of each tile of the segment: a number for a single tile."""
    with loop(segment.count) as index:
        yield segment.start if segment.count == 1 else segment.start + index * segment.width


def clamp_start(start: Expr, width: int, extent: int) -> Expr:
    """Shift a tile to end inside ``extent``: the overlap of two tiles is computed twice, identically."""
    assert width <= extent
    return bind(smaller(start, extent - width))


def clamp_rows(first: Expr, count: int, extent: int) -> Expr:
    """Shift ``count`` rows from ``first`` into [0, ``extent``), keeping all rows of the range that exist."""
    return larger(0, smaller(first, extent - count))


# --- epilogues -----------------------------------------------------------------------------------


_LOG2_E = 1.44269504088896341


def within(x: Any, low: Any = None, high: Any = None) -> Any:
    """Clip ``x`` to ``low`` and ``high``; NaN is preserved.

    TIR's maximum and the CPU's instruction return their second operand if a comparison with NaN is false, so the bounds
    are the first operands.
    """
    x = x if low is None else tirx.max(low, x)
    return x if high is None else tirx.min(high, x)


def _named(value: Any) -> Any:
    """Bind ``value``, which is used repeatedly, to a variable if a kernel is being emitted."""
    return T.bind(value) if IRBuilder.is_in_scope() else value


def exp(x: Any, lanes: int, coarse: bool = False) -> Any:
    """e^x on a vector, 2 ulp over [-87, 88]: Cephes' range reduction and degree-5 polynomial.

    LLVM converts its own ``exp`` intrinsic into one library call per lane. ``coarse``: see :func:`activate`.
    """
    if coarse:
        return operation(POWER_OF_TWO, lanes, x * splat(_LOG2_E, lanes))
    x = _named(within(x, splat(-87.3, lanes), splat(88.3, lanes)))
    # Adding and subtracting 1.5 * 2^23 is not possible: LLVM may reassociate and remove it.
    power = _named(tirx.floor(x * splat(_LOG2_E, lanes) + splat(0.5, lanes)))
    rest = _named(x - power * splat(0.693359375, lanes) + power * splat(2.12194440e-4, lanes))
    coefficients = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
    polynomial = splat(coefficients[0], lanes)
    for coefficient in coefficients[1:]:
        polynomial = _named(polynomial * rest + splat(coefficient, lanes))
    mantissa = _named(polynomial * rest * rest + rest + splat(1.0, lanes))
    integer, real = (f"{kind}32x{lanes}" if lanes > 1 else f"{kind}32" for kind in ("int", "float"))
    bits = tirx.const(23, "int32")
    exponent = tirx.shift_left(power.astype(integer), tirx.Broadcast(bits, lanes) if lanes > 1 else bits)
    return tirx.reinterpret(real, tirx.reinterpret(integer, mantissa) + exponent)


# Pi in parts with few digits, whose products with small integers are exact.
_HALF_TURN = (3.140625, 9.6702575683593750e-4, 6.2771141529083252e-7, 1.2154201256553421e-10)
# (sin(r) - r) / r^3 as a polynomial in r^2, for |r| up to pi/2: SLEEF's sinf_u35 (Shibata and Petrogalli 2020).
_SINE = (2.6083159809786594e-6, -1.9810690719168633e-4, 8.3330785855650902e-3, -0.16666659712791443)


def sine(x: Any, lanes: int) -> Any:
    """Sine of a vector, with an error of 4e-7 up to |x| = 1000, growing in proportion to |x| beyond."""
    turns = _named(tirx.floor(x * splat(1.0 / math.pi, lanes) + splat(0.5, lanes)))
    rest = x
    for size in _HALF_TURN:
        rest = _named(rest - turns * splat(size, lanes))
    square = _named(rest * rest)
    half = turns * splat(0.5, lanes)
    sign = splat(1.0, lanes) - splat(4.0, lanes) * (half - tirx.floor(half))
    return sign * (rest + rest * square * _polynomial(_SINE, square, lanes))


# erf(x) / x as a polynomial in 2 (x / 3.7)^2 - 1, highest power first: least squares on Chebyshev nodes weighted by x.
# x is clipped at 3.7, where erf is one within 2e-7. A rational form of fewer terms needs a division, which costs as
# much as 16 terms.
_ERF_END = 3.7
_ERF = (
    *(-0.00144068437, 0.00389593527, -0.00383966798, 0.00530986709, -0.0139308683, 0.0250574504, -0.0363209883),
    *(0.0515167907, -0.0704048626, 0.0906162451, -0.112649105, 0.140790184, -0.190467621, 0.382137519),
)


def erf(x: Any, lanes: int) -> Any:
    """Error function on a vector, with an error of 4e-7."""
    x = _named(within(x, splat(-_ERF_END, lanes), splat(_ERF_END, lanes)))
    square = _named(x * x * splat(2.0 / _ERF_END**2, lanes) - splat(1.0, lanes))
    return x * _polynomial(_ERF, square, lanes)


# The normal distribution is 1 / (1 + e^(x p(x^2))) with a mean error of 5.5e-5 of x: p with the highest power first, by
# Remez's exchange, weighted by the change of the result divided by (result + 0.02). Beyond the end of the square p
# would turn back; there it is constant.
_GELU = (0.00076619345, -0.074467323, -1.5944453)
_GELU_END = 45.0

# 2 atanh(s) / s as a polynomial in s^2 with s = y / (2 + y), at most 1/3: the truncation error is below 2e-8.
_LOG1P = tuple(2.0 / power for power in range(15, 0, -2))


def _log1p(y: Any, lanes: int) -> Any:
    """log(1 + y) of a vector between zero and one."""
    y = _named(y)
    ratio = _named(y / (y + splat(2.0, lanes)))
    return ratio * _polynomial(_LOG1P, _named(ratio * ratio), lanes)


def _polynomial(coefficients: Sequence[float], x: Any, lanes: int) -> Any:
    """Polynomial by Horner's scheme, highest power first."""
    value = splat(coefficients[0], lanes)
    for coefficient in coefficients[1:]:
        value = _named(value * x + splat(coefficient, lanes))
    return value


def activate(x: Any, activation: str | None, lanes: int, slope: float = 0.0, coarse: bool = False) -> Any:
    """Apply an activation of ``costmodel.operators.layers.ACTIVATIONS``, except ``prelu``, with ``slope`` to a vector.

    ``coarse``: for layers stored as bfloat16, use approximate operations: activations that divide by an exponential
    have an error of 1e-4 (GELU: 4e-4), while rounding has 2e-3. Others, which subtract from an exponential, are
    unaffected.
    """
    zero, six = splat(0.0, lanes), splat(6.0, lanes)
    if activation is None:
        return x
    if activation == "relu":
        return within(x, zero)
    if activation == "relu6":
        return within(x, zero, six)
    if activation == "relu1":
        return within(x, zero, splat(1.0, lanes))
    x = _named(x)
    if activation == "leaky_relu":
        return tirx.max(x, x * splat(slope, lanes))
    if activation in ("hard_sigmoid", "hard_swish"):
        gate = within(x + splat(3.0, lanes), zero, six) * splat(1.0 / 6.0, lanes)
        if slope:
            gate = within(x * splat(slope, lanes) + splat(0.5, lanes), zero, splat(1.0, lanes))
        return gate if activation == "hard_sigmoid" else x * gate
    one = splat(1.0, lanes)
    if activation == "gelu" and coarse:
        square = _named(within(x * x, high=splat(_GELU_END, lanes)))
        return _over_one_and_exp(x, x * _polynomial(_GELU, square, lanes), lanes, coarse)
    if activation == "gelu":
        return x * splat(0.5, lanes) * (one + erf(x * splat(math.sqrt(0.5), lanes), lanes))
    if activation == "gelu_tanh":
        # 1 + tanh(z) is twice the sigmoid of 2 z.
        slope = math.sqrt(8.0 / math.pi)
        inner = x * (splat(slope, lanes) + splat(0.044715 * slope, lanes) * x * x)
        return _over_one_and_exp(x, zero - inner, lanes, coarse)
    if activation == "quick_gelu":
        return _over_one_and_exp(x, x * splat(-1.702, lanes), lanes, coarse)
    if activation in ("elu", "selu"):
        below = exp(within(x, high=zero), lanes) - one
        if activation == "selu":
            return splat(SELU_SCALE, lanes) * within(x, zero) + splat(SELU_SCALE * SELU_SLOPE, lanes) * below
        return within(x, zero) + (below * splat(slope, lanes) if slope else below)
    if activation == "softplus":
        return within(x, zero) + _log1p(exp(tirx.min(x, zero - x), lanes), lanes)
    if activation == "tanh":
        return splat(2.0, lanes) / (one + exp(x * splat(-2.0, lanes), lanes)) - one
    if activation == "mish":
        # tanh(log(1 + e)) = e (e + 2) / (e (e + 2) + 2) with e = exp(x); one, to all digits, from 20 on.
        power = _named(exp(within(x, high=splat(20.0, lanes)), lanes, coarse))
        ratio = _named(power * (power + splat(2.0, lanes)))
        below = ratio + splat(2.0, lanes)
        return x * ratio * operation(RECIPROCAL, lanes, below) if coarse else x * ratio / below
    if activation not in ("sigmoid", "silu"):
        raise ValueError(f"no code for the activation {activation!r}")
    gate = _over_one_and_exp(one, zero - x, lanes, coarse)
    return gate if activation == "sigmoid" else x * gate


def _over_one_and_exp(x: Any, exponent: Any, lanes: int, coarse: bool) -> Any:
    """x / (1 + e^exponent)."""
    below = splat(1.0, lanes) + exp(exponent, lanes, coarse)
    return x * operation(RECIPROCAL, lanes, below) if coarse else x / below


def leaking(x: Any, slopes: Any, lanes: int) -> Any:
    """Apply a ``prelu``, with a vector of slopes."""
    zero = splat(0.0, lanes)
    return within(x, zero) + within(x, high=zero) * slopes


def finish(
    x: Any,
    epilogue: Epilogue,
    residual: Callable[[], Any] | None,
    lanes: int,
    constant: Callable[[str], Any] | None = None,
    coarse: bool = False,
) -> Any:
    """Apply residual, activation and affine to an accumulator that includes the bias.

    ``constant(name)``: vector named in :func:`schedules.loops.weight_packing.channel_vectors`; ``coarse``: see
    :func:`activate`.
    """
    if epilogue.residual == "before_activation":
        assert residual is not None
        x = x + residual()
    if epilogue.activation == "prelu":
        assert constant is not None
        x = leaking(T.bind(x), constant("slopes"), lanes)
    else:
        x = activate(x, epilogue.activation, lanes, epilogue.slope, coarse)
    if epilogue.affine:
        assert constant is not None
        x = x * constant("scale") + constant("shift")
    if epilogue.residual == "after_activation":
        assert residual is not None
        x = x + residual()
    return x
