# ruff: noqa: E402
from __future__ import annotations

import csv
import gzip
import itertools
import json
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="measuring needs torch")

from costmodel.base.errors import InputError, OutputError
from costmodel.commands.cli import main
from costmodel.measure import suites
from costmodel.measure.device import (
    TimingEffort,
    failure_line,
    time_call,
)
from costmodel.measure.kernel_suite import COLUMNS, DRAWS, MeasuredCase, kernel_cases, measure_cases
from costmodel.measure.operator_calls import make_call
from costmodel.measure.overhead_suite import measure_overheads
from costmodel.measure.runs import (
    SuiteProgress,
    Table,
    TimeBudget,
)
from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import (
    ConvolutionBackward,
    Elementwise,
    Gemm,
    Loss,
    MemoryCopy,
    Normalization,
    Pooling,
    Rearrangement,
    Reduction,
    Softmax,
)
from costmodel.operators.layers import Conv2d
from costmodel.operators.lookups import EmbeddingLookup
from lab.data.kernel_table import read_measured

CPU = torch.device("cpu")
ORIGIN = {"device": "toy"}
CONV = Conv2d(2, 3, 8, 8, 4, (3, 3), (2, 2), (1, 1, 1, 1))


def quiet(line):
    pass


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_cases_are_reproducible_and_distinct_and_a_prefix_holds_every_family_in_proportion():
    round_ = sum(weight for _, weight in DRAWS.values())
    first, again = (list(itertools.islice(kernel_cases(1 << 26), 2 * round_)) for _ in range(2))
    assert first == again and len({case.operator for case in first}) == len(first)
    for name, (_, weight) in DRAWS.items():
        assert sum(case.family == name for case in first) == pytest.approx(2 * weight, abs=1)
    for case in first:
        assert from_record(json.loads(json.dumps(to_record(case.operator)))) == case.operator


