"""Products in the tile registers of AMX, as the roofline prices them; the microbenchmarks that measure their rate."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.base.errors import MissingDependencyError
from costmodel.cpu.calibration import build_program
from costmodel.cpu.core_work import core_work, tile_loads
from costmodel.cpu.roofline import explain_operator
from costmodel.machines.machine_file import load_machine
from costmodel.operators.layers import Conv2d, Dense, FusedConvs

XEON = load_machine("xeon-amx-2c")
OLDER = replace(
    XEON,
    vector=replace(XEON.vector, features=tuple(each for each in XEON.vector.features if not each.startswith("amx"))),
)
PRODUCT = Conv2d(1, 256, 16, 16, 256, (1, 1), dtype="bfloat16")


def test_loads_of_two_by_two_tiles_are_one_for_each_row_of_sums():
    """Four tiles of 16 rows are loaded for 64 rows of sums, and again for every 16 words of depth."""
    assert tile_loads(steps=16, blocks=2, columns=32) == 1.0
    assert tile_loads(steps=48, blocks=16, columns=256) == 3.0
    assert tile_loads(steps=16, blocks=1, columns=64) == 1.25  # four tiles of data share one of weights
    assert tile_loads(steps=16, blocks=1, columns=16) == 2.0
    assert tile_loads(steps=16, blocks=4, columns=1) == 16.25  # of one row each row of weights is read for one product


def test_a_product_is_bound_by_the_rate_of_tiles():
    """A row of 64 bytes is loaded for each 32 input channels of a row of 16 sums."""
    work = core_work(PRODUCT, XEON)
    outputs = 256 * 16
    assert work.flops == PRODUCT.flops and work.arithmetic == "bfloat16"
    assert work.load_bytes == outputs * 256 / 32 * 64
    report = explain_operator(PRODUCT, XEON, 1)
    assert report.compute_seconds == pytest.approx(PRODUCT.flops / XEON.peak_flops("bfloat16", 1))
    assert core_work(PRODUCT, OLDER).load_bytes > 3 * work.load_bytes


@pytest.mark.parametrize(
    "operator",
    [
        replace(PRODUCT, groups=4),
        replace(PRODUCT, in_channels=3),
        Dense(1, 1024, 1000, dtype="bfloat16"),
        replace(PRODUCT, groups=4, dtype="int8"),
    ],
    ids=repr,
)
def test_what_has_no_kernel_in_tiles_takes_a_slot_of_fp32_for_each_word(operator):
    work = core_work(operator, XEON)
    words = {"bfloat16": 2, "int8": 4}[operator.dtype]
    plain = core_work(replace(operator, dtype="float32"), XEON)
    assert (work.arithmetic, work.flops) == ("float32", plain.flops / words)
    assert core_work(operator, OLDER).arithmetic == operator.dtype


def test_only_pairs_with_a_depthwise_layer_multiply_in_tiles():
    depthwise = Conv2d(1, 256, 16, 16, 256, (3, 3), padding=(1, 1, 1, 1), groups=256, dtype="bfloat16")
    two = explain_operator(FusedConvs((depthwise, PRODUCT)), XEON, 1)
    rate = XEON.peak_flops("bfloat16", 1)
    assert two.stages[1].compute_seconds == pytest.approx(PRODUCT.flops / rate)
    three = explain_operator(FusedConvs((PRODUCT, depthwise, PRODUCT)), XEON, 1)
    slots = PRODUCT.flops / 2 / XEON.peak_flops("float32", 1)
    assert three.stages[2].compute_seconds == pytest.approx(slots)


def test_the_microbenchmarks_of_tiles_compile(tmp_path: Path):
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    try:
        program, _ = build_program(tmp_path, (("-march=sapphirerapids",),))
    except MissingDependencyError:
        pytest.skip("the C compiler does not know Sapphire Rapids")
    text = program.read_bytes()
    assert b"tdpbf16ps\0" in text and b"tdpbssd\0" in text
