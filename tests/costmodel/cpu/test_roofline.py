from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costmodel.base.errors import MachineError, UnsupportedOperatorError
from costmodel.cpu.core_work import core_work, taps_inside
from costmodel.cpu.roofline import RooflineModel, explain_operator, fused_tile, middle_dtype
from costmodel.machines.machine_records import PerThreads
from costmodel.operators.layers import Conv2d, Dense, Epilogue, FusedConvs, Pool2d

# In bytes: input 4*4*10 = 160, weights 4*10*10 = 400, output 160; together 720: L2 of the toy machine.
SQUARE = Dense(rows=4, in_features=10, out_features=10)


def test_dense_by_hand(toy):
    report = explain_operator(SQUARE, toy, threads=1)
    assert report.compute_seconds == 2 * 4 * 10 * 10 / 100
    assert report.levels == {"input": "L2", "weights": "L2", "output": "L2"}
    assert report.memory_seconds == pytest.approx(720 / 50)
    assert report.seconds == pytest.approx(14.4)
    assert report.bound == "memory:L2"
    assert report.arithmetic_intensity == 800 / 720


def test_threads_share_activations_but_each_needs_the_weights(toy):
    # 160/2 + 160/2 + 400 = 560 B per thread: still beyond the 500 B of L1. 1 s of parallel region.
    report = explain_operator(SQUARE, toy, threads=2)
    assert report.levels["input"] == "L2"
    assert report.seconds == pytest.approx(720 / 100 + 1)
    assert report.region_seconds == 1


def test_small_kernels_live_in_l1_and_are_one_task(toy):
    """A parallel region takes a second, all of the kernel on one thread less than half."""
    report = explain_operator(Dense(rows=2, in_features=2, out_features=2), toy, threads=2)
    assert set(report.levels.values()) == {"L1"}
    assert (report.threads, report.region_seconds) == (1, 0.0)
    assert report.seconds == explain_operator(report.operator, toy, threads=1).seconds < 0.5
    assert explain_operator(SQUARE, toy, threads=2).threads == 2


def test_taps_in_the_padding_are_not_computed(toy):
    """Of 7 x 3 taps of a row 19 read the image, with stride 2 of 4 x 3 ten; all of them without padding."""
    for stride, share in ((1, 19 / 21), (2, 10 / 12)):
        conv = Conv2d(1, 4, 7, 7, 4, (3, 3), (stride, stride), (1, 1, 1, 1), groups=4)
        assert core_work(conv, toy).flops == pytest.approx(conv.flops * share**2)
    assert core_work(Conv2d(1, 4, 7, 7, 4, (3, 3)), toy).flops == 2 * 4 * 4 * 9 * 25
    dilated = Conv2d(1, 4, 5, 1, 4, (3, 1), padding=(2, 0, 2, 0), dilation=(2, 1))  # 3 + 5 + 3 of 15 taps
    assert core_work(dilated, toy).flops == pytest.approx(dilated.flops * 11 / 15)
    assert [taps_inside(5, 5, 1, offset) for offset in (-7, -2, 0, 3, 5)] == [0, 3, 5, 2, 0]


def test_large_kernels_stream_from_memory(toy):
    conv = Conv2d(1, 16, 16, 16, 16, (1, 1))
    report = explain_operator(conv, toy, threads=1)
    # 2*16*16*256 flop at 100 flop/s; 2*16384 + 1024 B at 10 B/s.
    assert (report.compute_seconds, report.memory_seconds) == pytest.approx((1310.72, 3379.2))
    assert report.bound == "memory:DRAM"


def test_weights_are_found_where_the_rest_of_the_network_left_them(toy):
    report = explain_operator(SQUARE, toy, threads=1, network_bytes=100_000)
    assert report.levels == {"input": "L2", "weights": "DRAM", "output": "L2"}
    assert report.memory_seconds == pytest.approx(320 / 50 + 400 / 10)
    assert report.memory_seconds_by_level == pytest.approx({"L2": 6.4, "DRAM": 40})


def test_write_bandwidth_prices_the_output(toy):
    level = toy.memory[1]
    slow = dataclasses.replace(level, write_bandwidth=toy.memory[2].bandwidth)
    machine = dataclasses.replace(toy, memory=(toy.memory[0], slow, toy.memory[2]))
    assert explain_operator(SQUARE, machine, 1).memory_seconds == pytest.approx(560 / 50 + 160 / 10)


def test_operands_bound_a_depthwise_convolution(vector_toy):
    conv = Conv2d(1, 4, 6, 6, 4, (3, 3), padding=(1, 1, 1, 1), groups=4)
    report = explain_operator(conv, vector_toy, threads=1)
    # 36 outputs in pairs: 21 loads of 16 B each pair, through 100 B/s; arithmetic takes 25.92 s. Of both 16 of 18 taps
    # along each axis read the image.
    inside = (16 / 18) ** 2
    assert report.operand_seconds == pytest.approx(18 * 21 * 16 / 100 * inside)
    assert report.compute_seconds == pytest.approx(25.92 * inside)
    assert report.bound == "operands"


