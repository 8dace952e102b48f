"""Tables as data, their file, and what each costs: the fast path against the models that price one operator."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from costmodel.base.errors import InputError, MachineError
from costmodel.gpu import gpu_cost_model
from costmodel.gpu.embedding_tables import EmbeddingTable, load_statistics, read_table_file
from costmodel.gpu.families.lookups import LookupKernels
from costmodel.gpu.fitted import Fitted, write_fitted
from costmodel.gpu.table_costs import table_seconds
from costmodel.machines.machine_file import load_machine
from costmodel.operators.lookups import EmbeddingLookup, TableLookup, uniform, zipf
from lab.fit.trees import train

A100 = load_machine("a100-sxm-80gb")
FILE = """
origin: a test
defaults: {dim: 64, pooling: 20, dtype: float16}
tables:
  - {name: user, rows: 1000, dim: 128, pooling: 1.5, optimizer: rowwise_adagrad}
  - {name: history, rows: 500, distribution: {zipf: 1.05}}
  - {name: item, rows: 300, count: 2, dtype: float32, distribution: uniform}
  - {name: page, rows: 200, distribution: {indices: batches.npz}}
model: {bottom: [512, 64]}
"""


def table(**changes) -> EmbeddingTable:
    return dataclasses.replace(EmbeddingTable("t", 10**6, 64, 20.0), **changes)


def lookup(each: EmbeddingTable, batch: int, direction: str) -> EmbeddingLookup:
    sizes = (each.rows, each.dim, each.indices(batch), batch)
    backward = direction == "backward"
    return EmbeddingLookup(
        *sizes,
        dtype=each.dtype,
        direction=direction,
        fused_optimizer=each.optimizer if backward else "",
        statistics=each.statistics,
        kernel="table_batched",
        whole_pass=backward,
    )


def test_sizes_of_a_table():
    small = table(rows=10, dim=4, dtype="float16", optimizer="rowwise_adagrad")
    assert (small.weight_bytes, small.optimizer_bytes, small.indices(3)) == (80, 40, 60)
    assert table(rows=10, dim=4, optimizer="adam").optimizer_bytes == 10 * 4 * 2 * 4
    assert small.popularity() == uniform(10)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 0}, "above zero"),
        ({"pooling": 0.0}, "above zero"),
        ({"dtype": "float8"}, "float8"),
        ({"optimizer": "lamb"}, "lamb"),
        ({"statistics": uniform(5)}, "statistics of 5 rows"),
    ],
)
def test_tables_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        table(**changes)


def test_the_file_lists_tables_with_defaults_counts_and_statistics(tmp_path):
    np.savez(tmp_path / "batches.npz", **{"page.indices": np.arange(60) % 7, "page.rows": 190})
    path = tmp_path / "tables.yaml"
    path.write_text(FILE)
    user, history, item, other, page = read_table_file(path).tables
    assert (user.dim, user.pooling, user.optimizer, user.statistics) == (128, 1.5, "rowwise_adagrad", None)
    assert (history.dim, history.pooling, history.dtype, history.statistics) == (64, 20.0, "float16", zipf(500, 1.05))
    assert (item.name, other.name, other.dtype) == ("item_0", "item_1", "float32")
    known = load_statistics(tmp_path / "batches.npz")["page"]
    assert page.statistics == dataclasses.replace(known, rows=200) and known.rows == 190
    file = read_table_file(path)
    assert file.origin == "a test" and file.model == {"bottom": [512, 64]}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("origin: a test", "", "origin: missing; add it"),
        ("rows: 1000,", "rows: 1000, colour: red,", r"tables\.0\.colour: unknown key"),
        ("rows: 1000,", "rows: many,", r"tables\.0\.rows"),
        ("rows: 1000,", f"rows: {10**30},", r"tables\.0\.rows.*less than or equal to"),
        ("count: 2", "count: 2000000000", r"count.*less than or equal to 100000"),
        ("pooling: 20, ", "", "pooling is missing; add it"),
        ("{zipf: 1.05}", "{zipf: -1}", "zipf"),
        ("{zipf: 1.05}", "{zipf: 1, indices: a.npz}", "give uniform"),
        ("name: history", "name: user", "two tables have the name 'user'"),
        ("batches.npz", "absent.npz", r"absent\.npz: cannot be read"),
        ("name: page", "name: leaf", "has no indices of it"),
        ("rows: 200", "rows: 189", "page: has indices of 190 rows, the table has 189"),
        ("tables:", "tables: [", "not valid YAML"),
    ],
)
def test_mistakes_are_one_line_that_names_file_and_key(tmp_path, old, new, words):
    np.savez(tmp_path / "batches.npz", **{"page.indices": np.arange(60) % 7, "page.rows": 190})
    path = tmp_path / "tables.yaml"
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(InputError, match=words) as caught:
        read_table_file(path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def random_tables(count: int, seed: int = 0) -> list[EmbeddingTable]:
    rng = np.random.default_rng(seed)
    tables = []
    for place in range(count):
        rows, dim = int(10 ** rng.uniform(1, 7.5)), int(rng.choice([4, 16, 30, 64, 128, 256]))
        statistics = zipf(rows, float(rng.uniform(0.5, 1.4))) if place % 2 else None
        dtype, optimizer = str(rng.choice(["float32", "float16"])), str(rng.choice(["sgd", "rowwise_adagrad", "adam"]))
        tables.append(
            EmbeddingTable(f"t{place}", rows, dim, float(rng.integers(1, 60)), dtype, statistics, optimizer)  # type: ignore[arg-type]
        )
    return tables


def test_alone_is_what_the_model_of_one_operator_says():
    tables = random_tables(40)
    batches = np.random.default_rng(1).integers(1, 20_000, 40)
    found, model = table_seconds(tables, batches, A100), gpu_cost_model(A100)
    for direction, alone in (("forward", found.forward_alone), ("backward", found.backward_alone)):
        records = [lookup(each, int(batch), direction) for each, batch in zip(tables, batches, strict=True)]
        assert alone == pytest.approx([each.seconds for each in model.estimate(records)], rel=1e-9)


def test_many_tables_in_one_kernel_cost_the_sum_and_one_launch():
    tables = [dataclasses.replace(each, optimizer="sgd") for each in random_tables(30, seed=2)]
    parts = [TableLookup(t.rows, t.dim, t.indices(8192), 8192, t.dtype, t.statistics) for t in tables]
    found = table_seconds(tables, 8192, A100)
    records = [EmbeddingLookup.of(parts), EmbeddingLookup.of(parts, "backward", "sgd", whole_pass=True)]
    forward, backward = (each.seconds for each in gpu_cost_model(A100).estimate(records))
    assert found.kernel(range(30))[0] == pytest.approx(forward, rel=1e-6)
    assert found.kernel(np.arange(30))[1] == pytest.approx(backward, rel=1e-6)
    assert found.kernel(range(30))[0] >= (found.forward.sum() + found.forward_launch) * (1 - 1e-12)  # rounding
    assert found.kernel([3])[0] == pytest.approx(found.forward_alone[3])
    assert found.kernel([]) == (0.0, 0.0)
    assert found.at([4, 4]).forward.tolist() == [found.forward[4]] * 2 and found.at([4]).kernel([0]) == found.kernel(
        [4]
    )


def test_no_tables_and_no_gpu():
    assert table_seconds([], 8, A100).kernel([]) == (0.0, 0.0)
    with pytest.raises(MachineError, match="is no GPU"):
        table_seconds([table()], 8, load_machine("toy"))


def test_what_is_learned_from_a_measured_table_prices_both_ways(tmp_path):
    """An invented table of kernels half as fast as the analytic model: fitted, it is met by the fast path too."""
    pytest.importorskip("xgboost")
    family, tables = LookupKernels(), random_tables(200, seed=4)
    records = [lookup(each, 2048, way) for each in tables for way in ("forward", "backward")]
    assert all(family.covers(each) for each in records)
    assert not family.covers(dataclasses.replace(records[1], whole_pass=False))
    analysis = family.analyse(records, A100)
    residual = train(analysis.features, np.full(len(records), np.log(2.0)), np.arange(len(records)) % 5 == 0)
    write_fitted(Fitted(A100.name, "ampere", False, {"embedding": residual}, {}), tmp_path)
    estimates = gpu_cost_model(A100, tmp_path).estimate(records)
    assert estimates[0].source == "fitted"
    assert [each.seconds for each in estimates] == pytest.approx(2 * analysis.seconds, rel=0.02)
    found = table_seconds(tables, 2048, A100, tmp_path)
    assert found.forward_alone == pytest.approx([each.seconds for each in estimates[::2]], rel=1e-6)
    assert found.backward_alone == pytest.approx([each.seconds for each in estimates[1::2]], rel=1e-6)
