"""Rewrites of quantised models that change no value.

Signs: an int8 tensor becomes a uint8 tensor with a zero point 128 higher. Zero points that a file omits become
explicit: they determine the dtype of the bytes.

Places: QuantizeLinear and DequantizeLinear are moved next to the layers whose data they round. Files from
quantisation-aware training have them only at the inputs of layers: pooling, reshaping and other moves of values are
between a layer and the rounding of its result, or between bytes and the layer that reads them. Rounding commutes with
a move, so that a pair of the two on the other side of a move changes no value, and weights are moved before they are
dequantised.

For comparisons all of them bring a model to the form that ONNX Runtime computes in integers wherever it can
(:func:`in_whole_numbers`). ONNX Runtime leaves these in floats: layers of signed bytes with several readers of their
data, layers with a move between DequantizeLinear and the data or weights, transposed convolutions, values that two
steps round, and means over pixels that are written as ReduceMean. The rounded result of such a layer sometimes
differs by one byte, and in a deep network the difference grows: quantised networks do not damp it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from fusion.relax.onnx.byte_steps import is_over_pixels
from fusion.relax.onnx.model_file import all_nodes, opset_of
from fusion.relax.onnx.quantised_graph import MOVES, SHIFTED, QuantisedTensors, is_move, padding_of
from fusion.relax.onnx.transposed_layers import split_transposed

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


_STEPS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def with_zero_points(model: ModelProto) -> ModelProto:
    """Return a copy of ``model`` in which every QuantizeLinear and DequantizeLinear of 8 or 16 bits with a constant
    scale has a zero point, of the dtype of its bytes; ``model`` itself if none is missing.

    The dtype for a QuantizeLinear is its ``output_dtype``, or ``uint8``; for a DequantizeLinear the dtype of its input,
    which may be signed.
    """
    from onnx import ModelProto, TensorProto, helper, numpy_helper, shape_inference

    if not any(map(_lacks, model.graph.node)):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    graph = shape_inference.infer_shapes(copy).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    types.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    scales = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensor = node.attribute[0].t
            types[node.output[0]], scales[node.output[0]] = tensor.data_type, tuple(tensor.dims)
    known = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16)
    for node in filter(_lacks, copy.graph.node):
        held = types.get((node.output if node.op_type == "QuantizeLinear" else node.input)[0])
        shape = scales.get(node.input[1])
        if held not in known or shape is None:
            continue
        name = f"{node.output[0]}_zero_point"
        zeros = np.zeros(shape, helper.tensor_dtype_to_np_dtype(held))
        copy.graph.initializer.append(numpy_helper.from_array(zeros, name))
        node.input[:] = [*node.input[:2], name]
    return copy


def _lacks(node: NodeProto) -> bool:
    return node.op_type in _STEPS and not (len(node.input) > 2 and node.input[2])


def remove_signs(model: ModelProto, resized: Collection[str] = ()) -> bool:
    """Convert int8 tensors that are quantised and read in ``model`` (in place); return True if it changed. Zero points
    must be present (:func:`with_zero_points`). ``resized``: outputs of Resize nodes that
    read bytes directly and truncate; the kernels that compute them truncate towards the original zero.
    """
    signs = _Signs(QuantisedTensors(model), resized)
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            signs.remove(node)
    return signs.found


class _Signs:
    def __init__(self, tensors: QuantisedTensors, resized: Collection[str]) -> None:
        self.found = False
        self._tensors = tensors
        self._resized = resized

    def remove(self, node: NodeProto) -> None:
        """Convert the tensors that hold the bytes of the QuantizeLinear ``node``."""
        for end in self._ends(node):
            self._shift(end)

    def _ends(self, node: NodeProto) -> list[NodeProto]:
        """Return the quantising and dequantising nodes of the tensors that hold the bytes of ``node``; empty if any
        other node reads or writes one of them, or they are unsigned.
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
                elif each.op_type in MOVES or is_move(each) or each.output[0] in self._resized:
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
        self.found = True
        name = f"{node.input[2]}{SHIFTED}"
        if name not in self._tensors.constants:
            shifted = (zero.astype(np.int16) + 128).astype(np.uint8)
            self._tensors.constants[name] = shifted
            self._tensors.graph.initializer.append(numpy_helper.from_array(shifted, name))
        node.input[2] = name
        for each in [each for each in node.attribute if each.name == "output_dtype"]:
            node.attribute.remove(each)  # the zero point determines the type


