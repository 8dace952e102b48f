"""What holds of kernels on every GPU: no rate above the datasheet, more is never faster, twins agree."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from costmodel.gpu import gpu_cost_model
from costmodel.gpu.families.rates import dense_peak, kernel_floor, l2_bytes, latency, stand_in
from costmodel.gpu.fitted import residuals_for
from costmodel.machines.machine_file import load_machine as read_machine
from costmodel.machines.machine_file import machine_files
from costmodel.machines.machine_records import ABOVE_BOOST, PerThreads
from costmodel.operators.any_operator import dtype_of
from costmodel.operators.attention import Attention, CausalConvolution, LinearAttention
from costmodel.operators.device_work import (
    ConvolutionBackward,
    Elementwise,
    Gemm,
    Loss,
    MemoryCopy,
    Normalization,
    OptimizerStep,
    Pooling,
    RadixSort,
    Rearrangement,
    Reduction,
    ScaledCast,
    ScaledGemm,
    Softmax,
)
from costmodel.operators.experts import ExpertLayer, GroupedGemm
from costmodel.operators.layers import Conv2d
from costmodel.operators.lookups import EmbeddingLookup
from lab.fit.transfer import are_twins

load_machine = functools.cache(read_machine)  # a file takes longer to read than a kernel to price
GPUS = sorted(name for name, path in machine_files().items() if path.parent.name == "gpu")
# Where trees still answer for products, on L40S, more may be faster (docs/limits.md).
LEARNED = {name: residuals_for(load_machine(name)).get("gemm-tensor") for name in GPUS}
RISING = [name for name, known in LEARNED.items() if known is None or known[1].lattice is not None]
DRAWN = settings(max_examples=40, deadline=None, derandomize=True)
EXACT = 1e-6

HALF = st.sampled_from(["bfloat16", "float16"])
ROWS = st.integers(1, 40000)
WIDTHS = st.sampled_from([64, 128, 256, 768, 1024, 2048, 2560, 3200, 4096, 5120, 8192, 11008, 14336, 28672, 128256])
DENSE = st.builds(Gemm, st.just(1), ROWS, WIDTHS, WIDTHS, HALF, transpose_b=st.just(True))
BATCHED = st.builds(Gemm, st.integers(1, 64), st.integers(1, 4096), WIDTHS, WIDTHS, HALF, transpose_b=st.just(True))
SINGLE = st.builds(Gemm, st.integers(1, 16), st.integers(1, 4096), WIDTHS, WIDTHS, st.sampled_from(["float64", "tf32"]))
SIZES = st.integers(1, 1 << 28)
STREAMS = st.one_of(
    st.builds(Elementwise, st.sampled_from(["add", "gelu", "fused"]), SIZES, st.integers(1, 3), dtype=HALF),
    st.builds(OptimizerStep, st.just("adamw"), SIZES, st.just(100), st.just(4), st.just(3)),
    st.builds(Reduction, st.just("sum"), SIZES, st.just(1)),
    st.builds(MemoryCopy, SIZES),
    st.builds(Loss, st.just("cross_entropy"), st.integers(1, 1 << 16), WIDTHS),
)
ROWWISE = st.one_of(
    st.builds(Normalization, st.sampled_from(["layer_norm", "rms_norm"]), ROWS, WIDTHS, HALF, st.just("backward")),
    st.builds(Softmax, ROWS, WIDTHS, HALF, st.just("backward")),
)


model_of = functools.cache(lambda name: gpu_cost_model(load_machine(name)))


def seconds(name, *operators):
    return np.array([each.seconds for each in model_of(name).estimate(operators)])


def larger(operator, field, factor):
    return dataclasses.replace(operator, **{field: getattr(operator, field) * factor})


EXPERTS = st.builds(
    lambda experts, rows, n, k: GroupedGemm((rows,) * experts, n, k),
    st.sampled_from([1, 8, 64]),
    st.integers(1, 4096),
    st.sampled_from([768, 2048, 4096, 14336]),
    st.sampled_from([768, 2048, 4096, 14336]),
)
LAYERS = st.builds(
    lambda experts, rows, hidden, inner, dtype, kernel: ExpertLayer(
        (rows,) * experts, experts * rows, hidden, inner, dtype, kernel, scaling="block" if dtype == "float8" else ""
    ),
    st.sampled_from([1, 8, 64]),
    st.integers(1, 4096),
    st.sampled_from([2048, 4096, 7168]),
    st.sampled_from([768, 2048, 14336]),
    st.sampled_from(["bfloat16", "float8"]),
    st.sampled_from(["cutlass", "triton"]),
)
ATTENTIONS = st.builds(
    lambda batch, heads, length, width, causal, direction, paged: Attention(
        batch, heads, length, length, width, heads, causal, "float16", direction, paged=paged and direction == "forward"
    ),
    st.integers(1, 16),
    st.sampled_from([1, 8, 32]),
    st.sampled_from([256, 1024, 2048, 8192]),
    st.sampled_from([64, 128]),
    st.booleans(),
    st.sampled_from(["forward", "backward"]),
    st.booleans(),
)
LOOKUPS = st.builds(
    EmbeddingLookup, st.integers(1000, 10**7), st.sampled_from([64, 128]), st.integers(512, 1 << 20), st.just(512)
)
CONVOLUTIONS = st.builds(
    lambda images, channels, size, filters, kernel, stride, grouped, dtype, last: Conv2d(
        images, channels, size, size, channels if grouped else filters, (kernel, kernel), (stride, stride),
        (kernel // 2,) * 4, groups=channels // 8 if grouped else 1, dtype=dtype, channels_last=last,
    ),
    st.integers(1, 256),
    st.sampled_from([8, 64, 256, 1024]),
    st.sampled_from([7, 14, 56, 224]),
    st.sampled_from([8, 64, 256, 1024]),
    st.sampled_from([1, 3, 7]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from(["float32", "float16", "bfloat16", "tf32"]),
    st.booleans(),
)  # fmt: skip
GRADIENTS = st.builds(ConvolutionBackward, CONVOLUTIONS, st.sampled_from(["data", "weight"]))
POOLS = st.builds(
    lambda kind, images, channels, size, dtype, direction, last: Pooling(
        kind, images, channels, size, size, size // 2, size // 2, (2, 2), dtype, direction, last
    ),
    st.sampled_from(["max", "average"]),
    st.integers(1, 256),
    st.sampled_from([8, 64, 512]),
    st.sampled_from([14, 56, 112]),
    st.sampled_from(["float32", "float16"]),
    st.sampled_from(["forward", "backward"]),
    st.booleans(),
)
IMAGE_NORMS = st.builds(
    Normalization, st.just("batch_norm"), st.integers(1, 1 << 22), st.sampled_from([8, 64, 512]),
    st.sampled_from(["float32", "float16"]), st.sampled_from(["forward", "backward"]), st.booleans(), st.booleans(),
)  # fmt: skip
HALF_NORMS = st.builds(Normalization, st.just("layer_norm"), st.integers(1, 1 << 18), WIDTHS, st.just("float16"))
MOVES = st.builds(
    Rearrangement, st.sampled_from(["transpose", "concat", "gather"]), SIZES, st.sampled_from([1, 64]), HALF
)
SORTS = st.builds(RadixSort, st.integers(1, 1 << 26), st.sampled_from([20, 64]))
SCALED = st.builds(
    ScaledGemm, ROWS, WIDTHS, WIDTHS, st.sampled_from(["float8", "int8"]), st.sampled_from(["tensor", "block", "mx"])
)
CASTS = st.builds(ScaledCast, ROWS, WIDTHS, st.just("bfloat16"), outputs=st.sampled_from([0, 1, 2]))
SCANS = st.builds(
    lambda kind, batch, length, heads, direction: LinearAttention(
        kind, batch, length, 8, 128, heads, 128, direction=direction
    ),
    st.sampled_from(["ssd", "gated_delta", "kimi_delta"]),
    st.integers(1, 16),
    st.sampled_from([256, 4096, 65536]),
    st.sampled_from([8, 32]),
    st.sampled_from(["forward", "backward"]),
)
SHORT = st.builds(
    CausalConvolution, st.integers(1, 32), st.sampled_from([1024, 8192]), st.integers(64, 65536), st.just(4)
)
ADDING = st.builds(
    lambda m, n, k: Gemm(1, m, n, k, "bfloat16", transpose_a=True, accumulates="float32"), WIDTHS, WIDTHS, WIDTHS
)
COMPUTING = st.one_of(
    DENSE, BATCHED, SINGLE, ADDING, SCALED, EXPERTS, LAYERS, ATTENTIONS, CONVOLUTIONS, GRADIENTS, SCANS
)
MOVING = st.one_of(STREAMS, ROWWISE, HALF_NORMS, IMAGE_NORMS, POOLS, MOVES, SORTS, CASTS, SHORT)
# Drawn once more: families are many, and each should meet several GPUs.
EVERY = settings(DRAWN, max_examples=120)


def has_units(machine, operator):
    """Whether ``machine`` has a rate, its own or a stand-in's, for what ``operator`` computes in, if it does."""
    number = dtype_of(operator)
    return number in ("", "int64") or stand_in(machine, number) in machine.compute


