"""Tensors of a quantised ONNX graph: their producers and readers, and the values that their bytes represent."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
