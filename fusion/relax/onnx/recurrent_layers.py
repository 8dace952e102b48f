"""Conversion of ONNX's LSTM and GRU: one matrix product for the inputs of all steps, and a kernel for the recurrence.

Text recognisers (CRNN) end in them. Forms that exporters of networks for images do not write are refused with their
name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx

from costmodel.base.errors import UnsupportedOperatorError
from fusion.relax.bindings import OPAQUE, constant_array
from fusion.relax.recurrent_kernels import LANES, Recurrence, gru, lstm
from schedules.contract.kernel_compilation import TEMPLATE_ATTRIBUTE

_BACKWARDS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_ACTIVATIONS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh")}
# Positions of inputs, and ONNX's names of inputs that no kernel supports.
_WEIGHT, _RECURRENT, _BIAS, _LENGTHS, _STATE, _CELL, _PEEPHOLES = range(1, 8)


def convert_lstm(builder: relax.BlockBuilder, inputs: Sequence[Any], attrs: Mapping[str, Any], name: str) -> relax.Expr:
    """Convert to (hidden states, last hidden state, last cell state) as a tuple; to the first alone if nothing else is
    read.
    """
    _require_plain("LSTM", inputs, attrs, name)
    if attrs.get("input_forget", 0) or _at(inputs, _PEEPHOLES) is not None:
        raise _refused("LSTM", name, "peepholes and coupled gates")
    layer = _recurrence(4, inputs, attrs)
    weight, recurrent, bias = _weights("LSTM", layer, inputs, name)
    half = bias.shape[1] // 2
    gates = _gates(builder, layer, inputs[0], weight, bias[:, :half] + bias[:, half:], attrs, name)
    states = [_state(layer, _at(inputs, position), attrs) for position in (_STATE, _CELL)]
    arguments = [gates, relax.const(layer.pack_recurrent(recurrent)), *states]
    return _results(builder, layer, lstm(layer), arguments, 2, attrs, name)


def convert_gru(builder: relax.BlockBuilder, inputs: Sequence[Any], attrs: Mapping[str, Any], name: str) -> relax.Expr:
    """Convert to (hidden states, last hidden state) as a tuple; to the first alone if nothing else is read."""
    _require_plain("GRU", inputs, attrs, name)
    layer = _recurrence(3, inputs, attrs)
    weight, recurrent, bias = _weights("GRU", layer, inputs, name)
    apart = bias.reshape(layer.directions, 2, 3, layer.hidden)
    added = apart[:, 0].copy()
    added[:, :2] += apart[:, 1, :2]
    if not attrs.get("linear_before_reset", 0):
        raise _refused("GRU", name, "a reset before the recurrent product (linear_before_reset=0)")
    gates = _gates(builder, layer, inputs[0], weight, added.reshape(layer.directions, -1), attrs, name)
    constants = (layer.pack_recurrent(recurrent), layer.pack_bias(apart[:, 1, 2]))
    arguments = [gates, *map(relax.const, constants), _state(layer, _at(inputs, _STATE), attrs)]
    return _results(builder, layer, gru(layer), arguments, 1, attrs, name)


def _refused(kind: str, name: str, what: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"operator {kind} of node {name!r}: {what} cannot be computed; export the model without it"
    )


def _at(inputs: Sequence[Any], position: int) -> Any:
    return inputs[position] if len(inputs) > position else None


def _require_plain(kind: str, inputs: Sequence[Any], attrs: Mapping[str, Any], name: str) -> None:
    """Raise ``UnsupportedOperatorError`` for forms that neither kernel computes."""
    direction = attrs.get("direction", b"forward").decode()
    if direction not in _BACKWARDS:
        raise _refused(kind, name, f"direction {direction!r}")
    activations = tuple(each.decode().lower() for each in attrs.get("activations", ()))
    if activations and activations != _ACTIVATIONS[kind] * len(_BACKWARDS[direction]):
        raise _refused(kind, name, f"activations {', '.join(activations)}")
    if attrs.get("clip", 0):
        raise _refused(kind, name, "a clip")
    if str(inputs[0].ty.dtype) != "float32":
        raise _refused(kind, name, f"data of {inputs[0].ty.dtype}")
    lengths, steps = _at(inputs, _LENGTHS), int(inputs[0].ty.shape[1 if attrs.get("layout", 0) else 0])
    if lengths is not None and (constant_array(lengths) is None or np.any(constant_array(lengths) != steps)):
        raise _refused(kind, name, "sequences of different lengths")


def _recurrence(gates: int, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Recurrence:
    steps, batch = (int(inputs[0].ty.shape[axis]) for axis in (0, 1))
    if attrs.get("layout", 0):
        steps, batch = batch, steps
    hidden = int(inputs[_RECURRENT].ty.shape[2])
    return Recurrence(gates, steps, batch, hidden, _BACKWARDS[attrs.get("direction", b"forward").decode()])


def _weights(
    kind: str, layer: Recurrence, inputs: Sequence[Any], name: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the weights of the input, the weights of the state, and both biases concatenated."""
    weight, recurrent, bias = (constant_array(_at(inputs, each)) for each in (_WEIGHT, _RECURRENT, _BIAS))
    if weight is None or recurrent is None or (bias is None and _at(inputs, _BIAS) is not None):
        raise _refused(kind, name, "weights that are computed")
    if bias is None:
        bias = np.zeros((layer.directions, 2 * layer.gates * layer.hidden), np.float32)
    return weight, recurrent, bias


