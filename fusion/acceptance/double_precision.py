"""FP64 evaluation of an ONNX model, and the effect of float32 rounding on its outputs.

The graph is evaluated node by node with the reference implementation of the ``onnx`` package (window operators:
:mod:`fusion.acceptance.reference_operators`) on the model as stored in the file. It shares no code with our importer
and kernels, nor with another runtime.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fusion.model.library_messages import sentence
from fusion.model.named_arrays import Arrays
from fusion.relax.onnx.onnx_file import opset_of
from fusion.relax.onnx.onnx_precision import half_types, holds_half, widened
from fusion.relax.onnx.onnx_prepare import drop_unread_results

if TYPE_CHECKING:
    from onnx import ModelProto

# Relative rounding error of one operation in float32 and in float16.
SINGLE_UNIT, HALF_UNIT = 2.0**-24, 2.0**-11
# Sums of many products: rounding affects every term and the result.
_SUMS = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "GlobalAveragePool", "AveragePool", "ReduceMean", "ReduceSum"}
    | {"LSTM", "GRU"}
)
# Operators that move, select or compare values: no rounding error.
_EXACT = frozenset(
    {"Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Concat", "Split", "Slice", "Gather", "Pad"}
    | {"Expand", "Tile", "Relu", "Clip", "Max", "Min", "MaxPool", "GlobalMaxPool", "Cast", "Dropout", "Where", "Neg"}
    | {"Abs", "DepthToSpace", "SpaceToDepth"}
)
# Bounded functions: approximated with an absolute error of one rounding of 1, also for small values.
_BOUNDED = frozenset(
    {"Sigmoid", "Tanh", "Erf", "Softmax", "HardSigmoid", "HardSwish", "Gelu", "Mish", "Softplus", "LSTM", "GRU"}
)
# Operators whose results depend on shapes only.
_OF_SHAPES = frozenset({"Shape", "Size"})
_NOISE_LENGTH = 2**20


class NoReference(Exception):
    """Raised if the model cannot be evaluated in FP64; the message gives the reason."""


class Rounding:
    """Random errors of the size of one rounding; deterministic for a given ``seed``."""

    def __init__(self, unit: float, seed: int) -> None:
        self._unit = unit
        self._generator = np.random.default_rng(seed)
        self._noise = np.tile(unit * self._generator.standard_normal(_NOISE_LENGTH), 2)

    def relative(self, array: np.ndarray) -> np.ndarray:
        """Return ``array`` with a relative error of one rounding in every element."""
        return array + array * self._draw(array)

    def bounded(self, array: np.ndarray) -> np.ndarray:
        """Return ``array`` with a relative error and an absolute error of one rounding of 1 in every element."""
        return self.relative(array) + self._draw(array)

    def _draw(self, array: np.ndarray) -> np.ndarray:
        """Return noise of the shape of ``array``, a slice of one precomputed vector: drawing new numbers would take
        longer than the network.
        """
        start = int(self._generator.integers(_NOISE_LENGTH))
        row = self._noise[start : start + _NOISE_LENGTH]
        return (
            np.resize(row, array.size).reshape(array.shape)
            if array.size > row.size
            else row[: array.size].reshape(array.shape)
        )


class DoubleModel:
    """An ONNX model with static input shapes, evaluated in FP64. Raises ``NoReference`` if it cannot be evaluated."""

    def __init__(self, model: ModelProto) -> None:
        from onnx import TensorProto
        from onnx.reference import ReferenceEvaluator

        from fusion.acceptance.reference_operators import OPERATORS

        self.unit = HALF_UNIT if holds_half(model.graph) else SINGLE_UNIT
        double = widened(model, _floats(), TensorProto.DOUBLE)
        drop_unread_results(double.graph)
        usable = [each for each in OPERATORS if _fits(each.__name__, opset_of(model))]
        try:
            evaluator = ReferenceEvaluator(double, new_ops=list(usable))
            self._known: dict[str, Any] = {"": None, **evaluator.rt_inits_}
            self._outputs = [value.name for value in double.graph.output]
            self._nodes: list[Any] = []
            self._split(evaluator.rt_nodes_, {value.name for value in double.graph.input} - self._known.keys())
        except Exception as error:  # the evaluator raises anything on what it does not know
            raise NoReference(sentence(error)) from error

    def run(self, inputs: Arrays, rounding: Rounding | None = None, deadline: float | None = None) -> Arrays:
        """Return the outputs by name, floating point ones in FP64.

        ``deadline`` is a time of ``time.monotonic``. Raises ``NoReference``.
        """
        results = {**self._known, **{name: _double(array) for name, array in inputs.items()}}
        uses = Counter(name for node in self._nodes for name in node.input)
        uses.update(self._outputs)
        for node in self._nodes:
            if deadline is not None and time.monotonic() > deadline:
                raise NoReference("it takes too long in double precision")
            try:
                values = _evaluate(node, results, rounding)
            except NoReference:
                raise
            except Exception as error:  # as above
                raise NoReference(f"{node.op_type} {node.onnx_node.name!r}: {sentence(error)}") from error
            results.update(zip(node.output, values, strict=False))
            for name in node.input:
                uses[name] -= 1
                if not uses[name] and name not in self._known:
                    del results[name]  # large models would not fit into memory with all of them
        return {name: np.asarray(results[name]) for name in self._outputs}

    def _split(self, nodes: Sequence[Any], varying: set[str]) -> None:
        """Evaluate the nodes that do not depend on inputs once; keep the other nodes for every run."""
        varying = set(varying)
        for node in nodes:
            nested = node.need_context()
            if nested or varying.intersection(node.input):
                self._nodes.append(node)
                varying.update(node.output)
            else:
                self._known.update(zip(node.output, _evaluate(node, self._known, None), strict=False))


def _evaluate(node: Any, results: Mapping[str, Any], rounding: Rounding | None) -> Sequence[Any]:
    arguments = [results[name] for name in node.input]
    if node.need_context():
        return node.run(*arguments, context=dict(results))
    if rounding is None or node.op_type in _EXACT:
        return node.run(*arguments)
    if node.op_type in _SUMS and _is_double(arguments[0]):
        arguments[0] = rounding.relative(arguments[0])
    disturb = rounding.bounded if node.op_type in _BOUNDED else rounding.relative
    return [disturb(value) if _is_double(value) else value for value in node.run(*arguments)]


def _is_double(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float64


def _double(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else array


def _fits(operator: str, opset: int) -> bool:
    """True if this project's reference of ``operator`` implements that opset."""
    return {"Resize": opset >= 11}.get(operator, True)


def _floats() -> tuple[int, ...]:
    from onnx import TensorProto

    return (TensorProto.FLOAT, *half_types())
