"""Preparation of an ONNX model for conversion: static shapes, the requested batch, one opset range, FP32, constants
folded, operators checked.

A batch is the leading dimension of the inputs, and every shape inside that contains it.

Kernels compute in FP32: CPUs have vector instructions for it, and TVM's code for 16-bit numbers converts value by
value. So a 16-bit model is computed in FP32, as ONNX Runtime does on CPUs; its inputs and outputs keep their types.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.base.errors import InputError, ModelError, UnsupportedOperatorError
from fusion.model.library_messages import sentence
from fusion.relax.onnx.model_file import all_nodes, load_model, opset_of
from fusion.relax.onnx.quantised_graph import taken_apart
from fusion.relax.onnx.refusals import check_limits, may_simplify, raise_unsupported

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto


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


def change_types(model: ModelProto, sources: Collection[int], target: int) -> ModelProto:
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
    copy = change_types(model, half, TensorProto.FLOAT)
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


# Older operators have attributes where newer ones have inputs: the converters expect the newer form.
CONVERTED_OPSET = 17
OLDEST_DIRECT_OPSET = 13
# Fusions belong to Relax, and equal weights or nodes of a real model are usually equal on purpose.
SKIPPED_OPTIMIZATIONS = ["graph_fusion", "subexpression_elimination", "weight_tying"]
# Operators with optional outputs; for other operators the number of outputs decides what they compute.
_WITH_OPTIONAL_RESULTS = frozenset({"Dropout", "GRU", "LSTM", "LayerNormalization", "MaxPool", "RNN"})


def prepare(
    file: Path, model: ModelProto, shapes: Mapping[str, tuple[int, ...]] | None, batch: int | None = None
) -> ModelProto:
    """Return a simplified copy of ``model``: inputs static, functions inlined, opset >= 13, constant sub-graphs
    evaluated.

    ``InputError`` for shapes that do not fit the inputs, ``UnsupportedOperatorError`` with every operator that no
    converter covers, ``ModelError`` if a library cannot process the graph.
    """
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if not copy.graph.output:
        raise ModelError(f"{file}: the graph has no outputs; export it again")
    copy = inline_functions(file, copy)
    apply_shapes(file, copy, shapes or {}, batch)
    if batch is not None:
        copy = rebatch(file, copy, batch)
    copy = computed_in_single(copy)
    name_nodes(copy.graph)
    copy = taken_apart(copy)
    check_limits(file, copy)
    if any(not may_simplify(node) for node in all_nodes(copy.graph)):
        raise_unsupported(file, copy.graph, model.graph)
    drop_unread_results(copy.graph)
    copy = _modernise(file, copy)
    copy = _simplify(file, copy)
    name_nodes(copy.graph)
    raise_unsupported(file, copy.graph, model.graph)
    return copy


def static_model(file: Path, shapes: Mapping[str, tuple[int, ...]] | None, batch: int | None = None) -> ModelProto:
    """Return the model of the file with static inputs, for ``batch`` samples. Errors as in ``prepare``."""
    model = inline_functions(file, load_model(file))
    apply_shapes(file, model, shapes or {}, batch)
    return model if batch is None else rebatch(file, model, batch)


def inline_functions(file: Path, model: ModelProto) -> ModelProto:
    """Replace model-local functions by their bodies."""
    if not model.functions:
        return model
    import onnx.inliner

    try:
        return onnx.inliner.inline_local_functions(model)
    except Exception as error:  # the inliner raises plain C++ errors
        raise ModelError(
            f"{file}: local functions cannot be inlined: {sentence(error)}; export the model without them"
        ) from error


def real_inputs(graph: GraphProto) -> list[ValueInfoProto]:
    """Return the graph inputs that the user supplies: old files list weights among the inputs as well."""
    weights = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def dimensions(value: ValueInfoProto) -> tuple[int | str, ...] | None:
    """Return sizes, or names (``?`` if unnamed) of dynamic dimensions; None if even the rank is unknown."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(int(d.dim_value) if d.dim_value > 0 else d.dim_param or "?" for d in tensor.shape.dim)


def apply_shapes(
    file: Path, model: ModelProto, shapes: Mapping[str, tuple[int, ...]], batch: int | None = None
) -> None:
    """Write the user's shapes into the inputs, and ``batch`` into open leading dimensions; every input must be static
    then.
    """
    inputs = {value.name: value for value in real_inputs(model.graph)}
    for value in inputs.values():
        sizes = dimensions(value)
        if batch is not None and value.name not in shapes and sizes and not isinstance(sizes[0], int):
            value.type.tensor_type.shape.dim[0].dim_value = batch
    for name, shape in shapes.items():
        if name not in inputs:
            raise InputError(f"{file}: no input {name!r}; the inputs are {', '.join(inputs) or 'none'}")
        _check_shape(file, name, dimensions(inputs[name]), tuple(shape))
        _set_shape(inputs[name], tuple(shape))
    missing = [value for value in inputs.values() if not _is_static(dimensions(value))]
    if missing:
        described = ", ".join(f"{value.name!r} {_describe(dimensions(value))}" for value in missing)
        options = " ".join(f"--shape {value.name}={_suggestion(dimensions(value))}" for value in missing)
        raise InputError(f"{file}: dynamic shape of input {described}; pass for example {options}")
    if shapes:
        del model.graph.value_info[:]  # inferred from the old shapes
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")


