from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.families.gemm import (
    ACCUMULATING_SHARE,
    BatchedSimtGemm,
    Products,
    SimtGemm,
    TensorGemm,
    Tile,
    analyse_products,
    gemm_family,
    tile_times,
)
from costmodel.machines.machine_file import load_machine
from costmodel.machines.machine_records import PerThreads
from costmodel.operators.device_work import Gemm

TILE = Tile(100, 100, 1.0, 1)


@pytest.fixture
def fast_memory(toy_gpu):
    """The toy GPU with memories that never limit."""
    levels = tuple(dataclasses.replace(each, bandwidth=PerThreads(((1, 1e15),))) for each in toy_gpu.memory)
    return dataclasses.replace(toy_gpu, memory=levels)


def products(batch, m, n, k, machine, size=4.0):
    shape = [np.array([float(each)]) for each in (batch, m, n, k)]
    return Products(*shape, np.array([size]), np.array([machine.peak_flops("float32", 1)]))


def terms(batch, m, n, k, machine, tile=TILE, splits=(1,)):
    times = tile_times(products(batch, m, n, k, machine), [tile], machine, splits)
    return {field.name: float(getattr(times, field.name)[0, 0]) for field in dataclasses.fields(times)}


def test_arithmetic_is_quantised_by_tiles_and_waves(toy_gpu):
    # A tile with k = 992 + 8 of filling the pipeline: 2 * 100 * 100 * 1000 = 2e7 flops on an SM of 1e8 flop/s.
    wave = 0.2
    assert terms(1, 1000, 100, 992, toy_gpu)["compute"] == pytest.approx(wave)  # ten tiles on ten SMs
    assert terms(1, 1, 1, 992, toy_gpu)["compute"] == pytest.approx(wave)  # one tile, mostly padding
    assert terms(1, 1001, 100, 992, toy_gpu)["compute"] == pytest.approx(2 * wave)  # an eleventh tile
    assert terms(11, 100, 100, 992, toy_gpu)["compute"] == pytest.approx(2 * wave)
    half = Tile(100, 100, 0.5, 1)
    assert terms(1, 1000, 100, 992, toy_gpu, half)["compute"] == pytest.approx(2 * wave)


def test_l2_delivers_both_operands_of_every_tile(toy_gpu):
    # 10 tiles x (100 + 100) x 1000 elements x 4 B / 1e7 B/s
    assert terms(1, 1000, 100, 992, toy_gpu)["l2"] == pytest.approx(10 * 200 * 1000 * 4 / 1e7)


def test_dram_delivers_operands_once_if_they_fit_l2_and_per_wave_if_not(toy_gpu):
    small = terms(1, 100, 100, 500, toy_gpu)["dram"]  # 200 kB x 2 fit half of L2 and are beyond its warm share
    assert small == pytest.approx((2 * 100 * 500 + 100 * 100) * 4 / 1e6)
    # 20 x 20 tiles, 4 x 3 to a wave: 400/12 waves load (4 + 3) x 100 x k
    large = terms(1, 2000, 2000, 1000, toy_gpu)["dram"]
    assert large == pytest.approx((400 / 12 * 700 * 1000 + 2000 * 2000) * 4 / 1e6)


def test_tensors_of_a_tenth_of_l2_are_still_there(toy_gpu):
    assert terms(1, 100, 100, 50, toy_gpu)["dram"] == 0  # 20 kB + 20 kB + 40 kB of 1 MB


def test_overlapping_terms_add_up_in_cubes(toy_gpu):
    each = terms(1, 1000, 100, 992, toy_gpu)
    cubes = each["compute"] ** 3 + each["dram"] ** 3 + each["l2"] ** 3
    assert each["seconds"] == pytest.approx(cubes ** (1 / 3))


def test_split_k_fills_idle_multiprocessors(fast_memory):
    whole = terms(1, 100, 100, 8000, fast_memory)
    split = terms(1, 100, 100, 8000, fast_memory, splits=(1, 2, 4, 8))
    assert whole["split"] == 1 and split["split"] == 8
    assert split["compute"] == pytest.approx(whole["compute"] * 1008 / 8008)
    assert terms(1, 1000, 100, 8000, fast_memory, splits=(1, 2, 4, 8))["split"] == 1  # all SMs are busy anyway


def test_the_fastest_tile_is_taken(fast_memory):
    narrow = Tile(100, 10, 0.5, 1)
    for n, best in ((10, 1), (1000, 0)):
        _, _, features = analyse_products(products(1, 1000, n, 1000, fast_memory), [TILE, narrow], fast_memory)
        assert features["tile"][0] == best


