"""Operators after a convolution or dense layer that its kernel computes: bias, residual, activation, affine.

``y = activation(x + bias [+ residual]) [* scale + shift] [+ residual]``; only convolutions take a scale and a shift.
Every value in between must have a single reader.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from tvm import relax

from costmodel.operators.layers import Epilogue, ResidualPosition
from fusion.relax.activations import Activation, match_activation
from fusion.relax.bindings import Program, operator_name, same_type, static_shape
from schedules.contract.template import Parameters

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
