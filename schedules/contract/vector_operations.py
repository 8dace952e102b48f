"""Operations on vectors that TIR has no word for: calls of functions in LLVM's own language, linked into every module.

A kernel calls them by name; compilation brings their bodies (:func:`definitions`), which LLVM inlines: those of the
CPU's own instructions, or a slow emulation in plain arithmetic that runs anywhere, so that the TIR of a kernel can be
checked on a CPU without them. TIR has no value of LLVM's type ``bfloat``, so operands are words of 32 bits, each of
which holds neighbouring values, the first in the lowest bits.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

# Lanes of 32 bits that vectors have: of a whole register and of half of one.
_LANES = (8, 16)


@dataclass(frozen=True)
class VectorOperation:
    """``name`` for each number of lanes; kernels that read or write the dtype ``of``, or say :data:`TABLES`, may call
    it. ``result``, ``parameters``: dtypes of one lane, ``uint8x2`` where there are two for each lane of 32 bits.
    ``native``, ``emulated``: its body for a number of lanes, with parameters %0, %1 ... and the value %r;
    ``declared``: what the native one calls, and the emulated one too where that is ``shared``.
    """

    name: str
    of: str
    result: str
    parameters: tuple[str, ...]
    declared: Callable[[int], str]
    native: Callable[[int], str]
    emulated: Callable[[int], str]
    shared: bool = False

    @property
    def joined(self) -> int:
        """Vectors of values that the result is, one behind the other."""
        return int(self.result.partition("x")[2] or 1)

    def result_type(self, lanes: int) -> str:
        """TIR's name of the type of the result."""
        return f"{self.result.partition('x')[0]}x{lanes * self.joined}"

    def symbol(self, lanes: int) -> str:
        """The name by which TIR calls it; ``ValueError`` for a number of lanes that it does not have."""
        if lanes not in _LANES:
            raise ValueError(f"{self.name} of {lanes} lanes: there are {_LANES}")
        return f"fusion_{self.name}_{lanes}"


# What kernels say that look bytes up in tables; others need not compile that.
TABLES = "tables"
# A parameter of 32 words of 16 bits, whatever the number of lanes.
_TABLE = "table"
_LLVM = {"float32": "float", "int32": "i32", "uint16": "i16", "uint8": "i8"}


def _operand(lanes: int, dtype: str) -> str:
    """LLVM's type of a vector of ``dtype``, as :class:`VectorOperation` writes it."""
    if dtype == _TABLE:
        return _vector(32, "i16")
    element, _, times = dtype.partition("x")
    return _vector(lanes * int(times or 1), _LLVM[element])


def _vector(lanes: int, element: str) -> str:
    return f"<{lanes} x {element}>"


def _all(lanes: int, element: str, value: int) -> str:
    """The constant that holds ``value`` in every lane."""
    return "<" + ", ".join([f"{element} {value}"] * lanes) + ">"


def _floats(lanes: int, value: float) -> str:
    """Likewise of float32, whose value LLVM wants as the bits of the nearest double."""
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
    """The upper 16 bits of a float32 are a bfloat16. Products of two are exact; so are the sums' roundings those of the
    instruction but for their order.
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
    """To nearest, ties to even: half a unit in the last place less one is added, and one where the last bit is set."""
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
    """The instruction leaves its second operand in the lower half."""
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


# 2^f for f from 0 to 1, of the highest power first, by Remez's exchange: the relative error is at most 7.5e-5, a
# twentieth of half a unit in the last place of bfloat16.
_POWER_OF_TWO = (0.078024523, 0.22606716, 0.69583354, 0.99992522)


def _cubic(lanes: int) -> str:
    """The polynomial of %f as %p; products and sums may be rounded once."""
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
    """What is left of x above the next whole number below, and that number as an exponent: without limits of x."""
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
    """The exponent is added to the bits; x is cut off where that would leave the normal numbers."""
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
    """Byte by byte: a shift to the top and back down leaves one, without or with its sign."""
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
    """By adding and subtracting 1.5 * 2^23, whose unit in the last place is one: values are below 2^22."""
    floats, words = _vector(lanes, "float"), _vector(lanes, "i32")
    large = "<" + ", ".join(["float 1.2582912e+07"] * lanes) + ">"
    return f"""
  %sum = fadd {floats} %0, {large}
  %bits = bitcast {floats} %sum to {words}
  %r = sub {words} %bits, {_all(lanes, "i32", 0x4B400000)}"""


def _pack_uint8(lanes: int) -> str:
    """Words of 32 bits saturate to 16 bits, to which the last parameter is added, and these to bytes: four of each
    vector by turns, which a permutation brings together.
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
    """Bounds before and behind the addition, of 32 bits."""
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
    """The shuffles that put two or four vectors one behind the other."""
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
    """The fence keeps LLVM from rounding once."""
    floats = _vector(lanes, "float")
    return f"""
  %p = fmul {floats} %0, %1
  %q = call {floats} @llvm.arithmetic.fence.v{lanes}f32({floats} %p)
  %r = fadd {floats} %q, %2"""


def _add_product_declared(lanes: int) -> str:
    floats = _vector(lanes, "float")
    return f"declare {floats} @llvm.arithmetic.fence.v{lanes}f32({floats})"


def _look_up(lanes: int) -> str:
    """The table as words of two bytes: one permutation of registers finds each of 64 words, and the lowest bit of the
    index says which byte of its word it is.
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
    """Byte by byte from the table as one vector."""
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


# Sums of float32 plus the products of the two bfloat16 of each word.
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
# Two vectors likewise, one behind the other.
ROUND_PAIR_BFLOAT16 = VectorOperation(
    "round_pair_bfloat16",
    "bfloat16",
    "uint16x2",
    ("float32", "float32"),
    _round_pair_bfloat16_declared,
    _round_pair_bfloat16,
    _round_pair_bfloat16_emulated,
)
# 2^x and 1/x of float32 that are to be rounded to bfloat16: to 13 and 14 bits.
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
# Sums of int32 plus the products of the four bytes of each word: of data without a sign, of weights with one.
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
# Four vectors of int32 plus a fifth, one behind the other as bytes: sums below 0 become 0, those above 255 become 255.
PACK_UINT8 = VectorOperation(
    "pack_uint8",
    "uint8",
    "uint8x4",
    ("int32",) * 5,
    _pack_uint8_declared,
    _pack_uint8,
    _pack_uint8_emulated,
)
# A product and an addition of float32, rounded once.
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
# The same, the product rounded by itself before it is added.
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
# Bytes looked up in a table of 256, which is given as four vectors of 32 words of two bytes.
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
    """LLVM's text of the operations of ``dtypes``: of the CPU's instructions, or ``emulated`` in plain arithmetic.

    No others: LLVM cannot compile instructions that a CPU lacks, called or not.
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