def test_families_by_dtype_and_batch():
    v100, p4 = load_machine("v100-pcie-32gb"), load_machine("p4")
    assert isinstance(gemm_family(Gemm(1, 8, 8, 8), v100), SimtGemm)
    assert isinstance(gemm_family(Gemm(2, 8, 8, 8), v100), BatchedSimtGemm)
    assert isinstance(gemm_family(Gemm(1, 8, 8, 8, "float16"), v100), TensorGemm)
    assert isinstance(gemm_family(Gemm(1, 8, 8, 8, "bfloat16"), v100), SimtGemm)  # no BF16 units on Volta
    assert isinstance(gemm_family(Gemm(1, 8, 8, 8, "float16"), p4), SimtGemm)


def test_a_product_added_to_values_moves_more_and_takes_longer():
    """In full it reads 4 bytes and writes 4 for each element where it wrote 2; a good half of that is not hidden."""
    plain = Gemm(1, 4096, 14336, 4096, "bfloat16", transpose_a=True)
    added, narrow = (dataclasses.replace(plain, accumulates=each) for each in ("float32", "bfloat16"))
    results = 4096 * 14336
    assert added.read_bytes - plain.read_bytes == 4 * results and added.write_bytes == 2 * plain.write_bytes
    assert repr(added) == repr(plain), "splits of tables are drawn by how records are written"
    machine = load_machine("a100-pcie-80gb")
    before, between, after = (TensorGemm().analyse([each], machine).seconds[0] for each in (plain, narrow, added))
    assert between - before == pytest.approx((after - before) / 3, rel=1e-6)
    assert after - before == pytest.approx(ACCUMULATING_SHARE * 6 * results / 1703e9, rel=1e-6)
    assert 0.03 < after / before - 1 < 0.09, "5.8 % of SimuMax's table of this GPU"


@pytest.mark.parametrize(("columns", "share"), [(50256, 1.0), (50258, 0.45), (50257, 0.4)])
def test_rows_of_tf32_are_aligned_by_bytes(columns, share):
    machine = load_machine("a100-sxm-80gb")
    odd, even = (Gemm(1, 16384, each, 768, "tf32", transpose_b=True) for each in (columns, 50304))
    computed = TensorGemm().analyse([odd, even], machine).terms["compute"]
    assert computed[0] == pytest.approx(computed[1] / share, rel=2e-3)


def test_tf32_follows_16_bits_of_twice_the_depth():
    family, machine = TensorGemm(), load_machine("a100-sxm-80gb")
    wide, narrow = Gemm(1, 4096, 2304, 768, "tf32"), Gemm(1, 4096, 2304, 1536, "bfloat16")
    features = family.analyse([wide, narrow], machine).matrix()
    assert features[0] == pytest.approx(features[1])
    assert family.follows(wide) and not family.covers(wide)
    assert not family.follows(dataclasses.replace(wide, batch=2))


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm", "a40"])
def test_memory_bound_products_take_longer_in_tf32_than_in_16_bits(name):
    """Layers of NCF: the tables in 16 bits show what the analytic time of such shapes lacks."""
    model = gpu_cost_model(load_machine(name))
    for n, k in ((256, 256), (256, 128), (64, 128), (128, 64)):
        wide, narrow = model.estimate([Gemm(1, 1 << 20, n, k, each, transpose_b=True) for each in ("tf32", "float16")])
        assert wide.seconds > 1.4 * narrow.seconds


def test_what_was_measured_in_another_dtype_only_is_less_certain():
    model = gpu_cost_model(load_machine("a100-sxm-80gb"))
    wide, narrow = model.estimate([Gemm(1, 4096, 2304, 1024, "tf32"), Gemm(1, 4096, 2304, 2048, "float16")])
    assert wide.upper / wide.lower > 1.3 * narrow.upper / narrow.lower
    assert wide.breakdown["extrapolates"] == "dtype"


@pytest.mark.parametrize(
    ("product", "measured"),
    [
        # Output layers of 50,257 columns, forward and both gradients.
        (Gemm(1, 4096, 50257, 768, "bfloat16", transpose_b=True), 3366e-6),
        (Gemm(1, 4096, 768, 50257, "bfloat16"), 2389e-6),
        (Gemm(1, 50257, 768, 4096, "bfloat16", transpose_a=True), 2172e-6),
        (Gemm(1, 4096, 3072, 768, "bfloat16", transpose_b=True), 30.8e-6),
        (Gemm(1, 14912, 128, 384, "tf32", transpose_b=True), 11.8e-6),
        (Gemm(16, 64, 2240, 1024, transpose_b=True), 154.4e-6),
        (Gemm(2, 8, 128, 80, transpose_b=True), 4.4e-6),
        # TF32, forward and both gradients: operands whose rows are not summed over are turned.
        (Gemm(1, 2048, 151936, 896, "tf32", transpose_b=True), 1486e-6),
        (Gemm(1, 2048, 896, 4864, "tf32"), 65.8e-6),
        (Gemm(1, 151936, 896, 2048, "tf32", transpose_a=True), 2267e-6),
    ],
)
def test_times_of_h200(product, measured):
    (found,) = gpu_cost_model(load_machine("h200-sxm")).estimate([product])
    assert found.seconds == pytest.approx(measured, rel=0.25)
