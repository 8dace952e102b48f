"""Activation functions in NumPy: the reference of kernels, also used to recognise activations in a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from costmodel.operators.layers import SELU_SCALE, SELU_SLOPE


def sigmoid(x: np.ndarray) -> np.ndarray:
    """``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + np.exp(-x))


def error_function(x: np.ndarray) -> np.ndarray:
    """``erf(x)``, in FP64."""
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x))


def _elu(x: np.ndarray, slope: float = 1.0) -> np.ndarray:
    return np.where(x > 0, x, slope * np.expm1(np.minimum(x, 0.0)))


def _hard_sigmoid(x: np.ndarray, slope: float = 1.0 / 6.0) -> np.ndarray:
    return np.clip(x * slope + 0.5, 0.0, 1.0)


# Functions of ``costmodel.operators.layers.ACTIVATIONS`` without a parameter.
ACTIVATION_FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "relu6": lambda x: np.clip(x, 0.0, 6.0),
    "relu1": lambda x: np.clip(x, 0.0, 1.0),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": lambda x: x * _hard_sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + error_function(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "tanh": np.tanh,
    "elu": _elu,
    "mish": lambda x: x * np.tanh(np.logaddexp(0.0, x)),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "selu": lambda x: SELU_SCALE * _elu(x, SELU_SLOPE),
    "softplus": lambda x: np.logaddexp(0.0, x),
}
# Functions of an ``Epilogue`` with a slope.
SLOPED_FUNCTIONS: Mapping[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "leaky_relu": lambda x, slope: np.maximum(x, x * slope),
    "elu": _elu,
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": lambda x, slope: x * _hard_sigmoid(x, slope),
}
