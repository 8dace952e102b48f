"""Chakra traces: what is written with the same descriptor is read back; a real trace, converted as Chakra does it."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from google.protobuf.proto import parse_length_prefixed, serialize_length_prefixed

from costmodel.base.errors import InputError
from e2e.sources.recorded_job import read_trace
from e2e.step.operator_trace import Tensor
from e2e.traces.formats.chakra import COMM_COLL_NODE, COMP_NODE, messages, read_chakra
from e2e.traces.formats.execution_trace import read_execution_trace
from e2e.traces.formats.json_stream import read_members
from tests.e2e.recorded_traces import recorded

INTEGERS = ("rf_id", "seq_id", "scope", "tid", "fw_tid")
SIDES = ("values", "shapes", "types")


def node(number: int, name: str, parent: int | None = None, kind: int = COMP_NODE, **attributes: Any) -> Any:
    """A node as the converter writes it."""
    message = messages()[1](id=number, name=name, type=kind)
    if parent is not None:
        message.ctrl_deps.append(parent)
    for key, value in ({"is_cpu_op": True, "tid": 1} | attributes).items():
        kinds = {bool: "bool_val", int: "int64_val", str: "string_val"}
        message.attr.add(name=key, **{kinds[type(value)]: value})
    return message


def with_arguments(message: Any, inputs: dict[str, Any], outputs: dict[str, Any]) -> Any:
    for side, given in ((message.inputs, inputs), (message.outputs, outputs)):
        for key in SIDES:
            setattr(side, key, str(given[key]))
    return message


def write(path: Path, *nodes: Any) -> Path:
    stream = io.BytesIO()
    serialize_length_prefixed(messages()[0](version="0.0.4"), stream)
    for message in nodes:
        serialize_length_prefixed(message, stream)
    content = stream.getvalue()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def product(number: int, parent: int | None = None) -> Any:
    tensor = {
        "values": [[1, 2, 0, 8, 4, "cuda:0"], "<None>"],
        "shapes": [[2, 4], []],
        "types": ["Tensor(float)", "None"],
    }
    message = node(number, "aten::relu", parent, rf_id=7, seq_id=3, op_schema="aten::relu(Tensor self) -> Tensor")
    return with_arguments(message, tensor, {key: value[:1] for key, value in tensor.items()})


@pytest.mark.parametrize("name", ["step.et", "step.et.gz"])
def test_what_is_written_is_read_back(name, tmp_path):
    kernel = node(3, "relu_kernel", 2, is_cpu_op=False, stream=7)
    collective = node(4, "ncclAllReduce", 2, COMM_COLL_NODE, is_cpu_op=False, comm_size=64)
    trace = read_chakra(write(tmp_path / name, node(1, "step", scope=7), product(2, 1), kernel, collective))
    (call,) = trace.calls
    assert (call.id, call.name, call.parent, call.sequence) == (2, "aten::relu", None, 3)
    assert call.attributes["rf_id"] == 7
    assert call.inputs == (Tensor(1, 2, (2, 4), "float32", "cuda:0"), None)
    assert call.outputs == (Tensor(1, 2, (2, 4), "float32", "cuda:0"),)
    assert read_trace(tmp_path / name).calls == trace.calls


def test_every_kind_of_attribute_keeps_its_field_number():
    # Field numbers and wire types as in the published schema: 31 is bytes_val, 8 a list of int32, 27 bool_val.
    attribute = messages()[1]().attr.add(name="a", bytes_val=b"x")
    assert attribute.SerializeToString() == b"\x0a\x01a" + bytes([31 << 3 & 0x7F | 0x80 | 2, 31 << 3 >> 7]) + b"\x01x"
    numbers = {field.name: field.number for field in attribute.DESCRIPTOR.fields}
    assert numbers["double_val"] == 3 and numbers["int32_list"] == 8 and numbers["int64_val"] == 9
    assert numbers["bool_val"] == 27 and numbers["string_val"] == 29 and numbers["bytes_list"] == 32


def converted(source: Path, target: Path) -> Path:
    """The steps of Chakra's converter for the host's operators."""
    nodes = []
    for key, found in read_members(source):
        if key != "nodes":
            continue
        attributes = {item["name"]: item["value"] for item in found["attrs"]}
        given = {name: int(attributes[name]) for name in INTEGERS} | {"op_schema": attributes["op_schema"]}
        message = node(found["id"], found["name"], found["ctrl_deps"], **given)
        nodes.append(with_arguments(message, found["inputs"], found["outputs"]))
    return write(target, *nodes)


def test_a_converted_execution_trace_holds_the_same_calls(tmp_path):
    source = recorded("execution_traces/1.0.3-chakra.0.0.4/resnet_1gpu_et.json.gz")
    original = read_execution_trace(source)
    trace = read_chakra(converted(source, tmp_path / "resnet.et"))
    assert len(trace.calls) == 14346
    assert [plain(call) for call in trace.calls] == [plain(call) for call in original.calls]


def plain(call: Any) -> Any:
    """Without the figures of collectives, which the converter moves to the kernels."""
    kept = {key: value for key, value in call.attributes.items() if key in ("rf_id", "overload", "annotations")}
    return replace(call, attributes=kept)


def test_a_truncated_file_is_said_to_be_one(tmp_path):
    path = write(tmp_path / "step.et", node(1, "step", scope=7), product(2, 1))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InputError, match=r"step\.et: truncated, or not a Chakra trace"):
        read_chakra(path)


@pytest.mark.parametrize(
    "content", [json.dumps({"schema": "1.0.1", "nodes": []}).encode(), b"\xff" * 64, b"PK\x03\x04 no", b""]
)
def test_another_format_is_said_to_be_one(content, tmp_path):
    path = tmp_path / "step.et"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"step\.et: "):
        read_chakra(path)


def test_traces_of_a_generator_have_no_operators(tmp_path):
    path = write(tmp_path / "generated.et", node(1, "COMP_NODE_0"), node(2, "COMM_COLL_NODE_0", 1, COMM_COLL_NODE))
    with pytest.raises(InputError, match="no operator of a framework among 2 nodes"):
        read_chakra(path)


def test_unreadable_arguments_name_the_node(tmp_path):
    message = product(2)
    message.inputs.values = "[1, 2"
    with pytest.raises(InputError, match=r"node 2 \(aten::relu\) has unreadable arguments"):
        read_chakra(write(tmp_path / "step.et", message))


def test_the_file_is_a_row_of_messages_with_lengths(tmp_path):
    stream = io.BytesIO(write(tmp_path / "step.et", product(2)).read_bytes())
    metadata, kind = messages()
    assert parse_length_prefixed(metadata, stream).version == "0.0.4"
    assert parse_length_prefixed(kind, stream).name == "aten::relu"
    assert parse_length_prefixed(kind, stream) is None


def test_numbers_behind_names_are_no_part_of_them(tmp_path: Path) -> None:
    trace = read_chakra(write(tmp_path / "t.et", node(1, "aten::conv2d(0)"), node(2, "aten::mm"), node(3, "f(x) (2)")))
    assert [call.name for call in trace.calls] == ["aten::conv2d", "aten::mm", "f(x) (2)"]
