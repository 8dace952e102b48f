"""Reader of untrusted ONNX files: every fault becomes one :class:`ModelError` that names the file.

External data is read only from regular files inside the model's own folder, because a model file is untrusted input: a
location that is absolute, leaves the folder or passes through a symbolic link is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.errors import ModelError, UnsupportedOperatorError
from costmodel.base.input_files import read_bytes
from fusion.model.library_messages import sentence

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

# Opset 7 introduced today's broadcasting; ONNX Runtime, our reference, guarantees nothing below it.
OLDEST_OPSET = 7
_JUDGED_LATER = ("No Op registered", "No opset import for domain")


def load_model(path: str | os.PathLike[str]) -> ModelProto:
    """Return the model with all its weights in memory, structurally valid for the ONNX checker.

    ``ModelError``: missing or unreadable file, not ONNX, truncated, weights missing, outside the folder or of the wrong
    size. ``UnsupportedOperatorError``: opset older than 7 or newer than the installed ``onnx`` package.
    """
    file = Path(path)
    model = _parse(file)
    sort_nodes(model.graph)
    check_opset(file, model)
    _check_interface(file, model.graph)
    tensors = list(all_tensors(model.graph))
    for tensor in tensors:
        _check_external_data(file, tensor)
    _load_external_data(file, model)
    for tensor in tensors:
        _check_size(file, tensor)
    _check_structure(file, model)
    return model


def require_loaded(file: Path) -> None:
    """Raise ``ModelError`` if ONNX Runtime, which checks the outputs of a build, cannot load the model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own and Python's exception types
        reason = sentence(str(error))
        raise ModelError(
            f"{file}: ONNX Runtime, which checks the outputs, does not load the model: {reason}; export it again"
        ) from error


def check_opset(file: Path, model: ModelProto) -> None:
    """Raise an error for opsets outside the supported range, and for models without one."""
    import onnx

    opset = opset_of(model)
    newest = onnx.defs.onnx_opset_version()
    if opset == 0:
        raise ModelError(f"{file}: the model names no opset; it is damaged; export it again")
    if not OLDEST_OPSET <= opset <= newest:
        raise UnsupportedOperatorError(
            f"{file}: opset {opset} is not supported (supported: {OLDEST_OPSET} to {newest}); "
            "export the model again with opset 17"
        )


def opset_of(model: ModelProto) -> int:
    """Return the version of the standard operator set; 0 if the model states none."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Yield the nodes of the graph and its sub-graphs."""
    for node in graph.node:
        yield node
        yield from nested_nodes(node)


def nested_nodes(node: NodeProto) -> Iterator[NodeProto]:
    """Yield the nodes of the sub-graphs of ``node``."""
    for attribute in node.attribute:
        for subgraph in (attribute.g, *attribute.graphs):
            yield from all_nodes(subgraph)


def all_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Yield the constant tensors of the graph and its sub-graphs: initializers and attributes."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for subgraph in (attribute.g, *attribute.graphs):
                yield from all_tensors(subgraph)


def sort_nodes(graph: GraphProto) -> None:
    """Sort nodes after those whose outputs they read, otherwise in the order of the file; unchanged if there is a
    cycle. ONNX requires that order, but tools that add casts to a model append them, and runtimes accept it.
    """
    known = {"", *(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer)}
    known |= {sparse.values.name for sparse in graph.sparse_initializer}
    made = {name for node in graph.node for name in node.output}
    waiting, ordered = list(graph.node), []
    while waiting:
        ready = []
        for node in waiting:
            if all(name in known or name not in made for name in _reads(node)):
                known.update(node.output)
                ready.append(node)
        if not ready:
            return
        ordered += ready
        taken = set(map(id, ready))
        waiting = [node for node in waiting if id(node) not in taken]
    if any(first is not second for first, second in zip(ordered, graph.node, strict=True)):
        copies = [type(node).FromString(node.SerializeToString()) for node in ordered]
        del graph.node[:]
        graph.node.extend(copies)


def _reads(node: NodeProto) -> Iterator[str]:
    """Yield the inputs of ``node`` and of the nodes in its sub-graphs."""
    yield from node.input
    for attribute in node.attribute:
        for subgraph in (attribute.g, *attribute.graphs):
            for inner in subgraph.node:
                yield from _reads(inner)


def _parse(file: Path) -> ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        data = read_bytes(file, "model")
    except FileNotFoundError:
        raise ModelError(f"{file}: no such file; check the path") from None
    except IsADirectoryError:
        raise ModelError(f"{file}: is a directory, expected an ONNX file") from None
    except OSError as error:
        raise ModelError(
            f"{file}: cannot be read: {error.strerror or error}; check its path and permissions"
        ) from error
    if not data:
        raise ModelError(f"{file}: the file is empty, expected an ONNX model")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise ModelError(f"{file}: not an ONNX model, or a truncated one; export or download it again") from None
    if not model.ir_version or not (model.graph.node or model.graph.output):
        raise ModelError(
            f"{file}: not an ONNX model, or a truncated one (it holds no graph); export or download it again"
        )
    return model


def _check_interface(file: Path, graph: GraphProto) -> None:
    """Check that the types of inputs exist, and that weights are dense."""
    from onnx import TensorProto

    for value in graph.input:
        kind = value.type.tensor_type.elem_type
        known = kind in TensorProto.DataType.values() and kind != TensorProto.UNDEFINED
        if value.type.HasField("tensor_type") and not known:
            raise ModelError(f"{file}: input {value.name!r} has the unknown type {kind}; export the model again")
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise ModelError(f"{file}: weights {name!r} are stored sparse, which is not supported; export them dense")


