"""Quantised ONNX graphs: operators with their own quantisation taken apart, and tensors with their producers, readers
and the values that their bytes represent.

Quantised operators of ONNX and of ONNX Runtime become the float operators that they stand for, between
DequantizeLinear and QuantizeLinear, so that later passes see one form of quantised models. Operators with scales
computed at run time (ConvInteger, MatMulInteger) become float operators on the integers that they read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto


# Suffix of the names of zero points of bytes that were signed.
SHIFTED = "_without_sign"
# Operators that do the same to bytes as to the values that they represent.
MOVES = frozenset(
    {"MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Concat", "Slice", "Tile"}
    | {"DepthToSpace", "SpaceToDepth", "Expand"}
)
# Element-wise operators of one tensor; their other inputs are constants.
_ALONG = frozenset({"Clip", "Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "PRelu", "Relu", "Sigmoid", "Tanh"})


@dataclass(frozen=True, eq=False)
class TensorOfBytes:
    """Byte tensor and its quantisation, from the DequantizeLinear ``node``."""

    source: str
    scale: np.ndarray
    zero: np.ndarray
    axis: int
    node: NodeProto

    def same_as(self, scale: np.float32, zero: int) -> bool:
        """True if bytes with that scale and zero point represent the same values."""
        return bool(self.scale.reshape(-1)[0] == scale) and int(self.zero.reshape(-1)[0]) == zero

    @property
    def offset(self) -> int:
        """Number that was added to signed bytes to make them unsigned."""
        return offset_of(self.node)


class QuantisedTensors:
    """Producers and readers of tensors, and the values of constant ones."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.graph = model.graph
        self.constants = constants_of(self.graph)
        self.made_by: dict[str, NodeProto] = {}
        self.readers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self.graph.node:
            if node.op_type == "QuantizeLinear" and node.input[0] in self.constants:
                self._quantise_constant(node)
        self.results = {value.name for value in self.graph.output}
        self.index()

    def index(self) -> None:
        """Find producers and readers, again after nodes have changed."""
        self.made_by.clear()
        self.readers.clear()
        for node in self.graph.node:
            for name in node.output:
                self.made_by[name] = node
            for name in node.input:
                self.readers[name].append(node)

    def inner(self, name: str) -> bool:
        """True if exactly one node reads the tensor, and it is no output of the graph."""
        return len(self.readers[name]) == 1 and name not in self.results

    def quantisation(self, node: NodeProto) -> tuple[np.ndarray, np.ndarray] | None:
        """Return scale and zero point of a QuantizeLinear or DequantizeLinear; None if they are not constant, or per
        block along an axis.
        """
        scale = self.constants.get(node.input[1])
        if scale is None or scale.dtype != np.float32:
            return None
        if any(each.name == "block_size" and each.i for each in node.attribute):
            return None
        if len(node.input) > 2 and node.input[2]:
            zero = self.constants.get(node.input[2])
            return None if zero is None else (scale, zero)
        # Bytes have a zero point, see `with_zero_points`; int32 biases may lack one.
        held = self.constants.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        return None if held is None else (scale, np.zeros(scale.shape, held.dtype))

    def _quantise_constant(self, node: NodeProto) -> None:
        """Quantise weights that a file holds as floats before a QuantizeLinear, as quantisation-aware training leaves
        them.
        """
        values, found = self.constants[node.input[0]], self.quantisation(node)
        if found is None or values.dtype != np.float32:
            return
        scale, zero = found
        axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
        if scale.size > 1:
            if scale.ndim != 1 or values.shape[axis % values.ndim] != scale.size:
                return
            shape = [1] * values.ndim
            shape[axis % values.ndim] = -1
            scale, zero = scale.reshape(shape), zero.reshape(shape)
        bounds = np.iinfo(zero.dtype)
        steps = np.rint(values / scale.astype(np.float32)) + zero.astype(np.float32)
        self.constants[node.output[0]] = np.clip(steps, bounds.min, bounds.max).astype(zero.dtype)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of tensors, where known."""
        values = [*self.graph.value_info, *self.graph.input, *self.graph.output]
        return {value.name: tuple(size.dim_value for size in value.type.tensor_type.shape.dim) for value in values}

    def dequantised(self, name: str) -> TensorOfBytes | None:
        """Return the byte tensor that ``name`` is dequantised from, or None."""
        node = self.made_by.get(name)
        if node is None or node.op_type != "DequantizeLinear":
            return None
        found = self.quantisation(node)
        if found is None:
            return None
        axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
        return TensorOfBytes(node.input[0], found[0], found[1], axis, node)

    def floats(self, name: str) -> np.ndarray | None:
        """Return the values of a constant, or of a constant dequantised by one scale; None for computed tensors."""
        if name in self.constants:
            return self.constants[name]
        held = self.dequantised(name)
        if held is None or held.source not in self.constants or held.scale.size > 1:
            return None
        steps = self.constants[held.source].astype(np.int64) - held.zero.astype(np.int64).reshape(())
        return steps.astype(np.float32) * held.scale.reshape(())

    def offset_behind(self, name: str) -> int | None:
        """Return the number that was added to the bytes ``name`` to make them unsigned; None if they are signed, or
        their producer is unknown.
        """
        node = self.made_by.get(name)
        while node is not None and node.op_type != "QuantizeLinear":
            node = self.made_by.get(node.input[0]) if node.op_type in (*MOVES, "Resize") else None
        found = None if node is None else self.quantisation(node)
        return None if node is None or found is None or found[1].dtype != np.uint8 else offset_of(node)

    def rounded_behind(self, name: str) -> tuple[tuple[NodeProto, ...], NodeProto] | None:
        """Return the element-wise nodes of ``name`` alone and the QuantizeLinear of one scale after them; None if
        another node reads a tensor in between.
        """
        value = name
        nodes: list[NodeProto] = []
        while self.inner(value):
            (reader,) = self.readers[value]
            if reader.op_type == "QuantizeLinear":
                found = self.quantisation(reader)
                return (tuple(nodes), reader) if found is not None and found[0].size == 1 else None
            others = {each for each in reader.input[1:] if each}
            if reader.op_type not in _ALONG or reader.input[0] != value or not self.constants.keys() >= others:
                return None
            nodes.append(reader)
            value = reader.output[0]
        return None

    def data(self, name: str) -> TensorOfBytes | None:
        """Return ``name`` as a computed, dequantised uint8 tensor with one scale and zero point, or None."""
        found = self.dequantised(name)
        if found is None or found.source in self.constants or found.scale.size != 1:
            return None
        return found if found.zero.dtype == np.uint8 else None


def constants_of(graph: GraphProto) -> dict[str, np.ndarray]:
    """Return the constant tensors of ``graph`` itself by name: initializers, and results of Constant nodes."""
    from onnx import numpy_helper

    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            found[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return found


def offset_of(node: NodeProto) -> int:
    """Return the number that was added to the bytes of a QuantizeLinear or DequantizeLinear to make them unsigned."""
    return 128 if node.input[2:] and node.input[2].endswith(SHIFTED) else 0


def is_of_channels(numbers: np.ndarray, channels: int) -> bool:
    """True if ``numbers`` has one value per channel of images of shape (N, ``channels``, H, W), broadcast
    as in ONNX.
    """
    return (1,) * (4 - numbers.ndim) + numbers.shape == (1, channels, 1, 1)


@dataclass(frozen=True)
class Padding:
    """Padding of a Pad node with constant widths."""

    # Widths at the start (``before``) and at the end (``behind``) of each of ``axes``.
    before: tuple[int, ...]
    behind: tuple[int, ...]
    # Padded axes; empty: all.
    axes: tuple[int, ...]
    # Constant that is padded with; None: values of the tensor itself.
    value: float | None

    def of_image(self) -> tuple[int, int, int, int] | None:
        """Return top, left, bottom, right of an NCHW tensor; None if other axes are padded or a width is negative."""
        axes = self.axes or range(4)
        widths = {axis % 4: pair for axis, pair in zip(axes, zip(self.before, self.behind, strict=True), strict=False)}
        others = any(width for axis in (0, 1) for width in widths.get(axis, ()))
        (top, bottom), (left, right) = (widths.get(axis, (0, 0)) for axis in (2, 3))
        return None if others or min(top, bottom, left, right) < 0 else (top, left, bottom, right)


def padding_of(tensors: QuantisedTensors, node: NodeProto) -> Padding | None:
    """Return the padding of ``node``; None if it is not a Pad, or its widths are computed."""
    if node.op_type != "Pad" or len(node.input) < 2:
        return None
    given = [tensors.constants.get(name) if name else np.zeros(()) for name in node.input[1:]]
    known = [array for array in given if array is not None]
    if len(known) < len(given):
        return None
    before, behind = known[0].reshape(2, -1)
    value = float(known[1].reshape(-1)[0]) if len(known) > 1 else 0.0
    axes = known[2].reshape(-1) if len(known) > 2 and node.input[3] else np.zeros(0, np.int64)
    mode = next((each.s for each in node.attribute if each.name == "mode"), b"constant")
    first, last, along = (tuple(int(each) for each in array) for array in (before, behind, axes))
    return Padding(first, last, along, value if mode == b"constant" else None)


def is_move(node: NodeProto) -> bool:
    """True if the node does the same to bytes as to the values that they represent."""
    if node.op_type == "Resize":
        return next((each.s for each in node.attribute if each.name == "mode"), b"nearest") == b"nearest"
    return node.op_type in MOVES and node.op_type != "Concat"


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
