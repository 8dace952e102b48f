"""ONNX's LSTM and GRU: one matrix product for the inputs of all steps, and a kernel for the recurrence.

Text recognisers (CRNN) end in them. Forms that exporters of networks for images do not write are refused with their
name.

The kernel computes step by step, all directions and sequences of a batch in parallel. A step is a product of the
state with the recurrent weights, packed in the order in which they are read, and the gates on vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from costmodel.base.errors import UnsupportedOperatorError
from fusion.relax.bindings import OPAQUE, constant_array
from schedules.contract.kernel_compilation import TEMPLATE_ATTRIBUTE
from schedules.loops import emit

# Lanes of the widest registers; LLVM splits vectors for CPUs with shorter ones.
LANES = 16


@dataclass(frozen=True)
class Recurrence:
    """Sizes of a recurrent layer."""

    # 4 for an LSTM (input, output, forget, cell), 3 for a GRU (update, reset, hidden).
    gates: int
    steps: int
    batch: int
    hidden: int
    # For each direction, True if it begins at the last step.
    backwards: tuple[bool, ...]

    @property
    def directions(self) -> int:
        """Number of directions, one or two."""
        return len(self.backwards)

    @property
    def blocks(self) -> int:
        """Vectors that hold the state of one sequence."""
        return -(-self.hidden // LANES)

    @property
    def padded(self) -> int:
        """Values in those vectors."""
        return self.blocks * LANES

    def pack_input(self, weight: np.ndarray) -> np.ndarray:
        """Return the rows (directions, gates x hidden, ...) of the input contribution as columns (..., directions x
        gates x ``padded``).
        """
        rows = weight.reshape(self.directions, self.gates, self.hidden, -1)
        wide = np.zeros((self.directions, self.gates, self.padded, rows.shape[3]), np.float32)
        wide[:, :, : self.hidden] = rows
        return np.ascontiguousarray(wide.reshape(-1, rows.shape[3]).T)

    def pack_recurrent(self, weight: np.ndarray) -> np.ndarray:
        """Return weights (directions, gates x hidden, hidden) as (directions, blocks, hidden, gates, lanes)."""
        rows = weight.reshape(self.directions, self.gates, self.hidden, self.hidden)
        wide = np.zeros((self.directions, self.gates, self.padded, self.hidden), np.float32)
        wide[:, :, : self.hidden] = rows
        apart = wide.reshape(self.directions, self.gates, self.blocks, LANES, self.hidden)
        return np.ascontiguousarray(apart.transpose(0, 2, 4, 1, 3))

    def pack_bias(self, bias: np.ndarray) -> np.ndarray:
        """Return one value per hidden unit, (directions, hidden), as (directions, blocks, lanes)."""
        wide = np.zeros((self.directions, self.padded), np.float32)
        wide[:, : self.hidden] = bias
        return wide.reshape(self.directions, self.blocks, LANES)


def lstm(layer: Recurrence) -> tirx.PrimFunc:
    """Build the LSTM kernel. Parameters: gates (steps, batch, directions, gates x blocks, lanes), packed recurrent
    weights, hidden and cell state (directions, batch, hidden); results: hidden states (steps, directions, batch,
    hidden), the last hidden and cell state.
    """

    def body(gates: Any, weight: Any, first: Any, first_cell: Any, every: Any, last: Any, last_cell: Any) -> None:
        with _sequences(layer) as (direction, image):
            state, new = _state(layer), _state(layer)
            cell = _state(layer)
            _copy_in(layer, first, direction, image, state)
            _copy_in(layer, first_cell, direction, image, cell)
            with T.serial(0, layer.steps) as step:
                at = emit.bind(_position(layer, direction, step))
                with emit.loop(layer.blocks) as block:
                    starts = [_input(layer, gates, at, image, direction, gate, block) for gate in range(4)]
                    sums = _products(layer, weight, state, direction, block, starts)
                    opened, shown, kept = (emit.activate(each, "sigmoid", LANES) for each in sums[:3])
                    old = emit.load(cell, block, lanes=LANES)
                    value = T.bind(T.bind(kept) * old + T.bind(opened) * _tanh(sums[3]))
                    emit.store(cell, value, block, lanes=LANES)
                    emit.store(new, T.bind(shown) * _tanh(value), block, lanes=LANES)
                _finish_step(layer, new, state, every, (at, direction, image))
            _copy_out(layer, state, last, (direction, image))
            _copy_out(layer, cell, last_cell, (direction, image))

    states = (layer.directions, layer.batch, layer.hidden)
    return _kernel("lstm", _parameters(layer, 2), (states, states), layer, body)


def gru(layer: Recurrence) -> tirx.PrimFunc:
    """Build the GRU kernel: parameters and results as in :func:`lstm`, without a cell state; the weights are followed
    by the bias of the reset state (directions, blocks, lanes), which is also multiplied by the reset gate.
    """

    def body(gates: Any, weight: Any, bias: Any, first: Any, every: Any, last: Any) -> None:
        with _sequences(layer) as (direction, image):
            state, new = _state(layer), _state(layer)
            _copy_in(layer, first, direction, image, state)
            with T.serial(0, layer.steps) as step:
                at = emit.bind(_position(layer, direction, step))
                with emit.loop(layer.blocks) as block:
                    starts = [_input(layer, gates, at, image, direction, gate, block) for gate in range(2)]
                    starts.append(emit.load(bias, direction, block, lanes=LANES))
                    sums = _products(layer, weight, state, direction, block, starts)
                    update, reset = (T.bind(emit.activate(each, "sigmoid", LANES)) for each in sums[:2])
                    inner = _input(layer, gates, at, image, direction, 2, block)
                    candidate = T.bind(_tanh(inner + reset * sums[2]))
                    old = emit.load(state, block, lanes=LANES)
                    emit.store(new, candidate + update * (old - candidate), block, lanes=LANES)
                _finish_step(layer, new, state, every, (at, direction, image))
            _copy_out(layer, state, last, (direction, image))

    states = (layer.directions, layer.batch, layer.hidden)
    bias = (layer.directions, layer.blocks, LANES)
    return _kernel("gru", (*_parameters(layer, 0), bias, states), (states,), layer, body)


def _parameters(layer: Recurrence, states: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of gates, weights, and ``states`` states."""
    gates = (layer.steps, layer.batch, layer.directions, layer.gates * layer.blocks, LANES)
    weight = (layer.directions, layer.blocks, layer.hidden, layer.gates, LANES)
    return (gates, weight, *((layer.directions, layer.batch, layer.hidden),) * states)


