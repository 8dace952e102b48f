"""Explicit zero points for quantised models that omit them: they determine the dtype of the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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
