"""Physics of embedding kernels on a toy GPU, and against the kernels of a recorded run."""

from __future__ import annotations

import dataclasses
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.base.errors import InputError
from costmodel.gpu import gpu_cost_model
from costmodel.gpu.families.lookups import LookupKernels, entries_of, reuse_of, stages_of
from costmodel.machines.machine_file import load_machine
from costmodel.operators.lookups import EmbeddingLookup, IndexStatistics, TableLookup, zipf
from lab.bench.unseen_kernels import FILE, MACHINE, read_dlrm_trace
from lab.data.data_folder import data_folder

DATA = data_folder()
A100 = load_machine("a100-sxm-80gb")
ONE_ROW = IndexStatistics(10**6, (1.0,), (1.0,))


@pytest.fixture
def price(toy_gpu, tmp_path):
    """Estimates on the toy GPU, latency 1 ms in DRAM and a tenth in L2, 1 s per launch if asked for."""

    def estimate(operator: EmbeddingLookup, floor: float = 0.0):
        l2, dram = toy_gpu.memory
        memory = (dataclasses.replace(l2, latency_seconds=1e-4), dataclasses.replace(dram, latency_seconds=1e-3))
        region = dataclasses.replace(toy_gpu.parallel_region, seconds=type(dram.bandwidth)(((1, floor),)))
        machine = dataclasses.replace(toy_gpu, memory=memory, parallel_region=region)
        return gpu_cost_model(machine, tmp_path).estimate([operator])[0]

    return estimate


LOOKUP = EmbeddingLookup(10**6, 64, 10**5, 10**3, unique_rows=10**5, kernel="table_batched")


def test_traffic_of_a_forward_pass(price):
    found = price(LOOKUP).breakdown
    # rows of 256 B and a sector more, outputs, indices and offsets at 1e6 B/s; rows in L2 at 1e7 B/s
    assert found["memory:DRAM_seconds"] == pytest.approx((10**5 * 288 + 10**3 * 256 + 8e5 + 8e3) / 1e6)
    assert found["memory:L2_seconds"] == pytest.approx((10**5 * 256 + 10**3 * 256 + 8e5 + 8e3) / 1e7)
    assert found["launch_seconds"] == pytest.approx(4e-3)  # four loads in a row


def test_a_row_that_all_look_up_is_fetched_once(price):
    same = dataclasses.replace(LOOKUP, unique_rows=None, statistics=ONE_ROW)
    assert price(same).breakdown["memory:DRAM_seconds"] == pytest.approx(
        (288 + 10**3 * 256 + 8e5 + 8e3) / 1e6, rel=1e-3
    )
    # each of the ten multiprocessors fetches it once from L2
    assert price(same).breakdown["memory:L2_seconds"] == pytest.approx((2560 + 10**3 * 256 + 8e5 + 8e3) / 1e7, rel=1e-3)
    assert price(same).seconds < price(LOOKUP).seconds / 10


@pytest.mark.parametrize(
    ("dim", "dtype", "size"),
    [
        (64, "float32", 256 + 32),
        (8, "float32", 64 + 32),
        (3, "float32", 12 + 60 + 32),
        (48, "float16", 96 + 32 + 32),
        (48, "int8", 48 + 8 + 56 + 32),  # 8 B of scale and bias
    ],
)
def test_rows_move_whole_units_of_dram(price, dim, dtype, size):
    """Units of 64 B: a row of 12 B at a multiple of 12 B touches (12 + 60) / 64 of them on average; and a sector.

    Pooled values are FP32 whatever the rows are.
    """
    lookup = dataclasses.replace(LOOKUP, dim=dim, dtype=dtype, bags=10**5)
    expected = (10**5 * (size + 4 * dim + 16)) / 1e6
    assert price(lookup).breakdown["memory:DRAM_seconds"] == pytest.approx(expected)


def test_a_long_bag_waits_for_row_after_row(price):
    few = EmbeddingLookup(10**6, 1, 200, 2, unique_rows=200, kernel="table_batched")
    # 100 rows, 1 ms each; PyTorch's bags have four on the way, and load their numbers from L2 before
    assert price(few).seconds == pytest.approx(4e-3 + 0.1, rel=0.01)
    assert price(dataclasses.replace(few, kernel="embedding_bag")).seconds == pytest.approx(4e-3 + 0.0275, rel=0.01)
    assert price(few).bound == "longest"


def test_tables_of_one_kernel_share_its_launch(price):
    part = TableLookup(10**6, 64, 10**5, 10**3)
    one, two = EmbeddingLookup.of([part]), EmbeddingLookup.of([part, part])
    alike = EmbeddingLookup(10**6, 64, 10**5, 10**3, tables=2)
    assert price(two, floor=1.0).seconds - 1 == pytest.approx(2 * (price(one, floor=1.0).seconds - 1), rel=1e-3)
    assert price(alike).seconds == pytest.approx(price(two).seconds)
    mixed = EmbeddingLookup.of([part, TableLookup(10**3, 16, 10**4, 10**3, "float16", zipf(10**3, 1.0))])
    assert price(one).seconds < price(mixed).seconds < price(two).seconds
    assert hash(mixed) == hash(dataclasses.replace(mixed))


