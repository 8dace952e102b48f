"""Layers of a quantised model that are computed in whole numbers: DequantizeLinear, a layer, QuantizeLinear become one.

Convolutions and products with constant matrices are taken, with an activation that cuts off and with a residual behind
them; max pooling and moves of values are done on the bytes themselves. A tensor of bytes with a sign becomes one of
bytes without, of a zero point that is 128 more. Whatever is not taken stays as it was: computed in floats between
DequantizeLinear and QuantizeLinear.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from schedules.contract.template import QuantisedAddition, Requantisation

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

QUANTISED_CONV, QUANTISED_DENSE = "FusionQuantisedConv", "FusionQuantisedDense"
# Inputs of these: data, weight, bias, multiplier, integers and factors of `requantisation_arrays`, perhaps a residual.
_LAYERS = {"Conv": QUANTISED_CONV, "Gemm": QUANTISED_DENSE, "MatMul": QUANTISED_DENSE}
# The same of bytes as of what they stand for.
_MOVES = frozenset({"MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Concat"})
# Sums of depthwise convolutions are taken in FP32, where whole numbers are exact so far.
_EXACT = 2**24
# Ends the names of zero points of bytes that had a sign.
_SHIFTED = "_without_sign"
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, eq=False)
class _Bytes:
    """A tensor of bytes and what they stand for; ``node``: the DequantizeLinear that says so."""

    source: str
    scale: np.ndarray
    zero: np.ndarray
    axis: int
    node: NodeProto

    @property
    def offset(self) -> int:
        """What was added to bytes with a sign."""
        return 128 if self.node.input[2:] and self.node.input[2].endswith(_SHIFTED) else 0


@dataclass(eq=False)
class _Layer:
    """A layer in whole numbers, under construction; it will stand where ``output`` was quantised."""

    operator: str
    name: str
    attributes: list[Any]
    data: str
    weight: np.ndarray
    bias: np.ndarray
    requantisation: Requantisation
    output: str
    residual: str = ""


def with_integer_layers(model: ModelProto) -> ModelProto:
    """``model`` itself if it is not quantised; else a copy with layers in whole numbers, of operator types that ONNX
    does not know (:data:`QUANTISED_CONV`, :data:`QUANTISED_DENSE`). Zero points must be there
    (:func:`fusion.relax.onnx.zero_points.with_zero_points`).
    """
    from onnx import ModelProto, shape_inference

    if not any(node.op_type == "QuantizeLinear" for node in model.graph.node):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    _Signs(_Tensors(copy)).remove()
    copy = shape_inference.infer_shapes(copy)
    matcher = _Matcher(_Tensors(copy))
    matcher.match()
    matcher.apply()
    return copy


class _Tensors:
    """Who makes a tensor, who reads it, and the values of those that are constant."""

    def __init__(self, model: ModelProto) -> None:
        from onnx import numpy_helper

        self.model = model
        self.graph = model.graph
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in self.graph.initializer}
        self.made_by: dict[str, NodeProto] = {}
        self.readers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self.graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self.constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
            for name in node.output:
                self.made_by[name] = node
            for name in node.input:
                self.readers[name].append(node)
        self.results = {value.name for value in self.graph.output}

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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of tensors whose shapes are known."""
        values = [*self.graph.value_info, *self.graph.input, *self.graph.output]
        return {value.name: tuple(size.dim_value for size in value.type.tensor_type.shape.dim) for value in values}


