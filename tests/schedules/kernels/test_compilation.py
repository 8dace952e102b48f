"""Where a kernel's buffers end up in machine code."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("tvm")
from costmodel.operators.layers import Conv2d, FusedConvs
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.kernel_compilation import compile_function, pass_context
from schedules.kernels.template_table import template_for
from tests.schedules.kernel_cases import CPU, conv

WIDE = CpuTarget(16, 32, "skylake-avx512", ("avx512f",), 2, 32 * 1024, 1024 * 1024)  # built for, not run
DEPTHWISE = conv(1, 32, 14, 14, 32, 3, groups=32)
POINTWISE = Conv2d(1, 32, 14, 14, 64, (1, 1))


@pytest.mark.parametrize(
    ("operator", "buffers"),
    [
        (POINTWISE, 0),
        (DEPTHWISE, 0),
        (FusedConvs((DEPTHWISE, POINTWISE)), 1),
        (FusedConvs((Conv2d(1, 64, 14, 14, 32, (1, 1)), DEPTHWISE, POINTWISE)), 2),
    ],
    ids=["pointwise", "depthwise", "depthwise-pointwise", "sliding window"],
)
def test_only_tiles_come_from_the_workspace_pool(operator, buffers):
    """Sums are registers: an allocation for each of them would cost more than small kernels do."""
    import tvm

    template = template_for(operator, CPU)
    function = template.build(operator, template.space(operator, CPU)[0], CPU)
    with pass_context():
        module = tvm.compile(tvm.IRModule({"main": function}), target=CPU.tvm_target()).mod
    calls = [line for line in module.inspect_source("ll").splitlines() if "load ptr, ptr @__TVMBackendAlloc" in line]
    assert len(calls) == buffers


def _ir(operator, **knobs) -> str:
    """LLVM IR of the first configuration with ``knobs``."""
    import tvm

    template = template_for(operator, WIDE)
    config = next(each for each in template.space(operator, WIDE) if knobs.items() <= each.items())
    with pass_context():
        module = tvm.compile(
            tvm.IRModule({"main": template.build(operator, config, WIDE)}), target=WIDE.tvm_target()
        ).mod
    return module.inspect_source("ll")


def _multiply_adds(ir: str, lanes: int) -> int:
    return ir.count(f"call <{lanes} x float> @llvm.fmuladd.v{lanes}f32(")


@pytest.mark.parametrize(
    "operator",
    [
        Conv2d(1, 64, 16, 40, 64, (3, 39), padding=(1, 19, 1, 19)),
        Conv2d(1, 64, 40, 16, 64, (39, 3), groups=64),
        Conv2d(1, 64, 16, 40, 64, (3, 39), padding=(1, 19, 1, 19), groups=64),
        pytest.param(
            FusedConvs((Conv2d(1, 32, 16, 40, 32, (3, 39), padding=(1, 19, 1, 19)), Conv2d(1, 32, 16, 40, 32, (1, 1)))),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["dense", "depthwise, tall", "depthwise, wide", "dense, then 1x1"],
)
def test_what_is_written_out_of_a_large_window_is_bounded(operator):
    """A dense 3x39 had 40,000 multiply-adds in eight steps of its inner loop, which took 21 s to compile."""
    template = template_for(operator, WIDE)
    space = template.space(operator, WIDE)
    largest = max((each.get("unroll", 1), each.get("columns", 1)) for each in space)
    ir = _ir(operator, **{k: v for k, v in zip(("unroll", "columns"), largest, strict=True) if k in space[0]})
    assert 0 < _multiply_adds(ir, 16) < 10_000


@pytest.mark.parametrize(("channels", "half"), [(24, True), (32, False), (28, False)])
def test_half_of_the_last_vector_is_enough_for_24_channels(channels, half):
    ir = _ir(Conv2d(1, 32, 14, 14, channels, (1, 1)), out_blocks=2)
    assert bool(_multiply_adds(ir, 8)) == half
    assert _multiply_adds(ir, 16)


@pytest.mark.parametrize(("size", "asked"), [(7, True), (56, False)])
def test_weights_that_are_used_few_times_are_asked_for_ahead(size, asked):
    """Seven by seven pixels use each weight four times, 56 x 56 more than a hundred times."""
    ir = _ir(Conv2d(1, 32, size, size, 32, (1, 1)), out_blocks=2)
    assert ("call void @llvm.prefetch" in ir) == asked


def _machine_code(module) -> str:
    """Assembly without comments and what only tells the linker where it lies."""
    lines = (line.partition("#")[0].rstrip() for line in module.inspect_source("asm").splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("."))


@pytest.mark.parametrize(
    "operator",
    [DEPTHWISE, pytest.param(FusedConvs((DEPTHWISE, POINTWISE)), marks=pytest.mark.thorough), POINTWISE],
    ids=["depthwise", "depthwise-pointwise", "pointwise"],
)
def test_the_shorter_pipeline_makes_the_machine_code_of_the_whole_one(operator):
    import tvm

    template = template_for(operator, WIDE)
    for config in template.space(operator, WIDE)[:6:3]:
        function = template.build(operator, config, WIDE).with_attr("global_symbol", "main")
        with pass_context():
            whole = tvm.compile(tvm.IRModule({"main": function}), target=WIDE.tvm_target()).mod
        assert _machine_code(compile_function(function, WIDE).mod) == _machine_code(whole)


def test_buffers_keep_the_padding_that_spreads_them_over_the_cache():
    """Winograd's positions lie an odd number of vectors apart; TVM's whole pipeline would cut what no loop reads."""
    operator = conv(1, 16, 14, 14, 32, 3)
    template = template_for(operator, WIDE)
    found = (each for each in template.space(operator, WIDE) if each.get("winograd_outputs") == 4)
    config = next(each for each in found if each["tiles"] % 2 == 0)  # an odd number needs no padding
    ir = compile_function(template.build(operator, config, WIDE), WIDE).mod.inspect_source("ll")
    positions, blocks = (4 + 2) ** 2, 1
    # Device type and number, bytes, type code and bits: what is asked of the workspace pool.
    asked = {int(size) for size in re.findall(r"\(i32 1, i32 [^,]+, i64 (\d+), i32 2, i32 32\)", ir)}
    assert positions * (blocks * config["tiles"] | 1) * WIDE.lanes * 4 in asked
