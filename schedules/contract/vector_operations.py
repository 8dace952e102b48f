"""Operations on vectors that TIR has no word for: calls of functions in LLVM's own language, linked into every module.

A kernel calls them by name; compilation brings their bodies (:func:`definitions`), which LLVM inlines: those of the
CPU's own instructions, or a slow emulation in plain arithmetic that runs anywhere, so that the TIR of a kernel can be
checked on a CPU without them. TIR has no value of LLVM's type ``bfloat``, so operands are words of 32 bits, each of
which holds neighbouring values, the first in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Lanes of 32 bits that vectors have: of a whole register and of half of one.
_LANES = (8, 16)


@dataclass(frozen=True)
class VectorOperation:
    """``name`` for each number of lanes. ``result``: dtype of one lane. ``native``, ``emulated``: its body for a number
    of lanes, with parameters %0, %1 ... and the value %r; ``declared``: what the native one calls.
    """

    name: str
    result: str
    parameters: tuple[str, ...]
    declared: Callable[[int], str]
    native: Callable[[int], str]
    emulated: Callable[[int], str]

    def symbol(self, lanes: int) -> str:
        """The name by which TIR calls it; ``ValueError`` for a number of lanes that it does not have."""
        if lanes not in _LANES:
            raise ValueError(f"{self.name} of {lanes} lanes: there are {_LANES}")
        return f"fusion_{self.name}_{lanes}"


_LLVM = {"float32": "float", "int32": "i32", "uint16": "i16"}


def _vector(lanes: int, element: str) -> str:
    return f"<{lanes} x {element}>"


def _all(lanes: int, element: str, value: int) -> str:
    """The constant that holds ``value`` in every lane."""
    return "<" + ", ".join([f"{element} {value}"] * lanes) + ">"


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


# Sums of float32 plus the products of the two bfloat16 of each word.
DOT_BFLOAT16 = VectorOperation(
    "dot_bfloat16",
    "float32",
    ("float32", "int32", "int32"),
    _dot_bfloat16_declared,
    _dot_bfloat16,
    _dot_bfloat16_emulated,
)
# float32 rounded to nearest, ties to even, to the bits of bfloat16.
ROUND_BFLOAT16 = VectorOperation(
    "round_bfloat16",
    "uint16",
    ("float32",),
    _round_bfloat16_declared,
    _round_bfloat16,
    _round_bfloat16_emulated,
)
VECTOR_OPERATIONS = (DOT_BFLOAT16, ROUND_BFLOAT16)


def definitions(emulated: bool) -> str:
    """LLVM's text of all operations: of the CPU's instructions, or ``emulated`` in plain arithmetic."""
    parts = []
    for operation in VECTOR_OPERATIONS:
        for lanes in _LANES:
            parameters = ", ".join(
                f"{_vector(lanes, _LLVM[dtype])} %{index}" for index, dtype in enumerate(operation.parameters)
            )
            result = _vector(lanes, _LLVM[operation.result])
            body = operation.emulated(lanes) if emulated else operation.native(lanes)
            parts.append(
                f"define {result} @{operation.symbol(lanes)}({parameters}) {{\nstart:{body}\n  ret {result} %r\n}}"
            )
            if not emulated:
                parts.append(operation.declared(lanes))
    return "\n".join(parts) + "\n"
