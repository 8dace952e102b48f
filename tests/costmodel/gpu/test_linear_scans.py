"""Linear attention on GPUs: work counted by hand, what a price must not do, and the shipped figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.gpu import gpu_cost_model
from costmodel.machines.machine_file import load_machine
from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.attention import CausalConvolution, LinearAttention

DELTA = LinearAttention("gated_delta", 4, 4096, 16, 128, 32, 128)


def test_work_of_one_chunk():
    one = LinearAttention("ssd", 1, 4, 1, 2, 3, 5, chunk=4)
    # Scores 4 x 2 x 4 of the group; 4 x 4 x 5 of them with values, two products with 2 x 5 states, of 3 heads.
    assert one.flops == 2 * (4 * 2 * 4 + 3 * (4 * 4 * 5 + 2 * 4 * 2 * 5))
    assert one.states == 30 and one.chunks == 1 and not one.one_token
    assert replace(one, direction="backward").flops == 3 * one.flops
    # Keys and queries of the group, values of three heads, a gate each; results of three heads.
    assert one.read_bytes == 4 * (2 * 2 + 15 + 3) * 2 and one.write_bytes == 4 * 15 * 2
    kept = replace(one, length=1, keeps_states=True)
    assert kept.one_token and kept.state_bytes == 30 * 4
    assert from_record(to_record(one)) == one


def test_convolution_bytes():
    one = CausalConvolution(2, 3, 5, 4)
    assert one.flops == 2 * 30 * 4 and one.read_bytes == (30 + 12) * 2 and one.write_bytes == 60
    update = CausalConvolution(2, 3, 1, 4, update=True)
    assert update.write_bytes == (6 + 18) * 2
    assert replace(one, direction="backward").read_bytes == (60 + 12) * 2


def test_a_token_behind_a_cache_moves_its_states():
    machine = load_machine("h100-sxm")
    step = replace(DELTA, batch=256, length=1, keeps_states=True, state_dtype="bfloat16")
    (found,) = gpu_cost_model(machine).estimate([step])
    assert found.seconds > 0.8 * 2 * step.state_bytes / machine.memory[-1].datasheet
    assert found.seconds < 4 * 2 * step.state_bytes / machine.memory[-1].datasheet


def test_the_scan_of_mamba_2_as_published():
    """vllm-project/vllm pull request 27299: tokens per second of one layer on H100, which the pace of 4,096 to 16,384
    tokens is fitted to, and longer ones that it is not.
    """
    rates = {4096: 1.206409e7, 16384: 1.292440e7, 65536: 1.106830e7, 262144: 1.081547e7}
    works = [LinearAttention("ssd", 1, length, 1, 128, 128, 64, 256) for length in rates]
    found = gpu_cost_model(load_machine("h100-sxm")).estimate(works)
    for each, (length, rate) in zip(found, rates.items(), strict=True):
        assert each.seconds == pytest.approx(length / rate, rel=0.2)
        assert each.lower < length / rate < each.upper
