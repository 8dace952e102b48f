"""Kernels as serving engines select them, and weights stored in fewer bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.families.rates import dram_bandwidth, kernel_floor
from costmodel.machines.machine_file import load_machine
from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.attention import ENGINES, Attention
from costmodel.operators.device_work import Gemm, StoredGemm
from costmodel.operators.experts import BALANCED, ExpertLayer
from costmodel.operators.layers import stored_bytes

DECODE = Attention(64, 32, 1, 4096, 128, 8, True, "bfloat16", kernel="vllm", paged=True)
LAYER = ExpertLayer(BALANCED.counts(512, 128), 128, 2880, 2880, "bfloat16", "vllm", True, "", "mxfp4")


def seconds(machine: str, operator: object) -> float:
    return gpu_cost_model(load_machine(machine)).estimate([operator])[0].seconds


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("machine", ["h200-sxm", "a100-sxm-80gb", "l40s"])
def test_measured_gpus_are_priced_by_the_tables_of_each_engine(machine: str, engine: str) -> None:
    found = gpu_cost_model(load_machine(machine)).estimate(
        [replace(DECODE, kernel=engine), replace(LAYER, kernel=engine)]
    )
    assert [each.source for each in found] == ["fitted", "fitted"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("machine", ["b200-sxm", "gh200", "h20"])
def test_other_gpus_have_a_price_with_an_interval(machine: str, engine: str) -> None:
    model = gpu_cost_model(load_machine(machine))
    for each in model.estimate([replace(DECODE, kernel=engine), replace(LAYER, kernel=engine)]):
        assert each.lower < each.seconds < each.upper


def test_decoding_over_8_bits_reads_half_of_the_cache() -> None:
    wide = replace(DECODE, kernel="trtllm")
    assert 0.4 < seconds("h200-sxm", replace(wide, cached="float8")) / seconds("h200-sxm", wide) < 0.75


def test_experts_of_4_bits_are_faster_where_weights_are_the_bound() -> None:
    assert seconds("h200-sxm", LAYER) < 0.6 * seconds("h200-sxm", replace(LAYER, stored=""))


def test_stored_weights_cost_their_bytes_at_few_rows_and_arithmetic_at_many() -> None:
    machine = load_machine("a100-sxm-80gb")
    few = StoredGemm(1, 8192, 8192, "int4")
    alone = few.read_bytes / (0.75 * dram_bandwidth(machine))
    assert seconds(machine.name, few) == pytest.approx(alone + kernel_floor(machine), rel=0.03)
    many = StoredGemm(8192, 8192, 8192, "int4")
    assert seconds(machine.name, many) > seconds(machine.name, Gemm(1, 8192, 8192, 8192, "bfloat16", transpose_b=True))


def test_four_bits_are_multiplied_faster_where_the_gpu_can() -> None:
    wide = StoredGemm(8192, 8192, 8192, "nvfp4")
    assert seconds("b200-sxm", replace(wide, dtype="float4")) < 0.4 * seconds("b200-sxm", wide)


def test_records_go_there_and_back() -> None:
    for each in (DECODE, replace(DECODE, cached="float8"), LAYER, StoredGemm(1, 2, 3, "int8")):
        assert from_record(to_record(each)) == each


def test_an_unknown_type_of_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="weights stored as 'int3': known are mxfp4, nvfp4, int4, int8"):
        stored_bytes("int3", "bfloat16")