def fewest_flops(operator):
    """A quarter in convolutions that Winograd's F(4x4, 3x3) may compute, outside the tensor cores or by no file's
    rates.
    """
    conv = operator.forward if isinstance(operator, ConvolutionBackward) else operator
    winograd = isinstance(conv, Conv2d) and conv.kernel == (3, 3) and conv.stride == (1, 1)
    return operator.flops / (4 if winograd and conv.dtype in ("float32", "tf32", "bfloat16") else 1)


def border_bytes(operator):
    """What must cross the border of the chip; of an image whose rows are skipped those that are read."""
    conv = operator.forward if isinstance(operator, ConvolutionBackward) else operator
    if not isinstance(conv, Conv2d):
        return operator.read_bytes + operator.write_bytes
    share = min(conv.kernel[0] / conv.stride[0], 1.0)
    return share * conv.input_bytes + conv.weight_bytes + conv.output_bytes


@EVERY
@given(st.sampled_from(GPUS), COMPUTING)
@example("h100-sxm", Gemm(1, 8192, 2048, 128256, "bfloat16"))
@example("h100-sxm", Gemm(1, 2048, 4096, 14336, "bfloat16"))
@example("l40s", ScaledGemm(113, 4096, 2048))
@example("l40s", ScaledGemm(462, 11008, 768, scaling="block"))
@example("v100-pcie-32gb", Conv2d(123, 320, 224, 224, 128, (7, 7), (2, 2), (3, 3, 3, 3), groups=4))
def test_nothing_is_computed_faster_than_the_datasheet_says(name, operator):
    machine = load_machine(name)
    if not has_units(machine, operator):
        return
    peak = dense_peak(machine, operator.dtype) * (ABOVE_BOOST if name.startswith("rtx-") else 1)
    assert fewest_flops(operator) / seconds(name, operator)[0] <= peak * (1 + EXACT)