class _Signs:
    """Turns bytes with a sign, from where they are quantised to where they are read, into bytes without."""

    def __init__(self, tensors: _Tensors) -> None:
        self._tensors = tensors

    def remove(self) -> None:
        for node in self._tensors.graph.node:
            if node.op_type == "QuantizeLinear":
                ends = self._ends(node)
                for end in ends:
                    self._shift(end)

    def _ends(self, node: NodeProto) -> list[NodeProto]:
        """The quantising and dequantising nodes of the tensors that hold the bytes of ``node``; none if some other node
        reads or makes one of them, or they have no sign.
        """
        tensors, ends = self._tensors, []
        waiting, seen = [node.output[0]], set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            maker = tensors.made_by.get(name)
            if maker is None or name in tensors.results:
                return []
            for each in (maker, *tensors.readers[name]):
                if each.op_type in ("QuantizeLinear", "DequantizeLinear"):
                    found = tensors.quantisation(each)
                    if found is None or found[1].dtype != np.int8:
                        return []
                    ends.append(each)
                elif each.op_type in _MOVES:
                    waiting += each.input if each.op_type == "Concat" else each.input[:1]
                    waiting.append(each.output[0])
                else:
                    return []
        return ends

    def _shift(self, node: NodeProto) -> None:
        from onnx import numpy_helper

        zero = self._tensors.constants[node.input[2]]
        if zero.dtype == np.uint8:
            return
        name = f"{node.input[2]}{_SHIFTED}"
        if name not in self._tensors.constants:
            shifted = (zero.astype(np.int16) + 128).astype(np.uint8)
            self._tensors.constants[name] = shifted
            self._tensors.graph.initializer.append(numpy_helper.from_array(shifted, name))
        node.input[2] = name
        for each in [each for each in node.attribute if each.name == "output_dtype"]:
            node.attribute.remove(each)  # the zero point says so


