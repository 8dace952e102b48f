"""Functions that stand alone, behind norms and sums: computed in vectors, to the digits of float32."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("tvm")
from tvm import relax
from tvm.relax import op

from fusion.relax.machine_code import build_executable, scheduling_pipeline
from tests.fusion.relax_models import CPU, module


def _sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def _erf(x):
    return np.vectorize(math.erf, otypes=[np.float64])(x)


FUNCTIONS = {
    "exp": (op.exp, np.exp),
    "erf": (op.erf, _erf),
    "sin": (op.sin, np.sin),
    "tanh": (op.tanh, np.tanh),
    "sigmoid": (op.sigmoid, _sigmoid),
    "silu": (op.nn.silu, lambda x: x * _sigmoid(x)),
    "gelu": (op.nn.gelu, lambda x: 0.5 * x * (1.0 + _erf(x * math.sqrt(0.5)))),
    "gelu_tanh": (
        op.nn.gelu_tanh,
        lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    ),
}
SHAPE = (3, 2, 1003)


@pytest.fixture(scope="module")
def computed():
    """All of them, of one row of arguments, without a call of a library."""
    mod = module(SHAPE, lambda net, x: [net(function(x), name) for name, (function, _) in FUNCTIONS.items()])
    with CPU.tvm_target():
        scheduled = str(scheduling_pipeline(CPU)(mod))
    assert not any(f"T.{name}(" in scheduled for name in ("exp", "erf", "sin", "tanh", "sigmoid"))
    arguments = np.linspace(-30, 30, math.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    return arguments, dict(zip(FUNCTIONS, build_executable(mod, CPU)(arguments), strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_as_exact_as_float32(computed, name):
    arguments, values = computed
    expected = FUNCTIONS[name][1](arguments.astype(np.float64))
    tolerance = 1e-6 if name == "exp" else 0.0
    assert np.all(np.abs(values[name] - expected) <= 2e-6 * np.maximum(1.0, np.abs(arguments)) + tolerance * expected)


def test_powers_end_at_zero_and_infinity():
    mod = module((1, 8), lambda net, x: net(op.exp(x)))
    ends = np.array([[-np.inf, -200, -104, -87.5, 0, 88.7, 89, np.inf]], np.float32)
    (values,) = build_executable(mod, CPU)(ends)
    expected = np.exp(ends.astype(np.float64))
    assert values[0, :2].tolist() == [0, 0] and values[0, -1] == np.inf and values[0, 4] == 1
    assert np.allclose(values[0, 2:6], expected[0, 2:6], rtol=2e-5, atol=1e-37) and values[0, 6] >= 3e38


def test_sines_of_many_turns():
    mod = module((1, 64), lambda net, x: net(op.sin(x)))
    turns = np.linspace(-3000, 3000, 64, dtype=np.float32)[None]
    (values,) = build_executable(mod, CPU)(turns)
    assert np.allclose(values, np.sin(turns.astype(np.float64)), rtol=0, atol=2e-6)


def test_integers_and_doubles_are_left_to_tvm():
    mod = module((4, 5), lambda net, x: net(op.tanh(net(relax.op.astype(x, "float64")))))
    arguments = np.linspace(-2, 2, 20, dtype=np.float32).reshape(4, 5)
    (values,) = build_executable(mod, CPU)(arguments)
    assert values.dtype == np.float64 and np.allclose(values, np.tanh(arguments.astype(np.float64)), rtol=1e-9)
