"""Execution traces of every schema version, by hand and real; what is said about files that are none."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from costmodel.base.errors import InputError
from e2e.step.operator_trace import Tensor, tensors
from e2e.traces.execution_trace import read_execution_trace
from e2e.traces.json_stream import archive_members, read_members
from e2e.traces.step_window import read_last_step

WEIGHT = [5, 6, 0, 32, 4, "cuda:0"]


def flat(number: int, name: str, parent: int, thread: int = 1, scope: int = 0, **fields: Any) -> dict[str, Any]:
    """A node as of schema 1.0.1."""
    node = {"id": number, "name": name, "parent": parent, "tid": thread, "scope": scope, "fw_tid": 0, "seq_id": -1}
    for side in ("input", "output"):
        node |= {f"{side}s": [], f"{side}_shapes": [], f"{side}_types": []}
    return node | {"rf_id": number, "op_schema": ""} | fields


def nested(node: dict[str, Any]) -> dict[str, Any]:
    """The same node as of schema 1.0.3 and later."""
    attributes = ("tid", "scope", "fw_tid", "seq_id", "rf_id", "op_schema")
    return {
        "id": node["id"],
        "name": node["name"],
        "ctrl_deps": node["parent"],
        "inputs": {"values": node["inputs"], "shapes": node["input_shapes"], "types": node["input_types"]},
        "outputs": {"values": node["outputs"], "shapes": node["output_shapes"], "types": node["output_types"]},
        "attrs": [{"name": name, "type": "", "value": node[name]} for name in attributes],
    }


NODES = [
    flat(2, "[pytorch|profiler|execution_graph|thread]", 1, scope=7),
    # Children end first, so they are written first.
    flat(
        5,
        "aten::addmm",
        4,
        op_schema="aten::addmm.out(Tensor self) -> Tensor",
        inputs=[WEIGHT, "<None>", [WEIGHT, WEIGHT], [3, 4], 1.5, True],
        input_shapes=[[4, 8], [], [[4, 8], [4, 8]], [[], []], [], []],
        input_types=[
            "Tensor(c10::Half)",
            "None",
            "GenericList[Tensor(float),Tensor(long int)]",
            "GenericList[Int,Int]",
            "Double",
            "Bool",
        ],
    ),
    flat(4, "aten::linear", 3, seq_id=7),
    flat(3, "## forward ##", 2, scope=7),
    flat(7, "aten::_foreach_add_", 6),
    flat(6, "Optimizer.step#SGD.step", 2, scope=7),
    flat(8, "[pytorch|profiler|execution_graph|thread]", 1, thread=2, scope=7),
    flat(10, "AddmmBackward0", 9, thread=2, scope=1),
    flat(9, "autograd::engine::evaluate_function: AddmmBackward0", 8, thread=2),
    flat(1, "[pytorch|profiler|execution_graph|process]", 1, thread=0, scope=7),
]


def write(path: Path, nodes: list[dict[str, Any]], schema: str = "1.0.1") -> Path:
    path.write_text(json.dumps({"schema": schema, "pid": 42, "nodes": nodes, "finish_ts": 1}))
    return path


def test_calls_in_order_of_begin_with_parents_threads_and_phases(tmp_path: Path) -> None:
    trace = read_execution_trace(write(tmp_path / "et.json", NODES))
    rows = [(call.id, call.name.split("::")[-1], call.parent, call.thread, call.phase) for call in trace.calls]
    assert rows == [
        (4, "linear", None, 0, "forward"),
        (5, "addmm", 4, 0, "forward"),
        (7, "_foreach_add_", None, 0, "optimizer"),
        (9, "evaluate_function: AddmmBackward0", None, 1, "backward"),
        (10, "AddmmBackward0", 9, 1, "backward"),
    ]
    assert trace.calls[0].sequence == 7
    assert trace.calls[1].sequence is None
    assert trace.calls[1].attributes["overload"] == "out"
    assert trace.calls[1].attributes["annotations"] == ("## forward ##",)
    assert trace.calls[1].attributes["rf_id"] == 5
    assert trace.pid == 42


def test_values_of_every_kind(tmp_path: Path) -> None:
    addmm = read_execution_trace(write(tmp_path / "et.json", NODES)).calls[1]
    half, one, two = (Tensor(5, 6, (4, 8), dtype, "cuda:0") for dtype in ("float16", "float32", "int64"))
    assert addmm.inputs == (half, None, (one, two), (3, 4), 1.5, True)
    assert list(tensors(addmm.inputs)) == [half, one, two]


@pytest.mark.parametrize("schema", ["1.0.3", "1.0.3-chakra.0.0.4", "1.1.0", "1.1.0-chakra.0.0.4", "1.1.1-chakra.0.0.4"])
def test_later_schemas_say_the_same(tmp_path: Path, schema: str) -> None:
    old = read_execution_trace(write(tmp_path / "old.json", NODES))
    new = read_execution_trace(write(tmp_path / "new.json", [nested(node) for node in NODES], schema))
    assert new.calls == old.calls


def test_process_groups_and_rank(tmp_path: Path) -> None:
    groups = [
        {"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 4},
        {"pg_name": "1", "pg_desc": "pair", "ranks": [1, 3], "group_size": 2},
    ]
    init = flat(3, "## process_group:init ##", 2, scope=7, inputs=[json.dumps(groups)], input_shapes=[[]])
    init["input_types"] = ["String"]
    add = flat(4, "aten::add", 2, inputs=[[1, 2, 0, 1, 4, "cuda:3"]], input_shapes=[[1]], input_types=["Tensor(int)"])
    trace = read_execution_trace(write(tmp_path / "et.json", [nested(node) for node in (init, add)], "1.1.0"))
    assert trace.process_groups == {"0": (0, 1, 2, 3), "1": (1, 3)}
    assert (trace.rank, trace.world_size) == (3, 4)
    assert [call.name for call in trace.calls] == ["aten::add"]


def test_archives(tmp_path: Path) -> None:
    text = write(tmp_path / "et.json", NODES).read_bytes()
    (tmp_path / "et.json.gz").write_bytes(gzip.compress(text))
    with tarfile.open(tmp_path / "two.tar.gz", "w:gz") as archive:
        for name in ("ranks/a.json", "ranks/b.json"):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    expected = read_execution_trace(tmp_path / "et.json").calls
    assert read_execution_trace(tmp_path / "et.json.gz").calls == expected
    assert archive_members(tmp_path / "two.tar.gz") == ("ranks/a.json", "ranks/b.json")
    assert read_execution_trace(tmp_path / "two.tar.gz/ranks/b.json").calls == expected
    with pytest.raises(InputError, match=r"two\.tar\.gz.*2 JSON files.*ranks/a\.json.*name one"):
        read_execution_trace(tmp_path / "two.tar.gz")
    with pytest.raises(InputError, match=r"holds no ranks/c\.json"):
        read_execution_trace(tmp_path / "two.tar.gz/ranks/c.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "one JSON object"),
        ("", "truncated"),
        ("not json", "one JSON object"),
        ('{"nodes": [{"id": 1', "truncated"),
        ('{"schema": "1.0.1", "nodes": [', "truncated"),
        ('{"schema": "1.0.1", "nodes": [tru', "truncated"),
        ('{"schema": "1.0', "truncated"),
        ('{"schema": "1.0.1", "nodes": [{"id" 1}]}', "not valid JSON near character"),
        ('{"schema": "1.0.1" "nodes": []}', "expected a comma"),
        ('{"nodes": [{"id": 1}]}', "node 1 is not of an execution trace"),
        ('{"nodes": [3]}', "node 3 is not of an execution trace"),
        ('{"a": 1}', "no schema"),
        ('{"schema": "1.0.1", "nodes": []}', "without nodes"),
        ('{"schema": "9.9.9", "nodes": []}', "schema '9.9.9' is not known"),
        ('{"traceEvents": [{}]}', "profiler .Kineto. trace"),
    ],
)
def test_files_that_are_no_execution_trace(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_execution_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["step.et", "step.et.gz"])
def test_of_a_trace_in_protobuf_its_json_is_asked_for(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x0a\x0a\x080.0.4.dev")
    for read in (read_execution_trace, read_last_step):
        with pytest.raises(InputError, match=r"step\.et\S*: a trace in protobuf.*give the JSON that PyTorch writes"):
            read(path)


@pytest.mark.parametrize("types", [[5, 5], {"a": 1}, "Tensor(float)", None, [["Tensor(float)"]]])
def test_types_that_are_no_texts(tmp_path: Path, types: Any) -> None:
    node = flat(4, "aten::add", 2, inputs=[WEIGHT, WEIGHT], input_shapes=[[4, 8], [4, 8]], input_types=types)
    for made, schema in ((node, "1.0.1"), (nested(node), "1.0.3")):
        path = write(tmp_path / "bad.json", [made], schema)
        with pytest.raises(InputError, match=r"bad\.json: node 4 is not of an execution trace .*record it again"):
            read_execution_trace(path)


def test_damaged_and_missing_archives(tmp_path: Path) -> None:
    whole = gzip.compress(write(tmp_path / "et.json", NODES * 50).read_bytes())
    (tmp_path / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cut\.json\.gz: truncated or damaged"):
        read_execution_trace(tmp_path / "cut.json.gz")
    with pytest.raises(InputError, match="cannot be read"):
        read_execution_trace(tmp_path / "none.json")


def test_memory_is_bounded_by_an_element_not_by_the_file(tmp_path: Path) -> None:
    """12 MB of text pass through less than half of that; 1 GB of repeated GPT-2 was tried by hand: 22 MB in all."""
    path = tmp_path / "large.json"
    element = json.dumps({"name": "aten::add", "values": list(range(200))})
    count = 12_000_000 // len(element)
    with path.open("w") as file:
        file.write('{"nodes": [' + ",\n".join([element] * count) + "]}")
    tracemalloc.start()
    read = sum(1 for _ in read_members(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == count
    assert peak < 6_000_000


def test_a_number_that_two_nodes_have_is_refused(tmp_path: Path) -> None:
    """The second one could be inside of itself, and whoever asks for all that is around it would never come out."""
    path = write(tmp_path / "twice.json", [*NODES, flat(5, "aten::relu", 5)])
    with pytest.raises(InputError, match=r"twice\.json: node 5 is there twice; record the trace again"):
        read_execution_trace(path)


def test_long_numbers_stay_exact(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    path.write_text('{"a": [1712195495519689.047, 0.5], "b": 12345678901234567890, "c": "\\u00e9"}')
    values = dict(read_members(path))
    assert [str(value) for _, value in read_members(path)][:2] == ["1712195495519689.047", "0.5"]
    assert (values["b"], values["c"]) == (12345678901234567890, "é")
