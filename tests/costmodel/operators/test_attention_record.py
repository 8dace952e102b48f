"""Attention counted exactly: which queries see which keys, flops and bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.attention import Attention, seen_pairs


def drawn(queries: int, keys: int, causal: bool, window: int, placed: str) -> int:
    """The same from the mask itself, one pair after the other."""
    own = np.arange(queries)[:, None] + (0 if placed == "start" else keys - queries)
    key = np.arange(keys)[None, :]
    mask = key <= own if causal else np.ones((queries, keys), dtype=bool)
    if window:
        mask = mask & (key > own - window) & (key < own + window)
    return int(mask.sum())


@pytest.mark.parametrize("placed", ["end", "start"])
@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 8), (1, 9), (8, 3)])
def test_pairs_are_those_of_the_mask(queries, keys, causal, window, placed):
    assert seen_pairs(queries, keys, causal, window, placed) == drawn(queries, keys, causal, window, placed)


def test_ranks_of_context_parallelism_share_the_triangle_evenly():
    assert 4 * seen_pairs(16, 64, True, 0, "spread") == seen_pairs(64, 64, True)


def test_flops_of_both_directions_and_of_unequal_widths():
    one = Attention(2, 3, 4, 4, 8, 3, causal=True, dtype="bfloat16")
    assert one.pairs == 10
    assert one.flops == 2 * 2 * 3 * 10 * (8 + 8)
    assert replace(one, direction="backward").flops == 2 * 2 * 3 * 10 * 5 * 8
    latent = replace(one, value_dim=4)
    assert latent.flops == 2 * 2 * 3 * 10 * (8 + 4)
    assert replace(latent, direction="backward").flops == 2 * 2 * 3 * 10 * (3 * 8 + 2 * 4)


def test_packed_sequences_see_themselves_alone():
    packed = Attention(1, 1, 6, 6, 1, 1, causal=True, packed=(1, 2, 3))
    assert packed.pairs == 1 + 3 + 6
    assert replace(packed, packed=()).pairs == 21


def test_bytes_of_grouped_queries_a_mask_and_a_window_behind_a_cache():
    decode = Attention(1, 8, 1, 100, 16, 2, causal=True, dtype="bfloat16")
    assert decode.read_bytes == 2 * (8 * 16 + 2 * 100 * 32)
    assert replace(decode, window=10).read_bytes == 2 * (8 * 16 + 2 * 10 * 32)
    assert replace(decode, mask=True).read_bytes - decode.read_bytes == 2 * 8 * 100


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        ({}, "forward"),
        ({"direction": "backward"}, "backward"),
        ({"causal": False, "head_dim": 64}, "encoder"),
        ({"causal": False}, "forward"),
        ({"paged": True}, "paged"),
        ({"query_length": 1, "paged": True}, "decode"),
        ({"query_length": 16, "heads": 64, "kv_heads": 8}, "decode"),
    ],
)
def test_phases(change, phase):
    assert replace(Attention(1, 8, 4096, 4096, 128, 8, causal=True), **change).phase == phase


def test_a_record_survives_json():
    one = Attention(1, 8, 6, 6, 64, 2, True, "bfloat16", kernel="flash3", window=4, sinks=True, packed=(2, 4))
    assert from_record(to_record(one)) == one