def _kernel(
    name: str,
    parameters: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    layer: Recurrence,
    body: Callable[..., None],
) -> tirx.PrimFunc:
    """Build a kernel; ``results``: shapes of the results after the hidden states of every step."""
    every = (layer.steps, layer.directions, layer.batch, layer.hidden)
    shapes = (*parameters, every, *results)
    with IRBuilder() as builder, T.prim_func():
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        body(*[T.arg(f"a{index}", T.buffer(shape, "float32")) for index, shape in enumerate(shapes)])
    return builder.get()


@contextmanager
def _sequences(layer: Recurrence) -> Iterator[tuple[Any, Any]]:
    """Open one task per direction and sequence; yield the indices of both."""
    with emit.tasks(layer.directions * layer.batch) as task:
        yield emit.quotient(task, layer.batch), emit.remainder(task, layer.batch)


def _state(layer: Recurrence) -> Any:
    return T.alloc_buffer((layer.blocks, LANES), "float32")


def _copy_in(layer: Recurrence, source: Any, direction: Any, image: Any, state: Any) -> None:
    """Copy the state of one sequence; zero beyond the hidden units."""
    with T.serial(0, layer.blocks) as block:
        emit.store(state, emit.splat(0.0, LANES), block, lanes=LANES)
    with T.serial(0, layer.hidden) as unit:
        T.buffer_store(state, source[direction, image, unit], [unit // LANES, unit % LANES])


def _copy_out(layer: Recurrence, state: Any, target: Any, place: tuple[Any, ...]) -> None:
    with T.serial(0, layer.hidden) as unit:
        T.buffer_store(target, state[unit // LANES, unit % LANES], [*place, unit])


def _finish_step(layer: Recurrence, new: Any, state: Any, every: Any, place: tuple[Any, ...]) -> None:
    with T.serial(0, layer.blocks) as block:
        emit.store(state, emit.load(new, block, lanes=LANES), block, lanes=LANES)
    _copy_out(layer, new, every, place)


def _position(layer: Recurrence, direction: Any, step: Any) -> Any:
    """Return the step of the sequence that iteration ``step`` of the loop computes."""
    from_end = layer.steps - 1 - step
    if len(set(layer.backwards)) == 1:
        return from_end if layer.backwards[0] else step
    return step + direction * (from_end - step)  # forwards, then backwards


def _input(layer: Recurrence, gates: Any, at: Any, image: Any, direction: Any, gate: int, block: Any) -> Any:
    return emit.load(gates, at, image, direction, gate * layer.blocks + block, lanes=LANES)


def _products(
    layer: Recurrence, weight: Any, state: Any, direction: Any, block: Any, starts: Sequence[Any]
) -> list[Any]:
    """Return for each gate its start plus the products of the state with the weights."""
    (sums,) = emit.registers(1, len(starts), LANES)
    for register, start in zip(sums, starts, strict=True):
        emit.store(register, start, lanes=LANES)
    with T.serial(0, layer.hidden) as unit:
        value = T.bind(emit.splat(state[unit // LANES, unit % LANES], LANES))
        for gate, register in enumerate(sums):
            product = value * emit.load(weight, direction, block, unit, gate, lanes=LANES)
            emit.store(register, emit.load(register, lanes=LANES) + product, lanes=LANES)
    return [T.bind(emit.load(register, lanes=LANES)) for register in sums]


def _tanh(x: Any) -> Any:
    """Return tanh as twice the sigmoid of twice the argument, minus one."""
    two, one = emit.splat(2.0, LANES), emit.splat(1.0, LANES)
    return two * emit.activate(x * two, "sigmoid", LANES) - one


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
    states = [_initial_state(layer, _at(inputs, position), attrs) for position in (_STATE, _CELL)]
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
    arguments = [gates, *map(relax.const, constants), _initial_state(layer, _at(inputs, _STATE), attrs)]
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


def _initial_state(layer: Recurrence, given: relax.Expr | None, attrs: Mapping[str, Any]) -> relax.Expr:
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