def _check_external_data(file: Path, tensor: TensorProto) -> None:
    """Check that the location is a regular file in the model's folder, long enough for the tensor."""
    from onnx import TensorProto

    if tensor.data_location != TensorProto.EXTERNAL:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    where = f"{file}: weights {tensor.name!r}"
    data = _resolve(file, location, where)
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", tensor_bytes(tensor)))
        available = data.stat().st_size
    except ValueError:
        raise ModelError(f"{where}: malformed external data entry {entries}; export the model again") from None
    except FileNotFoundError:
        raise ModelError(
            f"{where}: external data file {location!r} is missing from the model's folder; put it there"
        ) from None
    except OSError as error:
        raise ModelError(
            f"{where}: external data file {location!r} cannot be read: {error.strerror}; check its path and permissions"
        ) from error
    if not data.is_file():
        raise ModelError(
            f"{where}: external data {location!r} is not a regular file; put the file itself into the model's folder"
        )
    if offset < 0 or length != tensor_bytes(tensor) or offset + length > available:
        raise ModelError(
            f"{where}: external data file {location!r} does not hold the {tensor_bytes(tensor)} bytes of the tensor "
            f"(offset {offset}, length {length}, file size {available}); it is truncated or belongs to another model; "
            "put the right one there"
        )


def _resolve(file: Path, location: str, where: str) -> Path:
    """Return the path of an external data file; ``ModelError`` if it is outside the model's folder."""
    refused = f"{where}: external data location {location!r} "
    relative = Path(location)
    if not location or "\0" in location:
        raise ModelError(refused + "is not a file name; export the model again")
    if relative.is_absolute() or relative.drive or ".." in relative.parts or "\\" in location:
        raise ModelError(refused + "points outside the model's folder: refused; put the file into that folder")
    folder = file.parent
    data = folder / relative
    if any((folder / Path(*relative.parts[: depth + 1])).is_symlink() for depth in range(len(relative.parts))):
        raise ModelError(refused + "is a symbolic link: refused; put the file itself into the model's folder")
    return data


def _load_external_data(file: Path, model: ModelProto) -> None:
    import onnx

    try:
        onnx.load_external_data_for_model(model, str(file.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise ModelError(
            f"{file}: external data cannot be loaded: {sentence(error)}; export the model again"
        ) from error


def tensor_bytes(tensor: TensorProto) -> int:
    """Return the bytes of the tensor in ONNX's dense encoding; sub-byte elements are packed."""
    import onnx

    count = 1
    for size in tensor.dims:
        count *= size
    bits = packed_bits(tensor.data_type)
    if bits:
        return -(-count * bits // 8)
    return count * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def packed_bits(data_type: int) -> int:
    """Return the bits per element of sub-byte types, 0 for all others."""
    from onnx import TensorProto

    name = TensorProto.DataType.Name(data_type)
    return 4 if "INT4" in name or "FLOAT4" in name else 2 if "INT2" in name else 0


def _check_size(file: Path, tensor: TensorProto) -> None:
    """Check that the data fills the shape: otherwise it would be read as garbage, or crash deep inside a library."""
    from onnx import TensorProto, numpy_helper

    where = f"{file}: weights {tensor.name!r}"
    if tensor.data_type not in TensorProto.DataType.values() or tensor.data_type == TensorProto.UNDEFINED:
        raise ModelError(f"{where} have the unknown type {tensor.data_type}; the model is damaged; export it again")
    if any(size < 0 for size in tensor.dims):
        raise ModelError(
            f"{where} have the impossible shape {tuple(tensor.dims)}; the model is damaged; export it again"
        )
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != tensor_bytes(tensor):
            raise ModelError(
                f"{where}: {len(tensor.raw_data)} bytes do not fill shape {tuple(tensor.dims)} "
                f"({tensor_bytes(tensor)} bytes); the model is damaged; export it again"
            )
        return
    try:
        numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"{where} do not fill shape {tuple(tensor.dims)}: {sentence(error)}; export the model again"
        ) from error


def _check_structure(file: Path, model: ModelProto) -> None:
    """Run the ONNX checker, ignoring operators that it does not know: those are reported together later."""
    import onnx

    with _open_ranks_hidden(model):
        try:
            onnx.checker.check_model(model)
        except onnx.checker.ValidationError as error:
            if not any(text in str(error) for text in _JUDGED_LATER):
                raise ModelError(f"{file}: invalid ONNX model: {sentence(error)}; export it again") from error
        except ValueError:  # protobuf cannot serialise models of 2 GiB for the checker
            return


@contextmanager
def _open_ranks_hidden(model: ModelProto) -> Iterator[None]:
    """Hide inputs and outputs without a shape from the checker, which stops at them although runtimes accept them."""
    values = [*model.graph.input, *model.graph.output]
    tensors = [value.type.tensor_type for value in values if value.type.HasField("tensor_type")]
    shapeless = [tensor for tensor in tensors if not tensor.HasField("shape")]
    for tensor in shapeless:
        tensor.shape.SetInParent()
    try:
        yield
    finally:
        for tensor in shapeless:
            tensor.ClearField("shape")
