"""Float operators between quantised tensors of a model that can be computed as byte steps.

An element-wise function of one byte tensor is a table of 256 entries: activations, changes of scale, chains of them,
a tensor times a function of itself. The table is evaluated here once, in FP32, as ONNX Runtime would for every
element; once per channel if there are parameters per channel: slopes, factors, batch norms. Sums and products of two
tensors, averages over images and windows, and linear resizing have their own kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fusion.relax.epilogue import Activation, recognised
from fusion.relax.integer_calls import (
    MOST_PIXELS,
    RESIZE_COORDINATES,
    ByteResize,
    ByteWindow,
    PairKind,
    Quantisation,
    addition_factors,
    compute_pair,
    mean_factors,
    product_factors,
    resize_factors,
    window_factors,
)
from fusion.relax.onnx.quantised_graph import QuantisedTensors, TensorOfBytes, is_of_channels

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def linear_resize(
    tensors: QuantisedTensors, shapes: Mapping[str, tuple[int, ...]], node: NodeProto, cut_off: bool
) -> ByteResize | None:
    """Return the Resize ``node`` of mode ``linear`` of an NCHW image as a :class:`ByteResize`; None for any other node,
    and for forms that it does not cover. ``cut_off``: the node reads bytes directly and truncates.
    """
    given = {each.name: each for each in node.attribute}
    shape, result = shapes.get(node.input[0], ()), shapes.get(node.output[0], ())
    if not _is_linear(node) or len(shape) != 4 or len(result) != 4 or 0 in (*shape, *result):
        return None
    coordinates = given["coordinate_transformation_mode"].s if "coordinate_transformation_mode" in given else None
    name = "half_pixel" if coordinates is None else coordinates.decode()
    stretched = given["keep_aspect_ratio_policy"].s == b"stretch" if "keep_aspect_ratio_policy" in given else True
    filtered = "antialias" in given and given["antialias"].i
    if name not in RESIZE_COORDINATES or filtered or not stretched or shape[:2] != result[:2]:
        return None
    scales = _scales(tensors, node, shape, result)
    if scales is None or scales[0] != 1.0 or scales[1] != 1.0:
        return None
    batch, channels, height, width = shape
    image = (batch, channels, height, width)
    return ByteResize(image, (result[2], result[3]), (float(scales[2]), float(scales[3])), name, cut_off)


def linear_resizes(model: ModelProto) -> frozenset[str]:
    """Return the outputs of Resize nodes that read bytes directly and have a :class:`ByteResize`."""
    from onnx import shape_inference

    if not any(map(_is_linear, model.graph.node)):
        return frozenset()
    tensors = QuantisedTensors(shape_inference.infer_shapes(model))
    shapes, nodes = tensors.shapes(), tensors.graph.node
    return frozenset(each.output[0] for each in nodes if linear_resize(tensors, shapes, each, cut_off=True) is not None)


def _is_linear(node: NodeProto) -> bool:
    """True if ``node`` is a Resize of mode ``linear``."""
    return node.op_type == "Resize" and any(each.name == "mode" and each.s == b"linear" for each in node.attribute)


def _scales(
    tensors: QuantisedTensors, node: NodeProto, shape: tuple[int, ...], result: tuple[int, ...]
) -> np.ndarray | None:
    """Return the scales along the four axes, FP32: from the file, or the ratios of the sizes if it states sizes; else
    None.
    """
    if len(node.input) < 3:
        return None
    if not node.input[2] or (node.input[2] in tensors.constants and not tensors.constants[node.input[2]].size):
        return np.array(result, np.float32) / np.array(shape, np.float32)
    scales = tensors.constants.get(node.input[2])
    if scales is None:
        return None
    found = np.ones(4, np.float32)
    axes = next((list(each.ints) for each in node.attribute if each.name == "axes"), [0, 1, 2, 3])
    found[axes] = scales.astype(np.float32)
    return found


BYTE_TABLE, BYTE_PAIR = "FusionByteTable", "FusionBytePair"
BYTE_MEAN, BYTE_WINDOW, BYTE_RESIZE = "FusionByteMean", "FusionByteWindow", "FusionByteResize"
_NORM = "BatchNormalization"
# Operators that are element-wise in their data; their other inputs are constants.
_ELEMENT_WISE = frozenset(
    {"Abs", "Add", "Ceil", "Celu", "Clip", "Div", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"}
    | {"Identity", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "PRelu", "Pow", "Reciprocal", "Relu"}
    | {"Round", "Selu", "Sigmoid", "Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tanh", "ThresholdedRelu", _NORM}
)
_PAIRS: dict[str, PairKind] = {"Add": "add", "Mul": "multiply"}
# Do not fold chains of more nodes.
_MOST_NODES = 32
_EVERY_BYTE = np.arange(256, dtype=np.uint8)


@dataclass
class _Region:
    """Nodes between dequantised tensors and a value, in the order in which they are computed."""

    nodes: list[NodeProto] = field(default_factory=list)
    leaves: dict[str, TensorOfBytes] = field(default_factory=dict)  # by the name of the dequantised tensor
    numbers: dict[str, np.ndarray] = field(default_factory=dict)  # one value, or one per channel
    sums: list[str] = field(default_factory=list)  # float results of layers


@dataclass(frozen=True)
class Target:
    """Result of a QuantizeLinear ``node``: ``value`` quantised, clipped to the bounds of ``quantisation``."""

    node: NodeProto
    value: str
    quantisation: Quantisation

    @property
    def output(self) -> str:
        """Name of the quantised tensor."""
        return self.node.output[0]


def dequantised(data: np.ndarray, scale: np.float32, zero: int) -> np.ndarray:
    """Return the values that bytes represent, float32."""
    return (data.astype(np.int32) - zero).astype(np.float32) * scale


def quantise_values(values: np.ndarray, target: Quantisation) -> np.ndarray:
    """Quantise float32 values: divided by the scale, rounded to nearest, ties to even."""
    steps = (values.astype(np.float32) / target.scale).astype(np.float32)
    steps = np.rint(np.clip(steps, -target.zero, 255 - target.zero)) + target.zero
    return np.clip(steps, target.low, target.high).astype(np.uint8)


class ByteSteps:
    """Collector of byte steps: ``nodes`` by the byte tensor that they compute.

    ``shapes``: of tensors, if known.
    """

    def __init__(self, tensors: QuantisedTensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.nodes: dict[str, list[NodeProto]] = {}
        self._tensors = tensors
        self._shapes = shapes
        self._tables: dict[str, tuple[str, np.ndarray]] = {}  # output bytes -> source bytes, table

    def table_of(self, target: Target) -> tuple[str, np.ndarray, list[NodeProto]] | None:
        """Return the only byte tensor that ``target`` depends on, the table of 256 results, (256,), or (channels, 256)
        if the channels differ, and the nodes in between; else None.
        """
        region = _Region()
        if not self._visit(target.node.input[0], region) or not region.leaves or not self._of_channels(region):
            return None
        origins = {name: self._origin(leaf.source) for name, leaf in region.leaves.items()}
        roots = {root for root, _ in origins.values()}
        if len(roots) > 1:
            return None
        made = {name: table for name, (_, table) in origins.items()}
        table = self._paired_table(region, made, target)
        if table is None:
            table = self._evaluated(region, made, target)
        if table is None:
            return None
        if table.ndim > 1 and (table == table[:1]).all():
            table = table[0]
        return roots.pop(), table, region.nodes

    def put_table(self, output: str, root: str, table: np.ndarray) -> None:
        """Add a step: bytes ``output`` by ``table`` from those of ``root``."""
        self._tables[output] = root, table
        if np.array_equal(table, _EVERY_BYTE):
            self.nodes[output] = [_node("Identity", [root], output)]
        else:
            self.nodes[output] = [self._look_up(root, table, output)]

    def _look_up(self, source: str, table: np.ndarray, output: str) -> NodeProto:
        name = self.constant(f"{output}_table", table)
        return _node(BYTE_TABLE, [source, name], output, per_channel=int(table.ndim > 1))

    def take(self, target: Target) -> bool:
        """Add a byte step that computes ``target`` to ``nodes``; True if there is one."""
        maker = self._tensors.made_by.get(target.value)
        if maker is None:
            return False
        if maker.op_type in _PAIRS:
            return self._pair(maker, target)
        if maker.op_type in ("GlobalAveragePool", "ReduceMean"):
            return self._mean(maker, target)
        if maker.op_type == "AveragePool":
            return self._window(maker, target)
        if maker.op_type == "Resize":
            return self._resized(maker, target)
        return maker.op_type == "Concat" and self._concatenation(maker, target)

    def rescaled(self, name: str, data: TensorOfBytes, target: Quantisation) -> str:
        """Return the name of the bytes of ``data`` in the quantisation ``target``: converted by a table under ``name``
        if it differs.
        """
        root, before = self._origin(data.source)
        own = quantisation_of(data)
        table = quantise_values(dequantised(before, own.scale, own.zero), target)
        if np.array_equal(table, before):
            return data.source
        self.put_table(name, root, table)
        return name

    def rescaling(self, output: str, moved: str, data: TensorOfBytes, target: Quantisation) -> list[NodeProto]:
        """Return nodes that compute ``output`` from the bytes ``moved``, which have the quantisation of ``data``."""
        own = quantisation_of(data)
        table = quantise_values(dequantised(_EVERY_BYTE, own.scale, own.zero), target)
        return [self._look_up(moved, table, output)]

    def activation_of(self, value: str, layers: Collection[str]) -> tuple[Activation, str, np.ndarray | None] | None:
        """Return the activation between the output of an operator in ``layers`` and ``value``, the name of that output,
        and for ``prelu`` the slope of each channel. None if there is no such activation, or another node reads a tensor
        in between.
        """
        region = _Region()
        if not self._visit(value, region, layers) or region.leaves or len(region.sums) != 1 or not region.nodes:
            return None
        before, tensors = region.sums[0], self._tensors
        for name in (before, *outputs_of(region.nodes)):
            readers = [node for node in tensors.readers[name] if node not in region.nodes]
            if name != value and (readers or name in tensors.results):
                return None
        activation = self._of_one_kind(region, before, value)
        if activation is not None:
            return activation, before, None
        slopes = self._slopes(region, before)
        return None if slopes is None else (Activation("prelu"), before, slopes)

    def _of_one_kind(self, region: _Region, before: str, value: str) -> Activation | None:
        """Return the activation from ``before`` to ``value`` if it is the same in every channel; else None."""
        if any(numbers.size != 1 for numbers in region.numbers.values()):
            return None
        numbers = {name: each.reshape(()) for name, each in region.numbers.items()}

        def computed(grid: np.ndarray) -> np.ndarray | None:
            values = self._values(region.nodes, numbers, {before: grid.astype(np.float32)}, value)
            return None if values is None else values.astype(np.float64)

        return recognised(computed)

    def _slopes(self, region: _Region, before: str) -> np.ndarray | None:
        """Return the slopes of a single PRelu of an image, one per channel (also if all are equal, for slopes outside
        ``leaky_relu``); else None.
        """
        shape = self._shapes.get(before, ())
        if len(region.nodes) != 1 or region.nodes[0].op_type != "PRelu" or len(shape) != 4:
            return None
        slopes = region.numbers.get(region.nodes[0].input[1])
        if slopes is None or slopes.dtype != np.float32:
            return None
        if slopes.size == 1:
            return np.full(shape[1], slopes.reshape(()), np.float32)
        return slopes.reshape(-1) if is_of_channels(slopes, shape[1]) else None

    # --- tables -----------------------------------------------------------------------------------

    def _origin(self, source: str) -> tuple[str, np.ndarray]:
        return self._tables.get(source, (source, _EVERY_BYTE))

    def _visit(self, name: str, region: _Region, layers: Collection[str] = ()) -> bool:
        """Add the nodes before ``name`` to ``region``. True if they compute it element by element from dequantised
        tensors and outputs of the operators ``layers``.
        """
        if name in region.leaves or name in region.sums or any(name in node.output for node in region.nodes):
            return True
        numbers = self._tensors.floats(name)
        if numbers is not None:
            region.numbers[name] = numbers
            return True
        leaf = self._tensors.data(name)
        if leaf is not None:
            region.leaves[name] = leaf
            return True
        node = self._tensors.made_by.get(name)
        if node is not None and node.op_type in layers:
            region.sums.append(name)
            return True
        if node is None or node.op_type not in _ELEMENT_WISE or len(region.nodes) >= _MOST_NODES:
            return False
        if not all(self._visit(each, region, layers) for each in node.input if each):
            return False
        region.nodes.append(node)
        return True

    def _of_channels(self, region: _Region) -> bool:
        """True if each parameter is one number, or one per channel of images; reshapes the latter to broadcast against
        (1, channels, 256, 1).
        """
        shapes = [self._shapes.get(name, ()) for name in region.leaves]
        of_norms = {name for node in region.nodes if node.op_type == _NORM for name in node.input[1:]}
        for name, numbers in region.numbers.items():
            if numbers.size == 1 and name not in of_norms:
                region.numbers[name] = numbers.reshape(())
                continue
            if any(len(shape) != 4 for shape in shapes):
                return False
            channels = shapes[0][1]
            if name in of_norms:
                if numbers.shape != (channels,):
                    return False
                continue
            if not is_of_channels(numbers, channels) or any(shape[1] != channels for shape in shapes):
                return False
            region.numbers[name] = numbers.reshape(1, channels, 1, 1)
        return True

    def _evaluated(self, region: _Region, made: Mapping[str, np.ndarray], target: Target) -> np.ndarray | None:
        """Return the table of ``target``, evaluated in FP32; None if it cannot be evaluated."""
        channels = max((len(each) for each in _per_channel(made, region)), default=0)
        shape = (1, channels, 256, 1) if channels else (256,)
        floats = {}
        for name, leaf in region.leaves.items():
            own = quantisation_of(leaf)
            table = np.broadcast_to(made[name], (channels, 256)) if channels else made[name]
            floats[name] = dequantised(table, own.scale, own.zero).reshape(shape)
        values = self._values(region.nodes, region.numbers, floats, target.node.input[0])
        if values is None:
            return None
        return quantise_values(values.reshape(-1, 256) if channels else values, _uncut(target))

    def _values(
        self,
        nodes: Sequence[NodeProto],
        numbers: Mapping[str, np.ndarray],
        floats: Mapping[str, np.ndarray],
        result: str,
    ) -> np.ndarray | None:
        """Return the results of ``nodes`` on ``floats``, all of one shape and float32, by the reference evaluator of
        the ``onnx`` package; None if it does not support them, or a result is NaN.
        """
        from onnx import TensorProto, helper, numpy_helper
        from onnx.reference import ReferenceEvaluator

        shape = next(iter(floats.values())).shape
        if not nodes:
            return floats[result]
        given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in floats]
        last = [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)]
        constants = [numpy_helper.from_array(np.asarray(each), name) for name, each in numbers.items()]
        graph = helper.make_graph(nodes, "steps", given, last, constants)
        opsets = list(self._tensors.model.opset_import)
        try:
            evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets))
            with np.errstate(all="ignore"):
                (found,) = evaluator.run(None, dict(floats))
        except Exception:  # the evaluator raises any error for unsupported nodes; they are computed in floats then
            return None
        values = np.asarray(found)
        return values if values.shape == shape and values.dtype == np.float32 and not np.isnan(values).any() else None

    def _paired_table(self, region: _Region, made: Mapping[str, np.ndarray], target: Target) -> np.ndarray | None:
        """Return the table of a single sum or product, rounded as the kernel of two tensors rounds; else None."""
        if len(region.nodes) != 1 or region.nodes[0].op_type not in _PAIRS:
            return None
        (node,) = region.nodes
        if len(node.input) != 2:
            return None
        operands = [self._operand(name, region, made) for name in node.input]
        if any(each is None for each in operands):
            return None
        (left, a), (right, b) = [each for each in operands if each is not None]
        if a.shape[-1] == 1:  # ONNX Runtime adds numbers to a tensor, in either order
            (left, a), (right, b) = (right, b), (left, a)
        kind = _PAIRS[node.op_type]
        factors = _FACTORS[kind](left, right, _uncut(target))
        return compute_pair(kind, a, b, factors)

    def _operand(
        self, name: str, region: _Region, made: Mapping[str, np.ndarray]
    ) -> tuple[Quantisation, np.ndarray] | None:
        """Return the quantisation and the bytes, (256,) or (channels, 1), of an operand of a single sum or product, or
        None.
        """
        if name in region.leaves:
            return quantisation_of(region.leaves[name]), made[name]
        held = self._tensors.dequantised(name)
        if held is None or held.scale.size > 1 or held.zero.dtype != np.uint8:
            return None
        return quantisation_of(held), self._tensors.constants[held.source].reshape(-1, 1)

    # --- several tensors, and several pixels ------------------------------------------------------

    def _pair(self, node: NodeProto, target: Target) -> bool:
        operands = [self._tensors.data(name) for name in node.input]
        known = [each for each in operands if each is not None]
        if len(known) < len(operands) or len(known) != 2:
            return False
        kind, names = _PAIRS[node.op_type], list(node.input)
        left, right = (self._shapes.get(name) for name in names)
        if left is None or right is None or 0 in (*left, *right):
            return False
        per_channel = left != right
        if per_channel:
            if kind != "multiply" or not (_is_gate(left, right) or _is_gate(right, left)):
                return False
            known = known[::-1] if _is_gate(left, right) else known
        factors = _FACTORS[kind](*map(quantisation_of, known), target.quantisation)
        name = self.constant(f"{target.output}_factors", factors)
        sources = [each.source for each in known]
        made = _node(BYTE_PAIR, [*sources, name], target.output, kind=kind, per_channel=int(per_channel))
        self.nodes[target.output] = [made]
        return True

    def _mean(self, node: NodeProto, target: Target) -> bool:
        data = self._tensors.data(node.input[0])
        shape = None if data is None else self._shapes.get(node.input[0])
        if data is None or shape is None or len(shape) != 4 or 0 in shape:
            return False
        if node.op_type != "AveragePool" and not is_over_pixels(self._tensors, node):
            return False
        pixels = shape[2] * shape[3]
        if pixels > MOST_PIXELS:
            return False
        factors = mean_factors(quantisation_of(data), target.quantisation, pixels)
        name = self.constant(f"{target.output}_factors", factors)
        kept = node.op_type != "ReduceMean" or _integer(node, "keepdims", 1)
        output = target.output if kept else f"{target.output}_pixel"
        self.nodes[target.output] = [_node(BYTE_MEAN, [data.source, name], output)]
        if not kept:
            size = self.constant(f"{target.output}_shape", np.array(shape[:2], np.int64))
            self.nodes[target.output].append(_node("Reshape", [output, size], target.output))
        return True

    def _window(self, node: NodeProto, target: Target) -> bool:
        data = self._tensors.data(node.input[0])
        shape = None if data is None else self._shapes.get(node.input[0])
        if data is None or shape is None or len(shape) != 4 or 0 in shape:
            return False
        batch, channels, height, width = shape
        window = _pooling(node, (height, width), self._shapes.get(node.output[0], ())[2:])
        if window is None:
            return False
        kernel, stride, padding, counted = window
        if kernel == (height, width) and not any(padding):
            return self._mean(node, target)
        step = ByteWindow((batch, channels, height, width), kernel, stride, padding, counted)
        factors = self.constant(f"{target.output}_factors", window_factors(quantisation_of(data), target.quantisation))
        self.nodes[target.output] = [
            _node(
                BYTE_WINDOW, [data.source, factors], target.output, kernel=step.kernel, stride=step.stride,
                padding=step.padding, counts_padding=int(step.counts_padding),
            )
        ]  # fmt: skip
        return True

    def _resized(self, node: NodeProto, target: Target) -> bool:
        data = self._tensors.data(node.input[0])
        step = None if data is None else linear_resize(self._tensors, self._shapes, node, cut_off=False)
        if data is None or step is None:
            return False
        factors = resize_factors(quantisation_of(data), target.quantisation)
        self._put_resize(data.source, step, factors, target.output)
        return True

    def take_resize_of_bytes(self, node: NodeProto) -> None:
        """Add the step of a Resize that reads bytes directly and truncates; signed bytes are truncated towards their
        original zero.
        """
        offset = self._tensors.offset_behind(node.input[0])
        step = None if offset is None else linear_resize(self._tensors, self._shapes, node, cut_off=True)
        if step is not None and offset is not None:
            as_it_is = Quantisation(np.float32(1.0), offset)
            self._put_resize(node.input[0], step, resize_factors(as_it_is, as_it_is), node.output[0])

    def _put_resize(self, source: str, step: ByteResize, factors: np.ndarray, output: str) -> None:
        name = self.constant(f"{output}_factors", factors)
        options = {"size": step.size, "scales": step.scales, "coordinates": step.coordinates}
        self.nodes[output] = [_node(BYTE_RESIZE, [source, name], output, **options, cut_off=int(step.cut_off))]

    def _concatenation(self, node: NodeProto, target: Target) -> bool:
        """Add a concatenation of bytes, with each part rescaled if its quantisation differs; True if all parts are byte
        tensors.
        """
        parts = [self._tensors.data(name) for name in node.input]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return False
        nodes: list[NodeProto] = []
        names = []
        for index, part in enumerate(known):
            name = self.rescaled(f"{target.output}_part_{index}", part, target.quantisation)
            nodes += self.nodes.pop(name, []) if name.startswith(f"{target.output}_part_") else []
            names.append(name)
        made = type(node).FromString(node.SerializeToString())
        made.input[:], made.output[:] = names, [target.output]
        self.nodes[target.output] = [*nodes, made]
        return True

    def constant(self, name: str, array: np.ndarray) -> str:
        """Add ``array`` as a constant of the graph; return ``name``."""
        from onnx import numpy_helper

        self._tensors.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name


_FACTORS: dict[str, Any] = {"add": addition_factors, "multiply": product_factors}


def quantisation_of(data: TensorOfBytes) -> Quantisation:
    """Return the quantisation of a byte tensor with one scale and zero point."""
    return Quantisation(np.float32(data.scale.reshape(-1)[0]), int(data.zero.reshape(-1)[0]), offset=data.offset)


def is_over_pixels(tensors: QuantisedTensors, node: NodeProto) -> bool:
    """True if a GlobalAveragePool or ReduceMean of an image is the mean over its rows and columns."""
    if node.op_type == "GlobalAveragePool":
        return True
    axes = next((list(each.ints) for each in node.attribute if each.name == "axes"), None)
    if axes is None and len(node.input) > 1 and node.input[1] in tensors.constants:
        axes = tensors.constants[node.input[1]].reshape(-1).tolist()
    return axes is not None and sorted(axis % 4 for axis in axes) == [2, 3]


def only_readers(tensors: QuantisedTensors, source: str, allowed: Collection[str]) -> bool:
    """True if only the nodes that compute ``allowed`` read the dequantised bytes ``source``, and no node reads the
    bytes directly.
    """
    if source in tensors.results:
        return False
    for step in tensors.readers[source]:
        if step.op_type != "DequantizeLinear" or step.output[0] in tensors.results:
            return False
        if any(set(reader.output).isdisjoint(allowed) for reader in tensors.readers[step.output[0]]):
            return False
    return True


def outputs_of(nodes: Iterable[NodeProto]) -> set[str]:
    """Return the names of all outputs of ``nodes``."""
    return {name for node in nodes for name in node.output}


def _uncut(target: Target) -> Quantisation:
    """Return the quantisation without the bounds of activations, which are among the nodes that a table is
    made from.
    """
    return replace(target.quantisation, low=0, high=255)


def _is_gate(small: Sequence[int], image: Sequence[int]) -> bool:
    """True if ``small`` is (N, C, 1, 1) for an image of the same number of channels."""
    return len(small) == len(image) == 4 and tuple(small) == (*image[:2], 1, 1)


def _per_channel(made: Mapping[str, np.ndarray], region: _Region) -> list[np.ndarray]:
    """Return the tables and the parameters that vary by channel, the channel as the first axis."""
    tables = [table for table in made.values() if table.ndim > 1]
    return tables + [numbers.reshape(-1) for numbers in region.numbers.values() if numbers.ndim]


_Window: TypeAlias = tuple[tuple[int, int], tuple[int, int], tuple[int, int, int, int], bool]


def _pooling(node: NodeProto, image: tuple[int, int], result: Sequence[int]) -> _Window | None:
    """Return kernel, strides, padding (top, left, bottom, right) and if the padding is counted, of an AveragePool of
    ``image`` to ``result``; with ``ceil_mode`` the padding at the end covers the last window. None for unsupported
    forms.
    """
    given = {each.name: each for each in node.attribute}
    lists = {name: list(each.ints) for name, each in given.items() if each.ints}
    kernel, stride = lists.get("kernel_shape", []), lists.get("strides", [1, 1])
    automatic = given["auto_pad"].s if "auto_pad" in given else b"NOTSET"
    if len(kernel) != 2 or any(each != 1 for each in lists.get("dilations", [])) or len(result) != 2:
        return None
    before, behind = [0, 0], [0, 0]
    if automatic in (b"SAME_UPPER", b"SAME_LOWER"):
        total = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(image, kernel, stride, strict=True)]
        small, large = [each // 2 for each in total], [each - each // 2 for each in total]
        before, behind = (small, large) if automatic == b"SAME_UPPER" else (large, small)
    elif automatic in (b"NOTSET", b""):
        pads = lists.get("pads", [0, 0, 0, 0])
        before, behind = pads[:2], pads[2:]
    elif automatic != b"VALID":
        return None
    counts, reach = [], []
    for n, k, s, first, last in zip(image, kernel, stride, before, behind, strict=True):
        rest = n + first + last - k
        count = (-(-rest // s) if _integer(node, "ceil_mode", 0) else rest // s) + 1
        if (count - 1) * s >= n + first:  # no window begins in the padding at the end
            count -= 1
        counts.append(count)
        reach.append(max(last, (count - 1) * s + k - n - first))
    if counts != list(result) or min(counts) < 1 or any(p >= k for p, k in zip(before, kernel, strict=True)):
        return None
    padding = (before[0], before[1], reach[0], reach[1])
    counted = bool(_integer(node, "count_include_pad", 0))
    return (kernel[0], kernel[1]), (stride[0], stride[1]), padding, counted


def _integer(node: NodeProto, name: str, default: int) -> int:
    return next((int(each.i) for each in node.attribute if each.name == name), default)


def _node(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> NodeProto:
    from onnx import helper

    return helper.make_node(operator, list(inputs), [output], output, **attributes)
