"""Preparation of an ONNX model for conversion: static shapes, one opset range, constants folded, operators checked."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.errors import InputError, ModelError, UnsupportedOperatorError
from fusion.model.library_messages import sentence
from fusion.relax.onnx.model_size_limits import check_limits
from fusion.relax.onnx.onnx_batch import rebatch
from fusion.relax.onnx.onnx_file import all_nodes, load_model, opset_of
from fusion.relax.onnx.onnx_precision import computed_in_single
from fusion.relax.onnx.onnx_qlinear import taken_apart
from fusion.relax.onnx.onnx_unsupported import may_simplify, raise_unsupported

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, ValueInfoProto

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
