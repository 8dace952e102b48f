"""Checks that refuse models before anything is evaluated or tuned: too large, contradictory, non-numeric types, broken
weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.base.errors import ModelError
from fusion.relax.onnx.onnx_file import packed_bits

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

# 1 GiB in FP32: a copy in each layout, the reference in FP64 and the buffers of every candidate must fit too.
MOST_ELEMENTS = 2**28
# Every height of a tile of rows up to the height of the image is a candidate.
LONGEST_SIDE = 2**16
AUTO_PADS = ("", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_WINDOWED = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"})
# Operators, and the index of the first input that is a weight if constant.
_WEIGHTS_FROM = {"Conv": 1, "ConvTranspose": 1, "Gemm": 0, "MatMul": 0, "BatchNormalization": 1}


def check_limits(file: Path, model: ModelProto) -> None:
    """Raise ``ModelError`` that names the node or tensor. Input shapes must be static; nothing is evaluated."""
    for value in model.graph.input:
        _check_kind(file, value)
    constants = dict(_constants(model.graph))
    for name, tensor in constants.items():
        _check_type(file, name, tensor)
    for node in model.graph.node:
        if node.op_type in _WINDOWED:
            _check_window(file, node, constants)
    _check_sizes(file, model)
    _check_values(file, model.graph, constants)


def _check_kind(file: Path, value: ValueInfoProto) -> None:
    from onnx import TensorProto

    kind = value.type.WhichOneof("value")
    if kind != "tensor_type" or value.type.tensor_type.elem_type == TensorProto.STRING:
        held = "strings" if kind == "tensor_type" else f"a {(kind or 'value').removesuffix('_type')}"
        raise ModelError(f"{file}: input {value.name!r} holds {held}; only tensors of numbers are supported")


def _check_type(file: Path, name: str, tensor: TensorProto) -> None:
    """Refuse types with several values per byte, which TVM has no tensors for."""
    from onnx import TensorProto

    bits = packed_bits(tensor.data_type)
    if bits:
        kind = TensorProto.DataType.Name(tensor.data_type)
        raise ModelError(
            f"{file}: tensor {name!r} is of {kind}, values of {bits} bits, which no kernel reads; "
            "quantise the model to 8 bits"
        )


def _constants(graph: GraphProto) -> Iterator[tuple[str, TensorProto]]:
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                yield node.output[0], attribute.t


def _check_window(file: Path, node: NodeProto, constants: dict[str, TensorProto]) -> None:
    from onnx import helper

    where = f"{file}: {node.op_type} {node.name!r}"
    attributes: dict[str, Any] = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    auto_pad = attributes.get("auto_pad", b"").decode(errors="replace")
    if auto_pad not in AUTO_PADS:
        raise ModelError(f"{where}: auto_pad is {auto_pad!r}; there are {', '.join(AUTO_PADS[1:])}")
    weight = constants.get(node.input[1]) if len(node.input) > 1 else None
    kernel = attributes.get("kernel_shape")
    if weight is not None:
        held = list(weight.dims[2:])
        if kernel is not None and list(kernel) != held:
            raise ModelError(
                f"{where}: kernel_shape is {_by(kernel)}, but its weights {weight.name!r} hold kernels of {_by(held)}; "
                "the model is damaged; export it again"
            )
        kernel = held
    for name, sizes in (
        ("kernel", kernel),
        ("strides", attributes.get("strides")),
        ("dilations", attributes.get("dilations")),
    ):
        if sizes is not None and any(size < 1 for size in sizes):
            raise ModelError(f"{where}: {name} of {_by(sizes)}; every size must be at least 1")


def _check_sizes(file: Path, model: ModelProto) -> None:
    """Check the shapes that ONNX infers; shapes that depend on data, or cannot be inferred, are left to the
    importer.
    """
    import onnx

    _check_known(file, model.graph, {})
    try:
        inferred = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # it raises any error on contradictory graphs, and on files of 2 GiB
        return
    makers = {name: f"{node.op_type} {node.name!r}" for node in inferred.node for name in node.output}
    _check_known(file, inferred, makers)


def _check_known(file: Path, graph: GraphProto, makers: dict[str, str]) -> None:
    for value in (*graph.input, *graph.value_info, *graph.output):
        sizes = [int(size.dim_value) for size in value.type.tensor_type.shape.dim]
        if not sizes or not all(sizes):
            continue
        maker = makers.get(value.name)
        what = f"{file}: tensor {value.name!r}" + (f" of {maker}" if maker else "")
        if math.prod(sizes) > MOST_ELEMENTS:
            raise ModelError(
                f"{what} is {_by(sizes)}: {math.prod(sizes):,} elements; at most {MOST_ELEMENTS:,} (1 GiB in FP32) are "
                "taken, because several copies of it must fit into memory while kernels are tuned"
            )
        if len(sizes) == 4 and max(sizes[2:]) > LONGEST_SIDE:
            raise ModelError(
                f"{what} is {_by(sizes)}: images of at most {LONGEST_SIDE:,} rows or columns are taken, because every "
                "height of a tile up to the image's is a candidate"
            )


def _check_values(file: Path, graph: GraphProto, constants: dict[str, TensorProto]) -> None:
    """Refuse NaN and infinite weights: they make every output NaN or infinite, and every candidate of their kernel
    appear wrong.
    """
    from onnx import numpy_helper

    checked: set[str] = set()
    for node in graph.node:
        first = _WEIGHTS_FROM.get(node.op_type)
        for name in () if first is None else node.input[first:]:
            if name in checked or name not in constants:
                continue
            checked.add(name)
            values = numpy_helper.to_array(constants[name])
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                broken = int(np.sum(~np.isfinite(values)))
                raise ModelError(
                    f"{file}: weights {name!r} of {node.op_type} {node.name!r}: {broken} of {values.size} are NaN or "
                    "infinite; the model is damaged or its training diverged; export it from a good checkpoint"
                )


def _by(sizes: Any) -> str:
    return "x".join(map(str, sizes))
