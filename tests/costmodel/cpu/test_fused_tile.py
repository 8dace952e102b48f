from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.cpu.roofline import fused_tile, fused_tiles
from costmodel.operators.layers import Conv2d, FusedConvs

# 1x1 from 2 to 4 channels, then depthwise 3x3, on 4 x 4 pixels.
POINTWISE = Conv2d(1, 2, 4, 4, 4, (1, 1))
DEPTHWISE = Conv2d(1, 4, 4, 4, 4, (3, 3), padding=(1, 1, 1, 1), groups=4)
PROJECTION = Conv2d(1, 4, 4, 4, 3, (1, 1))


def test_pointwise_before_depthwise_recomputes_its_halo():
    tile = fused_tile(FusedConvs((POINTWISE, DEPTHWISE)), rows=2, lanes=2)
    # Rows 0-1 need rows 0-2, rows 2-3 need rows 1-3: 6 rows of 4 are computed.
    assert tile.count == 2
    assert tile.recomputation == (1.5, 1.0)
    assert tile.input_factor == 1.5
    # One block of 2 channels: 3 rows x 4 columns x 2 channels, half of 2*4 and of 4*9 weights; 4 bytes each.
    assert tile.resident_bytes == (3 * 4 * 2 + 4 + 18) * 4


def test_depthwise_before_pointwise_recomputes_nothing_but_reads_the_halo():
    tile = fused_tile(FusedConvs((DEPTHWISE, PROJECTION)), rows=1, lanes=2)
    assert tile.recomputation == (1.0, 1.0)
    assert tile.input_factor == (2 + 3 + 3 + 2) / 4
    # All 4 channels of one row, all weights.
    assert tile.resident_bytes == (4 * 4 + 36 + 12) * 4


def test_a_chain_of_three_slides_a_window():
    operator = FusedConvs((POINTWISE, DEPTHWISE, PROJECTION))
    alone = fused_tile(operator, rows=1, lanes=2)
    assert alone.recomputation == (1.0, 1.0, 1.0) and alone.count == 4 and alone.input_factor == 1.0
    # 3 rows of all channels before the depthwise, 1 row of all channels after it, all weights.
    assert alone.resident_bytes == (3 * 4 * 4 + 1 * 4 * 4 + 8 + 36 + 12) * 4
    # Two threads: rows 0-1 need rows 0-2, rows 2-3 need rows 1-3.
    both = fused_tile(operator, rows=1, lanes=2, threads=2)
    assert both.recomputation == (1.5, 1.0, 1.0) and both.input_factor == 1.5
    assert both.resident_bytes == alone.resident_bytes


def test_a_pair_with_a_dense_window_slides_too():
    """3x3 from 2 to 4 channels, then 3x3, on two threads: only the halo between their halves is computed twice."""
    first = Conv2d(1, 2, 8, 4, 4, (3, 3), padding=(1, 1, 1, 1))
    second = Conv2d(1, 4, 8, 4, 3, (3, 3), padding=(1, 1, 1, 1))
    tile = fused_tile(FusedConvs((first, second)), rows=2, lanes=2, threads=2)
    # Rows 0-3 need rows 0-4, rows 4-7 need rows 3-7; those need rows 0-5 and 2-7 of the input.
    assert tile.count == 4 and tile.recomputation == (10 / 8, 1.0) and tile.input_factor == 12 / 8
    # Four rows in between with all channels, all weights.
    assert tile.resident_bytes == (4 * 4 * 4 + 2 * 4 * 9 + 4 * 3 * 9) * 4


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(3, 20), window=st.sampled_from([3, 5]), stride=st.integers(1, 2), lanes=st.sampled_from([1, 4])
)
def test_a_tile_of_the_whole_image_recomputes_nothing(height, window, stride, lanes):
    pad = window // 2
    first = Conv2d(1, 2, height, height, 4, (1, 1))
    second = Conv2d(1, 4, height, height, 4, (window, window), (stride, stride), (pad,) * 4, groups=4)
    tiles = fused_tiles(FusedConvs((first, second)), lanes)
    assert tiles[-1].rows == second.out_height
    # With stride and valid borders the last rows may not be needed at all, so at most 1.
    assert tiles[-1].recomputation[0] <= 1
    factors = [tile.recomputation[0] for tile in tiles]
    assert factors[0] == max(factors)
    assert all(tile.count * tile.rows >= second.out_height for tile in tiles)


def test_every_tile_height_gives_another_number_of_tiles():
    tiles = fused_tiles(FusedConvs((DEPTHWISE, PROJECTION)), lanes=1)
    assert [(tile.rows, tile.count) for tile in tiles] == [(1, 4), (2, 2), (4, 1)]


def test_intermediate_shapes_must_fit():
    with pytest.raises(ValueError, match="does not feed"):
        FusedConvs((DEPTHWISE, POINTWISE))
