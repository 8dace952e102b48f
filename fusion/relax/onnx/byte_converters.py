"""Converters of byte steps (:mod:`fusion.relax.onnx.byte_steps`) to Relax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.byte_calls import ByteMean, BytePair, ByteStep, ByteTable, ByteWindow, byte_call
from fusion.relax.byte_resize import ByteResize
from fusion.relax.onnx.byte_steps import BYTE_MEAN, BYTE_PAIR, BYTE_RESIZE, BYTE_TABLE, BYTE_WINDOW


def _table(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> ByteStep:
    return ByteTable(shape, bool(attrs["per_channel"]))


def _pair(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> ByteStep:
    return BytePair("add" if attrs["kind"] == b"add" else "multiply", shape, bool(attrs["per_channel"]))


def _mean(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> ByteStep:
    batch, channels, height, width = shape
    return ByteMean((batch, channels, height, width))


def _window(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> ByteStep:
    batch, channels, height, width = shape
    (rows, columns), (down, across) = attrs["kernel"], attrs["stride"]
    top, left, bottom, right = attrs["padding"]
    counts_padding = bool(attrs["counts_padding"])
    return ByteWindow(
        (batch, channels, height, width), (rows, columns), (down, across), (top, left, bottom, right), counts_padding
    )


def _resize(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> ByteResize:
    batch, channels, height, width = shape
    (rows, columns), (down, across) = attrs["size"], attrs["scales"]
    image = (batch, channels, height, width)
    return ByteResize(image, (rows, columns), (down, across), attrs["coordinates"].decode(), bool(attrs["cut_off"]))


def _converter(
    make: Callable[[tuple[int, ...], Mapping[str, Any]], ByteStep],
) -> Callable[[relax.BlockBuilder, Sequence[Any], dict, str], relax.Expr]:
    def convert_step(builder: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict, name: str) -> relax.Expr:
        shape = static_shape(inputs[0])
        assert shape is not None
        step = make(shape, attrs)
        data, *others = inputs
        if isinstance(step, ByteResize):
            others[:0] = [relax.const(table) for table in step.tables()]
        return builder.emit(byte_call(builder, step, [data, *others]), name)

    return convert_step


BYTE_CONVERTERS = {
    BYTE_MEAN: _converter(_mean),
    BYTE_PAIR: _converter(_pair),
    BYTE_RESIZE: _converter(_resize),
    BYTE_TABLE: _converter(_table),
    BYTE_WINDOW: _converter(_window),
}