@EVERY
@given(st.sampled_from(GPUS), st.one_of(COMPUTING, MOVING))
@example("h100-pcie", Gemm(1, 46587, 11008, 128, "bfloat16", transpose_b=True))
@example("rtx-4090", Gemm(23, 2944, 2048, 64, "bfloat16", accumulates="float32"))
@example("v100-sxm2-16gb", Normalization("layer_norm", 88600, 512, "float16"))
@example("a40", Normalization("batch_norm", 122183, 512, training=False))
@example("p4", Conv2d(21, 24, 224, 224, 8, (3, 1), (2, 2), (1, 0, 1, 0)))
def test_no_cold_bytes_come_faster_than_dram_gives_them(name, operator):
    machine = load_machine(name)
    if not has_units(machine, operator):
        return
    cold = border_bytes(operator) - l2_bytes(machine)
    assert seconds(name, operator)[0] * machine.memory[-1].datasheet >= cold * (1 - EXACT)


@DRAWN
@given(
    st.sampled_from(RISING),
    st.one_of(DENSE, BATCHED),
    st.sampled_from(["m", "n", "k", "batch"]),
    st.sampled_from([2, 3, 8]),
)
@example("h100-sxm", Gemm(1, 4096, 2048, 8192, "bfloat16"), "m", 2)
@example("h100-sxm", Gemm(1, 8192, 4096, 14336, "bfloat16"), "m", 2)
def test_a_larger_product_is_never_faster(name, operator, field, factor):
    less, more = seconds(name, operator, larger(operator, field, factor))
    assert more >= less * (1 - EXACT)


@DRAWN
@given(st.sampled_from(RISING), DENSE, st.integers(1, 4096))
@example("h100-sxm", Gemm(1, 4096, 2048, 8192, "bfloat16"), 1024)
def test_a_product_of_more_rows_is_never_faster(name, operator, more_rows):
    less, more = seconds(name, operator, dataclasses.replace(operator, m=operator.m + more_rows))
    assert more >= less * (1 - EXACT)


@DRAWN
@given(st.sampled_from(GPUS), BATCHED)
@example("h100-pcie", Gemm(2, 1, 64, 64, "bfloat16", transpose_b=True))
@example("h100-pcie", Gemm(61, 3110, 3200, 64, "float16", transpose_b=True))
def test_several_products_are_never_faster_than_one_of_all_their_rows(name, operator):
    together = dataclasses.replace(operator, batch=1, m=operator.batch * operator.m)
    apart, dense = seconds(name, operator, together)
    assert apart >= dense * (1 - EXACT)


