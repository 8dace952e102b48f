"""Latent attention over its latents, attention in 8 bits: work by hand, what a price must not do, shipped figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.base.errors import MachineError, UnsupportedOperatorError
from costmodel.gpu import gpu_cost_model
from costmodel.gpu.families.attention import tiled
from costmodel.machines.machine_file import load_machine
from costmodel.operators.attention import Attention

LATENT = Attention(64, 128, 1, 4096, 576, 1, dtype="bfloat16", kernel="mla", value_dim=512, paged=True)
EIGHT = Attention(8, 32, 1, 4096, 128, 8, causal=True, dtype="float8", kernel="flash3-fp8", paged=True)


def test_values_are_the_first_part_of_the_keys():
    assert LATENT.phase == "decode" and replace(LATENT, query_length=4).phase == "decode"
    assert LATENT.read_bytes == 2 * 64 * (128 * 576 + 4096 * 576)
    assert LATENT.flops == 2 * 64 * 128 * 4096 * (576 + 512)


def test_heads_fill_tiles_of_64_queries():
    work = tiled(LATENT, "mla", 132, "hopper")
    # Two tiles of 64 heads for each of 64 sequences, 64 tiles of keys.
    assert (work.blocks, work.tiles, work.splits) == (128, 128 * 64, 1)
    assert tiled(replace(LATENT, batch=1, heads=16), "mla", 132, "hopper").splits == 64


def test_eight_bits_are_faster_and_refused_where_nobody_measured_them():
    h100 = load_machine("h100-sxm")
    wide = replace(EIGHT, dtype="bfloat16", kernel="flash3", batch=256)
    both = gpu_cost_model(h100).estimate([replace(EIGHT, batch=256), wide])
    assert both[0].seconds < 0.8 * both[1].seconds
    with pytest.raises(UnsupportedOperatorError, match="attention in 8 bits by 'sdpa' has no model"):
        gpu_cost_model(h100).estimate([replace(EIGHT, kernel="sdpa")])
    with pytest.raises(UnsupportedOperatorError, match="no gradients in 8 bits"):
        gpu_cost_model(h100).estimate([replace(EIGHT, direction="backward")])
    with pytest.raises(MachineError, match="l40s: FlashAttention 3 runs on Hopper alone"):
        gpu_cost_model(load_machine("l40s")).estimate([EIGHT])
    with pytest.raises(MachineError, match="t4: has no kernel 'mla', which needs Ampere or later; name `eager`"):
        gpu_cost_model(load_machine("t4")).estimate([LATENT])