def bring_steps_to_layers(model: ModelProto) -> bool:
    """Insert pairs in ``model`` (in place) after moves of dequantised tensors that are read as floats, and before moves
    of floats that are quantised afterwards. Return True if ``model`` changed.
    """
    tensors, before = QuantisedTensors(model), len(model.graph.node)
    for name in _moves(tensors):
        _forward(tensors, tensors.made_by[name])
    for name in reversed(_moves(tensors)):
        _backward(tensors, tensors.made_by[name])
    return len(model.graph.node) > before


def share_equal_steps(model: ModelProto) -> bool:
    """Merge QuantizeLinear nodes of ``model`` (in place) that round one value in the same way. Some tools write one
    pair per reader; a layer is computed in integers only if one step reads it. Return True if ``model`` changed.
    """
    tensors = QuantisedTensors(model)
    kept: dict[tuple[object, ...], str] = {}
    renamed: dict[str, str] = {}
    branches = (graph for node in model.graph.node for each in node.attribute for graph in (each.g, *each.graphs))
    in_branches = {name for graph in branches for node in all_nodes(graph) for name in node.input}
    for node in model.graph.node:
        found = tensors.quantisation(node) if node.op_type == "QuantizeLinear" and len(node.input) > 2 else None
        if found is None or node.output[0] in tensors.results or node.output[0] in in_branches:
            continue
        options = tuple(sorted(each.SerializeToString() for each in node.attribute))
        key = (node.input[0], *((array.dtype.str, array.shape, array.tobytes()) for array in found), options)
        first = kept.setdefault(key, node.output[0])
        if first != node.output[0]:
            renamed[node.output[0]] = first
    if not renamed:
        return False
    nodes = [node for node in model.graph.node if not (node.output and node.output[0] in renamed)]
    for node in nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    nodes = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return True


def transpose_weights(model: ModelProto) -> bool:
    """Replace each Transpose of dequantised constants in ``model`` (in place) by a DequantizeLinear of transposed
    constants. Tools that round weights in the layout of training, (out, in), write such a Transpose before products.
    Return True if ``model`` changed.
    """
    from onnx import helper, numpy_helper

    tensors, found = QuantisedTensors(model), False
    for node in model.graph.node:
        held = tensors.dequantised(node.input[0]) if node.op_type == "Transpose" else None
        if held is None or held.source not in tensors.constants:
            continue
        values, found = tensors.constants[held.source], True
        order = next((list(each.ints) for each in node.attribute if each.name == "perm"), [*range(values.ndim)][::-1])
        name = f"{node.output[0]}_transposed"
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values.transpose(order)), name))
        del node.attribute[:]
        node.op_type, node.input[:] = held.node.op_type, [name, *held.node.input[1:]]
        node.attribute.extend(each for each in held.node.attribute if each.name != "axis")
        if held.scale.size > 1:
            node.attribute.append(helper.make_attribute("axis", order.index(held.axis % values.ndim)))
    return found


def _moves(tensors: QuantisedTensors) -> list[str]:
    """Return the outputs of moves, in order; by name, because inserting nodes replaces the node objects."""
    nodes = [node for node in tensors.graph.node if len(node.output) == 1]
    return [node.output[0] for node in nodes if is_move(node) or _pads_exactly(tensors, node)]


def _pads_exactly(tensors: QuantisedTensors, node: NodeProto) -> bool:
    """True for a pad with zeros, which every scale rounds to themselves."""
    padding = padding_of(tensors, node)
    return padding is not None and not padding.value


