"""Products of experts on a machine of round numbers, and what their model must obey on real ones."""

from __future__ import annotations

import dataclasses

import pytest

from costmodel.gpu.families.gemm import STEP, TENSOR_TILES
from costmodel.gpu.families.grouped_gemm import GroupedProducts, ScaledGroupedProducts, grouped_family, grouped_product
from costmodel.machines.machine_records import ComputeRate, PerThreads
from costmodel.operators.experts import ExpertLayer, GroupedGemm

K = 1024 - STEP


@pytest.fixture
def fast_memory(toy_gpu):
    """Ten SMs of 1e8 flop/s in BF16, memories that never limit."""
    levels = tuple(dataclasses.replace(each, bandwidth=PerThreads(((1, 1e15),))) for each in toy_gpu.memory)
    rate = ComputeRate(PerThreads(((1, 1e9),)), "invented", 2e9)
    return dataclasses.replace(toy_gpu, memory=levels, compute={**toy_gpu.compute, "bfloat16": rate})


def seconds(counts, n, machine, **more):
    return grouped_product(GroupedGemm(tuple(counts), n, K, **more), machine).compute


def test_tiles_of_all_experts_share_the_waves(fast_memory):
    # Ten experts of one 128 x 256 tile each fill the ten SMs once: 2 * 128 * 256 * 1024 flops at 1e8.
    wave = 2 * 128 * 256 * 1024 / 1e8
    assert seconds([128] * 10, 256, fast_memory) == pytest.approx(wave)
    assert seconds([1280], 256, fast_memory) == pytest.approx(wave)
    assert seconds([128] * 20, 256, fast_memory) == pytest.approx(2 * wave)


def test_experts_without_rows_cost_nothing_and_few_rows_a_tile(fast_memory):
    assert seconds([128] * 10 + [0] * 50, 256, fast_memory) == seconds([128] * 10, 256, fast_memory)
    smallest = min(tile.m for tile in TENSOR_TILES)
    assert seconds([1] * 100, 64, fast_memory) == seconds([smallest] * 100, 64, fast_memory)


def test_uneven_experts_take_longer_than_even_ones(fast_memory):
    assert seconds([1, 127] * 10, 256, fast_memory) > seconds([64] * 20, 256, fast_memory)


def test_gradients_of_matrices_are_as_deep_as_an_expert_has_rows(fast_memory):
    few, many = (seconds([rows] * 8, 1024, fast_memory, wrt="weight") for rows in (128 - STEP, 256 - STEP))
    assert many == pytest.approx(2 * few)


def test_sizes_count_what_must_move():
    rows = GroupedGemm((4, 0, 2), 10, 5)
    assert rows.flops == 2 * 6 * 10 * 5 and rows.active == 2
    assert rows.read_bytes == (6 * 5 + 2 * 50) * 2 and rows.write_bytes == 6 * 10 * 2
    gradient = GroupedGemm((4, 0, 2), 10, 5, wrt="weight")
    assert gradient.flops == rows.flops and gradient.write_bytes == 3 * 50 * 2 and gradient.read_bytes == 6 * 15 * 2
    layer = ExpertLayer((4, 2), 3, hidden=8, inner=16)
    assert [(each.n, each.k) for each in layer.products] == [(32, 8), (8, 16)]
    assert GroupedGemm((4,), 10, 5, "float8").write_bytes == 4 * 10 * 2


def test_number_types_choose_the_family():
    assert type(grouped_family(GroupedGemm((4,), 8, 8))) is GroupedProducts
    assert type(grouped_family(GroupedGemm((4,), 8, 8, "float8"))) is ScaledGroupedProducts
