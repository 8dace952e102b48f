"""Reader of the arguments of execution-trace nodes.

Converts recorded (value, shape, type, stride) to values of :mod:`e2e.step.operator_trace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from e2e.step.operator_trace import Tensor, Value

# C++ and ATen names of scalar types; types that are not listed keep their names.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "long": "int64",
    "long int": "int64",
    "int": "int32",
    "short": "int16",
    "short int": "int16",
    "signed char": "int8",
    "char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
}
LARGEST_EXTENT = 2**48  # more elements than any memory holds
_UNDEFINED = "nullptr"
_MISSING = "<None>"


class ValueReader:
    """Reader of arguments; equal tensors become one object, because a trace repeats each many times."""

    def __init__(self) -> None:
        self._tensors: dict[Tensor, Tensor] = {}

    def read(
        self,
        values: Sequence[Any],
        shapes: Sequence[Any],
        types: Sequence[str],
        strides: Sequence[Any] | None = None,
    ) -> tuple[Value, ...]:
        """Convert all arguments. A tensor is ``[id, storage, offset, elements, element bytes, device]``."""
        for name, given in (("values", values), ("shapes", shapes), ("types", types)):
            if not isinstance(given, list | tuple):
                raise TypeError(f"the {name} of its arguments are {str(given)[:40]!r}, not a list")
        # Generated kernels are recorded with more values than types: their launch grid has no type.
        return tuple(
            self._value(value, _at(shapes, i), _at(types, i) or "", _at(strides, i)) for i, value in enumerate(values)
        )

    def _value(self, value: Any, shape: Any, kind: str, stride: Any) -> Value:
        if not isinstance(kind, str):
            raise TypeError(f"the type of an argument is {str(kind)[:40]!r}, not a text")
        if kind.startswith("Tensor("):
            return self._tensor(value, shape, kind[7:-1], stride)
        if isinstance(value, list):
            kinds = element_kinds(kind)
            return tuple(
                self._value(item, _at(shape, i), kinds[i] if i < len(kinds) else "", _at(stride, i))
                for i, item in enumerate(value)
            )
        if value == _MISSING:
            return None
        return value if isinstance(value, int | float | bool | str) or value is None else float(value)

    def _tensor(self, value: Sequence[Any], shape: Any, kind: str, stride: Any) -> Tensor | None:
        if kind.startswith(_UNDEFINED):
            return None
        tensor = Tensor(
            _whole(value[0]),
            _whole(value[1]),
            tuple(map(_extent, shape)),
            DTYPES.get(kind, kind),
            str(value[5]) if len(value) > 5 else "",
            None if stride is None else tuple(map(_extent, stride)),
        )
        return self._tensors.setdefault(tensor, tensor)


def _whole(value: Any) -> int:
    """Return ``value`` if it is an integer; raises ``TypeError`` otherwise."""
    if type(value) is not int:
        raise TypeError(f"{str(value)[:40]!r} is no whole number")
    return value


def _extent(value: Any) -> int:
    """Return a size or a stride; raises ``ValueError`` if it exceeds any memory."""
    if not 0 <= _whole(value) <= LARGEST_EXTENT:
        raise ValueError(f"{value} is no size of a tensor")
    return int(value)


@lru_cache(maxsize=4096)
def element_kinds(kind: str) -> tuple[str, ...]:
    """Types of the elements of ``GenericList[A,B]`` or ``Tuple[A,B]``, split at commas outside brackets."""
    start = kind.find("[")
    if start < 0 or not kind.endswith("]"):
        return ()
    parts, depth, begin = [], 0, start + 1
    for place in range(start + 1, len(kind) - 1):
        sign = kind[place]
        if sign in "[(<":
            depth += 1
        elif sign in "])>":
            depth -= 1
        elif sign == "," and not depth:
            parts.append(kind[begin:place])
            begin = place + 1
    last = kind[begin:-1]
    return tuple([*parts, last] if last else parts)


def _at(values: Any, place: int) -> Any:
    return values[place] if isinstance(values, list) and place < len(values) else None
