"""Change of the batch of a static model: the leading dimension of its inputs, and every shape inside that
contains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from costmodel.base.errors import InputError

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

# Index of the operand that holds the result shape, by operator.
_SHAPE_OPERAND = {"Reshape": 1, "Resize": 3, "Expand": 1}


def rebatch(file: Path, model: ModelProto, batch: int) -> ModelProto:
    """Return a copy of ``model``, whose inputs are static, that takes ``batch`` samples.

    Constant shapes that begin with the batch, or a multiple of it, are changed to the new one. ``InputError`` in one
    line if the inputs have no common leading dimension, or the outputs would not grow with it.
    """
    from onnx import ModelProto

    copy = ModelProto()
    copy.CopyFrom(model)
    before = _leading(file, copy.graph)
    if before == batch:
        return copy
    expected = [_output_shape(file, value, before, batch) for value in _inferred(file, copy).graph.output]
    weights = {tensor.name for tensor in copy.graph.initializer}
    for value in copy.graph.input:
        if value.name not in weights and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_value = batch
    del copy.graph.value_info[:]
    for value in copy.graph.output:
        value.type.tensor_type.ClearField("shape")
    _rewrite_shapes(file, copy.graph, before, batch)
    for value, wanted in zip(_inferred(file, copy).graph.output, expected, strict=True):
        found = tuple(int(size.dim_value) for size in value.type.tensor_type.shape.dim)
        if found != wanted:
            raise InputError(
                f"{file}: --batch {batch}: output {value.name!r} would be {found}, not {wanted}: the model fixes its "
                "batch inside; export it with an open batch"
            )
    return copy


def _leading(file: Path, graph: GraphProto) -> int:
    weights = {tensor.name for tensor in graph.initializer}
    sizes = {
        value.name: int(value.type.tensor_type.shape.dim[0].dim_value)
        for value in graph.input
        if value.name not in weights and value.type.tensor_type.shape.dim
    }
    if len(set(sizes.values())) != 1:
        listed = ", ".join(f"{name!r} {size}" for name, size in sizes.items()) or "none"
        raise InputError(
            f"{file}: --batch: the inputs have no common leading dimension ({listed}); name shapes instead"
        )
    return next(iter(sizes.values()))


def _inferred(file: Path, model: ModelProto) -> ModelProto:
    import onnx

    from fusion.model.library_messages import sentence

    try:
        return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except Exception as error:  # it raises plain C++ errors
        raise InputError(
            f"{file}: --batch: the shapes inside do not fit it: {sentence(error)}; export the model with an open batch"
        ) from error


def _output_shape(file: Path, value: ValueInfoProto, before: int, batch: int) -> tuple[int, ...]:
    sizes = [int(size.dim_value) for size in value.type.tensor_type.shape.dim]
    if not sizes or sizes[0] % before:
        raise InputError(
            f"{file}: --batch {batch}: output {value.name!r} of shape {tuple(sizes)} does not lead with the samples: "
            "what it is for another batch cannot be told; export the model for that batch"
        )
    return (sizes[0] * batch // before, *sizes[1:])


def _rewrite_shapes(file: Path, graph: GraphProto, before: int, batch: int) -> None:
    from onnx import numpy_helper

    tensors: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
    made: Mapping[str, NodeProto] = {name: node for node in graph.node for name in node.output}
    for node in list(graph.node):
        operand = _SHAPE_OPERAND.get(node.op_type)
        if operand is None or len(node.input) <= operand or not node.input[operand]:
            continue
        name = node.input[operand]
        tensor = tensors.get(name)
        if tensor is None and name in made and made[name].op_type == "Constant":
            tensor = next((each.t for each in made[name].attribute if each.name == "value"), None)
        if tensor is None:
            continue  # computed from shapes that change with the batch without help
        sizes = numpy_helper.to_array(tensor).copy()
        if not sizes.size or sizes[0] < 1 or sizes[0] * batch % before:
            continue
        if node.op_type == "Expand" and sizes[0] == 1:
            continue
        if node.op_type == "Reshape" and -1 in sizes.tolist() and not _is_batch(sizes, before):
            continue
        sizes[0] = sizes[0] * batch // before
        # The constant may be shared with operators that must keep the old shape.
        own = f"{name}_batch_{len(graph.initializer)}"
        graph.initializer.append(numpy_helper.from_array(sizes, own))
        node.input[operand] = own


def _is_batch(sizes: np.ndarray, before: int) -> bool:
    """True if the first size is the batch itself; for shapes with a free size elsewhere a multiple is not enough."""
    return int(sizes[0]) == before
