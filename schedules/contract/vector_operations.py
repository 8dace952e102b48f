"""Vector operations that TIR lacks, as calls of LLVM IR functions linked into every module.

A kernel calls them by name; compilation adds their bodies (:func:`definitions`), which LLVM inlines: the CPU's
instructions, or a slow emulation in plain arithmetic that runs anywhere, so that the TIR of a kernel can be checked on
a CPU without them. TIR has no value of LLVM's type ``bfloat``, so operands are 32-bit words that each hold neighbouring
values, the first in the lowest bits.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

# Supported numbers of 32-bit lanes: half a register and a whole one.
_LANES = (8, 16)


@dataclass(frozen=True)
class VectorOperation:
    """A vector operation, available for each number of lanes."""

    # Base of the function name.
    name: str
    # Kernels that read or write this dtype, or declare :data:`TABLES`, may call it.
    of: str
    # Dtypes of one lane, ``uint8x2`` if there are two values for each 32-bit lane.
    result: str
    parameters: tuple[str, ...]
    # Declarations for the native body (and the emulated one if ``shared``), by number of lanes.
    declared: Callable[[int], str]
    # Bodies by number of lanes, with parameters %0, %1 ... and the value %r.
    native: Callable[[int], str]
    emulated: Callable[[int], str]
    shared: bool = False

    @property
    def joined(self) -> int:
        """Number of concatenated vectors in the result."""
        return int(self.result.partition("x")[2] or 1)

    def result_type(self, lanes: int) -> str:
        """TIR name of the result type."""
        return f"{self.result.partition('x')[0]}x{lanes * self.joined}"

    def symbol(self, lanes: int) -> str:
        """Function name in TIR; raises ``ValueError`` for an unsupported number of lanes."""
        if lanes not in _LANES:
            raise ValueError(f"{self.name} of {lanes} lanes: there are {_LANES}")
        return f"fusion_{self.name}_{lanes}"


# Declared by kernels that look up bytes in tables, so that others need not compile the operation.
TABLES = "tables"
# A parameter of 32 16-bit words, independent of the number of lanes.
_TABLE = "table"
_LLVM = {"float32": "float", "int32": "i32", "uint16": "i16", "uint8": "i8"}


def _operand(lanes: int, dtype: str) -> str:
    """LLVM type of a vector of ``dtype`` in the notation of :class:`VectorOperation`."""
    if dtype == _TABLE:
        return _vector(32, "i16")
    element, _, times = dtype.partition("x")
    return _vector(lanes * int(times or 1), _LLVM[element])


def _vector(lanes: int, element: str) -> str:
    return f"<{lanes} x {element}>"


def _all(lanes: int, element: str, value: int) -> str:
    """Constant vector with ``value`` in every lane."""
    return "<" + ", ".join([f"{element} {value}"] * lanes) + ">"


def _floats(lanes: int, value: float) -> str:
    """Constant float32 vector; LLVM writes a value as the bits of the equal double."""
    (single,) = struct.unpack("f", struct.pack("f", value))
    (bits,) = struct.unpack("Q", struct.pack("d", single))
    return "<" + ", ".join([f"float 0x{bits:016X}"] * lanes) + ">"


def _dot_bfloat16(lanes: int) -> str:
    floats, words, halves = _vector(lanes, "float"), _vector(lanes, "i32"), _vector(2 * lanes, "bfloat")
    return f"""
  %x = bitcast {words} %1 to {halves}
  %w = bitcast {words} %2 to {halves}
  %r = call {floats} @llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}({floats} %0, {halves} %x, {halves} %w)"""


def _dot_bfloat16_declared(lanes: int) -> str:
    floats, halves = _vector(lanes, "float"), _vector(2 * lanes, "bfloat")
    return f"declare {floats} @llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}({floats}, {halves}, {halves})"


def _dot_bfloat16_emulated(lanes: int) -> str:
    """Emulated dot product of bfloat16 pairs: the upper 16 bits of a float32 are a bfloat16.

    Products of two are exact, so sums are rounded as by the instruction, except for their order.
    """
    floats, words = _vector(lanes, "float"), _vector(lanes, "i32")
    sixteen, upper = _all(lanes, "i32", 16), _all(lanes, "i32", -65536)
    return f"""
  %x0 = shl {words} %1, {sixteen}
  %w0 = shl {words} %2, {sixteen}
  %x1 = and {words} %1, {upper}
  %w1 = and {words} %2, {upper}
  %fx0 = bitcast {words} %x0 to {floats}
  %fw0 = bitcast {words} %w0 to {floats}
  %fx1 = bitcast {words} %x1 to {floats}
  %fw1 = bitcast {words} %w1 to {floats}
  %p1 = fmul {floats} %fx1, %fw1
  %s1 = fadd {floats} %0, %p1
  %p0 = fmul {floats} %fx0, %fw0
  %r = fadd {floats} %s1, %p0"""


def _round_bfloat16(lanes: int) -> str:
    floats, halves, words = _vector(lanes, "float"), _vector(lanes, "bfloat"), _vector(lanes, "i16")
    return f"""
  %h = call {halves} @llvm.x86.avx512bf16.cvtneps2bf16.{32 * lanes}({floats} %0)
  %r = bitcast {halves} %h to {words}"""


def _round_bfloat16_declared(lanes: int) -> str:
    return (
        f"declare {_vector(lanes, 'bfloat')} @llvm.x86.avx512bf16.cvtneps2bf16.{32 * lanes}({_vector(lanes, 'float')})"
    )


def _round_bfloat16_emulated(lanes: int) -> str:
    """Emulated rounding to nearest, ties to even: add half a unit in the last place minus one, plus one if the last
    bit is set.
    """
    floats, words, shorts = _vector(lanes, "float"), _vector(lanes, "i32"), _vector(lanes, "i16")
    sixteen = _all(lanes, "i32", 16)
    return f"""
  %bits = bitcast {floats} %0 to {words}
  %upper = lshr {words} %bits, {sixteen}
  %last = and {words} %upper, {_all(lanes, "i32", 1)}
  %half = add {words} %last, {_all(lanes, "i32", 32767)}
  %sum = add {words} %bits, %half
  %top = lshr {words} %sum, {sixteen}
  %r = trunc {words} %top to {shorts}"""


def _round_pair_bfloat16(lanes: int) -> str:
    """Native rounding of two vectors; the instruction places its second operand in the lower half."""
    floats, halves, words = _vector(lanes, "float"), _vector(2 * lanes, "bfloat"), _vector(2 * lanes, "i16")
    return f"""
  %h = call {halves} @llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * lanes}({floats} %1, {floats} %0)
  %r = bitcast {halves} %h to {words}"""


def _round_pair_bfloat16_declared(lanes: int) -> str:
    floats, halves = _vector(lanes, "float"), _vector(2 * lanes, "bfloat")
    return f"declare {halves} @llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * lanes}({floats}, {floats})"


def _round_pair_bfloat16_emulated(lanes: int) -> str:
    halves = [_round_bfloat16_emulated(lanes), _round_bfloat16_emulated(lanes).replace("%0", "%1")]
    parts = [re.sub(r"%([a-z]+)", rf"%\g<1>{index}", half) for index, half in enumerate(halves)]
    return "".join(parts) + _joined([f"%r{index}" for index in range(2)], lanes, "i16", "%r")


# Coefficients of 2^f for f from 0 to 1, highest power first, by Remez's exchange: the relative error is at most 7.5e-5,
# a twentieth of half a unit in the last place of bfloat16.
_POWER_OF_TWO = (0.078024523, 0.22606716, 0.69583354, 0.99992522)


def _cubic(lanes: int) -> str:
    """Polynomial of %f as %p; multiply and add may be contracted."""
    floats = _vector(lanes, "float")
    first, *others = _POWER_OF_TWO
    lines, value = [], _floats(lanes, first)
    for index, coefficient in enumerate(others):
        total = "%p" if index == len(others) - 1 else f"%p{index}"
        lines.append(f"%t{index} = fmul contract {floats} {value}, %f")
        lines.append(f"{total} = fadd contract {floats} %t{index}, {_floats(lanes, coefficient)}")
        value = total
    return "".join(f"\n  {line}" for line in lines)


def _power_of_two(lanes: int) -> str:
    """Native 2^x: polynomial of the fraction of x, scaled by the integer part as exponent, for any x."""
    floats, rounding = _vector(lanes, "float"), ", i32 4" if lanes == 16 else ""
    mask = f"{floats} zeroinitializer, i{lanes} -1{rounding}"
    return (
        f"\n  %f = call {floats} @llvm.x86.avx512.mask.reduce.ps.{32 * lanes}({floats} %0, i32 9, {mask})"
        + _cubic(lanes)
        + f"\n  %r = call {floats} @llvm.x86.avx512.mask.scalef.ps.{32 * lanes}({floats} %p, {floats} %0, {mask})"
    )


def _power_of_two_declared(lanes: int) -> str:
    floats, rounding = _vector(lanes, "float"), ", i32" if lanes == 16 else ""
    names = [f"{floats} @llvm.x86.avx512.mask.{name}.ps.{32 * lanes}" for name in ("reduce", "scalef")]
    mask = f"{floats}, i{lanes}{rounding}"
    return f"declare {names[0]}({floats}, i32, {mask})\ndeclare {names[1]}({floats}, {floats}, {mask})"


def _power_of_two_emulated(lanes: int) -> str:
    """Emulated 2^x: add the exponent to the bits; x is clipped to the range of normal numbers."""
    floats, words, flags = (_vector(lanes, each) for each in ("float", "i32", "i1"))
    least, most = _floats(lanes, -126.0), _floats(lanes, 127.0)
    lines = [
        f"%below = fcmp olt {floats} %0, {least}",
        f"%c0 = select {flags} %below, {floats} {least}, {floats} %0",
        f"%beyond = fcmp ogt {floats} %c0, {most}",
        f"%c = select {flags} %beyond, {floats} {most}, {floats} %c0",
        f"%n0 = fptosi {floats} %c to {words}",
        f"%n1 = sitofp {words} %n0 to {floats}",
        f"%over = fcmp ogt {floats} %n1, %c",
        f"%one = zext {flags} %over to {words}",
        f"%n = sub {words} %n0, %one",
        f"%whole = sitofp {words} %n to {floats}",
        f"%f = fsub {floats} %c, %whole",
    ]
    after = [
        f"%bits = bitcast {floats} %p to {words}",
        f"%up = shl {words} %n, {_all(lanes, 'i32', 23)}",
        f"%sum = add {words} %bits, %up",
        f"%r = bitcast {words} %sum to {floats}",
    ]
    return "".join(f"\n  {line}" for line in lines) + _cubic(lanes) + "".join(f"\n  {line}" for line in after)


def _reciprocal(lanes: int) -> str:
    floats = _vector(lanes, "float")
    return f"""
  %r = call {floats} @llvm.x86.avx512.rcp14.ps.{32 * lanes}({floats} %0, {floats} zeroinitializer, i{lanes} -1)"""


def _reciprocal_declared(lanes: int) -> str:
    floats = _vector(lanes, "float")
    return f"declare {floats} @llvm.x86.avx512.rcp14.ps.{32 * lanes}({floats}, {floats}, i{lanes})"


def _reciprocal_emulated(lanes: int) -> str:
    floats = _vector(lanes, "float")
    return f"""
  %r = fdiv {floats} {_floats(lanes, 1.0)}, %0"""


def _dot_uint8(lanes: int) -> str:
    words = _vector(lanes, "i32")
    return f"""
  %r = call {words} @llvm.x86.avx512.vpdpbusd.{32 * lanes}({words} %0, {words} %1, {words} %2)"""


def _dot_uint8_declared(lanes: int) -> str:
    words = _vector(lanes, "i32")
    return f"declare {words} @llvm.x86.avx512.vpdpbusd.{32 * lanes}({words}, {words}, {words})"


def _dot_uint8_emulated(lanes: int) -> str:
    """Emulated dot product byte by byte: shifts up and down extract a byte, zero- or sign-extended."""
    words, top = _vector(lanes, "i32"), _all(lanes, "i32", 24)
    lines = []
    for byte in range(4):
        up = _all(lanes, "i32", 24 - 8 * byte)
        total = "%r" if byte == 3 else f"%s{byte}"
        before = "%0" if byte == 0 else f"%s{byte - 1}"
        lines += [
            f"%xu{byte} = shl {words} %1, {up}",
            f"%x{byte} = lshr {words} %xu{byte}, {top}",
            f"%wu{byte} = shl {words} %2, {up}",
            f"%w{byte} = ashr {words} %wu{byte}, {top}",
            f"%p{byte} = mul {words} %x{byte}, %w{byte}",
            f"{total} = add {words} {before}, %p{byte}",
        ]
    return "".join(f"\n  {line}" for line in lines)


def _round_int32(lanes: int) -> str:
    floats, words = _vector(lanes, "float"), _vector(lanes, "i32")
    if lanes == 8:
        return f"""
  %r = call {words} @llvm.x86.avx.cvt.ps2dq.256({floats} %0)"""
    return f"""
  %r = call {words} @llvm.x86.avx512.mask.cvtps2dq.512({floats} %0, {words} zeroinitializer, i16 -1, i32 4)"""


def _round_int32_declared(lanes: int) -> str:
    floats, words = _vector(lanes, "float"), _vector(lanes, "i32")
    if lanes == 8:
        return f"declare {words} @llvm.x86.avx.cvt.ps2dq.256({floats})"
    return f"declare {words} @llvm.x86.avx512.mask.cvtps2dq.512({floats}, {words}, i16, i32)"


def _round_int32_emulated(lanes: int) -> str:
    """Emulated rounding by adding and subtracting 1.5 * 2^23, whose unit in the last place is one: values are below
    2^22.
    """
    floats, words = _vector(lanes, "float"), _vector(lanes, "i32")
    large = "<" + ", ".join(["float 1.2582912e+07"] * lanes) + ">"
    return f"""
  %sum = fadd {floats} %0, {large}
  %bits = bitcast {floats} %sum to {words}
  %r = sub {words} %bits, {_all(lanes, "i32", 0x4B400000)}"""


def _pack_uint8(lanes: int) -> str:
    """Native packing: 32-bit words saturate to 16 bits, the last parameter is added, and the sums saturate to bytes.

    The instructions interleave the vectors in groups of four values; a permutation restores the order.
    """
    shorts, narrow, words = _vector(2 * lanes, "i16"), _vector(4 * lanes, "i8"), _vector(lanes, "i32")
    to_shorts, to_bytes = _PACKS[lanes]
    lines = [f"%z = call {shorts} @llvm.x86.{to_shorts}({words} %4, {words} %4)"]
    for half in range(2):
        lines.append(f"%s{half} = call {shorts} @llvm.x86.{to_shorts}({words} %{2 * half}, {words} %{2 * half + 1})")
        lines.append(f"%t{half} = call {shorts} @llvm.sadd.sat.v{2 * lanes}i16({shorts} %s{half}, {shorts} %z)")
    order = ", ".join(f"i32 {quad * 4 + vector}" for vector in range(4) for quad in range(lanes // 4))
    lines += [
        f"%b = call {narrow} @llvm.x86.{to_bytes}({shorts} %t0, {shorts} %t1)",
        f"%w = bitcast {narrow} %b to {words}",
        f"%o = shufflevector {words} %w, {words} %w, <{lanes} x i32> <{order}>",
        f"%r = bitcast {words} %o to {narrow}",
    ]
    return "".join(f"\n  {line}" for line in lines)


_PACKS = {8: ("avx2.packssdw", "avx2.packuswb"), 16: ("avx512.packssdw.512", "avx512.packuswb.512")}


def _pack_uint8_declared(lanes: int) -> str:
    shorts, narrow, words = _vector(2 * lanes, "i16"), _vector(4 * lanes, "i8"), _vector(lanes, "i32")
    to_shorts, to_bytes = _PACKS[lanes]
    return (
        f"declare {shorts} @llvm.x86.{to_shorts}({words}, {words})\n"
        f"declare {narrow} @llvm.x86.{to_bytes}({shorts}, {shorts})\n"
        f"declare {shorts} @llvm.sadd.sat.v{2 * lanes}i16({shorts}, {shorts})"
    )


def _pack_uint8_emulated(lanes: int) -> str:
    """Emulated packing: saturation before and after the addition, in 32 bits."""
    words, flags, narrow = _vector(lanes, "i32"), _vector(lanes, "i1"), _vector(lanes, "i8")
    lines = []

    def bounded(name: str, least: int, most: int) -> None:
        for suffix, comparison, bound in (("l", "slt", least), ("h", "sgt", most)):
            limit = _all(lanes, "i32", bound)
            lines.append(f"{name}{suffix}f = icmp {comparison} {words} {name}, {limit}")
            lines.append(f"{name}{suffix} = select {flags} {name}{suffix}f, {words} {limit}, {words} {name}")
            name += suffix

    for index in range(4):
        lines.append(f"%v{index} = add {words} %{index}, zeroinitializer")
        bounded(f"%v{index}", -32768, 32767)
        lines.append(f"%u{index} = add {words} %v{index}lh, %4")
        bounded(f"%u{index}", 0, 255)
        lines.append(f"%b{index} = trunc {words} %u{index}lh to {narrow}")
    return "".join(f"\n  {line}" for line in lines) + _joined([f"%b{index}" for index in range(4)], lanes, "i8", "%r")


def _joined(vectors: Sequence[str], lanes: int, element: str, result: str) -> str:
    """Shuffles that concatenate two or four vectors."""
    if len(vectors) == 4:
        left = _joined(vectors[:2], lanes, element, f"{result}a")
        right = _joined(vectors[2:], lanes, element, f"{result}b")
        return left + right + _joined([f"{result}a", f"{result}b"], 2 * lanes, element, result)
    order = ", ".join(f"i32 {lane}" for lane in range(2 * lanes))
    first, second = (f"{_vector(lanes, element)} {vector}" for vector in vectors)
    return f"\n  {result} = shufflevector {first}, {second}, <{2 * lanes} x i32> <{order}>"


def _multiply_add(lanes: int) -> str:
    floats = _vector(lanes, "float")
    return f"""
  %r = call {floats} @llvm.fma.v{lanes}f32({floats} %0, {floats} %1, {floats} %2)"""


def _multiply_add_declared(lanes: int) -> str:
    floats = _vector(lanes, "float")
    return f"declare {floats} @llvm.fma.v{lanes}f32({floats}, {floats}, {floats})"


def _add_product(lanes: int) -> str:
    """Multiply and add with two roundings; the fence prevents contraction by LLVM."""
    floats = _vector(lanes, "float")
    return f"""
  %p = fmul {floats} %0, %1
  %q = call {floats} @llvm.arithmetic.fence.v{lanes}f32({floats} %p)
  %r = fadd {floats} %q, %2"""


def _add_product_declared(lanes: int) -> str:
    floats = _vector(lanes, "float")
    return f"declare {floats} @llvm.arithmetic.fence.v{lanes}f32({floats})"


def _look_up(lanes: int) -> str:
    """Native table lookup, with the table as two-byte words.

    Two register permutations look up 64 words each, and the lowest bit of the index selects the byte.
    """
    if lanes != 16:
        return _look_up_emulated(lanes)
    words, bytes_, choose = _vector(32, "i16"), _vector(32, "i8"), "@llvm.x86.avx512.vpermi2var.hi.512"
    return f"""
  %i = zext {bytes_} %0 to {words}
  %w = lshr {words} %i, {_all(32, "i16", 1)}
  %low = call {words} {choose}({words} %1, {words} %w, {words} %2)
  %high = call {words} {choose}({words} %3, {words} %w, {words} %4)
  %first = icmp ult {words} %w, {_all(32, "i16", 64)}
  %both = select {_vector(32, "i1")} %first, {words} %low, {words} %high
  %odd = and {words} %i, {_all(32, "i16", 1)}
  %shift = shl {words} %odd, {_all(32, "i16", 3)}
  %byte = lshr {words} %both, %shift
  %r = trunc {words} %byte to {bytes_}"""


def _look_up_declared(lanes: int) -> str:
    words = _vector(32, "i16")
    return f"declare {words} @llvm.x86.avx512.vpermi2var.hi.512({words}, {words}, {words})" if lanes == 16 else ""


def _look_up_emulated(lanes: int) -> str:
    """Emulated table lookup, byte by byte from one concatenated vector."""
    count, words, table = 2 * lanes, _vector(32, "i16"), _vector(128, "i16")
    halves = ", ".join(f"i32 {index}" for index in range(64))
    whole = ", ".join(f"i32 {index}" for index in range(128))
    pair = _vector(64, "i16")
    lines = [
        f"%lower = shufflevector {words} %1, {words} %2, <64 x i32> <{halves}>",
        f"%upper = shufflevector {words} %3, {words} %4, <64 x i32> <{halves}>",
        f"%table = shufflevector {pair} %lower, {pair} %upper, <128 x i32> <{whole}>",
        f"%bytes = bitcast {table} %table to {_vector(256, 'i8')}",
    ]
    for index in range(count):
        before = "zeroinitializer" if index == 0 else f"%v{index - 1}"
        after = "%r" if index == count - 1 else f"%v{index}"
        lines += [
            f"%b{index} = extractelement {_vector(count, 'i8')} %0, i32 {index}",
            f"%i{index} = zext i8 %b{index} to i32",
            f"%t{index} = extractelement {_vector(256, 'i8')} %bytes, i32 %i{index}",
            f"{after} = insertelement {_vector(count, 'i8')} {before}, i8 %t{index}, i32 {index}",
        ]
    return "".join(f"\n  {line}" for line in lines)


# float32 sums plus the products of the two bfloat16 of each word.
DOT_BFLOAT16 = VectorOperation(
    "dot_bfloat16",
    "bfloat16",
    "float32",
    ("float32", "int32", "int32"),
    _dot_bfloat16_declared,
    _dot_bfloat16,
    _dot_bfloat16_emulated,
)
# float32 rounded to nearest, ties to even, to the bits of bfloat16.
ROUND_BFLOAT16 = VectorOperation(
    "round_bfloat16",
    "bfloat16",
    "uint16",
    ("float32",),
    _round_bfloat16_declared,
    _round_bfloat16,
    _round_bfloat16_emulated,
)
# The same for two vectors, concatenated.
ROUND_PAIR_BFLOAT16 = VectorOperation(
    "round_pair_bfloat16",
    "bfloat16",
    "uint16x2",
    ("float32", "float32"),
    _round_pair_bfloat16_declared,
    _round_pair_bfloat16,
    _round_pair_bfloat16_emulated,
)
# 2^x and 1/x in float32, accurate to 13 and 14 bits, for results that are rounded to bfloat16.
POWER_OF_TWO = VectorOperation(
    "power_of_two",
    "bfloat16",
    "float32",
    ("float32",),
    _power_of_two_declared,
    _power_of_two,
    _power_of_two_emulated,
)
RECIPROCAL = VectorOperation(
    "reciprocal",
    "bfloat16",
    "float32",
    ("float32",),
    _reciprocal_declared,
    _reciprocal,
    _reciprocal_emulated,
)
# int32 sums plus the products of the four bytes of each word: unsigned data, signed weights.
DOT_UINT8 = VectorOperation(
    "dot_uint8",
    "uint8",
    "int32",
    ("int32", "int32", "int32"),
    _dot_uint8_declared,
    _dot_uint8,
    _dot_uint8_emulated,
)
# float32 rounded to the nearest int32, ties to even.
ROUND_INT32 = VectorOperation(
    "round_int32",
    "uint8",
    "int32",
    ("float32",),
    _round_int32_declared,
    _round_int32,
    _round_int32_emulated,
)
# Four int32 vectors plus a fifth, concatenated as bytes with saturation to 0 .. 255.
PACK_UINT8 = VectorOperation(
    "pack_uint8",
    "uint8",
    "uint8x4",
    ("int32",) * 5,
    _pack_uint8_declared,
    _pack_uint8,
    _pack_uint8_emulated,
)
# float32 multiply-add with one rounding.
MULTIPLY_ADD = VectorOperation(
    "multiply_add",
    "uint8",
    "float32",
    ("float32", "float32", "float32"),
    _multiply_add_declared,
    _multiply_add,
    _multiply_add,
    shared=True,
)
# float32 multiply and add with two roundings.
ADD_PRODUCT = VectorOperation(
    "add_product",
    "uint8",
    "float32",
    ("float32", "float32", "float32"),
    _add_product_declared,
    _add_product,
    _add_product,
    shared=True,
)
# Byte lookup in a table of 256, given as four vectors of 32 two-byte words.
LOOK_UP = VectorOperation(
    "look_up",
    TABLES,
    "uint8x2",
    ("uint8x2", _TABLE, _TABLE, _TABLE, _TABLE),
    _look_up_declared,
    _look_up,
    _look_up_emulated,
)
VECTOR_OPERATIONS = (
    *(DOT_BFLOAT16, ROUND_BFLOAT16, ROUND_PAIR_BFLOAT16, POWER_OF_TWO, RECIPROCAL),
    *(DOT_UINT8, ROUND_INT32, PACK_UINT8, MULTIPLY_ADD, ADD_PRODUCT, LOOK_UP),
)


def definitions(dtypes: Collection[str], emulated: bool) -> str:
    """LLVM IR of the operations of ``dtypes``: the CPU's instructions, or ``emulated`` in plain arithmetic.

    Other operations are omitted: LLVM cannot compile instructions that a CPU lacks, even if they are not called.
    """
    parts = []
    for operation in VECTOR_OPERATIONS:
        if operation.of not in dtypes:
            continue
        for lanes in _LANES:
            parameters = ", ".join(
                f"{_operand(lanes, dtype)} %{index}" for index, dtype in enumerate(operation.parameters)
            )
            result = _operand(lanes, operation.result)
            body = operation.emulated(lanes) if emulated else operation.native(lanes)
            parts.append(
                f"define {result} @{operation.symbol(lanes)}({parameters}) {{\nstart:{body}\n  ret {result} %r\n}}"
            )
            if not emulated or operation.shared:
                parts.append(operation.declared(lanes))
    return "\n".join(parts) + "\n"
