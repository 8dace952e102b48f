"""Operators that the kernel of a convolution or dense layer computes besides its sums: the epilogue after it, the
prologue before it, and the recognition of activations in both.

Epilogue: ``y = activation(x + bias [+ residual]) [* scale + shift] [+ residual]``; only convolutions take a scale and
a shift. Every value in between must have a single reader.

Prologue, applied as the kernel reads its input: ``x [* gate] [* scale + shift] [activation]``, in this order.
Operators that the preceding kernel applies to its output stay there.

Activations are recognised by the values they compute, independent of the operators that a framework uses for them. A
closed region of element-wise operators between one variable and one result is a scalar function; it *is* hard-swish
if it agrees with hard-swish on a grid that is dense where activations bend and wide enough to see every clip.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from tvm import relax

from costmodel.operators.layers import Conv2d, Epilogue, Prologue, ResidualPosition
from fusion.model.conv_graph import Node
from fusion.relax.bindings import Program, image_shape, is_float32, operator_name, same_type, static_shape
from schedules.contract.operator_reference import ACTIVATION_FUNCTIONS, SLOPED_FUNCTIONS, error_function, sigmoid
from schedules.contract.template import Parameters

Array = np.ndarray

_BINARY: Mapping[str, Callable[[Array, Array], Array]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.divide": np.divide,
    "relax.maximum": np.maximum,
    "relax.minimum": np.minimum,
    "relax.power": np.power,
}
_UNARY: Mapping[str, Callable[[Array], Array]] = {
    "relax.nn.relu": ACTIVATION_FUNCTIONS["relu"],
    "relax.sigmoid": sigmoid,
    "relax.nn.silu": ACTIVATION_FUNCTIONS["silu"],
    "relax.exp": np.exp,
    "relax.negative": np.negative,
    "relax.tanh": np.tanh,
    "relax.erf": error_function,
    "relax.nn.gelu": ACTIVATION_FUNCTIONS["gelu"],
    "relax.nn.gelu_tanh": ACTIVATION_FUNCTIONS["gelu_tanh"],
    "relax.nn.softplus": ACTIVATION_FUNCTIONS["softplus"],
    "relax.log": np.log,
    "relax.abs": np.abs,
}

_LEAKY = "relax.nn.leakyrelu"

# Activations with a slope that pass through one half at zero.
_HARD = ("hard_sigmoid", "hard_swish")


@cache
def _grid() -> Array:
    wide = np.geomspace(1e-6, 1e6, 121)
    return np.concatenate([np.linspace(-12.0, 12.0, 4801), wide, -wide])


@cache
def _expected() -> Mapping[str, Array]:
    with np.errstate(all="ignore"):
        return {name: function(_grid()) for name, function in ACTIVATION_FUNCTIONS.items()}


def element_wise(call: relax.Expr | None, program: Program, values: Mapping[relax.Var, Array]) -> Array | None:
    """Return the result of ``call`` on the arrays of its variables; None if it is not element-wise on
    them and scalars.
    """
    name = operator_name(call)
    if call is None or (name not in _UNARY and name not in _BINARY and name not in ("relax.clip", _LEAKY)):
        return None
    operands: list[Any] = []
    for argument in call.args:
        scalar = program.scalar(argument)
        value = values.get(argument) if isinstance(argument, relax.Var) else None
        if value is None and scalar is None:
            return None
        operands.append(np.float64(scalar) if value is None else value)
    with np.errstate(all="ignore"):
        if name == "relax.clip":
            return np.clip(*operands)
        if name == _LEAKY:
            return np.where(operands[0] < 0, float(call.attrs.alpha) * operands[0], operands[0])
        return _UNARY[name](*operands) if name in _UNARY else _BINARY[name](*operands)


@dataclass(frozen=True)
class Activation:
    """Activation function; ``name`` and ``slope`` as in :class:`costmodel.operators.layers.Epilogue`."""

    name: str
    slope: float = 0.0


def classify(values: Array) -> Activation | None:
    """Return the activation with these values on the grid, allowing for float32 rounding of constants;
    None if unknown.
    """
    for name, expected in _expected().items():
        if np.allclose(values, expected, rtol=1e-5, atol=1e-6):
            return Activation(name)
    slope = round(float(-np.interp(-1.0, *_sorted(values))), 6)
    if 0 < slope < 1 and np.allclose(values, SLOPED_FUNCTIONS["leaky_relu"](_grid(), slope), rtol=1e-5):
        return Activation("leaky_relu", slope)
    # Far below zero an ELU is minus its slope.
    slope = round(float(-np.interp(-100.0, *_sorted(values))), 6)
    if 0 < slope < 1 and np.allclose(values, SLOPED_FUNCTIONS["elu"](_grid(), slope), rtol=1e-5, atol=1e-6):
        return Activation("elu", slope)
    # At one both hard activations are slope + 1/2, unless they have reached one.
    slope = round(float(np.interp(1.0, *_sorted(values))) - 0.5, 6)
    for name in _HARD if 0 < slope < 0.5 else ():
        if np.allclose(values, SLOPED_FUNCTIONS[name](_grid(), slope), rtol=1e-5, atol=1e-6):
            return Activation(name, slope)
    return None


def recognised(function: Callable[[Array], Array | None]) -> Activation | None:
    """Return the activation that ``function`` of an array computes; None if it computes no activation or
    returns None.
    """
    values = function(_grid())
    return None if values is None else classify(values)


def _sorted(values: Array) -> tuple[Array, Array]:
    order = np.argsort(_grid())
    return _grid()[order], values[order]


def match_activation(
    program: Program, var: relax.Var, limit: int = 10
) -> tuple[Activation, tuple[relax.Var, ...]] | None:
    """Return the longest activation that starts at ``var``, and the variables it defines, the result last; None if
    there is none.

    Every use of ``var`` and of the variables in between lies inside the activation; it has at most ``limit`` operators.
    """
    values = {var: _grid()}
    inside: list[int] = []
    found = None
    home = program.block[program.position[var]]
    while len(inside) < limit:
        position = min(
            (user for known in values for user in program.users.get(known, ()) if user not in inside), default=None
        )
        if position is None or position < 0 or program.block[position] != home:
            break
        binding = program.bindings[position]
        result = element_wise(binding.value, program, values)
        if result is None or np.ndim(result) == 0 or not same_type(binding.var, var):
            break
        values[binding.var] = result
        inside.append(position)
        if all(set(program.users.get(known, ())) <= set(inside) for known in values if known != binding.var):
            activation = classify(result)
            if activation is not None:
                found = activation, tuple(program.bindings[index].var for index in inside)
    return found


def activation_before(
    program: Program, var: relax.Var, limit: int = 10
) -> tuple[Activation, relax.Var, tuple[relax.Var, ...]] | None:
    """Return the activation whose result is ``var``, its input variable, and the variables that it defines, in order.

    An activation of one operator may have an input that other operators read too. An activation of several operators
    (at most ``limit``) must be the only reader of its input.
    """
    sources = _operands(program, var)
    for source in sources:
        with np.errstate(all="ignore"):
            values = element_wise(program.bindings[program.position[var]].value, program, {source: _grid()})
        activation = None if values is None else classify(values)
        if activation is not None:
            return activation, source, (var,)
    waiting, seen = list(sources), set(sources)
    while waiting and len(seen) <= limit:
        source = waiting.pop(0)
        if source not in program.position:
            continue
        found = match_activation(program, source, limit)
        if found is not None and found[1][-1] == var:
            return found[0], source, found[1]
        following = [each for each in _operands(program, source) if each not in seen]
        waiting, seen = waiting + following, seen | set(following)
    return None


def _operands(program: Program, var: relax.Var) -> list[relax.Var]:
    """Return the tensors of the type of ``var`` that are inputs of the element-wise call that computes it."""
    if var not in program.position:
        return []
    call = program.bindings[program.position[var]].value
    if operator_name(call) not in (*_UNARY, *_BINARY, "relax.clip", _LEAKY):
        return []
    operands = [arg for arg in call.args if isinstance(arg, relax.Var) and not program.is_constant(arg)]
    return list(dict.fromkeys(arg for arg in operands if same_type(arg, var)))


_ARITHMETIC = ("relax.add", "relax.subtract", "relax.multiply")


@dataclass
class Absorbed:
    """Epilogue as far as it has been matched."""

    output: relax.Var
    bias: np.ndarray | None = None
    activation: Activation | None = None
    residual: relax.Var | None = None
    position: ResidualPosition | None = None
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None
    slopes: np.ndarray | None = None
    # Variables of the epilogue, the result last.
    covered: list[relax.Var] = field(default_factory=list)

    @property
    def epilogue(self) -> Epilogue:
        name, slope = (None, 0.0) if self.activation is None else (self.activation.name, self.activation.slope)
        return Epilogue(self.bias is not None, name, self.position, self.scale is not None, slope)

    def parameters(self, weight: np.ndarray) -> Parameters:
        """Return the parameters of the layer with this ``weight``."""
        return Parameters(weight, self.bias, self.scale, self.shift, slopes=self.slopes)

    def cover(self, *variables: relax.Var) -> None:
        self.covered.extend(variables)
        self.output = variables[-1]


def absorb(
    program: Program, start: relax.Var, axis: int, claimed: Collection[relax.Var], affine: bool = True
) -> Absorbed:
    """Return the longest epilogue after ``start``, whose channels are along ``axis``; stop at ``claimed`` variables.

    ``affine``: the kernel supports parameters along the channels after the sum: a scale and a shift, slopes.
    """
    state = Absorbed(start)
    while True:
        if _may_activate(state) and (
            _absorb_activation(program, state, claimed) or _absorb_prelu(program, state, claimed, axis, affine)
        ):
            continue
        reader = _sole_reader(program, state.output, claimed)
        if reader is None or not (
            _absorb_bias(program, state, reader, axis)
            or (affine and _absorb_affine(program, state, reader, axis))
            or _absorb_residual(program, state, reader)
        ):
            return state


def _may_activate(state: Absorbed) -> bool:
    return state.activation is None and state.scale is None


def _absorb_activation(program: Program, state: Absorbed, claimed: Collection[relax.Var]) -> bool:
    found = match_activation(program, state.output)
    if found is None or any(var in claimed for var in found[1]):
        return False
    state.activation = found[0]
    state.cover(*found[1])
    return True


def _absorb_prelu(
    program: Program, state: Absorbed, claimed: Collection[relax.Var], axis: int, by_channel: bool
) -> bool:
    """Absorb a parametric ReLU: with one slope between zero and one a leaky ReLU, else one slope per channel."""
    binding = _only_user(program, state.output)
    shape = static_shape(state.output)
    if binding is None or binding.var in claimed or operator_name(binding.value) != "relax.nn.prelu" or shape is None:
        return False
    slopes, along = program.constant(binding.value.args[1]), int(binding.value.attrs.axis) % len(shape)
    if slopes is None or slopes.dtype != np.float32 or not (slopes.size == 1 or along == axis):
        return False
    if slopes.size == 1 and 0 < slopes.reshape(-1)[0] < 1:
        state.activation = Activation("leaky_relu", round(float(slopes.reshape(-1)[0]), 6))
    elif by_channel:
        state.activation = Activation("prelu")
        state.slopes = np.ascontiguousarray(np.broadcast_to(slopes.reshape(-1), (shape[axis],)))
    else:
        return False
    state.cover(binding.var)
    return True


def _only_user(program: Program, var: relax.Var) -> relax.VarBinding | None:
    """Return the only binding that reads ``var``, if it is in the same block; else None."""
    users = program.users.get(var, [])
    if len(users) != 1 or users[0] < 0 or program.block[users[0]] != program.block[program.position[var]]:
        return None
    return program.bindings[users[0]]


def _sole_reader(program: Program, var: relax.Var, claimed: Collection[relax.Var]) -> relax.VarBinding | None:
    """Return the only reader of ``var`` if it adds, subtracts or multiplies and keeps the shape; else None."""
    binding = _only_user(program, var)
    if binding is None or operator_name(binding.value) not in _ARITHMETIC or binding.var in claimed:
        return None
    return binding if same_type(binding.var, var) else None


def _absorb_bias(program: Program, state: Absorbed, binding: relax.VarBinding, axis: int) -> bool:
    """Absorb a constant along the channels that is added before the activation."""
    if not _may_activate(state):
        return False
    bias = _added(program, state, binding, axis)
    if bias is None:
        return False
    state.bias = bias if state.bias is None else state.bias + bias
    state.cover(binding.var)
    return True


def _absorb_affine(program: Program, state: Absorbed, binding: relax.VarBinding, axis: int) -> bool:
    """Absorb constants along the channels after the activation: factors and summands, in any order."""
    if state.position == "after_activation" or (state.activation is None and state.residual is None):
        return False
    if operator_name(binding.value) == "relax.multiply":
        factor, summand = _constant_operand(program, state, binding, axis), None
    else:
        factor, summand = None, _added(program, state, binding, axis)
    if factor is None and summand is None:
        return False
    channels = (static_shape(binding.var) or ())[axis]
    scale = np.ones(channels, np.float32) if state.scale is None else state.scale
    shift = np.zeros(channels, np.float32) if state.shift is None else state.shift
    if factor is not None:
        scale, shift = scale * factor, shift * factor
    state.scale, state.shift = scale, shift if summand is None else shift + summand
    state.cover(binding.var)
    return True


def _added(program: Program, state: Absorbed, binding: relax.VarBinding, axis: int) -> np.ndarray | None:
    """Return the constant per channel that an addition or subtraction adds, or None."""
    name, left = operator_name(binding.value), binding.value.args[0]
    if name not in ("relax.add", "relax.subtract"):
        return None
    constant = _constant_operand(program, state, binding, axis)
    if constant is None or name == "relax.add":
        return constant
    return -constant if isinstance(left, relax.Var) and left == state.output else None


def _constant_operand(program: Program, state: Absorbed, binding: relax.VarBinding, axis: int) -> np.ndarray | None:
    left, right = binding.value.args
    is_left = isinstance(left, relax.Var) and left == state.output
    constant = program.constant(right if is_left else left)
    return None if constant is None else per_channel(constant, static_shape(binding.var) or (), axis)


def per_channel(constant: np.ndarray, shape: tuple[int, ...], axis: int) -> np.ndarray | None:
    """Return ``constant``, broadcast against ``shape``, as a vector over ``axis``; None if it varies along another
    axis.
    """
    if constant.ndim > len(shape) or constant.dtype != np.float32:
        return None
    aligned = constant.reshape((1,) * (len(shape) - constant.ndim) + constant.shape)
    if any(size != 1 for index, size in enumerate(aligned.shape) if index != axis):
        return None
    return np.ascontiguousarray(np.broadcast_to(aligned.reshape(-1), (shape[axis],)))


def _absorb_residual(program: Program, state: Absorbed, binding: relax.VarBinding) -> bool:
    """Absorb the addition of another tensor of the same shape."""
    if state.residual is not None or operator_name(binding.value) != "relax.add":
        return False
    left, right = binding.value.args
    other = right if isinstance(left, relax.Var) and left == state.output else left
    if not isinstance(other, relax.Var) or program.is_constant(other) or not same_type(other, binding.var):
        return False
    state.residual = other
    state.position = "before_activation" if _may_activate(state) else "after_activation"
    state.cover(binding.var)
    return True


# With fewer channels a kernel reads the plain image, which only the first layer of a network does.
_FEWEST_CHANNELS = 8
# Each convolution that reads a tensor would repeat its prologue.
_MOST_READERS = 2


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Computation of a convolution's input from ``data``."""

    data: relax.Var
    # The variables in between, in program order.
    covered: tuple[relax.Var, ...]
    gate: relax.Var | None = None
    activation: Activation | None = None
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None

    @property
    def prologue(self) -> Prologue | None:
        if self.activation is None and self.scale is None:
            return None
        name, slope = (None, 0.0) if self.activation is None else (self.activation.name, self.activation.slope)
        return Prologue(self.scale is not None, name, slope)


