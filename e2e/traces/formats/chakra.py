"""Reader of MLCommons Chakra execution traces (``.et``, protobuf) as :class:`OperatorTrace`.

A file has a ``GlobalMetadata`` and one ``Node`` per operator, each preceded by its length, possibly gzipped. Chakra's
converter writes the host's operators with the arguments of PyTorch's execution trace, and kernels beside them
(``is_cpu_op`` false), whose times belong to the recorded GPU: only the operators are used.

The messages (``schema/protobuf/et_def.proto``, 0.0.4) are declared by hand: only the fields of a framework's trace; the
decoder skips those of storage operations as unknown.
"""

from __future__ import annotations

import ast
import gzip
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, MissingDependencyError
from costmodel.base.input_files import MALFORMED, counted, open_unpacked
from e2e.step.operator_trace import OperatorTrace
from e2e.traces.formats.execution_trace import TraceNode, ValueReader, trace_of_nodes

# Values of ``NodeType``.
METADATA_NODE, COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE, COMM_COLL_NODE = 1, 4, 5, 6, 7
# Types of an attribute's value, in the order of their field numbers: each as a scalar and as a list.
_SCALARS = ("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64") + (
    "sfixed32",
    "sfixed64",
    "bool",
    "string",
    "bytes",
)
_PACKAGE = "ChakraProtoMsg"


@cache
def messages() -> tuple[Any, Any]:
    """Return the message classes of ``GlobalMetadata`` and ``Node``."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise MissingDependencyError("protobuf is not installed; run pip install 'fusion-costmodel[e2e]'") from None
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")
    _add_attributes(file)
    _add(file, "GlobalMetadata", ("version", 1, "string"), ("attr", 2, "AttributeProto", True))
    _add(file, "IOInfo", ("values", 1, "string"), ("shapes", 2, "string"), ("types", 3, "string"))
    _add(
        file,
        "Node",
        ("id", 1, "uint64"),
        ("name", 2, "string"),
        ("type", 3, "int32"),  # an enumeration, same encoding
        ("ctrl_deps", 4, "uint64", True),
        ("data_deps", 5, "uint64", True),
        ("start_time_micros", 6, "uint64"),
        ("duration_micros", 7, "uint64"),
        ("inputs", 8, "IOInfo"),
        ("outputs", 9, "IOInfo"),
        ("attr", 10, "AttributeProto", True),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in ("GlobalMetadata", "Node"))
    metadata, node = (message_factory.GetMessageClass(each) for each in found)
    return metadata, node


def _add_attributes(file: Any) -> None:
    """Add ``AttributeProto``: a name and one of many types of value."""
    fields: list[tuple[Any, ...]] = [("name", 1, "string"), ("doc_string", 2, "string")]
    for place, kind in enumerate(_SCALARS):
        _add(file, f"{kind.capitalize()}List", ("values", 1, kind, True))
        fields.append((f"{kind}_val", 3 + 2 * place, kind))
        fields.append((f"{kind}_list", 4 + 2 * place, f"{kind.capitalize()}List"))
    message = _add(file, "AttributeProto", *fields)
    message.oneof_decl.add(name="value")
    for field in message.field[2:]:
        field.oneof_index = 0


def _add(file: Any, name: str, *fields: tuple[Any, ...]) -> Any:
    """Add a message with fields (name, number, type, whether repeated)."""
    message = file.message_type.add(name=name)
    for field_name, number, kind, *repeated in fields:
        field = message.field.add(name=field_name, number=number)
        field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
        if kind in _SCALARS:
            field.type = getattr(field, f"TYPE_{kind.upper()}")
        else:
            field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    return message


_SUFFIXES = (".et", ".et.gz")
_GZIP = b"\x1f\x8b"
_NONE = -1
# Some converters append a counter to names: aten::conv2d(0).
_COUNTED = re.compile(r"(?<=\w)\(\d+\)$")


def is_chakra(path: Path | str) -> bool:
    """True if ``path`` has the suffix of a Chakra trace."""
    return str(path).endswith(_SUFFIXES)


def read_chakra(path: Path | str) -> OperatorTrace:
    """Read the operator calls in ``path``, in the order they began.

    Raises :class:`InputError` naming the file if it is truncated, of another format, or contains no framework's
    operators (such as traces generated for a network simulator).
    """
    values = ValueReader()
    nodes = [_node(message, values, path) for message in _messages(path) if _on_host(message)]
    if not any("::" in node.name for node in nodes):
        raise InputError(
            f"{path}: no operator of a framework among {len(nodes)} nodes; convert a PyTorch trace by chakra_converter"
        )
    nodes.sort(key=lambda node: node.id)
    return trace_of_nodes(nodes, {}, str(path))


def _messages(path: Path | str) -> Iterator[Any]:
    from google.protobuf.message import DecodeError
    from google.protobuf.proto import parse_length_prefixed

    metadata, node = messages()
    kinds: Iterator[Any] = iter((metadata,))
    try:
        with open_unpacked(path, "trace") as stream:
            parsed = iter(lambda: parse_length_prefixed(next(kinds, node), stream), None)
            yield from (message for message in counted(parsed, "trace") if isinstance(message, node))
    except (DecodeError, ValueError, EOFError, gzip.BadGzipFile) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: truncated, or not a Chakra trace in protobuf ({reason}); convert it again") from None
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}); check its path and permissions"
        ) from None


def _on_host(message: Any) -> bool:
    """True for calls of the host: not for kernels and nodes without a name. Metadata nodes carry process groups."""
    return bool(message.name) and (bool(_attributes(message).get("is_cpu_op", True)) or message.type == METADATA_NODE)


def _attributes(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attribute in message.attr:
        kind = attribute.WhichOneof("value")
        if kind is not None:
            value = getattr(attribute, kind)
            found[attribute.name] = list(value.values) if kind.endswith("_list") else value
    return found


def _node(message: Any, values: ValueReader, path: Path | str) -> TraceNode:
    attributes = _attributes(message)
    try:
        inputs, outputs = (
            values.read(_literal(side.values), _literal(side.shapes), _literal(side.types))
            for side in (message.inputs, message.outputs)
        )
        return TraceNode(
            id=message.id,
            name=_COUNTED.sub("", message.name),
            parent=message.ctrl_deps[0] if message.ctrl_deps else _NONE,
            scope=int(attributes.get("scope", 0)),
            thread=int(attributes.get("tid", 0)),
            forward_thread=int(attributes.get("fw_tid", 0)),
            sequence=int(attributes.get("seq_id", _NONE)),
            function=int(attributes.get("rf_id", _NONE)),
            schema=str(attributes.get("op_schema", "")),
            inputs=inputs,
            outputs=outputs,
            extra={name: attributes[name] for name in ("pg_name",) if name in attributes},
        )
    except (SyntaxError, MemoryError, *MALFORMED) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{path}: node {message.id} ({message.name}) has unreadable arguments ({reason}); convert the trace again"
        ) from None


@lru_cache(maxsize=1 << 15)
def _literal(text: str) -> list[Any]:
    """Parse a list, which the converter writes as a Python literal."""
    found = ast.literal_eval(text) if text else []
    if not isinstance(found, list):
        raise ValueError(f"{text[:40]!r} is no list")
    return found
