"""What follows a convolution or dense layer and belongs to its kernel: bias, residual, activation.

``y = activation(x + bias [+ residual]) [+ residual]``. Every value in between must have no second reader.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from tvm import relax

from costmodel.operators.layers import Epilogue, ResidualPosition
from fusion.relax.activations import match_activation
from fusion.relax.bindings import Program, operator_name, same_type, static_shape


@dataclass
class Absorbed:
    """An epilogue as far as it has been read; ``covered`` are its variables, the result last."""

    output: relax.Var
    bias: np.ndarray | None = None
    activation: str | None = None
    residual: relax.Var | None = None
    position: ResidualPosition | None = None
    covered: list[relax.Var] = field(default_factory=list)

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue(bias=self.bias is not None, activation=self.activation, residual=self.position)

    def cover(self, *variables: relax.Var) -> None:
        self.covered.extend(variables)
        self.output = variables[-1]


def absorb(program: Program, start: relax.Var, axis: int, claimed: Collection[relax.Var]) -> Absorbed:
    """The longest epilogue behind ``start``, whose channels lie along ``axis``; stops at ``claimed`` variables."""
    state = Absorbed(start)
    while True:
        if state.activation is None and _absorb_activation(program, state, claimed):
            continue
        addition = _sole_addition(program, state.output, claimed)
        if addition is None or not (
            _absorb_bias(program, state, addition, axis) or _absorb_residual(program, state, addition)
        ):
            return state


def _absorb_activation(program: Program, state: Absorbed, claimed: Collection[relax.Var]) -> bool:
    found = match_activation(program, state.output)
    if found is None or any(var in claimed for var in found[1]):
        return False
    state.activation = found[0]
    state.cover(*found[1])
    return True


def _sole_addition(program: Program, var: relax.Var, claimed: Collection[relax.Var]) -> relax.VarBinding | None:
    """The only reader of ``var`` if it adds or subtracts and keeps the shape."""
    users = program.users.get(var, [])
    if len(users) != 1 or users[0] < 0 or program.block[users[0]] != program.block[program.position[var]]:
        return None
    binding = program.bindings[users[0]]
    if operator_name(binding.value) not in ("relax.add", "relax.subtract") or binding.var in claimed:
        return None
    return binding if same_type(binding.var, var) else None


def _absorb_bias(program: Program, state: Absorbed, binding: relax.VarBinding, axis: int) -> bool:
    """A constant along the channels, added before the activation."""
    if state.activation is not None:
        return False
    left, right = binding.value.args
    is_left = isinstance(left, relax.Var) and left == state.output
    subtracts = operator_name(binding.value) == "relax.subtract"
    constant = program.constant(right if is_left else left)
    bias = None if constant is None else per_channel(constant, static_shape(binding.var) or (), axis)
    if bias is None or (subtracts and not is_left):
        return False
    bias = -bias if subtracts else bias
    state.bias = bias if state.bias is None else state.bias + bias
    state.cover(binding.var)
    return True


def per_channel(constant: np.ndarray, shape: tuple[int, ...], axis: int) -> np.ndarray | None:
    """``constant``, broadcast against ``shape``, as a vector over ``axis``; None if it varies along another axis."""
    if constant.ndim > len(shape) or constant.dtype != np.float32:
        return None
    aligned = constant.reshape((1,) * (len(shape) - constant.ndim) + constant.shape)
    if any(size != 1 for index, size in enumerate(aligned.shape) if index != axis):
        return None
    return np.ascontiguousarray(np.broadcast_to(aligned.reshape(-1), (shape[axis],)))


def _absorb_residual(program: Program, state: Absorbed, binding: relax.VarBinding) -> bool:
    """Another tensor of the same shape."""
    if state.residual is not None or operator_name(binding.value) != "relax.add":
        return False
    left, right = binding.value.args
    other = right if isinstance(left, relax.Var) and left == state.output else left
    if not isinstance(other, relax.Var) or program.is_constant(other) or not same_type(other, binding.var):
        return False
    state.residual = other
    state.position = "before_activation" if state.activation is None else "after_activation"
    state.cover(binding.var)
    return True
