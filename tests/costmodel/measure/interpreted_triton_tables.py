"""The table-batched Triton kernels, interpreted on the CPU, against NumPy: one row after the other.

Run by test_triton_tables.py in a process of its own, with TRITON_INTERPRET=1 from its start.
"""

# ruff: noqa: E402

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from costmodel.measure import embedding_calls, triton_tables
from costmodel.measure.embedding_calls import EPSILON, RATE, TableBatch
from costmodel.operators.lookups import (
    TableLookup,
    zipf,
)

CPU = torch.device("cpu")
MIXED = (TableLookup(7, 5, 12, 4), TableLookup(40, 16, 4, 4), TableLookup(3, 20, 21, 4, statistics=zipf(3, 1.0)))


def pieces(batch: TableBatch, tables):
    """Weights, lookups by bag, column of each table, as NumPy."""
    weights, lookups = batch.weights.float().numpy().copy(), batch.indices.numpy()
    offsets, start, column = batch.offsets.numpy(), 0, 0
    for place, table in enumerate(tables):
        rows = weights[start : start + table.rows * table.dim].reshape(table.rows, table.dim)
        bags = [
            lookups[offsets[place * table.bags + bag] : offsets[place * table.bags + bag + 1]]
            for bag in range(table.bags)
        ]
        yield rows, bags, slice(column, column + table.dim)
        start, column = start + table.rows * table.dim, column + table.dim


def updated(batch: TableBatch, tables, adagrad: bool):
    """Rows and state after one step, in double precision."""
    gradient, results, states = batch.gradient.double().numpy(), [], []
    for rows, bags, columns in pieces(batch, tables):
        rows, total = rows.astype(float), np.zeros(rows.shape)
        for bag, lookups in enumerate(bags):
            for row in lookups:
                total[row] += gradient[bag, columns]
        touched = np.unique(np.concatenate(bags))
        state = np.zeros(len(rows))
        state[touched] = (total[touched] ** 2).mean(axis=1)
        scale = np.sqrt(state[touched])[:, None] + EPSILON if adagrad else 1.0
        rows[touched] -= RATE * total[touched] / scale
        results.append(rows.ravel())
        states.append(state)
    return np.concatenate(results), np.concatenate(states)


def test_forward_sums_the_rows_of_every_bag_and_table():
    torch.manual_seed(0)
    batch = TableBatch(MIXED, CPU)
    output = batch.forward().numpy()
    assert output.shape == (4, 41)
    for rows, bags, columns in pieces(batch, MIXED):
        expected = np.stack([rows[lookups].sum(axis=0) for lookups in bags])
        np.testing.assert_allclose(output[:, columns], expected, rtol=1e-5, atol=1e-5)


def test_forward_is_torchs_embedding_bag_in_half_precision():
    torch.manual_seed(1)
    table = TableLookup(50, 32, 60, 6, "float16")
    batch = TableBatch([table], CPU)
    weight = batch.weights.view(50, 32).float()
    expected = torch.nn.functional.embedding_bag(batch.indices, weight, batch.offsets[:-1], mode="sum")
    torch.testing.assert_close(batch.forward(), expected)  # FP32, as the sums are


@pytest.mark.parametrize("adagrad", [False, True])
@pytest.mark.parametrize("longest", [2, 1024])
def test_backward_updates_every_row_once(monkeypatch, adagrad, longest):
    """Rows of more lookups than a program takes (2 here) are summed by several and updated by a second kernel."""
    monkeypatch.setattr(triton_tables, "SPLIT", longest)
    torch.manual_seed(2)
    batch = TableBatch(MIXED, CPU)
    rows, state = updated(batch, MIXED, adagrad)
    batch.backward("rowwise_adagrad" if adagrad else "sgd")
    np.testing.assert_allclose(batch.weights.numpy(), rows, rtol=1e-4, atol=1e-5)
    if adagrad:
        np.testing.assert_allclose(batch.state.numpy(), state, rtol=1e-4)
    else:
        assert not batch.state.any()


def test_uneven_bags_and_given_lookups():
    table = TableLookup(10, 4, 5, 3)
    batch = TableBatch([table], CPU, indices=torch.tensor([9, 9, 1, 2, 9]))
    assert batch.lengths.tolist() == [2, 2, 1] and batch.offsets.tolist() == [0, 2, 4, 5]
    rows, _ = updated(batch, [table], adagrad=False)
    batch.backward("sgd")
    np.testing.assert_allclose(batch.weights.numpy(), rows, rtol=1e-5)


def test_they_are_measured_on_gpus_alone():
    assert not embedding_calls.triton_runs_on(CPU)
