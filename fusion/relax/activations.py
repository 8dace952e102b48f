"""Recognition of activations by the values they compute, independent of the operators that a framework uses for them.

A closed region of element-wise operators between one variable and one result is a scalar function; it *is* hard-swish
if it agrees with hard-swish on a grid that is dense where activations bend and wide enough to see every clip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from tvm import relax

from fusion.relax.bindings import Program, operator_name, same_type
from schedules.contract.activation_functions import ACTIVATION_FUNCTIONS, SLOPED_FUNCTIONS, error_function, sigmoid

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
