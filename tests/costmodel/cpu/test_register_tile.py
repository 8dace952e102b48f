from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.cpu.core_work import core_work, vector_lanes
from costmodel.operators.layers import Conv2d, Dense, Epilogue, Pool2d

REGISTER = 16  # bytes of the vector toy machine: 4 lanes, 2 accumulators


def test_without_a_vector_unit_there_is_only_arithmetic(toy):
    work = core_work(Conv2d(1, 3, 4, 4, 5, (1, 1)), toy)
    assert (work.flops, work.load_bytes, work.store_bytes) == (2 * 3 * 5 * 16, 0, 0)
    assert work.units == 5 * 4


def test_unused_lanes_are_computed_too(vector_toy):
    # 5 output channels fill 2 vectors of 4: 8/5 of the arithmetic.
    work = core_work(Conv2d(1, 3, 4, 4, 5, (1, 1)), vector_toy)
    assert work.flops == pytest.approx(2 * 3 * 8 * 16)
    assert work.units == 2 * 4


def test_operands_of_a_product(vector_toy):
    # 2 accumulators: the best tile is 1 x 2 (or 2 x 1): 3 loads serve 2 multiply-accumulates.
    work = core_work(Dense(rows=2, in_features=10, out_features=4), vector_toy)
    assert work.load_bytes == pytest.approx(10 * 2 * 1.5 * REGISTER)
    assert work.store_bytes == 2 * REGISTER


def test_a_matrix_vector_product_reuses_no_weight(vector_toy):
    # One row, one block: each multiply-accumulate loads its weights and its broadcast.
    work = core_work(Dense(rows=1, in_features=10, out_features=4), vector_toy)
    assert work.load_bytes == pytest.approx(10 * 2 * REGISTER)


def test_depthwise_loads_windows_and_taps(vector_toy):
    # Two outputs of a row share a window of 3 x 4 inputs and 9 taps: 21 loads for 2 output vectors.
    work = core_work(Conv2d(1, 4, 4, 4, 4, (3, 3), groups=4), vector_toy)
    assert work.load_bytes == pytest.approx(2 * 2 / 2 * 21 * REGISTER)
    assert work.store_bytes == 4 * REGISTER


def test_a_residual_is_loaded_once_per_output(vector_toy):
    plain = Dense(2, 10, 4)
    added = Dense(2, 10, 4, epilogue=Epilogue(residual="before_activation"))
    assert core_work(added, vector_toy).load_bytes - core_work(plain, vector_toy).load_bytes == 2 * REGISTER


def test_pooling_has_no_taps(vector_toy):
    work = core_work(Pool2d("max", 1, 4, 2, 4, kernel=(2, 2), stride=(2, 2)), vector_toy)
    # Two outputs read 2 x 4 inputs.
    assert work.load_bytes == 8 * REGISTER
    strided = core_work(Pool2d("max", 1, 4, 1, 9, kernel=(1, 1), stride=(1, 8)), vector_toy)
    assert strided.load_bytes == 2 * REGISTER  # what no window reads is not loaded


def test_products_of_narrow_dtypes_take_neighbours_at_a_step(vector_toy):
    """Two of bfloat16 (the odd one with a zero), four of int8, for each load; sums have 32 bits."""
    assert vector_lanes(vector_toy, "bfloat16") == 4
    layer = Dense(rows=2, in_features=9, out_features=4, dtype="bfloat16")
    work = core_work(layer, vector_toy)
    assert work.load_bytes == pytest.approx(5 * 2 * 1.5 * REGISTER)
    assert (work.store_bytes, work.flops, work.arithmetic) == (2 * REGISTER, layer.flops, "bfloat16")
    assert core_work(replace(layer, dtype="int8"), vector_toy).load_bytes == pytest.approx(3 * 2 * 1.5 * REGISTER)


def test_what_sums_no_channels_is_computed_in_float32_from_narrow_values(vector_toy):
    """Each of two loads of a pooling window is widened by two operations of 4 lanes, each output rounded by one."""
    wide = Pool2d("max", 1, 4, 1, 9, kernel=(1, 1), stride=(1, 8))
    full, work = core_work(wide, vector_toy), core_work(replace(wide, dtype="bfloat16"), vector_toy)
    assert (full.arithmetic, work.arithmetic, work.load_bytes) == ("float32", "float32", full.load_bytes)
    assert work.flops - full.flops == 2 * 4 * (2 * 2 + 2)


def test_depthwise_windows_of_narrow_dtypes_take_two_taps_at_a_time(vector_toy):
    """Two steps for the three taps of each row; each of 21 loads for two outputs is paired with its neighbour."""
    work = core_work(Conv2d(1, 4, 4, 4, 4, (3, 3), groups=4, dtype="bfloat16"), vector_toy)
    assert work.flops == pytest.approx(2 * 4 * (4 * 3 * 2 + 2 * 21 + 4))
