"""Tables of 8-bit layers and of experts: which rows are taken, and what is taken off them."""

from __future__ import annotations

import pytest

from costmodel.operators.device_work import ScaledCast, ScaledGemm
from costmodel.operators.experts import ExpertLayer
from lab.data import aiconfigurator as expert_tables
from lab.data import aiconfigurator as scaled_tables

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(folder, place, columns):
    path = folder / "aiconfigurator" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_the_cast_before_a_product_is_taken_off(tmp_path):
    """10 ms of cast for this input: seen at 128 outputs, where BF16 takes 5 ms, so that 3 ms are the product's."""
    rows = [
        ("bfloat16", 128, 5.0), ("fp8", 128, 13.0),
        ("bfloat16", 65536, 100.0), ("fp8", 65536, 60.0),
        ("bfloat16", 256, 30.0), ("fp8", 256, 25.0),  # a third of BF16's time: what is left would be noise
    ]  # fmt: skip
    columns = {"gemm_dtype": [each[0] for each in rows], "n": [each[1] for each in rows]}
    columns |= {"m": [4096] * 6, "k": [8192] * 6, "latency": [each[2] for each in rows]}
    write(tmp_path, "h100_sxm/gemm/gemm_perf.parquet", columns)
    (table,) = scaled_tables.read_scaled(tmp_path)
    assert table.name == "gemm-8bit" and table.operators == (ScaledGemm(4096, 65536, 8192),)
    assert table.seconds.tolist() == pytest.approx([50e-3])


def test_a_dynamic_cast_is_the_static_one_and_what_it_takes_besides(tmp_path):
    columns = {"m": [16, 32], "k": [64, 64], "latency": [1.0, 2.0]}
    write(tmp_path, "l40s/quantize/vllm/0.24.0/scale_matrix_perf.parquet", columns)
    write(tmp_path, "l40s/quantize/vllm/0.24.0/computescale_perf.parquet", {**columns, "latency": [0.5, 0.0]})
    write(tmp_path, "l40s/quantize/sglang/0.5/scale_matrix_perf.parquet", columns)
    write(tmp_path, "l40s/gemm/gemm_perf.parquet", {**columns, "n": [1, 1], "gemm_dtype": ["bfloat16"] * 2})
    tables = [each for each in scaled_tables.read_scaled(tmp_path) if each.name == "quantize"]
    static, dynamic = tables
    assert static.operators == (ScaledCast(16, 64), ScaledCast(32, 64))
    assert dynamic.operators == (ScaledCast(16, 64, scaling="row", dynamic=True),)
    assert dynamic.seconds.tolist() == pytest.approx([1.5e-3])


def test_layers_of_known_work_are_read(tmp_path):
    kinds = [("bfloat16", "balanced", 1), ("fp8_block", "balanced", 2), ("bfloat16", "power_law_1.2", 2),
             ("int4_wo", "balanced", 1)]  # fmt: skip
    columns = {"moe_dtype": [each[0] for each in kinds], "distribution": [each[1] for each in kinds]}
    columns |= {"moe_ep_size": [each[2] for each in kinds], "kernel_source": ["moe_torch_flow_cutlass"] * 4}
    sizes = {"num_tokens": 64, "hidden_size": 32, "inter_size": 16, "topk": 2, "num_experts": 8, "moe_tp_size": 2}
    columns |= {name: [value] * 4 for name, value in sizes.items()} | {"latency": [1.0] * 4}
    write(tmp_path, "h100_sxm/moe/trtllm/1/moe_perf.parquet", columns)
    wide, eight = expert_tables.read_expert_layers(tmp_path)
    assert wide.operators == (ExpertLayer((16,) * 8, 64, 32, 8, "bfloat16", "cutlass"),)
    assert eight.operators == (ExpertLayer((16,) * 4, 64, 32, 8, "float8", "cutlass", scaling="block"),)
    assert (wide.name, eight.name, wide.seconds.tolist()) == ("moe", "moe-8bit", [1e-3])
