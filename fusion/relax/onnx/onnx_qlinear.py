"""Decomposition of quantised operators of ONNX and of ONNX Runtime: each becomes the float operator that it stands for,
between DequantizeLinear and QuantizeLinear, so that later passes see one form of quantised models. Operators with
scales computed at run time (ConvInteger, MatMulInteger) become float operators on the integers that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fusion.relax.onnx.quantised_tensors import constants_of

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_RUNTIMES_OWN = "com.microsoft"
# Suffix of the names of nodes that round the result of such an operator.
OF_OPERATOR = "_of_quantised_operator"
# Suffix of the names of nodes that make integers from a float result.
_WHOLE = "_whole_of_quantised_operator"


class _Parts:
    """Collector of the nodes that one quantised node becomes."""

    def __init__(self, node: NodeProto, constants: dict[str, np.ndarray], initializers: list[Any]) -> None:
        self.node = node
        self.nodes: list[Any] = []
        self._constants = constants
        self._initializers = initializers
        self._count = 0

    def given(self, index: int) -> str:
        """Return the name of an input, empty if it is omitted."""
        return self.node.input[index] if index < len(self.node.input) else ""

    def _name(self, what: str) -> str:
        self._count += 1
        return f"{self.node.output[0]}_{what}_{self._count}"

    def dequantised(self, first: int, axis: int | None = None) -> str:
        """Return the name of the dequantised tensor whose values, scale and zero point are the inputs from ``first``
        on.
        """
        from onnx import helper

        name = self._name("values")
        inputs = [each for each in (self.given(first), self.given(first + 1), self.given(first + 2)) if each]
        scale = self._constants.get(self.given(first + 1))
        attributes = {} if axis is None or scale is None or scale.size == 1 else {"axis": axis}
        self.nodes.append(helper.make_node("DequantizeLinear", inputs, [name], name, **attributes))
        return name

    def bias(self, index: int, data_scale: int, weight_scale: int) -> list[str]:
        """Return the dequantised int32 bias, in units of the sums, as a list of one name; empty if there is none."""
        from onnx import helper, numpy_helper

        if not self.given(index):
            return []
        scales = [self._constants.get(self.given(at)) for at in (data_scale, weight_scale)]
        if any(scale is None for scale in scales):
            raise KeyError(self.given(data_scale))
        left, right = (np.asarray(scale, np.float32) for scale in scales)
        scale = (left.reshape(-1)[0] * right).astype(np.float32)
        name, scale_name = self._name("bias"), self._name("bias_scale")
        self._initializers.append(numpy_helper.from_array(scale, scale_name))
        attributes = {"axis": 0} if scale.size > 1 else {}
        node = helper.make_node("DequantizeLinear", [self.given(index), scale_name], [name], name, **attributes)
        self.nodes.append(node)
        return [name]

    def compute(self, operator: str, inputs: Sequence[str], leave_out: Sequence[str] = (), named: bool = True) -> str:
        """Add the float operator, with the attributes of the node except ``leave_out``; return the name of
        its result.
        """
        from onnx import helper

        output = self._name("result")
        made = helper.make_node(operator, list(inputs), [output], self.node.name if named else output)
        made.attribute.extend(each for each in self.node.attribute if each.name not in leave_out)
        self.nodes.append(made)
        return output

    def quantise(self, value: str, scale: int, zero: int) -> None:
        """Add the quantisation of ``value`` as the output of the node."""
        from onnx import helper

        inputs = [each for each in (value, self.given(scale), self.given(zero)) if each]
        self.nodes.append(
            helper.make_node("QuantizeLinear", inputs, [self.node.output[0]], f"{self.node.name}{OF_OPERATOR}")
        )

    def centred(self, data: int, zero: int) -> str:
        """Return the integers of the input ``data`` minus the zero point at ``zero``, as floats. ``KeyError`` if there
        is more than one zero point.
        """
        from onnx import TensorProto, helper

        names = [self.given(data), *([self.given(zero)] if self.given(zero) else [])]
        if (known := self._constants.get(self.given(zero))) is not None and known.size > 1:
            raise KeyError(self.given(zero))
        floats = []
        for name in names:
            floats.append(self._name("floats"))
            self.nodes.append(helper.make_node("Cast", [name], [floats[-1]], floats[-1], to=TensorProto.FLOAT))
        if len(floats) == 1:
            return floats[0]
        name = self._name("centred")
        self.nodes.append(helper.make_node("Sub", floats, [name], name))
        return name

    def centred_weights(self, weight: int, zero: int, axis: int) -> str:
        """Return constant weights minus their zero point as floats; one zero point for all, one per output along
        ``axis``, or an array of the rank of the weights.
        """
        from onnx import numpy_helper

        values = self._constants[self.given(weight)].astype(np.float32)
        zeros = self._constants[self.given(zero)].astype(np.float32) if self.given(zero) else np.zeros(1, np.float32)
        if zeros.ndim != values.ndim:
            shape = [1] * values.ndim
            shape[axis] = zeros.size
            zeros = zeros.reshape(shape)
        name = self._name("weights")
        self._initializers.append(numpy_helper.from_array(values - zeros, name))
        return name

    def as_whole(self, value: str) -> None:
        """Add ``value`` as the int32 output of the node, rounded: a kernel may compute integer products with fractions
        (Winograd).
        """
        from onnx import TensorProto, helper

        output, rounded = self.node.output[0], self._name("rounded")
        self.nodes.append(helper.make_node("Round", [value], [rounded], f"{rounded}{_WHOLE}"))
        self.nodes.append(helper.make_node("Cast", [rounded], [output], f"{output}{_WHOLE}", to=TensorProto.INT32))

    def rename_result(self, value: str) -> None:
        """Make ``value`` the float output of the node."""
        for node in self.nodes:
            node.output[:] = [self.node.output[0] if name == value else name for name in node.output]


def _conv(parts: _Parts) -> None:
    data, weight = parts.dequantised(0), parts.dequantised(3, axis=0)
    parts.quantise(parts.compute("Conv", [data, weight, *parts.bias(8, 1, 4)]), 6, 7)


def _matmul(parts: _Parts) -> None:
    parts.quantise(parts.compute("MatMul", [parts.dequantised(0), parts.dequantised(3, axis=1)]), 6, 7)


def _gemm(parts: _Parts) -> None:
    transposed = any(each.name == "transB" and each.i for each in parts.node.attribute)
    data, weight = parts.dequantised(0), parts.dequantised(3, axis=0 if transposed else 1)
    result = parts.compute("Gemm", [data, weight, *parts.bias(6, 1, 4)])
    if parts.given(7):
        parts.quantise(result, 7, 8)
    else:
        parts.rename_result(result)


def _pairwise(operator: str) -> Callable[[_Parts], None]:
    def convert(parts: _Parts) -> None:
        parts.quantise(parts.compute(operator, [parts.dequantised(0), parts.dequantised(3)]), 6, 7)

    return convert


def _single(operator: str) -> Callable[[_Parts], None]:
    def convert(parts: _Parts) -> None:
        if any(each.name == "channels_last" and each.i for each in parts.node.attribute):
            raise KeyError("channels_last")
        parts.quantise(parts.compute(operator, [parts.dequantised(0)], ("channels_last",)), 3, 4)

    return convert


def _concat(parts: _Parts) -> None:
    values = [parts.dequantised(first) for first in range(2, len(parts.node.input), 3)]
    parts.quantise(parts.compute("Concat", values), 0, 1)


def _conv_integer(parts: _Parts) -> None:
    weight = parts.centred_weights(1, 3, axis=0)
    parts.as_whole(parts.compute("Conv", [parts.centred(0, 2), weight]))


def _matmul_integer(parts: _Parts) -> None:
    weight = parts.centred_weights(1, 3, axis=-1)
    parts.as_whole(parts.compute("MatMul", [parts.centred(0, 2), weight]))


_STANDARD: dict[str, Callable[[_Parts], None]] = {
    "ConvInteger": _conv_integer,
    "MatMulInteger": _matmul_integer,
    "QLinearConv": _conv,
    "QLinearMatMul": _matmul,
}
_OWN: dict[str, Callable[[_Parts], None]] = {
    "QGemm": _gemm,
    "QLinearAdd": _pairwise("Add"),
    "QLinearMul": _pairwise("Mul"),
    "QLinearAveragePool": _single("AveragePool"),
    "QLinearConcat": _concat,
    "QLinearGlobalAveragePool": _single("GlobalAveragePool"),
    "QLinearLeakyRelu": _single("LeakyRelu"),
    "QLinearSigmoid": _single("Sigmoid"),
}


def taken_apart(model: ModelProto) -> ModelProto:
    """Return a copy of ``model`` with such operators decomposed if their weights and scales (if any) are constant;
    ``model`` itself if it contains none.
    """
    from onnx import ModelProto

    def converter(node: NodeProto) -> Callable[[_Parts], None] | None:
        return (_OWN if node.domain == _RUNTIMES_OWN else _STANDARD if not node.domain else {}).get(node.op_type)

    if not any(converter(node) or _is_step_of_runtime(node) for node in model.graph.node):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    constants = constants_of(graph)
    nodes: list[NodeProto] = []
    for node in graph.node:
        convert = converter(node)
        if convert is None:
            if _is_step_of_runtime(node):
                node.domain = ""  # the standard operator, with more types
            nodes.append(node)
            continue
        initializers: list[Any] = []
        parts = _Parts(node, constants, initializers)
        try:
            convert(parts)
        except KeyError:  # kept, and reported as unsupported later
            nodes.append(node)
            continue
        nodes += parts.nodes
        graph.initializer.extend(initializers)
    kept = [type(node).FromString(node.SerializeToString()) for node in _without_round_trips(nodes)]
    del graph.node[:]
    graph.node.extend(kept)
    return copy


def _is_step_of_runtime(node: NodeProto) -> bool:
    return node.domain == _RUNTIMES_OWN and node.op_type in ("QuantizeLinear", "DequantizeLinear")


def _without_round_trips(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """Read integer sums, which exist as floats, as floats where they are cast back."""
    from onnx import TensorProto

    whole = {node.output[0]: node.input[0] for node in nodes if node.name.endswith(_WHOLE)}
    for node in nodes:
        if node.op_type != "Cast" or node.input[0] not in whole:
            continue
        if next(each.i for each in node.attribute if each.name == "to") == TensorProto.FLOAT:
            node.op_type, node.input[0] = "Identity", whole[whole[node.input[0]]]
            del node.attribute[:]
    return list(nodes)
