"""What a quantised model computes in floats between bytes, where bytes can be computed from bytes.

Whatever depends on one tensor of bytes element by element is a table of 256 entries: activations, changes of scale,
several of them one after the other, a tensor times a function of itself. It is evaluated here once, in FP32, as ONNX
Runtime would for every element. Sums and products of two tensors and global averages have kernels of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fusion.relax.byte_calls import (
    MOST_PIXELS,
    PairKind,
    Quantisation,
    addition_factors,
    mean_factors,
    paired,
    product_factors,
)
from fusion.relax.onnx.quantised_tensors import QuantisedTensors, TensorOfBytes

if TYPE_CHECKING:
    from onnx import NodeProto

BYTE_TABLE, BYTE_PAIR, BYTE_MEAN = "FusionByteTable", "FusionBytePair", "FusionByteMean"
# Element by element, whatever else they read one number.
_ELEMENT_WISE = frozenset(
    {"Abs", "Add", "Ceil", "Celu", "Clip", "Div", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"}
    | {"Identity", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "PRelu", "Pow", "Reciprocal", "Relu"}
    | {"Round", "Selu", "Sigmoid", "Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tanh", "ThresholdedRelu"}
)
_PAIRS: dict[str, PairKind] = {"Add": "add", "Mul": "multiply"}
# Longer chains than this are none.
_MOST_NODES = 32
_EVERY_BYTE = np.arange(256, dtype=np.uint8)


@dataclass
class _Region:
    """Nodes between dequantised tensors and a value, in the order in which they are computed."""

    nodes: list[NodeProto] = field(default_factory=list)
    leaves: dict[str, TensorOfBytes] = field(default_factory=dict)  # by the names of their floats
    numbers: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Target:
    """What a QuantizeLinear ``node`` makes: of ``value``, cut off at the bounds of ``quantisation``."""

    node: NodeProto
    value: str
    quantisation: Quantisation

    @property
    def output(self) -> str:
        """The name of its bytes."""
        return self.node.output[0]


def dequantised(data: np.ndarray, scale: np.float32, zero: int) -> np.ndarray:
    """What bytes stand for, float32."""
    return (data.astype(np.int32) - zero).astype(np.float32) * scale


def quantised(values: np.ndarray, target: Quantisation) -> np.ndarray:
    """float32 to bytes: over the scale, to nearest, ties to even."""
    steps = (values.astype(np.float32) / target.scale).astype(np.float32)
    steps = np.rint(np.clip(steps, -target.zero, 255 - target.zero)) + target.zero
    return np.clip(steps, target.low, target.high).astype(np.uint8)


class ByteSteps:
    """Collects ``nodes``, by the bytes that they make. ``shapes``: of tensors, where they are known."""

    def __init__(self, tensors: QuantisedTensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.nodes: dict[str, list[NodeProto]] = {}
        self._tensors = tensors
        self._shapes = shapes
        self._tables: dict[str, tuple[str, np.ndarray]] = {}  # of what bytes they are, and how

    def table_of(self, target: Target) -> tuple[str, np.ndarray, list[NodeProto]] | None:
        """The bytes that ``target`` depends on alone, for each of 256 what it makes of it, and the nodes between."""
        region = _Region()
        if not self._visit(target.node.input[0], region) or not region.leaves:
            return None
        origins = {name: self._origin(leaf.source) for name, leaf in region.leaves.items()}
        roots = {root for root, _ in origins.values()}
        if len(roots) > 1:
            return None
        made = {name: table for name, (_, table) in origins.items()}
        table = self._paired_table(region, made, target)
        if table is None:
            table = self._evaluated(region, made, target)
        return None if table is None else (roots.pop(), table, region.nodes)

    def put_table(self, output: str, root: str, table: np.ndarray) -> None:
        """Bytes ``output`` by ``table`` from those of ``root``."""
        self._tables[output] = root, table
        if np.array_equal(table, _EVERY_BYTE):
            self.nodes[output] = [_node("Identity", [root], output)]
        else:
            self.nodes[output] = [_node(BYTE_TABLE, [root, self._constant(f"{output}_table", table)], output)]

    def take(self, target: Target) -> bool:
        """Whether a step makes ``target``, which is now among ``nodes``."""
        maker = self._tensors.made_by.get(target.value)
        if maker is None:
            return False
        if maker.op_type in _PAIRS:
            return self._pair(maker, target)
        if maker.op_type in ("GlobalAveragePool", "ReduceMean"):
            return self._mean(maker, target)
        return maker.op_type == "Concat" and self._concatenation(maker, target)

    def rescaled(self, name: str, data: TensorOfBytes, target: Quantisation) -> str:
        """The bytes of ``data`` as those of ``target``: by a table of the name ``name`` where they differ."""
        root, before = self._origin(data.source)
        own = quantisation_of(data)
        table = quantised(dequantised(before, own.scale, own.zero), target)
        if np.array_equal(table, before):
            return data.source
        self.put_table(name, root, table)
        return name

    def rescaling(self, output: str, moved: str, data: TensorOfBytes, target: Quantisation) -> list[NodeProto]:
        """Nodes that make ``output`` of the bytes ``moved``, which stand for the same as those of ``data``."""
        own = quantisation_of(data)
        table = quantised(dequantised(_EVERY_BYTE, own.scale, own.zero), target)
        return [_node(BYTE_TABLE, [moved, self._constant(f"{output}_table", table)], output)]

    # --- tables -----------------------------------------------------------------------------------

    def _origin(self, source: str) -> tuple[str, np.ndarray]:
        return self._tables.get(source, (source, _EVERY_BYTE))

    def _visit(self, name: str, region: _Region) -> bool:
        """Whether ``name`` is computed element by element from dequantised tensors; adds what there is before it."""
        if name in region.leaves or any(name in node.output for node in region.nodes):
            return True
        if name in self._tensors.constants:
            region.numbers.add(name)
            return self._tensors.constants[name].size == 1
        leaf = self._tensors.data(name)
        if leaf is not None:
            region.leaves[name] = leaf
            return True
        node = self._tensors.made_by.get(name)
        if node is None or node.op_type not in _ELEMENT_WISE or len(region.nodes) >= _MOST_NODES:
            return False
        if not all(self._visit(each, region) for each in node.input if each):
            return False
        region.nodes.append(node)
        return True

    def _evaluated(self, region: _Region, made: Mapping[str, np.ndarray], target: Target) -> np.ndarray | None:
        """By the reference of the ``onnx`` package, in FP32."""
        from onnx import TensorProto, helper, numpy_helper
        from onnx.reference import ReferenceEvaluator

        floats = {}
        for name, leaf in region.leaves.items():
            own = quantisation_of(leaf)
            floats[name] = dequantised(made[name], own.scale, own.zero)
        result = target.node.input[0]
        if region.nodes:
            given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [256]) for name in floats]
            last = [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)]
            constants = [
                numpy_helper.from_array(self._tensors.constants[name].reshape(()), name) for name in region.numbers
            ]
            graph = helper.make_graph(region.nodes, "table", given, last, constants)
            opsets = list(self._tensors.model.opset_import)
            try:
                evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets))
                with np.errstate(all="ignore"):
                    (values,) = evaluator.run(None, floats)
            except Exception:  # the evaluator raises anything on what it does not know: computed in floats then
                return None
        else:
            values = floats[result]
        values = np.asarray(values)
        if values.size != 256 or values.dtype != np.float32 or np.isnan(values).any():
            return None
        return quantised(values.reshape(-1), _uncut(target))

    def _paired_table(self, region: _Region, made: Mapping[str, np.ndarray], target: Target) -> np.ndarray | None:
        """Of a lone sum or product: as a kernel of two tensors would round."""
        if len(region.nodes) != 1 or region.nodes[0].op_type not in _PAIRS:
            return None
        (node,) = region.nodes
        if len(node.input) != 2 or not all(name in region.leaves for name in node.input):
            return None
        own = [quantisation_of(region.leaves[name]) for name in node.input]
        kind = _PAIRS[node.op_type]
        factors = _FACTORS[kind](*own, _uncut(target))
        return paired(kind, made[node.input[0]], made[node.input[1]], factors)

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
        name = self._constant(f"{target.output}_factors", factors)
        sources = [each.source for each in known]
        made = _node(BYTE_PAIR, [*sources, name], target.output, kind=kind, per_channel=int(per_channel))
        self.nodes[target.output] = [made]
        return True

    def _mean(self, node: NodeProto, target: Target) -> bool:
        data = self._tensors.data(node.input[0])
        shape = None if data is None else self._shapes.get(node.input[0])
        if data is None or shape is None or len(shape) != 4 or 0 in shape or not is_over_pixels(self._tensors, node):
            return False
        pixels = shape[2] * shape[3]
        if pixels > MOST_PIXELS:
            return False
        factors = mean_factors(quantisation_of(data), target.quantisation, pixels)
        name = self._constant(f"{target.output}_factors", factors)
        kept = node.op_type == "GlobalAveragePool" or _integer(node, "keepdims", 1)
        output = target.output if kept else f"{target.output}_pixel"
        self.nodes[target.output] = [_node(BYTE_MEAN, [data.source, name], output)]
        if not kept:
            size = self._constant(f"{target.output}_shape", np.array(shape[:2], np.int64))
            self.nodes[target.output].append(_node("Reshape", [output, size], target.output))
        return True

    def _concatenation(self, node: NodeProto, target: Target) -> bool:
        """Each part rescaled where its bytes stand for something else."""
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

    def _constant(self, name: str, array: np.ndarray) -> str:
        from onnx import numpy_helper

        self._tensors.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name


_FACTORS: dict[str, Any] = {"add": addition_factors, "multiply": product_factors}


def quantisation_of(data: TensorOfBytes) -> Quantisation:
    """Of a tensor of bytes that are all alike."""
    return Quantisation(np.float32(data.scale.reshape(-1)[0]), int(data.zero.reshape(-1)[0]), offset=data.offset)


def is_over_pixels(tensors: QuantisedTensors, node: NodeProto) -> bool:
    """Whether a GlobalAveragePool or ReduceMean of an image is the mean over its rows and columns."""
    if node.op_type == "GlobalAveragePool":
        return True
    axes = next((list(each.ints) for each in node.attribute if each.name == "axes"), None)
    if axes is None and len(node.input) > 1 and node.input[1] in tensors.constants:
        axes = tensors.constants[node.input[1]].reshape(-1).tolist()
    return axes is not None and sorted(axis % 4 for axis in axes) == [2, 3]


def only_readers(tensors: QuantisedTensors, source: str, allowed: Collection[str]) -> bool:
    """Whether nothing but the nodes that make ``allowed`` reads what bytes ``source`` stand for, and nothing the bytes
    themselves.
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
    """The names of all that ``nodes`` make."""
    return {name for node in nodes for name in node.output}


def _uncut(target: Target) -> Quantisation:
    """Without the bounds of activations, which are among the nodes that a table is made of."""
    return replace(target.quantisation, low=0, high=255)


def _is_gate(small: Sequence[int], image: Sequence[int]) -> bool:
    """(N, C, 1, 1) for an image of as many channels."""
    return len(small) == len(image) == 4 and tuple(small) == (*image[:2], 1, 1)


def _integer(node: NodeProto, name: str, default: int) -> int:
    return next((int(each.i) for each in node.attribute if each.name == name), default)


def _node(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> NodeProto:
    from onnx import helper

    return helper.make_node(operator, list(inputs), [output], output, **attributes)
