"""Conversion of ONNX models to another floating-point precision.

Kernels compute in FP32: CPUs have vector instructions for it, and TVM's code for 16-bit numbers converts value by
value. So a 16-bit model is computed in FP32, as ONNX Runtime does on CPUs; its inputs and outputs keep their types.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto


def half_types() -> tuple[int, ...]:
    """Return ONNX's type numbers of the 16-bit floating-point types."""
    from onnx import TensorProto

    return (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def holds_half(graph: GraphProto) -> bool:
    """True if weights, inputs, constants or casts of ``graph`` or its sub-graphs have 16 bits."""
    half = half_types()
    types = [tensor.data_type for tensor in graph.initializer]
    types += [value.type.tensor_type.elem_type for value in graph.input]
    for node in graph.node:
        for attribute in node.attribute:
            types += [attribute.i] * (node.op_type == "Cast" and attribute.name == "to")
            types += [attribute.t.data_type] * attribute.HasField("t")
            if any(map(holds_half, (attribute.g, *attribute.graphs))):
                return True
    return any(each in half for each in types)


def widened(model: ModelProto, sources: Collection[int], target: int) -> ModelProto:
    """Return a copy with inputs, outputs, constants and casts of the types ``sources`` (ONNX's type numbers) changed to
    ``target``.
    """
    from onnx import ModelProto

    copy = ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]
    _widen_graph(copy.graph, sources, target)
    return copy


def computed_in_single(model: ModelProto) -> ModelProto:
    """Return a copy of ``model`` in FP32, between casts of inputs and outputs; ``model`` itself if nothing in it has 16
    bits.
    """
    from onnx import TensorProto, helper

    if not holds_half(model.graph):
        return model
    half = half_types()
    copy = widened(model, half, TensorProto.FLOAT)
    graph, names = copy.graph, {name for node in model.graph.node for name in (*node.input, *node.output)}
    weights = {tensor.name for tensor in graph.initializer}
    before: list[NodeProto] = []
    behind: list[NodeProto] = []
    renamed: dict[str, str] = {}
    for value, old in zip(graph.input, model.graph.input, strict=True):
        kind = old.type.tensor_type.elem_type
        if kind in half and value.name not in weights:
            renamed[value.name] = _new_name(value.name, names)
            before.append(helper.make_node("Cast", [value.name], [renamed[value.name]], to=TensorProto.FLOAT))
            value.type.tensor_type.elem_type = kind
    made = {name for node in graph.node for name in node.output} | weights
    for value, old in zip(graph.output, model.graph.output, strict=True):
        kind = old.type.tensor_type.elem_type
        if kind not in half:
            continue
        value.type.tensor_type.elem_type = kind
        if value.name in made and value.name not in renamed:
            renamed[value.name] = _new_name(value.name, names)
            behind.append(helper.make_node("Cast", [renamed[value.name]], [value.name], to=kind))
    _rename(graph, renamed)
    for tensor in graph.initializer:
        tensor.name = renamed.get(tensor.name, tensor.name)
    nodes = [*before, *graph.node, *behind]
    del graph.node[:]
    graph.node.extend(nodes)
    return copy


def _new_name(name: str, taken: set[str]) -> str:
    new = f"{name}_float32"
    while new in taken:
        new += "_"
    taken.add(new)
    return new


def _rename(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Rename tensors of nodes, including those in sub-graphs."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for subgraph in _subgraphs(node):
            _rename(subgraph, names)


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _widen_graph(graph: GraphProto, sources: Collection[int], target: int) -> None:
    from onnx import TensorProto

    for tensor in graph.initializer:
        _widen_tensor(tensor, sources, target)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in sources:
            value.type.tensor_type.elem_type = target
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i in sources:
                attribute.i = target
            _widen_attribute(attribute, node.op_type == "Constant", sources, target)
        for subgraph in _subgraphs(node):
            _widen_graph(subgraph, sources, target)
        if node.op_type == "ConstantOfShape" and not node.attribute and TensorProto.FLOAT in sources:
            _add_zero(node, target)


def _widen_attribute(attribute: AttributeProto, of_constant: bool, sources: Collection[int], target: int) -> None:
    from onnx import AttributeProto, TensorProto, helper, numpy_helper

    if attribute.type == AttributeProto.TENSOR:
        _widen_tensor(attribute.t, sources, target)
    if of_constant and attribute.name in ("value_float", "value_floats") and TensorProto.FLOAT in sources:
        values = np.asarray(helper.get_attribute_value(attribute), helper.tensor_dtype_to_np_dtype(target))
        attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(values)))


def _add_zero(node: NodeProto, target: int) -> None:
    """Add an explicit zero of type ``target``: the default of ConstantOfShape is a zero of single precision."""
    from onnx import helper, numpy_helper

    zero = np.zeros(1, helper.tensor_dtype_to_np_dtype(target))
    node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(zero)))


def _widen_tensor(tensor: Any, sources: Collection[int], target: int) -> None:
    from onnx import helper, numpy_helper

    if tensor.data_type in sources:
        array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(target))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
