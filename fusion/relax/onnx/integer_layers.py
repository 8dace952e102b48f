"""Layers of a quantised model that are computed in integers: DequantizeLinear, a layer and QuantizeLinear become one
node.

Convolutions and products with constant matrices are converted, with an activation and a residual after them; max
pooling, moves of values and the steps of :mod:`fusion.relax.onnx.byte_steps` work on the bytes directly. An int8 tensor
becomes a uint8 tensor with a zero point 128 higher. All other nodes stay unchanged: computed in floats between
DequantizeLinear and QuantizeLinear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fusion.relax.epilogue import Activation
from fusion.relax.integer_calls import Quantisation, addition_factors
from fusion.relax.onnx.byte_steps import (
    ByteSteps,
    Target,
    linear_resizes,
    only_readers,
    outputs_of,
    quantisation_of,
    quantise_values,
)
from fusion.relax.onnx.quantised_graph import (
    OF_OPERATOR,
    QuantisedTensors,
    TensorOfBytes,
    is_move,
    offset_of,
    padding_of,
)
from fusion.relax.onnx.quantised_rewrites import (
    bring_steps_to_layers,
    remove_signs,
    share_equal_steps,
    split_transposed,
    transpose_weights,
)
from schedules.contract.template import QuantisedAddition, Requantisation

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

QUANTISED_CONV, QUANTISED_DENSE = "FusionQuantisedConv", "FusionQuantisedDense"
# Inputs of the converted nodes: data, weight, bias, multiplier, integers and factors of `requantisation_arrays`, and
# optionally a residual.
_LAYERS = {"Conv": QUANTISED_CONV, "Gemm": QUANTISED_DENSE, "MatMul": QUANTISED_DENSE}
# Limit of exact integers in FP32, in which sums of depthwise convolutions are accumulated.
_EXACT = 2**24
_INT32 = np.iinfo(np.int32)


@dataclass(eq=False)
class _Layer:
    """Integer layer under construction; it replaces the QuantizeLinear that computed ``output``."""

    operator: str
    name: str
    attributes: list[Any]
    data: str
    weight: np.ndarray
    bias: np.ndarray
    requantisation: Requantisation
    output: str
    residual: str = ""
    activation: Activation | None = None
    slopes: np.ndarray | None = None
    before: list[NodeProto] = field(default_factory=list)  # compute the inputs of the layer


def with_integer_layers(model: ModelProto) -> ModelProto:
    """Return a copy of ``model`` with integer layers, of operator types that are not in ONNX (:data:`QUANTISED_CONV`,
    :data:`QUANTISED_DENSE`); ``model`` itself if it is not quantised. Zero points must be present
    (:func:`fusion.relax.onnx.quantised_rewrites.with_zero_points`).
    """
    from onnx import ModelProto, shape_inference

    if not any(node.op_type == "QuantizeLinear" for node in model.graph.node):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    share_equal_steps(copy)
    transpose_weights(copy)
    bring_steps_to_layers(copy)
    split_transposed(copy)
    remove_signs(copy, linear_resizes(copy))
    copy = shape_inference.infer_shapes(copy)
    matcher = _Matcher(QuantisedTensors(copy))
    matcher.match()
    matcher.apply()
    return copy


class _Matcher:
    def __init__(self, tensors: QuantisedTensors) -> None:
        self._tensors = tensors
        self._shapes = tensors.shapes()
        self._layers: dict[str, _Layer] = {}  # by the byte tensor that they compute
        self._steps = ByteSteps(tensors, self._shapes)
        # Byte tensors padded with their zero point: the tensor inside, and top, left, bottom, right.
        self._zero_padded: dict[str, tuple[str, tuple[int, int, int, int]]] = {}

    def match(self) -> None:
        """Match every QuantizeLinear in turn, and every Resize of bytes."""
        for node in self._tensors.graph.node:
            if node.op_type == "Resize":
                self._steps.take_resize_of_bytes(node)
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
        target = Target(node, value, Quantisation(scale, zero, low, high, _offset(node)))
        taken = self._layer(target) or self._table(target) or self._steps.take(target)
        _ = taken or self._move(target) or self._padded(target)

    def _layer(self, target: Target) -> bool:
        """Match ``target`` as the result of an integer layer; True if it is one."""
        maker, made = self._tensors.made_by.get(target.value), target.quantisation
        if maker is None or not self._tensors.inner(target.value):
            return False
        bounds = (made.low, made.high)
        if maker.op_type in _LAYERS:
            self._weighted(maker, target)
        elif maker.op_type == "Add":
            self._addition(maker, target.node, made.scale, made.zero, bounds)
        if target.output not in self._layers and (found := self._steps.activation_of(target.value, _LAYERS)):
            activation, before, slopes = found
            self._weighted(self._tensors.made_by[before], target, activation, slopes)
        return target.output in self._layers

    def _table(self, target: Target) -> bool:
        """Match ``target`` as an element-wise function of one byte tensor: computed by a table, or by the bounds of the
        layer that computes the tensor, if the function only clips and nothing else reads the tensor. True if matched.
        """
        found = self._steps.table_of(target)
        if found is None:
            return False
        source, table, nodes = found
        layer = self._layers.get(source)
        low, high = int(table.min()), int(table.max())
        cuts_off = table.ndim == 1 and np.array_equal(table, np.clip(np.arange(256), low, high))
        made = {*outputs_of(nodes), target.output}
        if layer is None or not cuts_off or not only_readers(self._tensors, source, made):
            self._steps.put_table(target.output, source, table)
            return True
        del self._layers[source]
        before = layer.requantisation
        layer.requantisation = replace(before, low=max(before.low, low), high=max(before.low, min(before.high, high)))
        layer.output = target.output
        self._layers[target.output] = layer
        return True

    def _bounds(self, node: NodeProto) -> tuple[float, float] | None:
        """Return the bounds of an activation that clips; None for any other node."""
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

    def _weighted(
        self,
        node: NodeProto,
        target: Target,
        activation: Activation | None = None,
        slopes: np.ndarray | None = None,
    ) -> None:
        """Match the layer ``node``, with ``activation`` (and its ``slopes`` per channel) between it and ``target``;
        only the result is rounded.
        """
        made = target.quantisation
        data, held = self._tensors.data(node.input[0]), self._tensors.dequantised(node.input[1])
        if data is None or held is None:
            return
        found = self._weight(node, held)
        if found is None:
            return
        weight, weight_scale = found
        sums_scale = (data.scale.reshape(-1)[0] * weight_scale).astype(np.float32)
        bias = self._bias(node, sums_scale, rounded=activation is None)
        if bias is None:
            return
        attributes = [each for each in node.attribute if node.op_type == "Conv"]
        name = data.source
        if name in self._zero_padded and _has_pads(node):
            name, around = self._zero_padded[name]
            attributes = _with_more_pads(attributes, around)
        depthwise = weight.ndim == 4 and weight.shape[1] == 1
        before: list[NodeProto] = []
        if weight.dtype != np.int8:
            repeated = self._repeated_channels(node, target, name, weight)
            if repeated is None:
                return
            name, weight, before = repeated
        taken = np.abs(weight.astype(np.int64)).reshape(weight.shape[0], -1).sum(axis=1)
        steps = 0 if activation else np.abs(bias)
        if (steps + 2 * 255 * taken).max() >= (_EXACT if depthwise else _INT32.max):
            return
        multiplier = (sums_scale if activation else sums_scale / made.scale).astype(np.float32)
        requantisation = Requantisation(
            multiplier, int(data.zero.reshape(-1)[0]), made.low, made.high, made.zero,
            step=float(made.scale) if activation else 0.0,
        )  # fmt: skip
        self._layers[target.output] = _Layer(
            _LAYERS[node.op_type], node.name, attributes, name, weight,
            bias.astype(np.float32 if activation else np.int32), requantisation, target.output,
            activation=activation, slopes=slopes, before=before,
        )  # fmt: skip

    def _weight(self, node: NodeProto, held: TensorOfBytes) -> tuple[np.ndarray, np.ndarray] | None:
        """Return signed weights (out, ...) with a zero point of zero, and the scale of each output: int8, or int16 if
        the zero point requires more than 8 bits. None if they are not constant or the product is not plain.
        """
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
        outputs = values.shape[along]
        scale = np.broadcast_to(held.scale.reshape(-1), (outputs,)).astype(np.float32)
        fits = centred.min() >= -128 and centred.max() <= 127
        weight = centred.astype(np.int8) if fits else centred
        return np.ascontiguousarray(weight.T if along else weight), scale

    def _repeated_channels(
        self, node: NodeProto, target: Target, data: str, weight: np.ndarray
    ) -> tuple[str, np.ndarray, list[NodeProto]] | None:
        """Return data and 8-bit weights that give the same sums as the 9-bit ``weight``: channels with a weight that
        does not fit are repeated for the remainder, until it is zero (of 255 a second 127 leaves 1). None for grouped
        convolutions.
        """
        from onnx import helper

        if any(each.name == "group" and each.i > 1 for each in node.attribute):
            return None
        axis = 1 if node.op_type == "Conv" else len(self._shapes.get(node.input[0], ())) - 1
        if axis < 0:
            return None
        others = tuple(each for each in range(weight.ndim) if each != 1)
        fitting = np.clip(weight, -128, 127)
        parts, channels, rest = [fitting], [], weight - fitting
        while rest.any():
            channels.append(np.flatnonzero(rest.any(axis=others)))
            fitting = np.clip(rest, -128, 127)
            parts.append(fitting[:, channels[-1]])
            rest = rest - fitting
        index = self._steps.constant(f"{target.output}_channels", np.concatenate(channels).astype(np.int64))
        again, both = f"{target.output}_again", f"{target.output}_repeated"
        before = [
            helper.make_node("Gather", [data, index], [again], again, axis=axis),
            helper.make_node("Concat", [data, again], [both], both, axis=axis),
        ]
        return both, np.concatenate(parts, axis=1).astype(np.int8), before

    def _is_plain(self, node: NodeProto, options: dict[str, Any]) -> bool:
        """True if a product has no factors and its data is not transposed."""
        ones = all(name not in options or options[name].f == 1.0 for name in ("alpha", "beta"))
        return ones and not ("transA" in options and options["transA"].i)

    def _bias(self, node: NodeProto, sums_scale: np.ndarray, rounded: bool) -> np.ndarray | None:
        """Return the bias in units of the sums: zeros if there is none, None if it is computed. A bias in floats or in
        other units is rounded to these units, as ONNX Runtime does; unless ``rounded``, it is returned as floats.
        """
        if len(node.input) < 3 or not node.input[2]:
            return np.zeros(sums_scale.shape, np.int64)
        held = self._tensors.dequantised(node.input[2])
        values = self._tensors.constants.get(node.input[2] if held is None else held.source)
        if values is None or values.size != sums_scale.size or (held is not None and held.zero.any()):
            return None
        if held is not None and values.dtype == np.int32:
            if rounded and np.allclose(held.scale.reshape(-1), sums_scale, rtol=1e-5, atol=0.0):
                return values.reshape(-1).astype(np.int64)
            values = values.reshape(-1).astype(np.float32) * held.scale.reshape(-1)
        elif held is not None or values.dtype != np.float32:
            return None
        if not rounded:
            return values.reshape(-1)
        steps = np.rint((values.reshape(-1) / sums_scale).astype(np.float32))
        return steps.astype(np.int64) if np.isfinite(steps).all() and np.abs(steps).max() < _INT32.max else None

    def _addition(
        self, node: NodeProto, quantised: NodeProto, scale: np.float32, zero: int, bounds: tuple[int, int]
    ) -> None:
        """Add an addition to the layer that computes one of the summands, if nothing else reads that; of two layers, to
        the later one.
        """
        summands = [self._tensors.data(name) for name in node.input]
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
        result = Quantisation(scale, zero, *bounds, _offset(quantised))
        factors = addition_factors(quantisation_of(left), quantisation_of(right), result)
        offset = int(factors[-1])
        first, second, fixed = map(float, factors[:3])
        ratios = (first, second) if own is left else (second, first)
        addition = QuantisedAddition(
            before.low, before.high, before.zero, ratios[0], ratios[1], fixed, offset, own_last=own is left
        )
        layer.requantisation = replace(before, low=bounds[0], high=bounds[1], zero=offset, addition=addition)
        layer.residual, layer.output = other.source, quantised.output[0]
        self._layers[quantised.output[0]] = layer

    def _may_add(self, node: NodeProto, own: TensorOfBytes, other: TensorOfBytes) -> bool:
        layer, tensors = self._layers.get(own.source), self._tensors
        if layer is None or layer.residual or layer.activation or own.source in tensors.results:
            return False
        dequantised = tensors.readers[own.source]
        readers = [reader for each in dequantised for name in each.output for reader in tensors.readers[name]]
        if any(each.op_type != "DequantizeLinear" for each in dequantised) or readers != [node]:
            return False
        if any(name in tensors.results for each in dequantised for name in each.output):
            return False
        shape = self._shapes.get(own.source)
        return shape is not None and shape == self._shapes.get(other.source)

    def _move(self, target: Target) -> bool:
        """Match a move of values, done on the bytes, followed by a table if the quantisation changes; True
        if matched.
        """
        node = self._tensors.made_by.get(target.value)
        if node is None or not is_move(node) or len(node.output) > 1:
            return False
        source = self._tensors.data(node.input[0])
        if source is None:
            return False
        made = type(node).FromString(node.SerializeToString())
        same = source.same_as(target.quantisation.scale, target.quantisation.zero) and target.quantisation.is_whole
        name = target.output if same else f"{target.output}_moved"
        made.input[:], made.output[:] = [source.source, *node.input[1:]], [name]
        self._steps.nodes[target.output] = [made]
        if not same:
            self._steps.nodes[target.output] += self._steps.rescaling(target.output, name, source, target.quantisation)
        return True

    def _padded(self, target: Target) -> bool:
        """Match a pad, done on bytes of the scale of ``target``; True if matched."""
        node = self._tensors.made_by.get(target.value)
        source = None if node is None else self._tensors.data(node.input[0])
        padding = None if node is None else padding_of(self._tensors, node)
        if node is None or source is None or padding is None:
            return False
        made, nodes = target.quantisation, self._steps.nodes
        name = self._steps.rescaled(f"{target.output}_inside", source, made)
        inside = nodes.pop(name, []) if name != source.source else []
        value = quantise_values(np.float32(padding.value or 0.0).reshape(1), made)
        pad = type(node).FromString(node.SerializeToString())
        given = [name, node.input[1], "", *node.input[3:]]
        if padding.value is not None:
            given[2] = self._steps.constant(f"{target.output}_around", value.reshape(()))
        pad.input[:], pad.output[:] = given, [target.output]
        nodes[target.output] = [*inside, pad]
        widths = padding.of_image() if len(self._shapes.get(target.value, ())) == 4 else None
        if padding.value is not None and widths is not None and int(value[0]) == made.zero and not inside:
            self._zero_padded[target.output] = name, widths
        return True

    def apply(self) -> None:
        """Rewrite the graph; nodes that are not read any more are dropped."""
        graph = self._tensors.graph
        nodes: list[NodeProto] = []
        for node in graph.node:
            name = node.output[0] if node.output else ""
            if node.op_type == "QuantizeLinear" and name in self._layers:
                nodes += [*self._layers[name].before, self._node(self._layers[name])]
            elif name in self._steps.nodes:
                nodes += self._steps.nodes[name]
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
        if layer.slopes is not None:
            names.append(self._steps.constant(f"{layer.output}_slopes", layer.slopes))
        residual = [layer.residual] if layer.residual else []
        made = helper.make_node(layer.operator, [layer.data, *names, *residual], [layer.output], layer.name)
        made.attribute.extend(layer.attributes)
        if layer.activation is not None:
            made.attribute.append(helper.make_attribute("activation", layer.activation.name))
            made.attribute.append(helper.make_attribute("slope", layer.activation.slope))
        return made


def _offset(node: NodeProto) -> int:
    """Return the offset of the output of a QuantizeLinear with several inputs. ONNX Runtime's signed byte operators add
    signed bytes; around a float operator its optimiser removes the signs first.
    """
    return offset_of(node) if node.name.endswith(OF_OPERATOR) else 0


def _has_pads(node: NodeProto) -> bool:
    """True if ``node`` is a convolution with explicit padding in its attributes."""
    automatic = next((each.s for each in node.attribute if each.name == "auto_pad"), b"NOTSET")
    return node.op_type == "Conv" and automatic in (b"NOTSET", b"")


def _with_more_pads(attributes: Sequence[Any], around: Sequence[int]) -> list[Any]:
    """Return the attributes of a convolution of images with ``around`` (top, left, bottom, right) added to
    its padding.
    """
    from onnx import helper

    own = next((list(each.ints) for each in attributes if each.name == "pads"), [0, 0, 0, 0])
    added = [first + second for first, second in zip(own, around, strict=True)]
    return [*(each for each in attributes if each.name != "pads"), helper.make_attribute("pads", added)]


def _read(nodes: list[NodeProto], results: Iterable[str]) -> list[NodeProto]:
    """Return the nodes without those that nothing reads."""
    wanted, kept = set(results), []
    for node in reversed(nodes):
        nested = [each for attribute in node.attribute for each in (attribute.g, *attribute.graphs)]
        if any(name in wanted for name in node.output):
            wanted.update(node.input)
            wanted.update(name for graph in nested for each in graph.node for name in each.input)
            kept.append(node)
    return kept[::-1]
