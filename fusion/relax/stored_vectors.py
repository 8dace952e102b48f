"""Vectors of tensors that are stored in bfloat16 and computed in float32: widened as they are read, rounded as they are
written.
"""

from __future__ import annotations

from typing import Any

from schedules.loops import emit


def wide(value: Any, lanes: int = 1) -> Any:
    """``value``, a scalar or a vector of ``lanes``, in float32."""
    return value if _element(value) == "float32" else value.astype(_vector("float32", lanes))


def rounded(value: Any, dtype: str, lanes: int = 1) -> Any:
    """``value`` of float32 in ``dtype``, to the nearest."""
    return value if dtype == "float32" else value.astype(_vector(dtype, lanes))


def load_wide(buffer: Any, *indices: Any, lanes: int) -> Any:
    """:func:`schedules.loops.emit.load` of a buffer of any number type, in float32."""
    return wide(emit.load(buffer, *indices, lanes=lanes), lanes)


def store_rounded(buffer: Any, value: Any, *indices: Any, lanes: int) -> None:
    """:func:`schedules.loops.emit.store` of ``value``, of float32, into a buffer of any number type."""
    emit.store(buffer, rounded(value, str(buffer.dtype), lanes), *indices, lanes=lanes)


def _element(value: Any) -> str:
    return str(value.dtype).split("x")[0]


def _vector(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"