@DRAWN
@given(st.sampled_from(GPUS), STREAMS, st.sampled_from([2, 5]))
def test_more_bytes_are_never_faster(name, operator, factor):
    field = next(each for each in ("elements", "size_bytes", "rows") if hasattr(operator, each))
    less, more = seconds(name, operator, larger(operator, field, factor))
    assert more >= less * (1 - EXACT)


TWINS = [
    (one, other) for one in GPUS for other in GPUS if one < other and are_twins(load_machine(one), load_machine(other))
]
SHAPES = st.tuples(st.sampled_from([2048, 4096, 8192, 16384]), WIDTHS.filter(lambda n: n >= 1024))


@DRAWN
@given(st.sampled_from(TWINS), SHAPES, WIDTHS.filter(lambda k: k >= 1024))
@example(("h100-sxm", "h200-sxm"), (4096, 2048), 8192)
def test_twins_take_the_same_time_where_arithmetic_rules(twins, shape, k):
    product = Gemm(1, *shape, k, "bfloat16", transpose_b=True)
    one, other = (model_of(name).estimate([product])[0] for name in twins)
    if {one.bound, other.bound} == {"compute"}:
        assert one.seconds == pytest.approx(other.seconds, rel=0.12)


@pytest.mark.parametrize("width", [2048, 4096, 5120])
@pytest.mark.parametrize("rows", [4096, 8192, 16384, 32768])
def test_a_layers_products_are_as_fast_on_twins(width, rows):
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    products = [Gemm(1, rows, n, k, "bfloat16", transpose_b=True) for k, n in shapes]
    ratio = seconds("h100-sxm", *products).sum() / seconds("h200-sxm", *products).sum()
    assert 0.93 <= ratio <= 1.10


@DRAWN
@given(st.sampled_from(GPUS), st.one_of(DENSE, STREAMS, ROWWISE), st.sampled_from([1.0, 1.5]))
def test_a_renamed_gpu_has_the_same_price_and_interval_and_more_power_is_no_slower(name, operator, power):
    machine = load_machine(name)
    chip = dataclasses.replace(machine.chip(), power_watts=machine.chip().power_watts * power)
    renamed = dataclasses.replace(machine, name="somebody's", gpu=chip)
    here, there = (gpu_cost_model(each).estimate([operator])[0] for each in (machine, renamed))
    if power == 1.0:
        assert (there.lower, there.seconds, there.upper) == (here.lower, here.seconds, here.upper)
    elif not machine.chip().power_limited:
        assert there.seconds <= here.seconds * (1 + EXACT)


@DRAWN
@given(st.sampled_from(GPUS), st.one_of(STREAMS, ROWWISE))
def test_what_streams_is_known_within_a_factor_of_two(name, operator):
    (found,) = model_of(name).estimate([operator])
    assert found.lower <= found.seconds <= found.upper
    if isinstance(operator, MemoryCopy | OptimizerStep):
        assert found.upper / found.lower < 2.3


@DRAWN
@given(st.sampled_from(RISING), EXPERTS)
@example("h100-sxm", GroupedGemm((2048,) * 8, 14336, 4096))
def test_products_of_experts_are_never_faster_than_one_product_of_their_rows(name, operator):
    if "bfloat16" not in load_machine(name).compute:
        return
    dense = Gemm(1, operator.rows, operator.n, operator.k, "bfloat16", transpose_b=True)
    apart, together = seconds(name, operator, dense)
    assert apart >= together * (1 - EXACT)


WIDE = WIDTHS.filter(lambda width: width >= 1024)
EIGHT_BITS = [name for name in GPUS if "float8" in load_machine(name).compute]


@DRAWN
@given(st.sampled_from(EIGHT_BITS), st.integers(512, 40000), WIDE, WIDE)
@example("h100-sxm", 528, 4096, 4096)
def test_a_product_in_8_bits_takes_no_longer_than_in_16(name, m, n, k):
    """But for what trees of two tables differ by. A field more in a record once was the seconds of a wave."""
    narrow, wide = seconds(name, ScaledGemm(m, n, k), Gemm(1, m, n, k, "bfloat16", transpose_b=True))
    assert narrow <= 1.5 * wide + kernel_floor(load_machine(name))


