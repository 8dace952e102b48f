"""Which kernel attention takes, how it is cut into tiles, and what it costs."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from costmodel.base.errors import MachineError
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.families.attention import (
    FusedAttention,
    KernelPace,
    kernel_of,
    named_family,
    pace_of,
    sdpa_kernel,
    tiled,
)
from costmodel.machines.machine_file import load_machine
from costmodel.machines.machine_records import ComputeRate, PerThreads
from costmodel.operators.attention import Attention
from lab.data.kernel_table import read_measured
from lab.fit.kernels import rows_by_family
from lab.validate.cost_models import fit_pace

BASE = Attention(2, 16, 4096, 4096, 128, 16, causal=True, dtype="bfloat16")


@pytest.mark.parametrize(
    ("machine", "change", "release", "kernel"),
    [
        ("h100-sxm", {}, (2, 13, 0), "cudnn"),
        ("h100-sxm", {}, (2, 10, 0), "flash2"),
        ("h100-sxm", {}, (2, 5, 1), "flash2"),
        ("h100-sxm", {}, (2, 5, 0), "cudnn"),
        ("h100-sxm", {}, (2, 1, 0), "flash1"),
        ("b200-sxm", {}, (2, 13, 0), "cudnn"),
        # Latent attention: queries and keys of 192, values of 128.
        ("h100-sxm", {"head_dim": 192, "value_dim": 128}, (2, 13, 0), "cudnn"),
        ("h100-sxm", {"head_dim": 192, "value_dim": 128}, (2, 10, 0), "efficient"),
        ("h100-sxm", {"head_dim": 256}, (2, 13, 0), "cudnn"),
        ("h100-sxm", {"head_dim": 256}, (2, 5, 0), "flash2"),
        ("b200-sxm", {"head_dim": 192, "value_dim": 128}, (2, 13, 0), "cudnn"),
        ("b200-sxm", {"head_dim": 192}, (2, 13, 0), "flash2"),
        ("a100-sxm-80gb", {}, (2, 13, 0), "flash2"),
        ("a100-sxm-80gb", {}, (2, 0, 1), "flash1"),
        ("a100-sxm-80gb", {"mask": True}, (2, 13, 0), "efficient"),
        ("a100-sxm-80gb", {"dtype": "float32"}, (2, 13, 0), "efficient"),
        ("a100-sxm-80gb", {"value_dim": 64}, (2, 13, 0), "efficient"),
        ("a100-sxm-80gb", {"head_dim": 256}, (2, 13, 0), "flash2"),
        ("a100-sxm-80gb", {"head_dim": 256}, (2, 1, 0), "efficient"),
        ("a100-sxm-80gb", {"head_dim": 512}, (2, 13, 0), "efficient"),
        ("a100-sxm-80gb", {"query_length": 2048}, (2, 13, 0), "efficient"),
        ("a100-sxm-80gb", {"query_length": 2048, "placed": "spread"}, (2, 13, 0), "flash2"),
        ("a100-sxm-80gb", {"sinks": True}, (2, 13, 0), "math"),
        ("l40s", {}, (2, 13, 0), "flash2"),
        ("rtx-5090", {}, (2, 13, 0), "flash2"),  # runs kernels of Ada
        ("v100-sxm2-16gb", {}, (2, 13, 0), "math"),
        ("v100-sxm2-16gb", {"dtype": "float16"}, (2, 13, 0), "efficient"),
        ("t4", {"dtype": "float16"}, (2, 13, 0), "efficient"),
        ("t4", {"dtype": "float32"}, (2, 13, 0), "efficient"),
    ],
)
def test_the_choice_of_scaled_dot_product_attention(machine, change, release, kernel):
    assert kernel_of(replace(BASE, **change), load_machine(machine), release) == kernel


def test_a_kernel_by_name_is_taken_where_it_runs():
    h100, a100, t4 = (load_machine(name) for name in ("h100-sxm", "a100-sxm-80gb", "t4"))
    assert kernel_of(replace(BASE, kernel="flash3"), h100) == "flash3"
    assert kernel_of(replace(BASE, kernel="flash"), h100) == "flash2"
    with pytest.raises(MachineError, match="a100-sxm-80gb: FlashAttention 3 runs on Hopper alone"):
        kernel_of(replace(BASE, kernel="flash3"), a100)
    assert kernel_of(replace(BASE, kernel="flash4"), load_machine("b200-sxm")) == "flash4"
    with pytest.raises(MachineError, match="h100-sxm: FlashAttention 4 is for B200 and its like"):
        kernel_of(replace(BASE, kernel="flash4"), h100)
    with pytest.raises(MachineError, match="t4: has no kernel 'flash2', which needs Ampere"):
        kernel_of(replace(BASE, kernel="flash2"), t4)


@pytest.mark.parametrize(
    ("causal", "direction", "milliseconds"),
    [(False, "forward", 1.433), (True, "forward", 0.775), (False, "backward", 4.043), (True, "backward", 2.274)],
)
def test_flash_attention_4_as_its_authors_time_it(causal, direction, milliseconds):
    """Dao-AILab/flash-attention, pull request 2280, B200."""
    one = Attention(4, 16, 8192, 8192, 128, 16, causal, "bfloat16", direction, "flash4")
    (estimate,) = gpu_cost_model(load_machine("b200-sxm")).estimate([one])
    assert estimate.seconds * 1e3 == pytest.approx(milliseconds, rel=0.06)


def test_tiles_behind_a_causal_mask_are_skipped():
    full = replace(BASE, batch=1, heads=1, kv_heads=1, query_length=512, key_length=512, causal=False)
    # 128 x 64 tiles: four blocks of eight
    everything = tiled(full, "flash2", 108, "ampere")
    assert (everything.blocks, everything.tiles, everything.longest, everything.equal) == (4, 32, 8, True)
    causal = tiled(replace(full, causal=True), "flash2", 108, "ampere")
    assert (causal.blocks, causal.tiles, causal.longest, causal.equal) == (4, 2 + 4 + 6 + 8, 8, False)
    windowed = tiled(replace(full, causal=True, window=64), "flash2", 108, "ampere")
    assert windowed.tiles == 2 + 3 + 3 + 3
    packed = tiled(replace(full, packed=(256, 256)), "flash2", 108, "ampere")
    assert (packed.blocks, packed.tiles) == (4, 16)
    # backward: blocks of 64 keys over queries in steps of 64, the first keys are seen by all
    back = tiled(replace(full, direction="backward", causal=True), "flash2", 108, "ampere")
    assert (back.blocks, back.tiles, back.longest) == (8, 36, 8)


def test_decode_splits_the_keys_until_the_chip_is_full():
    one = replace(BASE, batch=1, heads=8, kv_heads=2, query_length=1, key_length=8192, paged=True)
    work = tiled(one, "flash2", 108, "ampere")
    assert (work.splits, work.blocks) == (54, 108)
    assert tiled(replace(one, batch=64), "flash2", 108, "ampere").splits == 1


def test_compute_of_whole_waves_by_hand():
    """Ten multiprocessors of 1e8 flop/s: 20 blocks of 10 tiles, 128 x 128 scores each, are two waves."""
    a100 = load_machine("a100-sxm-80gb")
    chip = dataclasses.replace(a100.chip(), sm_count=10, clock_hz=1e9)
    rates = {"bfloat16": ComputeRate(PerThreads(((1, 1e9),)), "toy")}
    toy = dataclasses.replace(a100, gpu=chip, compute=rates)
    family = FusedAttention("cudnn", "forward", KernelPace(0.5, 100.0, 1000.0, 1.0))
    one = Attention(1, 2, 1280, 1280, 128, 2, dtype="bfloat16")
    score = 4 * 128 / (1e8 * 0.5) + 0.1 / 1e9
    compute = family.analyse([one], toy).terms["compute"][0]
    assert compute == pytest.approx(2 * 10 * 128 * 128 * score + 2 * 1000 / 1e9)


def test_a_sliding_window_is_not_priced_as_the_whole_triangle(tmp_path):
    """Sinks and windows cost a fused kernel what they see; the unfused form all pairs, several times over."""
    model = gpu_cost_model(load_machine("h100-sxm"), tmp_path)
    long = replace(BASE, query_length=32768, key_length=32768, head_dim=64, kernel="flash2", sinks=True)
    whole, windowed, unfused = (
        each.seconds for each in model.estimate([long, replace(long, window=128), replace(long, kernel="math")])
    )
    assert windowed < 0.1 * whole and unfused > 3 * whole


@pytest.mark.parametrize("kernel", ["flash1", "flash2", "cudnn", "efficient"])
@pytest.mark.parametrize("generation", ["volta", "turing", "ampere", "ada", "hopper", "blackwell"])
@pytest.mark.parametrize("phase", ["encoder", "forward", "backward", "paged", "decode"])
def test_every_kernel_has_a_pace_everywhere(kernel, generation, phase):
    assert pace_of(kernel, phase, generation).products > 0


def published(machine: str) -> dict[str, object]:
    tables = [each for each in read_measured() if each.machine == machine and isinstance(each.operators[0], Attention)]
    return {each.family.name: each for each in rows_by_family(tables)}


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        *(
            ("h100-sxm", f"{kernel}-{way}")
            for kernel in ("flash2", "flash3", "cudnn")
            for way in ("forward", "backward")
            if (kernel, way) != ("cudnn", "backward")  # fitted to kernels of our own too
        ),
        ("a100-pcie-80gb", "flash2-forward"),
        ("a100-pcie-80gb", "flash2-backward"),
        ("b200-sxm", "cudnn-forward"),
        ("b200-sxm", "cudnn-backward"),
    ],
)
def test_paces_are_those_that_the_published_rows_give(machine, name):
    rows = published(machine)[name]
    kernel, phase = name.split("-")
    fitted = named_family(kernel, phase).with_pace(fit_pace([rows]))
    known = named_family(kernel, phase)
    found, kept = (each.analyse(rows.operators, rows.machine).seconds for each in (fitted, known))
    assert np.abs(np.log(kept / found)).max() < 0.06


@pytest.mark.parametrize(("direction", "worst"), [("forward", 0.13), ("backward", 0.1)])
def test_published_speeds_of_hopper_come_out(direction, worst):
    """The shipped model at 8k and 16k tokens, against the figures of the FlashAttention-3 paper."""
    model = gpu_cost_model(load_machine("h100-sxm"))
    for name, rows in published("h100-sxm").items():
        picked = [
            (operator, seconds)
            for operator, seconds in zip(rows.operators, rows.seconds, strict=True)
            if operator.query_length >= 8192 and operator.direction == direction
        ]
        for estimate, (_, seconds) in zip(model.estimate([each for each, _ in picked]), picked, strict=True):
            assert abs(np.log(estimate.seconds / seconds)) < worst, name
            assert estimate.source == "fitted"


@pytest.mark.parametrize(
    ("operator", "measured"),
    [
        (Attention(15, 8, 192, 192, 128, 8, causal=True, dtype="bfloat16", direction="backward"), 45.4e-6),
        (Attention(12, 32, 128, 128, 64, 32, causal=True, dtype="float16", direction="backward"), 45.0e-6),
        (Attention(5, 12, 7197, 7197, 128, 3, dtype="bfloat16", direction="backward"), 7085e-6),
        (Attention(4, 12, 1024, 1024, 64, 12, causal=True, dtype="bfloat16", dropout=True), 62.5e-6),
        # The memory-efficient kernel in FP32: three products in TF32.
        (Attention(3, 12, 1856, 1856, 128, 12, dtype="float32", direction="backward"), 4383e-6),
        (Attention(6, 32, 2048, 2048, 128, 32, causal=True, dtype="float32"), 4798e-6),
    ],
)
def test_times_of_h200(operator, measured):
    (found,) = gpu_cost_model(load_machine("h200-sxm")).estimate([operator])
    assert found.seconds == pytest.approx(measured, rel=0.16)


def test_the_memory_efficient_kernel_has_no_grouped_heads():
    grouped = Attention(1, 8, 512, 512, 64, 2, dtype="float32")
    assert [sdpa_kernel(each, load_machine("h200-sxm")) for each in (grouped, replace(grouped, kv_heads=8))] == [
        "math",
        "efficient",
    ]