def backward(**changes) -> EmbeddingLookup:
    whole = dataclasses.replace(LOOKUP, direction="backward", whole_pass=True, unique_rows=None)
    return dataclasses.replace(whole, **changes)


def test_an_update_reads_gradients_and_reads_and_writes_rows_and_state(price):
    update = backward(fused_optimizer="sgd", unique_rows=10, whole_pass=False, indices=10, bags=10)
    # 10 gradients, 10 rows read and written, 10 x (8 + 12) B of lists
    assert price(update).breakdown["memory:DRAM_seconds"] == pytest.approx((3 * 10 * 288 + 200) / 1e6)
    adagrad = dataclasses.replace(update, fused_optimizer="rowwise_adagrad")
    assert price(adagrad).breakdown["memory:DRAM_seconds"] == pytest.approx((3 * 10 * 288 + 200 + 10 * 2 * 96) / 1e6)
    adam = dataclasses.replace(update, fused_optimizer="adam")
    assert price(adam).breakdown["memory:DRAM_seconds"] == pytest.approx((3 * 10 * 288 + 200 + 10 * 8 * 2 * 64) / 1e6)


def test_gradients_of_bags_are_fp32_where_rows_are_not(price):
    update = backward(fused_optimizer="sgd", unique_rows=10, whole_pass=False, indices=10, bags=10, dtype="float16")
    # 10 gradients of 256 B, 10 rows of 128 B read and written
    assert price(update).breakdown["memory:DRAM_seconds"] == pytest.approx((10 * 288 + 2 * 10 * 160 + 200) / 1e6)
    quantised = dataclasses.replace(update, dtype="int8")  # 72 B: 72 + 64 - 8
    assert price(quantised).breakdown["memory:DRAM_seconds"] == pytest.approx((10 * 288 + 2 * 10 * 160 + 200) / 1e6)


def test_launches_of_whole_backward_passes(price):
    """One second each: those of FBGEMM's pass, of PyTorch's with and without a sort, and of a sparse gradient."""
    launches = {
        "table_batched": (backward(fused_optimizer="sgd", indices=100, bags=100), 1 + 1 + 4 + 3),
        "bag": (backward(kernel="embedding_bag", indices=200, bags=100), 1 + 1 + 9),
        "few": (backward(kernel="embedding", indices=100, bags=100), 1 + 1),
        "many": (backward(kernel="embedding", indices=4000, bags=4000), 1 + (8 + 2) + 9),
        "sparse bag": (backward(kernel="embedding_bag", gradient="sparse", indices=200, bags=100), 1),
        "sparse": (backward(kernel="embedding", gradient="sparse", indices=100, bags=100), 0),
        "maximum": (backward(kernel="embedding_bag", mode="max", indices=200, bags=100), 1 + 1),
    }
    for name, (operator, count) in launches.items():
        slower = price(operator, floor=1.0).seconds - price(operator).seconds
        assert slower == pytest.approx(count), name


def test_a_gather_starts_a_block_for_every_row_or_4_kib_of_it():
    """160 cycles from block to block on each of 132 multiprocessors."""
    h200 = load_machine("h200-sxm")
    for dim, blocks in ((16, 1), (1024, 1), (1025, 2)):
        entries = entries_of([EmbeddingLookup(1000, dim, 10**6, 10**6)])
        (waiting,) = stages_of(entries, reuse_of(entries, h200), h200)[0].waiting
        assert waiting == pytest.approx(blocks * 1e6 * 160 / (132 * 1.98e9)), dim


def test_a_gradient_with_a_sort_waits_for_the_lookups_of_ten_at_a_time():
    """One block of 1,024 threads for ten lookups of a row, two at once on each of 132 multiprocessors; loads in L2."""
    h200 = load_machine("h200-sxm")
    near, far = (each.latency_seconds for each in h200.memory)
    operator = EmbeddingLookup(1000, 1024, 10**6, 10, direction="backward", kernel="embedding_bag")
    entries = entries_of([operator])
    waiting = max(float(each.waiting[0]) for each in stages_of(entries, reuse_of(entries, h200), h200))
    sums = 1e5 + 500
    summing = 2 * far + 1e6 / sums * 3 * near  # place, bag, gradient
    adding = 2 * far + sums / 1000 / 4 * near
    assert waiting == pytest.approx((sums * summing + 1000 * adding) / 264, rel=0.01)


@pytest.mark.parametrize(
    ("rows", "dim", "indices", "bags", "microseconds"),
    [(1632, 16, 2206700, 22067, 604), (3356, 768, 37307, 37307, 203), (98280, 1024, 2920, 292, 225)],
)
def test_gradients_measured_on_h200(rows, dim, indices, bags, microseconds):
    whole = EmbeddingLookup(rows, dim, indices, bags, direction="backward", whole_pass=True)
    (found,) = gpu_cost_model(load_machine("h200-sxm")).estimate([whole])
    assert found.seconds == pytest.approx(microseconds * 1e-6, rel=0.25)