# Of what trees and paces price, more may be faster by so much: trees answer in steps; and by the shortest kernel.
LOOSE = 0.15
OTHERS = st.one_of(
    st.tuples(st.one_of(ROWWISE, HALF_NORMS, IMAGE_NORMS), st.just("rows")),
    st.tuples(st.one_of(ATTENTIONS, SCANS, CONVOLUTIONS, POOLS), st.just("batch")),
    st.tuples(SCALED, st.sampled_from(["m", "n", "k"])),
    st.tuples(CASTS, st.sampled_from(["rows", "columns"])),
    st.tuples(SHORT, st.sampled_from(["batch", "length"])),
    st.tuples(MOVES, st.just("elements")),
    st.tuples(SORTS, st.just("pairs")),
    st.tuples(EXPERTS, st.sampled_from(["n", "k"])),
    st.tuples(LAYERS, st.sampled_from(["hidden", "inner"])),
    st.tuples(LOOKUPS, st.just("indices")),
)


@EVERY
@given(st.sampled_from(GPUS), OTHERS, st.sampled_from([2, 4]))
def test_more_of_anything_is_not_faster(name, case, factor):
    operator, field = case
    machine = load_machine(name)
    if not has_units(machine, operator):
        return
    less, more = seconds(name, operator, larger(operator, field, factor))
    assert more >= less * (1 - LOOSE) - kernel_floor(machine)


@DRAWN
@given(
    st.sampled_from(["l4", "rtx-4090", "h100-sxm", "h20", "b200-sxm"]),
    st.integers(1 << 22, 1 << 26),
    st.integers(4, 64),
)
@example("h20", 1 << 22, 8)
def test_few_blocks_of_threads_wait_whatever_l2_holds(name, elements, outputs):
    """A larger L2 once made kernels of few blocks six times as fast: by the time that a load takes they are alike."""
    moments = Reduction("moments", elements, outputs)
    here, there = load_machine(name), load_machine("v100-sxm2-16gb")
    waiting = [outputs / 4 * 16384 / latency(each, 1) for each in (here, there)]
    if max(waiting) > min(each.memory[-1].bandwidth.at(1) for each in (here, there)):
        return
    times = [seconds(each.name, moments)[0] - kernel_floor(each) for each in (here, there)]
    assert times[0] / times[1] == pytest.approx(waiting[1] / waiting[0], rel=0.1)


def better(machine, what):
    """``machine`` with twice the bandwidth of its memory, twice the rates, or twice the chip at its clock and power."""
    cache, memory = machine.memory[0], machine.memory[-1]
    if what == "bandwidth":
        wider = dataclasses.replace(memory, bandwidth=twice(memory.bandwidth), datasheet=2 * (memory.datasheet or 0))
        return dataclasses.replace(machine, memory=(*machine.memory[:-1], wider))
    rates = {
        name: dataclasses.replace(
            each,
            sustained=twice(each.sustained),
            burst=each.burst and 2 * each.burst,
            datasheet=each.datasheet and 2 * each.datasheet,
        )
        for name, each in machine.compute.items()
    }
    if what == "rates":
        return dataclasses.replace(machine, compute=rates)
    whole = dataclasses.replace(cache, capacity_bytes=2 * cache.capacity_bytes, bandwidth=twice(cache.bandwidth))
    chip = dataclasses.replace(machine.chip(), sm_count=2 * machine.chip().sm_count)
    return dataclasses.replace(machine, compute=rates, memory=(whole, *machine.memory[1:]), gpu=chip)


def twice(rate):
    return PerThreads(tuple((threads, 2 * value) for threads, value in rate.points))


# A card between two that were measured takes what was learned on the nearer: H100's and H200's differ by so much.
RELATIVES = 0.03


@DRAWN
@given(
    st.sampled_from(GPUS),
    st.one_of(DENSE, BATCHED, STREAMS, ROWWISE, EXPERTS, ATTENTIONS, LOOKUPS),
    st.sampled_from(["bandwidth", "rates", "chip"]),
)
@example("h100-sxm-96gb", Gemm(1, 40000, 14336, 14336, "float16", transpose_b=True), "bandwidth")
@example("p100-pcie-16gb", Softmax(4922, 11008, "float16", "backward"), "chip")
def test_a_better_gpu_is_never_slower(name, operator, what):
    machine = load_machine(name)
    if isinstance(operator, GroupedGemm) and "bfloat16" not in machine.compute:
        return
    (here,), (there,) = (gpu_cost_model(each).estimate([operator]) for each in (machine, better(machine, what)))
    borrowed = here.breakdown.get("fitted_on") != there.breakdown.get("fitted_on")
    assert there.seconds <= here.seconds * (1 + (RELATIVES if borrowed else EXACT))
