"""Models that are refused before anything is evaluated or tuned: too large, contradictory, of non-numeric types, with
broken weights, or with unsupported operators; these are all reported at once, with advice to cut out the part of the
model before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.base.errors import ModelError, UnsupportedOperatorError
from fusion.relax.onnx.model_file import all_nodes, nested_nodes, packed_bits

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


RANDOM_OPERATORS = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
STANDARD_DOMAINS = ("", "ai.onnx")
# Operators whose result shapes depend on values.
SHAPED_BY_VALUES = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
_RUNTIMES_OWN = "com.microsoft"
_QUANTISED = ("QLinear", "QGemm", "QAttention", "ConvInteger", "DynamicQuantize", "MatMulNBits", "MatMulInteger")
# Layers, at least one of which makes a part worth tuning.
_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_MOST_NAMED = 6


def may_simplify(node: NodeProto) -> bool:
    """True if a library may evaluate the node: not for operators of other domains, nor for random numbers."""
    return node.domain in STANDARD_DOMAINS and node.op_type not in RANDOM_OPERATORS


def raise_unsupported(file: Path, graph: GraphProto, original: GraphProto) -> None:
    """Raise ``UnsupportedOperatorError`` that lists every operator without a converter once, with its nodes, and
    explains how to cut the part before them out of ``original``, the graph of ``file``.
    """
    from fusion.relax.onnx.frontend import supported_operators

    supported = supported_operators()

    def is_unsupported(node: NodeProto) -> bool:
        return not may_simplify(node) or node.op_type not in supported

    found: dict[str, list[str]] = {}
    for node in filter(is_unsupported, all_nodes(graph)):
        operator = f"{node.domain}.{node.op_type}" if node.domain not in STANDARD_DOMAINS else node.op_type
        found.setdefault(operator, []).append(node.name)
    if found:
        listed = "; ".join(f"{operator} ({_some(nodes)})" for operator, nodes in sorted(found.items()))
        way = part_before(file, graph, original, is_unsupported)
        raise UnsupportedOperatorError(f"{file}: unsupported operators: {listed}{_origin(found)}{way}")


def _origin(operators: Collection[str]) -> str:
    """Return advice on the source of operators that exporters do not write, if all are such: another file should be
    tuned.
    """
    names = [name.removeprefix(f"{_RUNTIMES_OWN}.") for name in operators]
    if all(name.startswith(_QUANTISED) for name in names):
        return (
            "; no kernel computes what is quantised so: tune the model from before it was quantised, or one of QDQ form"
        )
    if all(name.startswith(f"{_RUNTIMES_OWN}.") for name in operators):
        return "; these are ONNX Runtime's own: tune the model from before its optimiser rewrote it"
    return ""


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def part_before(file: Path, graph: GraphProto, original: GraphProto, ends: Callable[[NodeProto], bool]) -> str:
    """Return advice (``; ...``) to cut out of ``file`` the part before the nodes for which ``ends`` is true; empty if
    that part has no layer, or its results have no names in ``original``.
    """
    if not any(map(ends, all_nodes(graph))):
        return ""
    inputs, outputs = _interface_before(graph, ends)
    known = {name for node in original.node for name in node.output}
    if not outputs or not known.issuperset(outputs) or len(outputs) > _MOST_NAMED:
        return ""
    cut = f"onnx.utils.extract_model({str(file)!r}, 'part.onnx', {inputs}, {outputs})"
    return f"; what comes before can be tuned by itself, cut out in Python with {cut}"


def require_known_shapes(file: Path, graph: GraphProto, original: GraphProto) -> None:
    """Raise ``ModelError`` if shapes depend on values; it names the nodes, and explains how to cut out the part before
    them.
    """
    nodes = [f"{node.op_type} ({node.name})" for node in filter(_is_shaped_by_values, all_nodes(graph))]
    if nodes:
        way = part_before(file, graph, original, _is_shaped_by_values)
        raise ModelError(
            f"{file}: how much {_some(nodes)} finds depends on the data; only static shapes are supported{way}"
        )


def _is_shaped_by_values(node: NodeProto) -> bool:
    return node.op_type in SHAPED_BY_VALUES


def _interface_before(graph: GraphProto, ends: Callable[[NodeProto], bool]) -> tuple[list[str], list[str]]:
    """Return inputs and outputs of the part that is computed before the nodes for which ``ends`` is true; empty without
    a layer.

    Outputs are the tensors of the part that those nodes, and all nodes after them, read, and the outputs of ``graph``
    in it.
    """
    weights = {tensor.name for tensor in graph.initializer}
    # Graph inputs that each tensor before those nodes is computed from.
    sources = {value.name: {value.name} for value in graph.input if value.name not in weights}
    computed: set[str] = set()
    wanted: dict[str, None] = {}
    has_layer = False
    for node in graph.node:
        nodes = [node, *nested_nodes(node)]
        inside = {name for each in nodes[1:] for name in each.output}
        read = [name for each in nodes for name in each.input if name and name not in inside]
        if any(map(ends, nodes)) or any(name not in sources and name not in weights for name in read):
            wanted.update((name, None) for name in read if name in computed)
            continue
        origins = {origin for name in read for origin in sources.get(name, ())}
        sources.update((name, origins) for name in node.output)
        computed.update(name for name in node.output if origins)
        has_layer = has_layer or any(each.op_type in _LAYERS for each in nodes)
    wanted.update((value.name, None) for value in graph.output if value.name in computed)
    used = {origin for name in wanted for origin in sources[name]}
    return ([value.name for value in graph.input if value.name in used], list(wanted)) if has_layer else ([], [])
