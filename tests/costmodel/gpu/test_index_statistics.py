"""Statistics of lookups against draws: distinct rows, reuse factors, LRU hits; from batches and exponents."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.base.errors import InputError
from costmodel.gpu.embedding_tables import (
    CountBin,
    IndexBatch,
    load_batches,
    load_statistics,
    statistics_of_batch,
    statistics_of_counts,
)
from costmodel.operators.lookups import REUSE_EDGES, IndexStatistics, uniform, zipf


def chances(statistics: IndexStatistics) -> np.ndarray:
    """Probability of every row; groups of whole numbers of rows."""
    sizes = np.array(statistics.group_rows).round().astype(int)
    return np.repeat(np.array(statistics.group_shares) / sizes, sizes)


def draw(statistics: IndexStatistics, lookups: int, seed: int = 0) -> np.ndarray:
    probability = chances(statistics)
    return np.random.default_rng(seed).choice(len(probability), lookups, p=probability / probability.sum())


def lru_hits(indices: np.ndarray, cache_rows: int) -> int:
    """Hits of an LRU cache that starts empty, one lookup after the other."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in indices.tolist():
        if row in cache:
            hits += 1
            cache.move_to_end(row)
            continue
        cache[row] = None
        if len(cache) > cache_rows:
            cache.popitem(last=False)
    return hits


