"""Moves QuantizeLinear and DequantizeLinear next to the layers whose data they round.

Files from quantisation-aware training have them only at the inputs of layers: pooling, reshaping and other moves of
values are between a layer and the rounding of its result, or between bytes and the layer that reads them. Rounding
commutes with a move, so that a pair of the two on the other side of a move changes no value, and weights are moved
before they are dequantised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fusion.relax.onnx.onnx_file import all_nodes
from fusion.relax.onnx.quantised_tensors import QuantisedTensors, is_move, padding_of

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


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
