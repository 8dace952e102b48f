"""Winograd's algorithm in the roofline: its work by hand, and when it is the better of the two."""

from __future__ import annotations

import dataclasses

import pytest

from costmodel.cpu.core_work import (
    OUTPUTS,
    Lines,
    core_work,
    line_work,
    lines_of,
    transform_operations,
    winograd_applies,
    winograd_work,
)
from costmodel.cpu.roofline import RooflineModel, explain_operator
from costmodel.machines.machine_file import load_machine
from costmodel.operators.layers import Conv2d, Epilogue, FusedConvs

# 4 x 4 outputs of 4 channels from 4: with registers of 4 floats one block in, one out.
SMALL = Conv2d(1, 4, 4, 4, 4, (3, 3), padding=(1, 1, 1, 1), epilogue=Epilogue(bias=True))
XEON = load_machine("xeon-amx-2c")


def square(channels: int, size: int, kernel: int = 3, stride: int = 1, **options) -> Conv2d:
    pads = (kernel // 2,) * 4
    return Conv2d(1, channels, size, size, channels, (kernel, kernel), (stride, stride), pads, **options)


def test_operations_of_the_transforms():
    """2x2: 4 lines of 4 values and again, each two sums of two and what lies beside; as the matrices in the kernels."""
    assert transform_operations(2) == (2 * 4 * 4, 6 * 4)
    assert transform_operations(4) == (2 * 6 * 12, 10 * 12)


def test_work_by_hand(vector_toy):
    """One tile of 4x4 outputs, or four of 2x2; positions 36 and 16."""
    one, four = winograd_work(SMALL, vector_toy, 4), winograd_work(SMALL, vector_toy, 2)
    assert (one.tiles, four.tiles) == (1, 4)
    # 36 positions x 4 channels, a vector each of 2 * 4 operations; direct sums have 16 x 9 x 4 of them.
    assert one.products.flops == 36 * 4 * 8 and four.products.flops == 4 * 16 * 4 * 8
    assert SMALL.flops == 16 * 9 * 4 * 8
    # Two accumulators: for a single tile (1 + 1) / 1 loads a product, for two columns (1 + 2) / 2; vectors of 16 bytes.
    assert one.products.load_bytes == 36 * 4 * 2 * 16 and four.products.load_bytes == 4 * 16 * 4 * 1.5 * 16
    assert one.transform.flops == 144 * 8 and one.finish.flops == 120 * 8
    assert one.transform.store_bytes == 36 * 16 and one.finish.store_bytes == 16 * 16
    assert one.tile_bytes == 36 * 16 and one.weight_bytes == 36 * 4 * 16 + 4 * 4


def test_the_roofline_takes_the_better_algorithm(vector_toy):
    """In L1 at 100 B/s the operands decide; direct sums load 1.5 vectors for each of 16 x 36 products."""
    direct = 16 * 36 * 1.5 * 16 / 100
    small = dataclasses.replace(SMALL, height=6, width=6, padding=(0, 0, 0, 0))
    report = explain_operator(small, vector_toy, 1)
    slow = explain_operator(dataclasses.replace(small, height=8, width=8, dilation=(2, 2)), vector_toy, 1)
    assert slow.winograd_outputs == 0 and slow.core_seconds == pytest.approx(direct)
    assert report.winograd_outputs == 2 or report.winograd_outputs == 4
    assert report.seconds < direct
    assert sum(stage.seconds for stage in report.stages) == report.core_seconds and len(report.stages) == 3
    (estimate,) = RooflineModel(vector_toy, 1).estimate([small])
    assert estimate.seconds == report.seconds and estimate.breakdown["winograd_outputs"] == report.winograd_outputs


def test_where_it_does_not_apply():
    for other in (
        square(64, 28, stride=2),
        square(64, 28, kernel=5),
        square(64, 28, groups=2),
        square(64, 28, gated=True),
        square(4, 28),
        square(64, 28, dilation=(2, 2)),
    ):
        assert not winograd_applies(other, 16)
    assert winograd_applies(square(64, 28), 16) and winograd_applies(square(8, 28), 16)


def test_without_vectors_nothing_is_known_of_it(toy):
    assert explain_operator(SMALL, toy, 1).winograd_outputs == 0
    with pytest.raises(ValueError, match="no vector unit"):
        winograd_work(SMALL, toy, 2)


def test_it_saves_most_with_many_channels_and_nothing_that_is_not_fp32():
    """On a real CPU: 128 channels on 28x28 gain a lot, a 64-bit layer has no such kernel, a pair has one too."""
    layer = square(128, 28)
    report = explain_operator(layer, XEON, 2)
    direct = layer.flops / XEON.peak_flops("float32", 2)
    assert report.winograd_outputs in OUTPUTS and direct / 4 < report.seconds < direct / 1.5
    assert explain_operator(dataclasses.replace(layer, dtype="float64"), XEON, 2).winograd_outputs == 0
    fused = explain_operator(FusedConvs((layer, layer)), XEON, 2)
    assert fused.winograd_outputs in OUTPUTS and 2 * report.core_seconds <= fused.core_seconds < 2 * direct
    assert fused.tile is not None and len(fused.stages) == 6
    assert fused.recomputation == pytest.approx(sum(fused.tile.recomputation) / 2)


def test_a_pair_is_priced_by_winograd_only_where_a_layer_allows_it():
    """A 1x1 behind a 3x3 of stride 2 is direct; behind one of stride 1 the transformed weights count."""
    strided, plain = square(64, 56, stride=2), square(64, 28)
    shrunk = dataclasses.replace(plain, kernel=(1, 1), padding=(0, 0, 0, 0))
    assert explain_operator(FusedConvs((strided, shrunk)), XEON, 2).winograd_outputs == 0
    pair = FusedConvs((plain, shrunk))
    report = explain_operator(pair, XEON, 2)
    assert report.winograd_outputs == 4 and len(report.stages) == 4
    weights = next(each.size_bytes for each in report.traffic if each.tensor == "weights")
    assert weights == pair.weight_bytes + (36 - 9) * 64 * 64 * 4


def test_blocks_of_tiles_stream_the_weights_again():
    """256 channels on 112x112: 784 tiles of 4x4 of 36 KB each; a core keeps 1 MiB of them, 28, to itself."""
    layer = square(256, 112)
    report = explain_operator(layer, XEON, 2)
    assert report.winograd_outputs == 4
    sizes = {each.tensor: each.size_bytes for each in report.traffic}
    work = winograd_work(layer, XEON, 4)
    assert work.tiles == 784 and work.tile_bytes == 36 * 256 * 4 and sizes["weights"] == work.weight_bytes
    assert sizes["weights of further tiles"] == 2 * (392 // 28 - 1) * work.weight_bytes


def test_work_of_a_line_by_hand(vector_toy):
    """Two tiles of 3 outputs, a window of two pieces of 3 taps: 5 positions, 4 channels, vectors of 4 floats."""
    lines = Lines(Conv2d(1, 4, 1, 11, 4, (1, 6)), 3, 1)
    work = line_work(lines, vector_toy)
    assert (lines.pieces, lines.tiles, lines.steps, work.tiles) == (2, 2, 8, 2)
    assert work.products.flops == 2 * 5 * 8 * 8 and work.finish.flops == 2 * 3 * 5 * 8
    # What the two tiles and the two pieces read: three tiles of input, of one block.
    assert work.transform.flops == 3 * 5 * 4 * 8 and work.transform.store_bytes == 3 * 5 * 16
    assert work.weight_bytes == 5 * 8 * 16
    assert [(each.taps, each.axis) for each in lines_of(Conv2d(1, 4, 1, 32, 4, (1, 6)))] == [(3, 1), (4, 1)]


def test_long_windows_and_few_outputs_are_priced_by_their_algorithms():
    """39 taps: 13 of 3 in 5 products each, or 10 of 4 in 7; one output channel: 16 columns of 20 taps in a vector."""
    layer = Conv2d(1, 32, 172, 264, 16, (3, 39), padding=(1, 19, 1, 19))
    report, direct = explain_operator(layer, XEON, 2), core_work(layer, XEON).flops / XEON.peak_flops("float32", 2)
    assert report.winograd_outputs in (3, 4) and direct / 2.3 < report.seconds < direct / 1.2
    single = Conv2d(1, 32, 172, 264, 1, (5, 5))
    assert core_work(single, XEON).flops == pytest.approx(single.flops * 16 * 20 / (16 * 5))