# 1 image of 4 x 4: depthwise 3x3 on 8 channels, then 1x1 to 8.
DEPTHWISE = Conv2d(1, 8, 4, 4, 8, (3, 3), padding=(1, 1, 1, 1), groups=8)
POINTWISE = Conv2d(1, 8, 4, 4, 8, (1, 1))
PAIR = FusedConvs((DEPTHWISE, POINTWISE))


def test_fused_pair_by_hand(toy):
    report = explain_operator(PAIR, toy, threads=1)
    # Depthwise 2*9*128 flop, of which 10 of 12 along each axis read the image, and pointwise 2*8*128; none twice.
    assert report.recomputation == 1
    assert report.compute_seconds == pytest.approx((2304 * (10 / 12) ** 2 + 2048) / 100)
    # All in L2 (input and output 512 B, weights 288 + 256). The best tile is the whole image: no halo.
    assert report.tile.rows == 4
    memory = {each.tensor: each.size_bytes for each in report.traffic}
    assert memory == {"input": 512, "weights": 544, "output": 512, "intermediate": 1024}
    assert report.memory_seconds == pytest.approx((512 + 544 + 512 + 1024) / 50)
    assert report.seconds == pytest.approx(max(43.52, 51.84))


def test_a_tile_that_fits_the_private_caches_is_preferred(toy):
    # A row has 16 columns x 16 channels x 4 B = 1024 B: three fit into 5000 B beside 1600 B of weights, four do not.
    first = Conv2d(1, 16, 16, 16, 16, (3, 3), padding=(1, 1, 1, 1), groups=16)
    report = explain_operator(FusedConvs((first, Conv2d(1, 16, 16, 16, 16, (1, 1)))), toy, threads=1)
    assert (report.tile.rows, report.tile.count) == (3, 6)
    assert report.tile.resident_bytes == 3 * 1024 + 1600
    again = next(each for each in report.traffic if each.tensor == "weights of further tiles")
    assert (again.size_bytes, again.level) == (5 * 1600, "L2")


def test_where_no_tile_fits_the_weights_are_streamed_once(toy):
    # 18 KiB of weights: every further tile would read them from DRAM again, so the best tile is the whole image.
    depthwise = Conv2d(1, 64, 4, 4, 64, (3, 3), padding=(1, 1, 1, 1), groups=64)
    pair = FusedConvs((depthwise, Conv2d(1, 64, 4, 4, 64, (1, 1))))
    report = explain_operator(pair, toy, threads=2)
    assert report.levels["intermediate"] == "DRAM"
    assert report.tile.count == 1
    assert "weights of further tiles" not in report.levels


def test_too_few_row_tiles_leave_threads_idle(toy):
    # Seven rows on two threads: four rows are the best that the busier one can have.
    depthwise = Conv2d(1, 4, 7, 7, 4, (3, 3), padding=(1, 1, 1, 1), groups=4)
    fused = explain_operator(FusedConvs((depthwise, Conv2d(1, 4, 7, 7, 4, (1, 1)))), toy, threads=2)
    needed = (depthwise.flops * (19 / 21) ** 2 + 2 * 4 * 4 * 49) / 200
    assert fused.compute_seconds == pytest.approx(needed * 4 / 3.5)


def test_recomputation_is_weighed_by_flops(toy):
    expand = Conv2d(1, 2, 4, 4, 4, (1, 1))
    pair = FusedConvs((expand, Conv2d(1, 4, 4, 4, 4, (3, 3), padding=(1, 1, 1, 1), groups=4)))
    report = explain_operator(pair, toy, threads=1)
    rho = report.tile.recomputation[0]
    assert report.recomputation == pytest.approx((expand.flops * rho + pair.convs[1].flops) / pair.flops)


def test_the_estimate_carries_what_the_report_says(toy):
    report, (estimate,) = explain_operator(PAIR, toy, 2), RooflineModel(toy, 2).estimate([PAIR])
    assert estimate == report.estimate()
    assert estimate.source == "analytic"
    assert estimate.lower == estimate.seconds == report.seconds
    assert estimate.upper == pytest.approx(report.compute_seconds + report.memory_seconds + 1)
    assert estimate.breakdown["rho"] == report.recomputation
    assert estimate.breakdown["level.intermediate"] == report.levels["intermediate"]
    assert estimate.breakdown["tile_rows"] == report.tile.rows


