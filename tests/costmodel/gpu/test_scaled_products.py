"""8-bit products and casts: rates, bytes, and refusals."""

from __future__ import annotations

import pytest

from costmodel.base.errors import MachineError
from costmodel.gpu import gpu_cost_model
from costmodel.machines.machine_file import load_machine
from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.device_work import Gemm, ScaledCast, ScaledGemm


def test_sizes():
    product = ScaledGemm(256, 512, 1024)
    assert product.flops == 2 * 256 * 512 * 1024
    assert product.read_bytes == 768 * 1024 and product.write_bytes == 256 * 512 * 2
    assert ScaledGemm(256, 512, 1024, scaling="mx").read_bytes == 768 * 1024 * 33 // 32
    cast = ScaledCast(64, 128, outputs=2)
    assert cast.read_bytes == cast.write_bytes == 64 * 128 * 2
    assert ScaledCast(64, 128, outputs=0).write_bytes == 0
    assert from_record(to_record(product)) == product


@pytest.mark.parametrize("name", ["h100-sxm", "h200-sxm", "l40s", "b200-sxm", "h100-pcie", "l4"])
def test_a_large_product_is_faster_than_in_16_bits_and_slower_than_the_datasheet(name):
    """An 8192^3 product was priced at 8,000 TFLOP/s on H100 once."""
    machine, work = load_machine(name), ScaledGemm(8192, 8192, 8192)
    eight, sixteen = gpu_cost_model(machine).estimate([work, Gemm(1, 8192, 8192, 8192, "bfloat16")])
    rate = work.flops / eight.seconds
    # The clock of L4 sinks under such a load.
    assert 0.3 * machine.compute["float8"].datasheet < rate < machine.compute["float8"].datasheet
    assert eight.seconds < sixteen.seconds


@pytest.mark.parametrize("name, least, most", [("h100-sxm", 1.08, 1.15), ("b200-sxm", 1.0, 1.0)])
def test_gradients_whose_sums_are_promoted_take_longer_on_hopper_alone(name, least, most):
    model = gpu_cost_model(load_machine(name))
    kept, promoted = model.estimate([ScaledGemm(8192, 8192, 8192), ScaledGemm(8192, 8192, 8192, split_sums=True)])
    assert least <= promoted.seconds / kept.seconds <= most + 1e-9
    rows = [ScaledGemm(8192, 8192, 8192, scaling="row", split_sums=each) for each in (False, True)]
    assert len({each.seconds for each in model.estimate(rows)}) == 1


def test_a_gpu_without_8_bit_floats_says_so():
    with pytest.raises(MachineError, match="no compute rate for float8"):
        gpu_cost_model(load_machine("a100-sxm-80gb")).estimate([ScaledGemm(64, 64, 64)])


def test_a_cast_is_bound_by_memory_and_two_copies_cost_more_than_one():
    model = gpu_cost_model(load_machine("h100-sxm"))
    one, two, search = model.estimate(
        [ScaledCast(16384, 8192), ScaledCast(16384, 8192, outputs=2), ScaledCast(16384, 8192, outputs=0)]
    )
    assert one.bound == "memory:DRAM" and search.seconds < one.seconds < two.seconds
    assert one.seconds == pytest.approx(16384 * 8192 * 3 / 3.0e12, rel=0.15)


def test_gradients_of_weights_in_8_bits_are_added_to_fp32_values():
    plain, added = (ScaledGemm(4096, 14336, 4096, accumulates=each) for each in ("", "float32"))
    assert added.write_bytes == 2 * plain.write_bytes and added.read_bytes - plain.read_bytes == added.write_bytes
    assert from_record(to_record(added)) == added
    before, after = (each.seconds for each in gpu_cost_model(load_machine("h100-sxm")).estimate([plain, added]))
    assert before < after < 1.4 * before
