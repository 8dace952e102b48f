"""FLOPs as MFU and HFU count them, against mental arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.operators.any_operator import NO_FLOPS, CountedFlops, counted_flops
from costmodel.operators.attention import Attention, LinearAttention
from costmodel.operators.device_work import ConvolutionBackward, Elementwise, Gemm, Normalization, OptimizerStep
from costmodel.operators.layers import Conv2d

# 2 x 3 heads, 10 queries and keys, 4 wide: 2 * 6 * 100 * 4 = 4800 flops for each of its products.
PRODUCT = 4800
ATTENTION = Attention(2, 3, 10, 10, 4, 3)


def test_products_count_what_they_compute_and_all_else_counts_nothing():
    assert counted_flops(Gemm(2, 3, 5, 7)) == CountedFlops(420, 420)
    conv = Conv2d(1, 4, 8, 8, 6, (1, 1))
    assert counted_flops(ConvolutionBackward(conv, "weight")).model == 2 * 4 * 6 * 64
    for other in (Elementwise("add", 100), Normalization("rms_norm", 10, 10), OptimizerStep("adamw", 100, 1, 4, 3)):
        assert counted_flops(other) == NO_FLOPS


def test_fused_attention_counts_as_its_products_do_masked_or_not():
    """Eager attention: two batched products forward, four backward, of all pairs. The fused one computes the scores
    again in its backward pass, which only what is executed has."""
    eager = Gemm(6, 10, 10, 4)
    assert counted_flops(eager).model == PRODUCT
    for causal in (False, True):
        forward = replace(ATTENTION, causal=causal)
        assert counted_flops(forward) == CountedFlops(2 * PRODUCT, 2 * PRODUCT)
        assert counted_flops(replace(forward, direction="backward")) == CountedFlops(4 * PRODUCT, 5 * PRODUCT)
    assert replace(ATTENTION, causal=True).flops < 2 * PRODUCT  # what prices it knows better


def test_pairs_that_nobody_computes_do_not_count():
    windowed = replace(ATTENTION, causal=True, window=2)
    assert counted_flops(windowed).model == 2 * PRODUCT // 5
    packed = replace(ATTENTION, causal=True, packed=(4, 6))
    assert counted_flops(packed).model == 2 * PRODUCT * (16 + 36) // 100
    decoding = replace(ATTENTION, query_length=1, causal=True)
    assert counted_flops(decoding).model == 2 * PRODUCT // 10


@pytest.mark.parametrize("kind", ["ssd", "gated_delta"])
def test_scans_count_gradients_of_two_operands_and_execute_the_forward_pass_again(kind):
    forward = LinearAttention(kind, 1, 128, 2, 16, 4, 8)
    backward = replace(forward, direction="backward")
    assert counted_flops(forward).model == forward.flops
    assert counted_flops(backward) == CountedFlops(2 * forward.flops, 3 * forward.flops)
