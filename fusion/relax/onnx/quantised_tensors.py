"""The tensors of an ONNX graph that is quantised: who makes and reads them, and what their bytes stand for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

# Ends the names of zero points of bytes that had a sign.
SHIFTED = "_without_sign"
# The same of bytes as of what they stand for.
MOVES = frozenset(
    {"MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Concat", "Slice", "Tile"}
    | {"DepthToSpace", "SpaceToDepth", "Expand"}
)
# Of one tensor, value by value; other inputs are numbers.
_ALONG = frozenset({"Clip", "Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "PRelu", "Relu", "Sigmoid", "Tanh"})


@dataclass(frozen=True, eq=False)
class TensorOfBytes:
    """A tensor of bytes and what they stand for; ``node``: the DequantizeLinear that says so."""

    source: str
    scale: np.ndarray
    zero: np.ndarray
    axis: int
    node: NodeProto

    def same_as(self, scale: np.float32, zero: int) -> bool:
        """Whether equal bytes of that scale and zero point stand for the same."""
        return bool(self.scale.reshape(-1)[0] == scale) and int(self.zero.reshape(-1)[0]) == zero

    @property
    def offset(self) -> int:
        """What was added to bytes with a sign."""
        return offset_of(self.node)


class QuantisedTensors:
    """Who makes a tensor, who reads it, and the values of those that are constant."""

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
        """Finds makers and readers, anew where nodes have changed."""
        self.made_by.clear()
        self.readers.clear()
        for node in self.graph.node:
            for name in node.output:
                self.made_by[name] = node
            for name in node.input:
                self.readers[name].append(node)

    def inner(self, name: str) -> bool:
        """Whether one node alone reads it, and nobody outside."""
        return len(self.readers[name]) == 1 and name not in self.results

    def quantisation(self, node: NodeProto) -> tuple[np.ndarray, np.ndarray] | None:
        """Scale and zero point of a QuantizeLinear or DequantizeLinear; ``None`` where they are no constants, or of
        blocks along an axis.
        """
        scale = self.constants.get(node.input[1])
        if scale is None or scale.dtype != np.float32:
            return None
        if any(each.name == "block_size" and each.i for each in node.attribute):
            return None
        if len(node.input) > 2 and node.input[2]:
            zero = self.constants.get(node.input[2])
            return None if zero is None else (scale, zero)
        # Bytes have a zero point, see `with_zero_points`; biases of 32 bits may lack one.
        held = self.constants.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        return None if held is None else (scale, np.zeros(scale.shape, held.dtype))

    def _quantise_constant(self, node: NodeProto) -> None:
        """Weights that a file holds as floats in front of a QuantizeLinear, as training with rounded weights leaves
        them: their bytes.
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
        """Of tensors whose shapes are known."""
        values = [*self.graph.value_info, *self.graph.input, *self.graph.output]
        return {value.name: tuple(size.dim_value for size in value.type.tensor_type.shape.dim) for value in values}

    def dequantised(self, name: str) -> TensorOfBytes | None:
        """What ``name`` is dequantised from."""
        node = self.made_by.get(name)
        if node is None or node.op_type != "DequantizeLinear":
            return None
        found = self.quantisation(node)
        if found is None:
            return None
        axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
        return TensorOfBytes(node.input[0], found[0], found[1], axis, node)

    def floats(self, name: str) -> np.ndarray | None:
        """The values of a constant, or of one that is dequantised by one scale; ``None`` for what is computed."""
        if name in self.constants:
            return self.constants[name]
        held = self.dequantised(name)
        if held is None or held.source not in self.constants or held.scale.size > 1:
            return None
        steps = self.constants[held.source].astype(np.int64) - held.zero.astype(np.int64).reshape(())
        return steps.astype(np.float32) * held.scale.reshape(())

    def offset_behind(self, name: str) -> int | None:
        """What was added to the bytes ``name`` when they lost their sign; ``None`` if they have one, or it is not known
        who makes them.
        """
        node = self.made_by.get(name)
        while node is not None and node.op_type != "QuantizeLinear":
            node = self.made_by.get(node.input[0]) if node.op_type in (*MOVES, "Resize") else None
        found = None if node is None else self.quantisation(node)
        return None if node is None or found is None or found[1].dtype != np.uint8 else offset_of(node)

    def rounded_behind(self, name: str) -> tuple[tuple[NodeProto, ...], NodeProto] | None:
        """What is computed of ``name`` alone, value by value, and the QuantizeLinear of one scale behind that; ``None``
        where something else reads a value on the way.
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
        """Of a computed tensor of bytes without a sign, all alike."""
        found = self.dequantised(name)
        if found is None or found.source in self.constants or found.scale.size != 1:
            return None
        return found if found.zero.dtype == np.uint8 else None


def constants_of(graph: GraphProto) -> dict[str, np.ndarray]:
    """The tensors that ``graph`` itself holds, by name: initialisers, and what its Constant nodes make."""
    from onnx import numpy_helper

    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            found[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return found


def offset_of(node: NodeProto) -> int:
    """What was added to the bytes of a QuantizeLinear or DequantizeLinear when they lost their sign."""
    return 128 if node.input[2:] and node.input[2].endswith(SHIFTED) else 0


def is_of_channels(numbers: np.ndarray, channels: int) -> bool:
    """Whether there is one for each channel of images of shape (N, ``channels``, H, W), as ONNX broadcasts it."""
    return (1,) * (4 - numbers.ndim) + numbers.shape == (1, channels, 1, 1)


@dataclass(frozen=True)
class Padding:
    """A Pad by numbers: ``before`` and ``behind`` the ``axes``, all of them where that is empty, of the constant
    ``value``, or where that is ``None`` of the tensor's own values.
    """

    before: tuple[int, ...]
    behind: tuple[int, ...]
    axes: tuple[int, ...]
    value: float | None

    def of_image(self) -> tuple[int, int, int, int] | None:
        """Top, left, bottom, right of an NCHW tensor; ``None`` where it pads something else."""
        axes = self.axes or range(4)
        widths = {axis % 4: pair for axis, pair in zip(axes, zip(self.before, self.behind, strict=True), strict=False)}
        others = any(width for axis in (0, 1) for width in widths.get(axis, ()))
        (top, bottom), (left, right) = (widths.get(axis, (0, 0)) for axis in (2, 3))
        return None if others or min(top, bottom, left, right) < 0 else (top, left, bottom, right)


def padding_of(tensors: QuantisedTensors, node: NodeProto) -> Padding | None:
    """What ``node`` pads; ``None`` if it is no Pad, or by what is computed."""
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
    """Whether it does the same to bytes as to what they stand for."""
    if node.op_type == "Resize":
        return next((each.s for each in node.attribute if each.name == "mode"), b"nearest") == b"nearest"
    return node.op_type in MOVES and node.op_type != "Concat"
