"""Activations recognised by what they compute, not by how a framework spells them.

A closed region of element-wise operators between one variable and one result is a scalar function; it *is* hard-swish
if it agrees with hard-swish on a grid that is dense where activations bend and wide enough to see every clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from tvm import relax

from fusion.relax.bindings import Program, operator_name, same_type

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


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x))


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1.0 + _erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _hard_sigmoid(x: Array) -> Array:
    return np.clip(x / 6.0 + 0.5, 0.0, 1.0)


_UNARY: Mapping[str, Callable[[Array], Array]] = {
    "relax.nn.relu": lambda x: np.maximum(x, 0.0),
    "relax.sigmoid": _sigmoid,
    "relax.nn.silu": lambda x: x * _sigmoid(x),
    "relax.exp": np.exp,
    "relax.negative": np.negative,
    "relax.tanh": np.tanh,
    "relax.erf": _erf,
    "relax.nn.gelu": _gelu,
    "relax.nn.gelu_tanh": _gelu_tanh,
}

_LEAKY = "relax.nn.leakyrelu"

# The activations of ``costmodel.operators.layers.ACTIVATIONS``.
_KNOWN: Mapping[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "relu6": lambda x: np.clip(x, 0.0, 6.0),
    "relu1": lambda x: np.clip(x, 0.0, 1.0),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "hard_swish": lambda x: x * _hard_sigmoid(x),
    "hard_sigmoid": _hard_sigmoid,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


@cache
def _grid() -> Array:
    wide = np.geomspace(1e-6, 1e6, 121)
    return np.concatenate([np.linspace(-12.0, 12.0, 4801), wide, -wide])


@cache
def _expected() -> Mapping[str, Array]:
    with np.errstate(all="ignore"):
        return {name: function(_grid()) for name, function in _KNOWN.items()}


def element_wise(call: relax.Expr | None, program: Program, values: Mapping[relax.Var, Array]) -> Array | None:
    """The result of ``call`` on the arrays of its variables; None if it is not element-wise on them and scalars."""
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
    """``name``: of ``costmodel.operators.layers.ACTIVATIONS``; ``slope``: of a leaky ReLU below zero."""

    name: str
    slope: float = 0.0


def classify(values: Array) -> Activation | None:
    """The activation with these values on the grid, float32 rounding of constants allowed."""
    for name, expected in _expected().items():
        if np.allclose(values, expected, rtol=1e-5, atol=1e-6):
            return Activation(name)
    slope = round(float(-np.interp(-1.0, *_sorted(values))), 6)
    leaky = np.where(_grid() < 0, slope * _grid(), _grid())
    return Activation("leaky_relu", slope) if 0 < slope < 1 and np.allclose(values, leaky, rtol=1e-5) else None


def _sorted(values: Array) -> tuple[Array, Array]:
    order = np.argsort(_grid())
    return _grid()[order], values[order]


def match_activation(
    program: Program, var: relax.Var, limit: int = 10
) -> tuple[Activation, tuple[relax.Var, ...]] | None:
    """The longest activation that starts at ``var``, and the variables it defines, the result last.

    Every use of ``var`` and of the variables in between lies inside; at most ``limit`` operators.
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
