"""Messages of MLCommons Chakra execution traces (``schema/protobuf/et_def.proto``, 0.0.4), declared by hand.

Only the fields of a framework's trace; the decoder skips those of storage operations as unknown.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from costmodel.base.errors import MissingDependencyError

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
