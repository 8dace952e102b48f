"""Execution traces of several ranks: groups, sequence numbers and sizes of their collectives agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from costmodel.base.errors import InputError
from e2e.commands.cli import app
from e2e.lowering.lower_trace import lower
from e2e.step.execution_graph import Collective
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor
from e2e.traces.execution_trace import read_execution_trace
from e2e.traces.recorded_run import ranks_of_job, with_groups
from tests.e2e.recorded_traces import DLRM_ET, recorded

A = Tensor(1, 1, (64,), "float32", "cuda:0")


def rank(number: int, *details: tuple[object, ...], **more: object) -> OperatorTrace:
    """All-reduces with what is recorded inside each, then a wait that names the rank."""
    calls = []
    for place, inner in enumerate(details):
        calls.append(OperatorCall(10 * place, "c10d::allreduce_", None, 0, ((A,), "<Object>"), ((A,),)))
        calls.append(OperatorCall(10 * place + 1, "record_param_comms", 10 * place, 0, ((A,), place, *inner), ()))
    calls.append(OperatorCall(999, "record_param_comms", None, 0, (0, 0, number, "wait", (), ()), ()))
    return OperatorTrace(tuple(calls), source=f"rank{number}.json", **more)  # type: ignore[arg-type]


def collectives(trace: OperatorTrace) -> list[Collective]:
    return [task.collective for task in lower(trace).tasks if task.collective is not None]


def test_groups_without_names_are_told_apart_in_the_order_of_their_use():
    world, other = 0xA0, 0xB0
    traces = [rank(1, (world, 1, "allreduce", (), ()), (other, 1, "allreduce", (), ()), (world, 1, "x", (), ()))]
    traces.append(rank(0, (0xC0, 0, "allreduce", (), ()), (0xD0, 0, "allreduce", (), ()), (0xC0, 0, "x", (), ())))
    found = ranks_of_job(traces)
    assert [entry.rank for entry in found] == [0, 1]
    for entry in found:
        assert [(each.group, each.sequence, each.ranks, each.size_bytes) for each in collectives(entry)] == [
            ("group 0", 0, (0, 1), 256),
            ("group 1", 0, (0, 1), 256),
            ("group 0", 1, (0, 1), 256),
        ]


def test_named_groups_keep_their_ranks():
    trace = rank(3, (("dp", "data parallel"), 3, "allreduce", (), ()), process_groups={"dp": (1, 3)}, world_size=4)
    (met,) = collectives(with_groups(trace))
    assert (met.group, met.ranks) == ("dp", (1, 3))


def test_a_place_in_a_group_is_not_the_rank():
    """In a group that starts elsewhere the wait tells the place, too; the root of a broadcast tells nothing."""
    details = [(("dp", ""), 1, "allreduce", (), ()), *[(("dp", ""), 0, "broadcast", (), ())] * 2]
    trace = rank(1, *details, process_groups={"dp": (1, 3)}, world_size=4)
    assert with_groups(trace).rank == 3


def test_a_group_that_nobody_describes_is_refused():
    unknown = rank(0, (0xA0, 0, "all_to_all", (1, 1), (1, 1)))
    with pytest.raises(InputError, match="group 'group 0' has 2 of 4 ranks, but the trace does not tell which"):
        with_groups(unknown, 4)


def test_two_traces_of_one_rank_are_refused():
    with pytest.raises(InputError, match=r"rank1.json, rank1.json: give one trace of every rank"):
        ranks_of_job([rank(1), rank(1)])


def test_a_rank_without_a_trace_is_named():
    details = (("dp", ""), 0, "allreduce", (), ())
    traces = [rank(number, details, process_groups={"dp": (number,)}, world_size=4) for number in (0, 2)]
    with pytest.raises(InputError, match="rank0.json: the job has 4 ranks, but there is no trace of rank 1, 3"):
        ranks_of_job(traces)


def node(number: int, name: str, parent: int, inputs: list[Any], shapes: list[Any], types: list[str]) -> dict[str, Any]:
    """Of schema 1.0.1; what it writes is its first input."""
    told: dict[str, Any] = {"id": number, "name": name, "parent": parent, "tid": 1, "scope": 0, "fw_tid": 0}
    told |= {"inputs": inputs, "input_shapes": shapes, "input_types": types}
    told |= {"outputs": inputs[:1], "output_shapes": shapes[:1], "output_types": types[:1]}
    return told | {"seq_id": -1, "rf_id": number, "op_schema": ""}


def write_rank(path: Path, number: int, ranks: int, products: int) -> Path:
    """Products of 4096 x 4096 on the GPU of that number; the last one needs what is all-reduced before it."""
    matrix, shape, dtype = [5, 6, 0, 4096**2, 4, f"cuda:{number}"], [4096, 4096], "Tensor(float)"
    places = [*range(10, 9 + products), 103]
    nodes = [node(place, "aten::mm", 1, [matrix] * 2, [shape] * 2, [dtype] * 2) for place in places]
    comms = [[matrix], 1, 0xA0 + number, number, "allreduce", [1] * ranks, [1] * ranks]
    types = [f"GenericList[{dtype}]", "Int", "Int", "Int", "String", "GenericList[Int]", "GenericList[Int]"]
    details = (comms, [[shape], [], [], [], [], [], []], types)
    nodes.append(node(100, "c10d::allreduce_", 1, [[matrix]], [[shape]], types[:1]))
    nodes.append(node(101, "record_param_comms", 100, *details))
    nodes.append(node(102, "record_param_comms", 1, [1, 0, number, "wait"], [[]] * 4, ["Int", "Int", "Int", "String"]))
    path.write_text(json.dumps({"schema": "1.0.1", "pid": number, "nodes": nodes, "finish_ts": 1}))
    return path


def predicted(*options: Any, gpu: str = "a100-sxm-40gb") -> dict[str, Any]:
    result = CliRunner().invoke(app, ["predict", *map(str, options), "--gpu", gpu, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_ranks_wait_for_the_one_with_more_work(tmp_path):
    """Traces alone: kernels and host times are predicted, the all-reduce of the idle rank begins with the other's."""
    files = [write_rank(tmp_path / f"{rank}.json", rank, 2, products) for rank, products in ((0, 2), (1, 20))]
    record = predicted("--trace", files[1], "--trace", files[0])
    first, second = record["ranks"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert second["compute_seconds"] == pytest.approx(10 * first["compute_seconds"])
    waited = second["compute_seconds"] - first["compute_seconds"]
    assert any("2 ranks are taken to begin together" in line for line in record["warnings"])
    assert first["exposed_wait_seconds"] == pytest.approx(waited, rel=0.1) and second["exposed_wait_seconds"] == 0
    (reduced,) = record["collectives"]
    assert (reduced["kind"], reduced["ranks"], reduced["size_bytes"]) == ("all_reduce", 2, 4096**2 * 4)
    alone = predicted("--trace", files[0], "--gpus", 2)
    assert alone["iteration_seconds"] < record["iteration_seconds"] / 5
    matched = predicted("--trace", tmp_path / "*.json")
    assert matched["asked"] != record["asked"]  # each names what was given
    assert {**matched, "asked": None} == {**record, "asked": None}


def test_ranks_of_traces_may_differ_in_speed(tmp_path):
    files = [write_rank(tmp_path / f"{rank}.json", rank, 2, 2) for rank in range(2)]
    record = predicted("--trace", files[0], "--trace", files[1], "--speed-spread", 0.2)
    first, second = (each["compute_seconds"] for each in record["ranks"])
    assert first != pytest.approx(second, rel=1e-3)


def test_the_eight_ranks_of_dlrm_meet_in_eight_collectives():
    folder = recorded(DLRM_ET) / "dlrm_pytorch_et"
    traces = [read_execution_trace(folder / f"dlrm_eg_{number}.json") for number in range(8)]
    found = ranks_of_job(list(reversed(traces)))
    assert [entry.rank for entry in found] == list(range(8))
    met = [collectives(entry) for entry in found]
    kinds = [each.kind for each in met[0]]
    assert len(kinds) == 8
    for entry in met:
        assert [each.kind for each in entry] == kinds
        assert all(each.ranks == tuple(range(8)) for each in entry)
        assert [(each.group, each.sequence) for each in entry] == [(each.group, each.sequence) for each in met[0]]
    # Elements that every rank sends (of 4 and 8 bytes), read off the traces; what they receive of the fourth differs.
    exchanged = [{entry[place].size_bytes for entry in met} for place in range(8) if kinds[place] == "all_to_all"]
    assert exchanged == [{6144 * 4}, {24 * 8}, {384 * 4}, {3392 * 4}, {6144 * 4}]
    fourth = [entry[3] for entry in met]
    assert fourth[2].received_bytes == 2304 * 4 and len({each.received_bytes for each in fourth}) > 1
    reduced = [{entry[place].size_bytes for entry in met} for place in range(8) if kinds[place] == "all_reduce"]
    assert reduced == [{394241 * 4}, {112 * 4}, {226960 * 4}]