def absorb_before(program: Program, nodes: Sequence[Node]) -> list[Node]:
    """Return ``nodes`` (all of a program), their convolutions with the operators before them as prologues.

    A prologue on a tensor is used only if all readers of the tensor can apply it.
    """
    claimed = {var for node in nodes for var in node.covered}
    readers: dict[relax.Var, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        readers[node.data].append(index)
    result = list(nodes)
    for var, indices in readers.items():
        if not _all_read_it_here(program, var, [nodes[index] for index in indices]):
            continue
        prepared = [_before(program, nodes[index], claimed) for index in indices]
        if len({None if found is None else found.covered for found in prepared}) > 1:
            continue  # applied for all readers, as one of them does not support it
        for index, found in zip(indices, prepared, strict=True):
            if found is not None:
                result[index] = _with(nodes[index], found)
    return result


def _all_read_it_here(program: Program, var: relax.Var, nodes: Sequence[Node]) -> bool:
    """True if ``nodes`` are all readers of ``var``, few convolutions, in the block that defines it."""
    if var not in program.position or len(nodes) > _MOST_READERS or len(program.users.get(var, ())) != len(nodes):
        return False
    return all(node.block == program.block[program.position[var]] for node in nodes)


def _before(program: Program, node: Node, claimed: Collection[relax.Var]) -> _Prepared | None:
    """Return the prologue that ``node`` can apply to its data; None if there is none."""
    conv, shape = node.operator, image_shape(node.data)
    if not isinstance(conv, Conv2d) or shape is None or conv.dtype == "int8":
        return None
    walk = _Walk(program, node.data, claimed)
    if conv.groups == 1 and shape[1] >= _FEWEST_CHANNELS:
        walk.take_activation()
        walk.take_affine()
    if conv.is_pointwise and shape[2:] != (1, 1):
        walk.take_gate()
    return walk.found()


def _with(node: Node, found: _Prepared) -> Node:
    (parameters,) = node.parameters
    assert isinstance(node.operator, Conv2d)
    return replace(
        node,
        operator=replace(node.operator, gated=found.gate is not None, prologue=found.prologue),
        data=found.data,
        gate=found.gate,
        parameters=(replace(parameters, input_scale=found.scale, input_shift=found.shift),),
        covered=(*found.covered, *node.covered),
    )


class _Walk:
    """Walk backwards from ``start``, one step at a time, up to a value with another reader."""

    def __init__(self, program: Program, start: relax.Var, claimed: Collection[relax.Var]) -> None:
        self._program, self._claimed = program, claimed
        self._start = self._at = start
        self._covered: list[relax.Var] = []
        self._gate: relax.Var | None = None
        self._activation: Activation | None = None
        self._scale: np.ndarray | None = None
        self._shift: np.ndarray | None = None

    def found(self) -> _Prepared | None:
        """Return the operators that were absorbed, or None."""
        if not self._covered:
            return None
        return _Prepared(self._at, tuple(self._covered), self._gate, self._activation, self._scale, self._shift)

    def take_activation(self) -> None:
        """Absorb an activation that ends at the current value."""
        if self._binding() is None:
            return
        found = activation_before(self._program, self._at)
        if found is not None and not any(var in self._claimed for var in found[2]):
            self._activation, source, covered = found
            self._step(source, covered)

    def take_affine(self) -> None:
        """Absorb constants along the channels: factors and summands, in any order."""
        steps: list[tuple[str, np.ndarray]] = []
        while (binding := self._binding()) is not None:
            name, shape = operator_name(binding.value), image_shape(self._at)
            if name not in ("relax.add", "relax.multiply") or shape is None:
                break
            source, constant = binding.value.args[0], self._program.constant(binding.value.args[1])
            vector = None if constant is None else per_channel(constant, shape, 1)
            if vector is None or not isinstance(source, relax.Var) or not same_type(source, self._at):
                break
            steps.append((name, vector))
            self._step(source, (self._at,))
        if not steps:
            return
        scale, shift = np.ones(len(steps[0][1])), np.zeros(len(steps[0][1]))
        for name, vector in reversed(steps):
            if name == "relax.multiply":
                scale, shift = scale * vector, shift * vector
            else:
                shift = shift + vector
        self._scale, self._shift = scale.astype(np.float32), shift.astype(np.float32)

    def take_gate(self) -> None:
        """Absorb a product with one factor per image and channel (squeeze-and-excite)."""
        binding, shape = self._binding(), image_shape(self._at)
        if binding is None or shape is None or operator_name(binding.value) != "relax.multiply":
            return
        for data, factors in (binding.value.args, reversed(binding.value.args)):
            if not isinstance(data, relax.Var) or not isinstance(factors, relax.Var):
                continue
            if self._program.is_constant(factors) or not is_float32(factors) or image_shape(data) != shape:
                continue
            if image_shape(factors) == (shape[0], shape[1], 1, 1):
                self._gate = factors
                self._step(data, (self._at,))
                return

    def _step(self, source: relax.Var, covered: Sequence[relax.Var]) -> None:
        self._covered = [*covered, *self._covered]
        self._at = source

    def _binding(self) -> relax.VarBinding | None:
        """Return the binding of the current value if no kernel writes it and only the absorbed operators read it; else
        None.
        """
        var, program = self._at, self._program
        if var not in program.position or var in self._claimed or not is_float32(var):
            return None
        binding, block = program.bindings[program.position[var]], program.block[program.position[var]]
        alone = var == self._start or len(program.users.get(var, ())) == 1
        if not alone or block != program.block[program.position[self._start]] or program.is_constant(binding.value):
            return None
        return binding
