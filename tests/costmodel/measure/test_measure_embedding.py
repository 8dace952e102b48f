"""The embedding suite on CPU tensors: cases, draws, calls, rows, and how a fitted model would read them."""

# ruff: noqa: E402

from __future__ import annotations

import csv
import gzip
import itertools
import json
from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from costmodel.commands.cli import main
from costmodel.gpu.families.lookups import LookupKernels
from costmodel.measure.embedding_calls import (
    draw_indices,
    make_embedding_call,
)
from costmodel.measure.embedding_suite import COLUMNS, DRAWS, embedding_cases, measure_cases, measure_embeddings
from costmodel.measure.kernel_suite import MeasuredCase
from costmodel.measure.runs import (
    Table,
    TimeBudget,
)
from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.layers import element_bytes
from costmodel.operators.lookups import (
    EmbeddingLookup,
    TableLookup,
    zipf,
)
from lab.data.kernel_table import read_measured
from lab.fit.kernels import FAMILIES

CPU = torch.device("cpu")


def quiet(line: str) -> None:
    pass


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_draws_follow_the_statistics():
    torch.manual_seed(0)
    statistics = zipf(5000, 1.1)
    indices = draw_indices(TableLookup(5000, 8, 40_000, 400, statistics=statistics), CPU).numpy()
    assert indices.min() >= 0 and indices.max() < 5000
    counts = np.sort(np.bincount(indices))[::-1]
    assert counts[0] / 40_000 == pytest.approx(statistics.group_shares[0], rel=0.05)
    assert len(np.unique(indices)) == pytest.approx(statistics.unique_rows(40_000), rel=0.02)
    even = draw_indices(TableLookup(64, 8, 10_000, 100), CPU)
    assert sorted(even.unique().tolist()) == list(range(64))


def test_cases_fit_cover_every_kind_and_survive_json():
    largest = 1 << 24
    cases = list(islice(embedding_cases(largest, batched=True), 260))
    operators = [case.operator for case in cases]
    assert len(set(operators)) == 260 and operators == [
        case.operator for case in islice(embedding_cases(largest, batched=True), 260)
    ]
    for kind, (_, weight) in DRAWS.items():
        assert sum(case.family == kind for case in cases) == pytest.approx(20 * weight, abs=1)
    for operator in operators:
        assert from_record(json.loads(json.dumps(to_record(operator)))) == operator
        assert LookupKernels().covers(operator)
        for table, count in operator.parts:
            assert count * table.bags * table.dim * element_bytes(table.dtype) <= largest
            assert table.rows * table.dim * element_bytes(table.dtype) <= 4 * largest
            assert table.indices >= table.bags > 0
    backward = [each for each in operators if each.direction == "backward"]
    assert {each.fused_optimizer for each in backward} == {"", "sgd", "rowwise_adagrad"}
    assert {each.gradient for each in backward} == {"dense", "sparse"}
    assert {each.mode for each in operators} == {"sum", "mean", "max"}
    assert {len(each.mixed) for each in operators} >= {0, 1, 2, 4, 8, 16, 32}
    assert all(case.family != "table_batched" for case in islice(embedding_cases(largest, batched=False), 50))


BAG = EmbeddingLookup(20, 4, 30, 10, statistics=zipf(20, 1.0), kernel="embedding_bag")


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (10, 4)),
        ({"mode": "max"}, (10, 4)),
        ({"mode": "mean", "dtype": "float16"}, (10, 4)),
        ({"kernel": "embedding", "bags": 30}, (30, 4)),
        ({"direction": "backward"}, (20, 4)),
        ({"direction": "backward", "mode": "max"}, (20, 4)),
        ({"direction": "backward", "gradient": "sparse"}, (20, 4)),
        ({"direction": "backward", "kernel": "embedding", "bags": 30, "gradient": "sparse"}, (20, 4)),
    ],
)
def test_calls_of_torch(changes, shape):
    operator = EmbeddingLookup(**{**{name: getattr(BAG, name) for name in BAG.__dataclass_fields__}, **changes})
    call, (lookups,) = make_embedding_call(operator, CPU)
    result = call()
    result = result[0] if operator.direction == "backward" else result
    assert tuple(result.shape) == shape and len(lookups) == 30
    assert result.is_sparse == (operator.gradient == "sparse")
    dense = result.to_dense() if result.is_sparse else result
    assert dense.float().abs().sum() > 0
    if operator.direction == "backward" and operator.mode == "sum":
        untouched = np.setdiff1d(np.arange(20), lookups.numpy())
        assert not dense[untouched].any()


def test_rows_carry_the_statistics_of_their_batch(tmp_path):
    lines: list[str] = []
    path = measure_embeddings(CPU, tmp_path, TimeBudget(1), False, lines.append, most=6)
    rows = rows_of(path)
    assert len(rows) == 6 and not any(row["error"] for row in rows)
    assert "left out" in lines[0] and "6 lookups measured" in lines[-1]
    for row in rows:
        operator = from_record(json.loads(row["operator"]))
        assert int(row["lookups"]) == operator.indices
        shares = [float(share) for share in row["reuse_factors"].split()]
        assert len(shares) == 17 and sum(shares) == pytest.approx(1, abs=1e-3)
        (table, _), unique = operator.parts[0], int(row["unique_rows"])
        assert unique == pytest.approx(table.unique_rows(), rel=0.1, abs=6 * unique**0.5 + 3)
        assert 0 < float(row["minimum_s"]) <= float(row["median_s"])
    origin = json.loads((tmp_path / "embedding.json").read_text())["runs"][0]
    assert origin["triton"] is None and origin["torch"] == torch.__version__


def test_a_case_that_fails_is_a_row_and_the_budget_ends_the_suite(tmp_path):
    broken = MeasuredCase("table_batched", EmbeddingLookup.of([TableLookup(5, 4, 6, 3, "no-such-dtype")]))
    fine = [MeasuredCase("embedding", EmbeddingLookup(20 + place, 4, 3, 3)) for place in range(30)]
    clock = itertools.count(0, 4)
    with Table(tmp_path, "t", COLUMNS, {"device": "toy"}, False) as table:
        measured = measure_cases([broken, *fine], set(), CPU, TimeBudget(1, lambda: next(clock)), table, quiet)
    rows = rows_of(table.path)
    assert "no-such-dtype" in rows[0]["error"] and not rows[0]["median_s"]
    assert 1 < measured == len(rows) < 16 and not rows[1]["error"]


def test_the_table_is_what_fit_reads(tmp_path):
    path = measure_embeddings(CPU, tmp_path / "out", TimeBudget(1), False, quiet, most=4)
    folder = tmp_path / "toy-gpu" / "measured"
    folder.mkdir(parents=True)
    with gzip.open(folder / "embedding.csv.gz", "wb") as stream:
        stream.write(path.read_bytes())
    (table,) = read_measured(tmp_path)
    assert table.name == "embedding" and len(table.operators) == 4 and isinstance(FAMILIES[table.name], LookupKernels)


def test_the_command_resumes(tmp_path, capsys):
    command = ["measure", "--suite", "embedding", "--device", "cpu", "--minutes", "0.01", "-o", str(tmp_path)]
    assert main(command) == 0
    first = (tmp_path / "embedding.csv").read_text()
    assert "left out" in capsys.readouterr().err and len(rows_of(tmp_path / "embedding.csv")) > 0
    assert main([*command, "--resume"]) == 0
    assert (tmp_path / "embedding.csv").read_text().startswith(first)