def bin_shares(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of the distinct rows and of the lookups by reuse factor, counted."""
    counts = np.unique(indices, return_counts=True)[1]
    edges = np.array([*REUSE_EDGES[:-1], 1e18]) + 0.5
    rows = np.histogram(counts, edges)[0]
    lookups = np.histogram(counts, edges, weights=counts)[0]
    return rows / rows.sum(), lookups / lookups.sum()


def test_mental_arithmetic():
    two = uniform(2)
    assert two.unique_rows(1) == pytest.approx(1) and two.unique_rows(2) == pytest.approx(1.5)
    assert two.hit_rate(2, cache_rows=2) == pytest.approx(0.25)  # the second lookup is the first's row half the time
    # a cache of one row out of ten: all but the first lookup hit with one chance in ten
    assert uniform(10).misses(101, cache_rows=1) == pytest.approx(1 + 100 * 0.9, rel=0.01)
    one_row = IndexStatistics(100, (1.0,), (1.0,))
    assert one_row.unique_rows(50) == pytest.approx(1) and one_row.hit_rate(50, 1) == pytest.approx(0.98)


def test_zipf_of_three_rows_and_of_exponent_zero():
    three = zipf(3, 1.0)
    assert three.group_rows == (1.0, 1.0, 1.0)
    assert three.group_shares == pytest.approx((6 / 11, 3 / 11, 2 / 11))
    assert zipf(1000, 0.0).group_shares == (1.0,)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(17, 20_000), exponent=st.floats(0.3, 1.6))
def test_grouped_zipf_is_the_sum_over_ranks(rows, exponent):
    weights = np.arange(1, rows + 1) ** -exponent
    probability = weights / weights.sum()
    grouped = zipf(rows, exponent)
    for lookups in (10, 1000, 100_000):
        exact = (1 - (1 - probability) ** lookups).sum()
        assert grouped.unique_rows(lookups) == pytest.approx(exact, rel=0.01)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(50, 3000),
    exponent=st.floats(0.0, 1.4),
    lookups=st.integers(200, 6000),
    cache=st.integers(5, 1000),
    seed=st.integers(0, 99),
)
def test_hits_and_distinct_rows_of_draws(rows, exponent, lookups, cache, seed):
    statistics = zipf(rows, exponent)
    indices = draw(statistics, lookups, seed)
    noise = 4 / np.sqrt(lookups)
    assert statistics.hit_rate(lookups, cache) == pytest.approx(lru_hits(indices, cache) / lookups, abs=0.01 + noise)
    unique = len(np.unique(indices))
    assert statistics.unique_rows(lookups) == pytest.approx(unique, rel=0.02 + 4 / np.sqrt(unique))


def test_reuse_factors_of_draws():
    statistics = zipf(30_000, 1.1)
    rows, lookups = bin_shares(draw(statistics, 200_000))
    assert statistics.reuse_factors(200_000) == pytest.approx(rows, abs=0.01)
    assert statistics.lookup_shares(200_000) == pytest.approx(lookups, abs=0.02)


# Of a few lookups the approximation of caches is off by up to a fiftieth.
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 10**8), exponent=st.floats(0, 1.5), lookups=st.integers(100, 10**7), cache=st.floats(1, 10**7)
)
def test_bounds_and_order(rows, exponent, lookups, cache):
    statistics = zipf(rows, exponent)
    unique, misses = statistics.unique_rows(lookups), statistics.misses(lookups, cache)
    assert 1 - 1e-6 <= unique <= min(rows, lookups) * (1 + 1e-6)
    assert unique * (1 - 1e-6) <= misses <= lookups * (1 + 1e-6)
    assert statistics.misses(lookups, 2 * cache) <= misses * (1 + 1e-6)
    assert statistics.unique_rows(2 * lookups) >= unique
    assert statistics.reuse_factors(lookups).sum() == pytest.approx(1)
    assert statistics.lookup_shares(lookups).sum() == pytest.approx(1)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.2])
def test_a_batch_predicts_smaller_and_larger_ones(exponent):
    truth = zipf(100_000, exponent)
    indices = draw(truth, 100_000, seed=3)
    found = statistics_of_batch(IndexBatch(indices, np.arange(0, 100_001, 10), 100_000))
    for lookups, tolerance in ((1000, 0.03), (10_000, 0.02), (100_000, 0.01), (400_000, 0.15)):
        assert found.unique_rows(lookups) == pytest.approx(truth.unique_rows(lookups), rel=tolerance), lookups
    for cache in (100, 3000):
        assert found.hit_rate(100_000, cache) == pytest.approx(truth.hit_rate(100_000, cache), abs=0.01)


def test_rows_of_one_batch_that_are_all_different_are_not_all_there_are():
    found = statistics_of_counts([CountBin(0, 1, 1000, 1.0)], 10**6, "")
    assert found.unique_rows(1000) == pytest.approx(1000, rel=0.03)
    assert found.unique_rows(10_000) > 5000


def test_shards_and_stretching_keep_the_shape():
    whole = zipf(100_000, 1.0)
    half = whole.of_row_shard(0.5)
    assert half.rows == 50_000 and half.unique_rows(10**9) == pytest.approx(50_000, rel=1e-3)
    assert 2 * half.unique_rows(5000) == pytest.approx(whole.unique_rows(10_000), rel=1e-3)
    assert whole.resized(200_000).unique_rows(10**9) == pytest.approx(200_000, rel=1e-3)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (((), ()), "at least one row"),
        (((1.0, 2.0), (1.0,)), "as many shares"),
        (((5.0, 0.0), (0.5, 0.5)), "above zero"),
        (((5.0,), (0.7,)), "add up to 0.7"),
        (((50.0,), (1.0,)), "50 rows, the table 10"),
    ],
)
def test_statistics_that_make_no_sense_are_refused(groups, words):
    with pytest.raises(ValueError, match=words):
        IndexStatistics(10, *groups)


def test_batches_are_read_and_their_statistics_kept(tmp_path):
    path = tmp_path / "batch.npz"
    indices = np.array([3, 3, 1, 0, 3, 9])
    np.savez(path, **{"t.indices": indices, "t.offsets": np.array([0, 2, 6]), "u.indices": indices, "u.rows": 20})
    batches = load_batches(path)
    assert batches["t"].rows == 10 and batches["t"].pooling == 3 and batches["t"].offsets.tolist() == [0, 2, 6]
    assert batches["u"].rows == 20 and batches["u"].pooling == 1
    found = load_statistics(path)
    assert found["u"].rows == 20 and found["u"].unique_rows(6) == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"t.rows": np.array(3)}, "no array NAME.indices"),
        ({"t.indices": np.array([0.5])}, "t.indices must be a list of integers"),
        ({"t.indices": np.array([1, 7]), "t.rows": np.array(5)}, "from 0 to 4, found 1, 7"),
        ({"t.indices": np.array([1, 2]), "t.offsets": np.array([0, 5, 2])}, "must ascend from 0"),
    ],
)
def test_malformed_batches_are_named(tmp_path, arrays, words):
    path = tmp_path / "batch.npz"
    np.savez(path, **arrays)
    with pytest.raises(InputError, match=f"{path}.*{words}"):
        load_batches(path)


def test_files_that_are_none_are_named(tmp_path):
    (tmp_path / "a.npz").write_text("no archive")
    for name, words in (("a.npz", "not an .npz of index batches"), ("missing.npz", "cannot be read")):
        with pytest.raises(InputError, match=f"{name}: {words}"):
            load_statistics(tmp_path / name)