@pytest.mark.parametrize(
    ("operator", "shape"),
    [
        (Gemm(1, 3, 5, 7, transpose_b=True, bias=True), (3, 5)),
        (Gemm(2, 3, 5, 7, "bfloat16"), (2, 3, 5)),
        (CONV, (2, 4, 4, 4)),
        (Attention(2, 4, 6, 6, 8, 2, True, "float32"), (2, 4, 6, 8)),
        (Softmax(4, 9), (4, 9)),
        (Normalization("batch_norm", 32, 5), (16, 5, 2, 1)),
        (Elementwise("mul", 10, 2), (10,)),
        (Reduction("norm", 12, 3, contiguous=False), (3,)),
        (EmbeddingLookup(20, 4, 30, 10), (10, 4)),
        (MemoryCopy(64, "host_to_device"), (16,)),
        (Rearrangement("concat", 24, 3, inputs=2), (4, 6)),
        (Rearrangement("tril", 16, 4), (4, 4)),
        (Pooling("max", 1, 2, 8, 8, 3, 3, (3, 3)), (1, 2, 3, 3)),
        (Loss("cross_entropy", 5, 7), ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_call_computes_what_the_record_says(operator, shape):
    result = make_call(operator, CPU)()
    assert tuple(result.shape) == shape and result.float().abs().sum() > 0


@pytest.mark.parametrize(
    ("operator", "shapes"),
    [
        (Softmax(4, 9, direction="backward"), [(4, 9)]),
        (Normalization("layer_norm", 4, 9, direction="backward"), [(4, 9), (9,), (9,)]),
        (Attention(1, 2, 6, 6, 8, 2, dtype="float32", direction="backward"), [(1, 2, 6, 8)] * 3),
        (EmbeddingLookup(20, 4, 30, 10, direction="backward"), [(20, 4)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_backward_call_gives_the_gradients_again_and_again(operator, shapes):
    call = make_call(operator, CPU)
    first, second = call(), call()
    assert [tuple(each.shape) for each in first] == shapes
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("wrt", "place"), [("data", 0), ("weight", 1)])
def test_backward_of_a_convolution_gives_one_gradient_alone(wrt, place):
    gradients = make_call(ConvolutionBackward(CONV, wrt), CPU)()
    shape = CONV.input_shape if wrt == "data" else CONV.weight_shape
    assert tuple(gradients[place].shape) == shape and gradients[1 - place] is None


def test_the_time_of_a_call_is_no_less_than_it_sleeps():
    timing = time_call(lambda: time.sleep(0.01), CPU, TimingEffort(repeats=3, call_seconds=0.05))
    assert 0.01 <= timing.minimum <= timing.median and timing.calls == 1


def test_a_case_that_fails_is_a_row_and_the_next_is_measured(tmp_path):
    cases = [
        MeasuredCase("elementwise", Elementwise("unheard-of", 8)),
        MeasuredCase("gemm", Gemm(1, 8, 8, 8, "no-such-dtype")),
    ]
    cases.append(MeasuredCase("elementwise", Elementwise("relu", 8)))
    with Table(tmp_path, "t", COLUMNS, ORIGIN, False) as table:
        assert measure_cases(cases, set(), CPU, TimeBudget(1), table, quiet) == 3
    first, second, third = rows_of(table.path)
    assert "no call" in first["error"] and "no-such-dtype" in second["error"] and not second["median_s"]
    assert not third["error"] and float(third["minimum_s"]) <= float(third["median_s"])


def test_the_budget_ends_a_suite_before_its_cases(tmp_path):
    clock = itertools.count(0, 10)
    with Table(tmp_path, "t", COLUMNS, ORIGIN, False) as table:
        cases = (MeasuredCase("elementwise", Elementwise("relu", 8 + place)) for place in itertools.count())
        assert 0 < measure_cases(cases, set(), CPU, TimeBudget(1, lambda: next(clock)), table, quiet) <= 6


def test_loading_pytorch_takes_nothing_of_the_budget(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(suites, "TimeBudget", lambda minutes: TimeBudget(minutes, lambda: now[0]))
    monkeypatch.setattr(suites, "open_device", lambda name: now.__setitem__(0, 50.0))
    monkeypatch.setitem(suites.SUITES, "kernels", lambda device, output, budget, resume, report: budget.elapsed)
    assert suites.measure("kernels", "cpu", tmp_path, 1, False, quiet) == 0.0


def test_progress_says_what_is_left():
    now, lines = [0.0], []
    progress = SuiteProgress(TimeBudget(1, lambda: now[0]), lines.append, total=4)
    now[0] = 11.0
    progress.step("this")
    progress.step("too soon")
    assert lines == ["1 of 4 done, 11 s, about 33 s left; last: this"]


def test_a_lost_device_ends_the_suite_and_other_failures_do_not():
    with pytest.raises(InputError, match="--resume"):
        failure_line("x", RuntimeError("CUDA error: an illegal memory access was encountered"), CPU)
    assert failure_line("x", RuntimeError("CUDA out of memory.\nmore"), CPU) == "CUDA out of memory."


def test_a_table_is_resumed_without_its_cut_off_line_and_only_on_its_device(tmp_path):
    with Table(tmp_path, "t", ("a", "b"), ORIGIN, False) as table:
        table.add(a=1, b="x,y")
    table.path.write_text(table.path.read_text() + "2,cut o")
    with pytest.raises(InputError, match="--resume"):
        Table(tmp_path, "t", ("a", "b"), ORIGIN, False)
    with pytest.raises(InputError, match="measured on toy"):
        Table(tmp_path, "t", ("a", "b"), {"device": "other"}, True)
    with Table(tmp_path, "t", ("a", "b"), ORIGIN, True) as table:
        assert table.rows == [{"a": "1", "b": "x,y"}]
        table.add(a=3)
    assert [row["a"] for row in rows_of(table.path)] == ["1", "3"]
    assert len(json.loads((tmp_path / "t.json").read_text())["runs"]) == 2


def test_overheads_have_primitives_and_pairs_of_steps_with_traces(tmp_path, monkeypatch):
    from costmodel.measure import overhead_suite as overheads

    monkeypatch.setattr(overheads, "MODELS", {"mlp": overheads.MODELS["mlp"]})
    rows = {row["quantity"]: row for row in rows_of(measure_overheads(CPU, tmp_path, TimeBudget(1), False, quiet))}
    assert list(rows) == ["host launch", "kernel floor", "synchronize", "item", "step mlp", "profiled step mlp"]
    assert float(rows["host launch"]["median_s"]) < float(rows["step mlp"]["median_s"])
    with gzip.open(tmp_path / rows["profiled step mlp"]["trace"], "rt") as stream:
        names = [event.get("name", "") for event in json.load(stream)["traceEvents"]]
    assert names.count("aten::addmm") == 9 * overheads.TRACED_STEPS


def test_a_trace_for_which_there_is_no_room_is_told():
    from costmodel.measure.overhead_suite import traced_seconds

    one = torch.ones(1)
    with pytest.raises(OutputError, match="/dev/full: cannot be written .*No space left"):
        traced_seconds(lambda: one.add_(1), CPU, 1, Path("/dev/full"))


def write_measured(directory, operators, seconds):
    folder = directory / "toy-gpu" / "measured"
    folder.mkdir(parents=True)
    with gzip.open(folder / "kernels.csv.gz", "wt", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, restval="")
        writer.writeheader()
        for operator, value in zip(operators, seconds, strict=True):
            writer.writerow({"operator": json.dumps(to_record(operator)), "median_s": value})
        writer.writerow({"operator": json.dumps(to_record(operators[0])), "error": "out of memory"})


def test_measured_tables_are_read_by_family(tmp_path):
    operators = [Gemm(1, 8, 8, 8), Gemm(2, 8, 8, 8), Gemm(1, 8, 8, 8, "bfloat16"), Elementwise("relu", 9), CONV]
    write_measured(tmp_path, [*operators, MemoryCopy(8)], [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3])
    tables = {table.name: table for table in read_measured(tmp_path)}
    assert set(tables) == {"linear", "bmm", "gemm-bf16", "add", "conv"}
    assert tables["bmm"].machine == "toy-gpu" and tables["linear"].operators == (operators[0],)
    assert tables["add"].seconds.tolist() == [4e-3]


def test_a_malformed_measured_table_is_named(tmp_path):
    write_measured(tmp_path, [CONV], [0.0])
    with pytest.raises(InputError, match="not above zero"):
        list(read_measured(tmp_path))
    (tmp_path / "toy-gpu" / "measured" / "kernels.csv.gz").write_bytes(b"not gzip")
    with pytest.raises(InputError, match=r"kernels\.csv\.gz: not a table of"):
        list(read_measured(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "kernel", "--device", "cpu"], "choose one of kernels, overheads, "),
        (["--suite", "kernels", "--device", "meta"], "only cuda"),
        (["--suite", "kernels", "--device", "cuda:99"], "CUDA devices"),
        (["--suite", "overheads", "--device", "cpu", "--minutes", "0"], "above zero"),
    ],
)
def test_bad_arguments_are_one_line_and_status_two(capsys, tmp_path, arguments, words):
    assert main(["measure", *arguments, "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_the_command_writes_the_table_and_resumes_it(capsys, tmp_path):
    command = ["measure", "--suite", "kernels", "--device", "cpu", "--minutes", "0.02", "-o", str(tmp_path)]
    assert main(command) == 0
    first = (tmp_path / "kernels.csv").read_text()
    assert rows_of(tmp_path / "kernels.csv") and "operators measured" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert (tmp_path / "kernels.csv").read_text().startswith(first)


def test_an_operand_that_is_broadcast_is_measured_over_the_whole_other():
    drawn = [case.operator for case in itertools.islice(kernel_cases(1 << 22), 400) if case.family == "elementwise"]
    cases = [each for each in drawn if each.broadcast_elements]
    assert cases and len(cases) < len(drawn)
    for each in cases:
        assert each.one_by_one and each.elements % each.broadcast_elements == 0
        assert make_call(each, CPU)().numel() == each.elements