def _gates(
    builder: relax.BlockBuilder,
    layer: Recurrence,
    data: relax.Expr,
    weight: np.ndarray,
    bias: np.ndarray,
    attrs: Mapping[str, Any],
    name: str,
) -> relax.Expr:
    """Return the contribution of the input to the gates of every step."""
    if attrs.get("layout", 0):
        data = builder.emit(relax.op.permute_dims(data, [1, 0, 2]), f"{name}_steps_first")
    product = builder.emit(relax.op.matmul(data, relax.const(layer.pack_input(weight))), f"{name}_input")
    shift = layer.pack_input(bias[:, :, None]).reshape(-1)
    total = builder.emit(relax.op.add(product, relax.const(shift)), f"{name}_input_bias")
    shape = (layer.steps, layer.batch, layer.directions, layer.gates * layer.blocks, LANES)
    return builder.emit(relax.op.reshape(total, shape), f"{name}_gates")


def _state(layer: Recurrence, given: relax.Expr | None, attrs: Mapping[str, Any]) -> relax.Expr:
    """Return the initial state (directions, batch, hidden); zeros if there is none."""
    if given is None:
        return relax.const(np.zeros((layer.directions, layer.batch, layer.hidden), np.float32))
    return relax.op.permute_dims(given, [1, 0, 2]) if attrs.get("layout", 0) else given


def _results(
    builder: relax.BlockBuilder,
    layer: Recurrence,
    kernel: tirx.PrimFunc,
    arguments: Sequence[relax.Expr],
    states: int,
    attrs: Mapping[str, Any],
    name: str,
) -> relax.Expr:
    shapes = [
        (layer.steps, layer.directions, layer.batch, layer.hidden),
        *[(layer.directions, layer.batch, layer.hidden)] * states,
    ]
    attributes = {"op_pattern": OPAQUE, TEMPLATE_ATTRIBUTE: "recurrent"}
    function = kernel.without_attr("global_symbol").with_attr(attributes)
    variable = builder.add_func(function, str(kernel.attrs["global_symbol"]))
    bound = [each if isinstance(each, relax.Var) else builder.normalize(each) for each in arguments]
    operands = [each if not isinstance(each, relax.Call) else builder.emit(each, f"{name}_state") for each in bound]
    types = [relax.TensorType(shape, "float32") for shape in shapes]
    call = builder.emit(relax.call_tir(variable, operands, out_ty=types), name)
    results = [builder.emit(relax.TupleGetItem(call, index), f"{name}_{index}") for index in range(len(shapes))]
    if attrs.get("layout", 0):
        order: list[Callable[[relax.Expr], relax.Expr]] = [
            lambda each: relax.op.permute_dims(each, [2, 0, 1, 3]),
            *[lambda each: relax.op.permute_dims(each, [1, 0, 2])] * states,
        ]
        results = [builder.emit(move(each), name) for move, each in zip(order, results, strict=True)]
    return results[0] if attrs["tvm_custom"]["num_outputs"] == 1 else relax.Tuple(results)
