"""Operands of register tiles that no register is left for: what the cost says, and what the compiler does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("tvm")

from costmodel.operators.layers import Conv2d, Epilogue
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.kernel_compilation import compile_function
from schedules.kernels.direct_conv2d import DirectConv2d
from schedules.loops import config_space
from schedules.loops.config_space import TapRow

CPU = CpuTarget(16, 32, "cascadelake", ("avx512f", "avx512_vnni"), 2, 32 * 1024, 1024 * 1024)
CONV = Conv2d(
    1, 16, 28, 28, 64, (3, 3), (1, 1), (1, 1, 1, 1), groups=1, epilogue=Epilogue(bias=True), dtype="int8"
)  # fmt: skip


def config(out_blocks, columns, **others):
    return {"out_blocks": out_blocks, "columns": columns, "unroll": 4, "rows": 1, "channel_tasks": 1, "row_tasks": 2}


def on_the_stack(out_blocks, columns):
    """Vectors that are stored on the stack or read from there, of as many products."""
    function = DirectConv2d().build(CONV, config(out_blocks, columns), CPU)
    lines = compile_function(function, CPU).mod.inspect_source("asm").splitlines()
    stack = sum("zmm" in line and re.search(r"\(%r[sb]p\)", line) is not None for line in lines)
    return stack / sum("vpdpbusd" in line for line in lines)


def test_operands_that_several_taps_read_are_spilled_where_registers_run_out():
    row = TapRow.of(CONV)
    assert row.spilled(CPU, 4, 4) == row.spilled(CPU, 4, 5) == 0
    assert row.spilled(CPU, 2, 14) == 14 and row.spilled(CPU, 4, 6) == 4
    assert on_the_stack(4, 4) < 0.05 < 0.3 < on_the_stack(2, 14)


def test_operands_that_one_tap_reads_are_not_kept():
    assert TapRow(1, 1, 1).spilled(CPU, 2, 14) == TapRow(2, 2, 1).spilled(CPU, 2, 14) == 0
    assert TapRow(3, 1, 16).spilled(CPU, 2, 14) == 0
    assert TapRow(3, 2, 1).spilled(CPU, 2, 14) > TapRow(3, 1, 1).spilled(CPU, 2, 14)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_tiles_that_fit_the_registers_come_first_where_bytes_are_multiplied(dtype, monkeypatch):
    conv, template = replace(CONV, dtype=dtype), DirectConv2d()

    def cost(*tile):
        return template.cost(conv, config(*tile), CPU)

    assert (cost(4, 4) < cost(2, 14)) == (dtype != "float32")
    before = cost(2, 14)
    monkeypatch.setattr(config_space, "SPILL_SLOTS", 0.0)
    assert (cost(2, 14) < before) == (dtype != "float32")