def _forward(tensors: QuantisedTensors, node: NodeProto) -> None:
    step, output = tensors.made_by.get(node.input[0]), node.output[0]
    if step is None or step.op_type != "DequantizeLinear" or not _is_of_all(tensors, step):
        return
    readers = tensors.readers[output]
    if output in tensors.results or not readers or any(each.op_type == "QuantizeLinear" for each in readers):
        return
    node.output[0] = f"{output}_before_bytes"
    _insert(tensors, node, node.output[0], output, step, after=True)


def _backward(tensors: QuantisedTensors, node: NodeProto) -> None:
    value, output = node.input[0], node.output[0]
    maker = tensors.made_by.get(value)
    if maker is None or maker.op_type == "DequantizeLinear" or not tensors.inner(value) or not tensors.inner(output):
        return
    (step,) = tensors.readers[output]
    if step.op_type != "QuantizeLinear" or not _is_of_all(tensors, step):
        return
    node.input[0] = f"{value}_through_bytes"
    _insert(tensors, node, value, node.input[0], step, after=False)


def _is_of_all(tensors: QuantisedTensors, step: NodeProto) -> bool:
    """True if ``step`` has one positive scale and zero point for the whole tensor, and the tensor is computed."""
    found = tensors.quantisation(step)
    return (
        found is not None
        and found[0].size == 1
        and found[0].reshape(-1)[0] > 0
        and len(step.input) > 2
        and step.input[0] not in tensors.constants
    )


def _insert(tensors: QuantisedTensors, node: NodeProto, value: str, result: str, like: NodeProto, after: bool) -> None:
    """Insert a pair next to ``node``: ``result`` is ``value`` quantised and dequantised with the parameters of
    ``like``.
    """
    from onnx import helper

    given, held = list(like.input[1:]), f"{result}_bytes"
    pair = [
        helper.make_node("QuantizeLinear", [value, *given], [held], f"{result}_quantised"),
        helper.make_node("DequantizeLinear", [held, *given], [result], f"{result}_dequantised"),
    ]
    nodes = tensors.graph.node
    place = next(index for index, each in enumerate(nodes) if each.output == node.output)
    for offset, made in enumerate(pair):
        nodes.insert(place + after + offset, made)
    tensors.index()


# First opset in which the axes of Squeeze are an input.
_AXES_AS_INPUT = 13


def in_whole_numbers(model: ModelProto) -> ModelProto | None:
    """Return an equivalent copy with unsigned bytes, one quantisation step next to each layer, transposed convolutions
    as phases, and GlobalAveragePool for means over pixels; None if ``model`` already has this form.
    """
    from onnx import ModelProto

    copy = ModelProto()
    copy.CopyFrom(with_zero_points(model))
    # All of them, in order, whatever the earlier ones changed.
    changes = [share_equal_steps(copy), transpose_weights(copy), bring_steps_to_layers(copy), split_transposed(copy)]
    changes += [remove_signs(copy), _pool_means(copy)]
    return copy if any(changes) else None


def _pool_means(model: ModelProto) -> bool:
    """Replace means over pixels in ``model`` (in place) by GlobalAveragePool; return True if it changed."""
    from onnx import helper, numpy_helper, shape_inference

    shapes = QuantisedTensors(shape_inference.infer_shapes(model)).shapes()
    tensors, found = QuantisedTensors(model), False
    for index, node in reversed(list(enumerate(model.graph.node))):
        if node.op_type != "ReduceMean" or tensors.data(node.input[0]) is None:
            continue
        if len(shapes.get(node.input[0], ())) != 4 or not is_over_pixels(tensors, node):
            continue
        kept = next((each.i for each in node.attribute if each.name == "keepdims"), 1)
        if not kept and opset_of(model) < _AXES_AS_INPUT:
            continue
        found, output = True, node.output[0]
        if not kept:
            axes = numpy_helper.from_array(np.array([2, 3], np.int64), f"{output}_axes")
            model.graph.initializer.append(axes)
            node.output[0] = f"{output}_pixel"
            squeezed = helper.make_node("Squeeze", [node.output[0], axes.name], [output], f"{output}_squeezed")
            model.graph.node.insert(index + 1, squeezed)
        node.op_type = "GlobalAveragePool"
        del node.input[1:], node.attribute[:]
    return found
