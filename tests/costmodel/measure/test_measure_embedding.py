"""The embedding suite on CPU tensors: cases, draws, calls, rows, and how a fitted model would read them."""

# ruff: noqa: E402

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from costmodel.commands.cli import main
from costmodel.gpu.families.lookups import LookupKernels
from costmodel.measure.kernel_suite import LOOKUPS, kernel_cases, measure_kernels
from costmodel.measure.operator_calls import draw_indices, make_call
from costmodel.measure.runs import TimeBudget
from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.layers import element_bytes
from costmodel.operators.lookups import EmbeddingLookup, TableLookup, zipf
from lab.data.kernel_table import read_measured
from lab.fit.kernels import FAMILIES

CPU = torch.device("cpu")


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
    cases = list(islice(kernel_cases(largest, LOOKUPS), 140))
    operators = [case.operator for case in cases]
    assert len(set(operators)) == 140
    for kind, (_, weight) in LOOKUPS.items():
        assert sum(case.family == kind for case in cases) == pytest.approx(20 * weight, abs=1)
    for operator in operators:
        assert from_record(json.loads(json.dumps(to_record(operator)))) == operator
        assert LookupKernels().covers(operator)
        ((table, _),) = operator.parts
        assert table.bags * table.dim * element_bytes(table.dtype) <= largest
        assert table.rows * table.dim * element_bytes(table.dtype) <= 4 * largest
        assert table.indices >= table.bags > 0
    backward = [each for each in operators if each.direction == "backward"]
    assert {each.gradient for each in backward} == {"dense", "sparse"}
    assert {each.mode for each in operators} == {"sum", "mean", "max"}


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
    operator = dataclasses.replace(BAG, **changes)
    result = make_call(operator, CPU)()
    result = result[0] if operator.direction == "backward" else result
    assert tuple(result.shape) == shape and result.is_sparse == (operator.gradient == "sparse")
    dense = result.to_dense() if result.is_sparse else result
    assert dense.float().abs().sum() > 0


def test_its_table_is_what_fit_reads(tmp_path):
    path = measure_kernels(CPU, tmp_path / "out", TimeBudget(1), False, str, "embedding", most=4)
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 4 and not any(row["error"] for row in rows)
    folder = tmp_path / "toy-gpu" / "measured"
    folder.mkdir(parents=True)
    with gzip.open(folder / "embedding.csv.gz", "wb") as stream:
        stream.write(path.read_bytes())
    (table,) = read_measured(tmp_path)
    assert table.name == "embedding" and len(table.operators) == 4 and isinstance(FAMILIES[table.name], LookupKernels)


def test_the_command_writes_it(tmp_path, capsys):
    command = ["measure", "--suite", "embedding", "--device", "cpu", "--minutes", "0.01", "-o", str(tmp_path)]
    assert main(command) == 0 and "operators measured" in capsys.readouterr().err
    assert (tmp_path / "embedding.csv").read_text().count("\n") > 1