class _Matcher:
    def __init__(self, tensors: _Tensors) -> None:
        self._tensors = tensors
        self._shapes = tensors.shapes()
        self._layers: dict[str, _Layer] = {}  # by the bytes that they make
        self._moved: dict[str, tuple[NodeProto, list[str]]] = {}  # likewise: the move, and what it reads now

    def match(self) -> None:
        """Looks at every QuantizeLinear in turn."""
        for node in self._tensors.graph.node:
            if node.op_type != "QuantizeLinear":
                continue
            found = self._tensors.quantisation(node)
            if found is None or found[0].size != 1 or found[1].dtype != np.uint8:
                continue
            self._quantised(node, found[0].reshape(-1)[0], int(found[1].reshape(-1)[0]))

    def _quantised(self, node: NodeProto, scale: np.float32, zero: int) -> None:
        tensors, value = self._tensors, node.input[0]
        low, high = 0, 255
        while tensors.inner(value) and value in tensors.made_by:
            maker = tensors.made_by[value]
            bounds = self._bounds(maker)
            if bounds is None:
                break
            least, most = (np.clip(np.rint(np.float32(bound) / scale) + zero, 0, 255) for bound in bounds)
            low, high, value = max(low, int(least)), min(high, int(most)), maker.input[0]
        maker = tensors.made_by.get(value)
        if maker is None or not tensors.inner(value):
            return
        if maker.op_type in _LAYERS:
            self._weighted(maker, node, scale, zero, (low, high))
        elif maker.op_type == "Add":
            self._addition(maker, node, scale, zero, (low, high))
        elif maker.op_type in _MOVES and (low, high) == (0, 255):
            self._move(maker, node, scale, zero)

    def _bounds(self, node: NodeProto) -> tuple[float, float] | None:
        """Of an activation that cuts off."""
        if node.op_type == "Relu":
            return 0.0, np.inf
        if node.op_type != "Clip":
            return None
        bounds = []
        for index, open_end in ((1, -np.inf), (2, np.inf)):
            name = node.input[index] if index < len(node.input) else ""
            value = self._tensors.constants.get(name) if name else np.array(open_end)
            if value is None:
                return None
            bounds.append(float(value.reshape(-1)[0]))
        return bounds[0], bounds[1]

    def _bytes(self, name: str) -> _Bytes | None:
        """What ``name`` is dequantised from."""
        node = self._tensors.made_by.get(name)
        if node is None or node.op_type != "DequantizeLinear":
            return None
        found = self._tensors.quantisation(node)
        if found is None:
            return None
        axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
        return _Bytes(node.input[0], found[0], found[1], axis, node)

    def _data(self, name: str) -> _Bytes | None:
        """Of a computed tensor of bytes without a sign, all alike."""
        found = self._bytes(name)
        if found is None or found.source in self._tensors.constants or found.scale.size != 1:
            return None
        return found if found.zero.dtype == np.uint8 else None

    def _weighted(
        self, node: NodeProto, quantised: NodeProto, scale: np.float32, zero: int, bounds: tuple[int, int]
    ) -> None:
        data, held = self._data(node.input[0]), self._bytes(node.input[1])
        if data is None or held is None:
            return
        found = self._weight(node, held)
        if found is None:
            return
        weight, weight_scale = found
        sums_scale = (data.scale.reshape(-1)[0] * weight_scale).astype(np.float32)
        bias = self._bias(node, sums_scale)
        if bias is None:
            return
        attributes = [each for each in node.attribute if node.op_type == "Conv"]
        depthwise = weight.ndim == 4 and weight.shape[1] == 1
        taken = np.abs(weight.astype(np.int64)).reshape(weight.shape[0], -1).sum(axis=1)
        if (np.abs(bias) + 2 * 255 * taken).max() >= (_EXACT if depthwise else _INT32.max):
            return
        multiplier = (sums_scale / scale).astype(np.float32)
        requantisation = Requantisation(multiplier, int(data.zero.reshape(-1)[0]), *bounds, zero)
        self._layers[quantised.output[0]] = _Layer(
            _LAYERS[node.op_type], node.name, attributes, data.source, weight, bias.astype(np.int32),
            requantisation, quantised.output[0],
        )  # fmt: skip

    def _weight(self, node: NodeProto, held: _Bytes) -> tuple[np.ndarray, np.ndarray] | None:
        """Weights (out, ...) of 8 bits with a sign and a zero point of zero, and the scale of each output."""
        values = self._tensors.constants.get(held.source)
        if values is None or values.dtype not in (np.int8, np.uint8):
            return None
        options = {each.name: each for each in node.attribute}
        along = 0
        if node.op_type == "Conv":
            if values.ndim != 4:
                return None
        elif values.ndim != 2 or not self._is_plain(node, options):
            return None
        else:
            along = 0 if node.op_type == "Gemm" and "transB" in options and options["transB"].i else 1
        if held.scale.size > 1 and held.axis % values.ndim != along:
            return None
        shape = [1] * values.ndim
        shape[along] = -1
        centred = values.astype(np.int16) - held.zero.astype(np.int16).reshape(shape if held.zero.size > 1 else ())
        if centred.min() < -128 or centred.max() > 127:
            return None
        outputs = values.shape[along]
        scale = np.broadcast_to(held.scale.reshape(-1), (outputs,)).astype(np.float32)
        weight = centred.astype(np.int8)
        return np.ascontiguousarray(weight.T if along else weight), scale

    def _is_plain(self, node: NodeProto, options: dict[str, Any]) -> bool:
        """A product without factors, its data not transposed."""
        ones = all(name not in options or options[name].f == 1.0 for name in ("alpha", "beta"))
        return ones and not ("transA" in options and options["transA"].i)

    def _bias(self, node: NodeProto, sums_scale: np.ndarray) -> np.ndarray | None:
        """In units of the sums; zeros where there is none, ``None`` where it is in other units."""
        if len(node.input) < 3 or not node.input[2]:
            return np.zeros(sums_scale.shape, np.int64)
        held = self._bytes(node.input[2])
        values = None if held is None else self._tensors.constants.get(held.source)
        if held is None or values is None or values.dtype != np.int32 or held.zero.any():
            return None
        if values.size != sums_scale.size or not np.allclose(held.scale.reshape(-1), sums_scale, rtol=1e-5, atol=0.0):
            return None
        return values.reshape(-1).astype(np.int64)

    def _addition(
        self, node: NodeProto, quantised: NodeProto, scale: np.float32, zero: int, bounds: tuple[int, int]
    ) -> None:
        """Belongs to the layer that makes one of the summands, and nothing else; of two to the later one."""
        summands = [self._data(name) for name in node.input]
        left, right = summands
        if left is None or right is None or left.source == right.source:
            return
        order = list(self._layers)
        candidates = [(left, right), (right, left)]
        candidates = [(own, other) for own, other in candidates if self._may_add(node, own, other)]
        if not candidates:
            return
        own, other = max(candidates, key=lambda pair: order.index(pair[0].source))
        layer = self._layers.pop(own.source)
        before = layer.requantisation
        ratios = [(each.scale.reshape(-1)[0] / scale).astype(np.float32) for each in (own, other)]
        offset = own.offset if own.offset == other.offset else 0
        zeros = [np.float32(int(each.zero.reshape(-1)[0]) - offset) for each in (own, other)]
        fixed = np.float32(zero - offset) - (ratios[0] * zeros[0] + ratios[1] * zeros[1])
        addition = QuantisedAddition(
            before.low, before.high, before.zero, float(ratios[0]), float(ratios[1]), float(fixed), offset
        )
        layer.requantisation = replace(before, low=bounds[0], high=bounds[1], zero=offset, addition=addition)
        layer.residual, layer.output = other.source, quantised.output[0]
        self._layers[quantised.output[0]] = layer

    def _may_add(self, node: NodeProto, own: _Bytes, other: _Bytes) -> bool:
        layer, tensors = self._layers.get(own.source), self._tensors
        if layer is None or layer.residual or own.source in tensors.results:
            return False
        dequantised = tensors.readers[own.source]
        readers = [reader for each in dequantised for name in each.output for reader in tensors.readers[name]]
        if any(each.op_type != "DequantizeLinear" for each in dequantised) or readers != [node]:
            return False
        if any(name in tensors.results for each in dequantised for name in each.output):
            return False
        shape = self._shapes.get(own.source)
        return shape is not None and shape == self._shapes.get(other.source)

    def _move(self, node: NodeProto, quantised: NodeProto, scale: np.float32, zero: int) -> None:
        """On the bytes, where those before and behind stand for the same."""
        names = list(node.input) if node.op_type == "Concat" else [node.input[0]]
        sources = [self._data(name) for name in names]
        for source in sources:
            if source is None or source.scale.reshape(-1)[0] != scale or int(source.zero.reshape(-1)[0]) != zero:
                return
        if len(node.output) > 1:
            return
        known = [source.source for source in sources if source is not None]
        rest = [] if node.op_type == "Concat" else list(node.input[1:])
        self._moved[quantised.output[0]] = node, [*known, *rest]

    def apply(self) -> None:
        """Writes the graph anew; what is not read any more is left out by whoever reads it."""
        graph = self._tensors.graph
        nodes: list[NodeProto] = []
        for node in graph.node:
            name = node.output[0] if node.output else ""
            if node.op_type == "QuantizeLinear" and name in self._layers:
                nodes.append(self._node(self._layers[name]))
            elif node.op_type == "QuantizeLinear" and name in self._moved:
                move, inputs = self._moved[name]
                made = type(move).FromString(move.SerializeToString())
                made.input[:], made.output[:] = inputs, [name]
                nodes.append(made)
            else:
                nodes.append(node)
        kept = [type(node).FromString(node.SerializeToString()) for node in _read(nodes, self._tensors.results)]
        del graph.node[:]
        graph.node.extend(kept)

    def _node(self, layer: _Layer) -> NodeProto:
        from onnx import helper, numpy_helper

        from schedules.contract.operator_workload import requantisation_arrays

        integers, factors = requantisation_arrays(layer.requantisation)
        arrays = (layer.weight, layer.bias, layer.requantisation.multiplier, integers, factors)
        names = []
        for what, array in zip(("weight", "bias", "multiplier", "integers", "factors"), arrays, strict=True):
            names.append(f"{layer.output}_{what}")
            self._tensors.graph.initializer.append(numpy_helper.from_array(array, names[-1]))
        residual = [layer.residual] if layer.residual else []
        made = helper.make_node(layer.operator, [layer.data, *names, *residual], [layer.output], layer.name)
        made.attribute.extend(layer.attributes)
        return made


def _read(nodes: list[NodeProto], results: Iterable[str]) -> list[NodeProto]:
    """Without nodes that nothing reads."""
    wanted, kept = set(results), []
    for node in reversed(nodes):
        nested = [each for attribute in node.attribute for each in (attribute.g, *attribute.graphs)]
        if any(name in wanted for name in node.output):
            wanted.update(node.input)
            wanted.update(name for graph in nested for each in graph.node for name in each.input)
            kept.append(node)
    return kept[::-1]
