"""Profiles: units, threads, correlation, NCCL's metadata; by hand and real."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from e2e.traces.host_time import nest
from e2e.traces.kineto import CollectiveInfo, read_kineto
from tests.e2e.recorded_traces import MAIN, Profile

SPAN = '"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]'


def test_spans_of_every_kind_in_seconds_from_the_first(tmp_path: Path) -> None:
    profile = Profile(distributedInfo={"rank": 1, "world_size": 2}, deviceProperties=[{"id": 0, "name": "toy"}])
    profile.operator("aten::mm", 1000.5, 20.25, **{"Input Dims": [[2, 3]], "Input type": ["long int"]})
    profile.launch(1005.5, 2, 1010.5, 4)
    profile.launch(1008.5, 1, 1015.5, 2, call="cudaMemcpyAsync", category="gpu_memcpy")
    profile.host("user_annotation", "ProfilerStep#3", 1000, 100)
    trace = read_kineto(profile.write(tmp_path / "k.json"))
    (operator,) = trace.operators
    assert (operator.start, operator.end) == (pytest.approx(0.5e-6), pytest.approx(20.75e-6))
    assert (operator.shapes, operator.dtypes) == (([2, 3],), ("int64",))
    assert [span.name for span in trace.runtime] == ["cudaLaunchKernel", "cudaMemcpyAsync"]
    assert [(span.kind, span.stream, span.correlation) for span in trace.device] == [("kernel", 7, 1), ("copy", 7, 2)]
    assert trace.device[0].seconds == pytest.approx(4e-6)
    assert (trace.rank, trace.world_size, trace.gpu, trace.main_thread) == (1, 2, "toy", MAIN)
    assert trace.base_seconds == pytest.approx(1000e-6)
    assert nest(trace).parent[trace.runtime[0].id] == operator.id


@pytest.mark.parametrize(("unit", "offset"), [(1, 1_700_000_000_000_000), (1000, 1_700_000_000_000_000_000)])
def test_nanoseconds_are_recognised_by_magnitude_not_by_the_display_unit(
    tmp_path: Path, unit: int, offset: int
) -> None:
    profile = Profile(displayTimeUnit="ns")
    profile.operator("aten::mm", offset, 10 * unit)
    profile.operator("aten::add", offset + 30 * unit, 5 * unit)
    trace = read_kineto(profile.write(tmp_path / "k.json"))
    assert [span.seconds for span in trace.operators] == [pytest.approx(10e-6), pytest.approx(5e-6)]
    assert trace.operators[1].start == pytest.approx(30e-6)


def test_fractions_of_microseconds_since_1970_survive(tmp_path: Path) -> None:
    (tmp_path / "k.json").write_text(
        '{"traceEvents": ['
        '{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": 1712195495519689.047, "dur": 1},'
        '{"ph": "X", "cat": "cpu_op", "name": "b", "pid": 1, "tid": 1, "ts": 1712195495519690.171, "dur": 1}]}'
    )
    assert read_kineto(tmp_path / "k.json").operators[1].start == pytest.approx(1.124e-6, abs=1e-12)


def test_collectives_carry_kind_sizes_and_group(tmp_path: Path) -> None:
    profile = Profile()
    number = profile.launch(0, 1, 2, 5, stream=40, name="ncclDevKernel_AllReduce")
    profile.events[-1]["args"] |= {
        "Collective name": "allreduce",
        "In msg nelems": 64,
        "Out msg nelems": 64,
        "Group size": 2,
        "dtype": "BFloat16",
        "Process Group Name": "3",
        "Process Group Ranks": "[0, 5]",
    }
    trace = read_kineto(profile.write(tmp_path / "k.json"))
    assert trace.device[0].correlation == number
    assert trace.device[0].collective == CollectiveInfo("all_reduce", "3", (0, 5), 64, "bfloat16")


def test_operators_that_start_together_keep_their_numbers_order(tmp_path: Path) -> None:
    """Whole microseconds: a sibling of no length stands before one that began in the same microsecond."""
    profile = Profile()
    profile.operator("first", 5, 0)
    profile.operator("second", 5, 1)
    profile.events.reverse()
    assert [span.name for span in read_kineto(profile.write(tmp_path / "k.json")).operators] == ["first", "second"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": []}', "empty one"),
        ('{"schema": "1.0.1", "nodes": [{}]}', "an execution trace, not a profiler"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1}]}', "event 'k' is not of a profiler"),
        ('{"traceEvents": [7]}', "event 7 is not of a profiler"),
        ('{"traceEvents": [{"ph": "X"', "truncated"),
        ('{"a": 1}', "not a profiler trace"),
        (f'{{"deviceProperties": ["x"], {SPAN}}}', r"deviceProperties has 'x', which is no device.*record it again"),
        (f'{{"deviceProperties": "x", {SPAN}}}', "deviceProperties has 'x', which is no device"),
        (f'{{"deviceProperties": [{{"id": []}}], {SPAN}}}', "which is no device with an id and a name"),
        (f'{{"distributedInfo": [1], {SPAN}}}', "not a mapping with rank and world_size"),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_kineto(tmp_path / "bad.json")
    assert str(tmp_path / "bad.json") in str(caught.value)


def test_device_events_without_stream_are_foreign(tmp_path: Path) -> None:
    profile = Profile()
    profile.launch(0, 1, 2, 3)
    del profile.events[-1]["args"]["stream"]
    with pytest.raises(InputError, match="stream"):
        read_kineto(profile.write(tmp_path / "bad.json"))