def test_only_products_of_narrow_dtypes_have_the_rate_of_the_dtype(toy):
    """1000 flop/s of bfloat16 beside 100 of float32; the depthwise layer of a pair stays in float32."""
    rate = dataclasses.replace(toy.compute["float32"], sustained=PerThreads(((1, 1000.0), (2, 2000.0))))
    machine = dataclasses.replace(toy, compute={**toy.compute, "bfloat16": rate})
    narrow = FusedConvs(tuple(dataclasses.replace(conv, dtype="bfloat16") for conv in PAIR.convs))
    wide, report = explain_operator(PAIR, machine, 1), explain_operator(narrow, machine, 1)
    seconds = {conv.is_depthwise: stage.compute_seconds for conv, stage in zip(PAIR.convs, report.stages, strict=True)}
    before = {conv.is_depthwise: stage.compute_seconds for conv, stage in zip(PAIR.convs, wide.stages, strict=True)}
    assert seconds[True] == pytest.approx(before[True]) and seconds[False] == pytest.approx(before[False] / 10)


def test_a_depthwise_layer_of_a_chain_reads_float32_and_a_dense_one_its_own_dtype():
    depthwise = Conv2d(1, 4, 9, 9, 4, (3, 3), padding=(1, 1, 1, 1), groups=4, dtype="bfloat16")
    pointwise = Conv2d(1, 4, 9, 9, 4, (1, 1), dtype="bfloat16")
    assert middle_dtype(depthwise) == "float32" and middle_dtype(pointwise) == "bfloat16"
    first, other = (fused_tile(FusedConvs(pair), 9, 4) for pair in ((depthwise, pointwise), (pointwise, depthwise)))
    weights = depthwise.weight_bytes + pointwise.weight_bytes
    assert (first.resident_bytes - weights, other.resident_bytes - weights) == (2 * 4 * 81, 4 * 4 * 81)


def test_errors_name_what_is_missing(toy):
    with pytest.raises(MachineError, match="no compute rate for bfloat16"):
        explain_operator(dataclasses.replace(SQUARE, dtype="bfloat16"), toy, 1)
    with pytest.raises(MachineError, match="8 asked"):
        RooflineModel(toy, 8)
    with pytest.raises(UnsupportedOperatorError, match="Epilogue"):
        explain_operator(Epilogue(), toy, 1)


def operators(channels: int, height: int, window: int, stride: int) -> list:
    pad = window // 2
    depthwise = Conv2d(
        1, channels, height, height, channels, (window, window), (stride, stride), (pad,) * 4, groups=channels
    )
    out = depthwise.out_height
    pointwise = Conv2d(1, channels, out, out, 2 * channels, (1, 1))
    pool = Pool2d("average", 1, channels, height, height, (window, window), (stride, stride), (pad,) * 4)
    return [depthwise, pointwise, FusedConvs((depthwise, pointwise)), pool, Dense(height, channels, 2 * channels)]


SHAPES = {
    "channels": st.integers(2, 40),
    "height": st.integers(3, 20),
    "window": st.sampled_from([3, 5]),
    "stride": st.integers(1, 2),
}
FAST = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def scaled(machine, *, compute=1.0, bandwidth=1.0):
    def faster(points, factor):
        return dataclasses.replace(points, points=tuple((n, value * factor) for n, value in points.points))

    rates = {
        dtype: dataclasses.replace(rate, sustained=faster(rate.sustained, compute))
        for dtype, rate in machine.compute.items()
    }
    memory = tuple(dataclasses.replace(level, bandwidth=faster(level.bandwidth, bandwidth)) for level in machine.memory)
    return dataclasses.replace(machine, compute=rates, memory=memory)


@FAST
@given(threads=st.integers(1, 2), **SHAPES)
def test_times_are_finite_and_no_less_than_the_roofline(vector_toy, threads, channels, height, window, stride):
    for operator in operators(channels, height, window, stride):
        report = explain_operator(operator, vector_toy, threads)
        assert math.isfinite(report.seconds)
        layers = operator.convs if isinstance(operator, FusedConvs) else (operator,)
        needed = sum(core_work(layer, vector_toy).flops for layer in layers)
        assert report.seconds >= needed / vector_toy.peak_flops("float32", threads) * 0.999
        assert report.seconds >= report.memory_seconds
        assert report.recomputation >= 1 or isinstance(operator, FusedConvs)
        report.estimate()


@FAST
@given(factor=st.floats(1.0, 8.0), **SHAPES)
def test_a_faster_machine_is_never_slower(vector_toy, factor, channels, height, window, stride):
    for operator in operators(channels, height, window, stride):
        before = explain_operator(operator, vector_toy, 1).seconds
        assert explain_operator(operator, scaled(vector_toy, compute=factor), 1).seconds <= before * 1.000001
        assert explain_operator(operator, scaled(vector_toy, bandwidth=factor), 1).seconds <= before * 1.000001


@FAST
@given(**SHAPES)
def test_more_channels_never_take_less_time(vector_toy, channels, height, window, stride):
    small = operators(channels, height, window, stride)
    large = operators(2 * channels, height, window, stride)
    for less, more in zip(small, large, strict=True):
        assert explain_operator(less, vector_toy, 1).seconds <= explain_operator(more, vector_toy, 1).seconds