def test_a_dense_gradient_is_cleared_and_a_sparse_one_is_not(price):
    dense = backward(kernel="embedding_bag", indices=200, bags=100)
    assert price(dense).seconds > 10**6 * 256 / 1e6
    assert price(dataclasses.replace(dense, gradient="sparse")).seconds < 1


def test_a_long_run_of_one_row_is_split():
    """Beyond 1,024 lookups of one row, more of them make no longer chain."""
    chains = []
    for lookups in (16, 1024, 4096, 10**6):
        entries = entries_of([backward(fused_optimizer="sgd", indices=lookups, bags=lookups, statistics=ONE_ROW)])
        stages = stages_of(entries, reuse_of(entries, A100), A100)
        chains.append(max(float(each.longest[0]) for each in stages))
    assert chains[0] < chains[1] and chains[3] <= chains[1] * 1.3


lookups_of = st.builds(
    lambda rows, dim, bags, pooling, dtype, exponent: TableLookup(
        rows, dim, bags * pooling, bags, dtype, None if exponent is None else zipf(rows, exponent)
    ),
    rows=st.integers(2, 10**7),
    dim=st.integers(1, 1024),
    bags=st.just(512),
    pooling=st.integers(1, 100),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    exponent=st.one_of(st.none(), st.floats(0.1, 1.5)),
)


@settings(max_examples=40, deadline=None)
@given(
    tables=st.lists(lookups_of, min_size=1, max_size=6),
    more=lookups_of,
    way=st.sampled_from([("forward", "", False), ("backward", "sgd", True), ("backward", "rowwise_adagrad", False)]),
)
def test_another_table_never_makes_a_kernel_faster(tables, more, way):
    some, all_ = (
        LookupKernels()
        .analyse([EmbeddingLookup.of(tables, *way), EmbeddingLookup.of([*tables, more], *way)], A100)
        .seconds
    )
    assert 0 < some <= all_ * (1 + 1e-9)


@pytest.mark.skipif(not (DATA / FILE).exists(), reason=f"{DATA / FILE} (public profiles) is absent")
def test_kernels_of_the_recorded_run():
    """Forward from published latencies alone; backward with indices taken for even, which the run's are not."""
    machine, ranks = load_machine(MACHINE), read_dlrm_trace(DATA)
    forward = LookupKernels().analyse([each.operator("forward") for each in ranks], machine).seconds
    assert error(forward, [each.forward for each in ranks]) < 0.12
    entries = entries_of([each.operator("backward") for each in ranks])
    stages = [each.seconds(entries) for each in stages_of(entries, reuse_of(entries, machine), machine)]
    assert error(stages[2], [each.linearize for each in ranks]) < 0.2
    assert error(stages[3], [each.sort for each in ranks]) < 0.15
    assert error(np.sum(stages, axis=0), [each.backward for each in ranks]) < 0.28
    # the longest forward kernel, 100 lookups one after the other, and the shortest
    assert np.argmax(forward) == np.argmax([each.forward for each in ranks]) == 3


@pytest.mark.skipif(not (DATA / FILE).exists(), reason=f"{DATA / FILE} (public profiles) is absent")
def test_the_least_skew_that_the_recorded_run_shows_explains_its_backward_pass():
    """Its kernel for rows looked up more than 32 times has work on every rank: one such row in every table."""
    machine, ranks = load_machine(MACHINE), read_dlrm_trace(DATA)
    ranks = tuple(
        dataclasses.replace(rank, tables=tuple(with_popular_row(each, 33) for each in rank.tables)) for rank in ranks
    )
    forward, backward = (
        LookupKernels().analyse([each.operator(way) for each in ranks], machine).seconds
        for way in ("forward", "backward")
    )
    assert error(forward, [each.forward for each in ranks]) < 0.10
    assert error(backward, [each.backward for each in ranks]) < 0.10


def with_popular_row(table: TableLookup, count: int) -> TableLookup:
    """``count`` lookups, or an even share if that is more, go to one row, the rest to the others."""
    share = max(count / table.indices, 1 / table.rows)
    found = IndexStatistics(table.rows, (1.0, table.rows - 1.0), (share, 1 - share))
    return dataclasses.replace(table, statistics=found)


def error(predicted: np.ndarray, measured: list[float]) -> float:
    """Mean absolute percentage error."""
    return float(np.mean(np.abs(predicted / np.array(measured) - 1)))


def test_profiles_that_are_none_are_named(tmp_path):
    with pytest.raises(InputError, match=r"dlrm_kineto\.tar\.gz: cannot be read"):
        read_dlrm_trace(tmp_path)
    path = tmp_path / FILE
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("worker0_x.json"))
    with pytest.raises(InputError, match="not the profiles of the eight ranks"):
        read_dlrm_trace(tmp_path)