def _check_shape(file: Path, name: str, declared: tuple[int | str, ...] | None, given: tuple[int, ...]) -> None:
    text = ",".join(map(str, given))
    if not all(isinstance(size, int) and size > 0 for size in given):
        raise InputError(f"{file}: shape {text} of input {name!r} must have positive sizes")
    if declared is None:
        return
    if len(declared) != len(given):
        raise InputError(
            f"{file}: shape {text} of input {name!r} has rank {len(given)}, the model has {_describe(declared)}; "
            "give as many sizes"
        )
    if any(isinstance(size, int) and size != new for size, new in zip(declared, given, strict=True)):
        raise InputError(
            f"{file}: shape {text} of input {name!r} contradicts the model's {_describe(declared)}"
            + _way_on(declared, given)
        )


def _way_on(declared: tuple[int | str, ...], given: tuple[int, ...]) -> str:
    """Return advice for the error: the option that rewrites the batch, if only the leading dimension differs."""
    alike = all(isinstance(old, str) or old == new for old, new in zip(declared[1:], given[1:], strict=True))
    return f"; --batch {given[0]} rewrites a model for another batch" if alike else "; give the sizes that it has"


def _set_shape(value: ValueInfoProto, shape: tuple[int, ...]) -> None:
    tensor = value.type.tensor_type
    tensor.ClearField("shape")
    tensor.shape.SetInParent()  # rank 0 has a shape too
    for size in shape:
        tensor.shape.dim.add().dim_value = size


def _is_static(sizes: tuple[int | str, ...] | None) -> bool:
    return sizes is not None and all(isinstance(size, int) for size in sizes)


def _describe(sizes: tuple[int | str, ...] | None) -> str:
    return "of unknown rank" if sizes is None else f"({', '.join(map(str, sizes))})"


def _suggestion(sizes: tuple[int | str, ...] | None) -> str:
    """Return example sizes: one image of 224 x 224 where the model leaves sizes open, channels last if the
    model is so.
    """
    if sizes is None or len(sizes) == 4:
        last = sizes is not None and sizes[3] in (1, 3, 4) and sizes[1] not in (1, 3, 4)
        usual: tuple[int, ...] = (1, 224, 224, 3) if last else (1, 3, 224, 224)
        return ",".join(str(s if isinstance(s, int) else u) for s, u in zip(sizes or ("?",) * 4, usual, strict=True))
    return ",".join(str(size if isinstance(size, int) else 1) for size in sizes)


def name_nodes(graph: GraphProto) -> None:
    """Give unnamed nodes the name of their first output, so that reports can name every node."""
    for node in graph.node:
        if not node.name:
            node.name = next((name for name in node.output if name), node.op_type)


def drop_unread_results(graph: GraphProto) -> None:
    """Remove optional outputs that nothing reads but exporters name: masks, indices, last states."""
    nodes = list(all_nodes(graph))
    read = {name for node in nodes for name in node.input} | {value.name for value in graph.output}
    read |= {value.name for node in nodes for each in node.attribute for value in each.g.output}
    for node in nodes:
        if node.op_type in _WITH_OPTIONAL_RESULTS:
            last = max((index for index, name in enumerate(node.output) if name in read), default=0)
            del node.output[last + 1 :]


def _modernise(file: Path, model: ModelProto) -> ModelProto:
    """Convert old opsets with onnx's version converter."""
    opset = opset_of(model)
    if opset >= OLDEST_DIRECT_OPSET:
        return model
    import onnx.version_converter

    # Since IR 4 weights need not be graph inputs; for an older version the converter does not find those that are not.
    model.ir_version = max(model.ir_version, 8)
    try:
        return onnx.version_converter.convert_version(model, CONVERTED_OPSET)
    except Exception as error:  # raises plain C++ errors
        raise UnsupportedOperatorError(
            f"{file}: opset {opset} cannot be converted to {CONVERTED_OPSET} ({sentence(error)}); "
            f"export the model again with opset {CONVERTED_OPSET}"
        ) from error


def _simplify(file: Path, model: ModelProto) -> ModelProto:
    """Evaluate constant sub-graphs and infer shapes with onnxslim; batch norms and pads are left to Relax."""
    import onnxslim

    inputs = [type(value).FromString(value.SerializeToString()) for value in real_inputs(model.graph)]
    try:
        with contextlib.redirect_stdout(io.StringIO()), _compared_quickly():
            simple = onnxslim.slim(model, skip_optimizations=SKIPPED_OPTIMIZATIONS)
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{file}: the graph cannot be simplified: {sentence(error)}; export the model again"
        ) from error
    del simple.graph.input[:]  # onnxslim removes inputs that nothing reads; they are part of the interface
    simple.graph.input.extend(inputs)
    return simple


@contextlib.contextmanager
def _compared_quickly() -> Iterator[None]:
    """Speed up onnxslim's test for convergence: it compares graphs in which all readers of a tensor are connected to
    each other, 12 s if 10,000 nodes read one input. Comparing nodes and shapes of the model is equivalent.
    """
    import onnxslim.utils

    before = onnxslim.utils.check_point
    onnxslim.utils.check_point = _state
    try:
        yield
    finally:
        onnxslim.utils.check_point = before


def _state(model: ModelProto) -> tuple[object, ...]:
    graph = model.graph
    nodes = [node.SerializeToString(deterministic=True) for node in graph.node]
    values = [*graph.value_info, *graph.input, *graph.output]
    types = {value.name: value.type.SerializeToString(deterministic=True) for value in values}
    return nodes, types, {tensor.name for tensor in graph.initializer}
