"""Attention and experts engine by engine: which rows of aiconfigurator's tables are taken, and what they say."""

from __future__ import annotations

import pytest

from costmodel.operators.attention import Attention
from lab.data.engine_tables import engine_files, read_engine_tables


def written(folder, kind: str, engine: str, name: str, **columns: list[object]):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder / "aiconfigurator" / "h100_sxm" / kind / engine / "1.0" / f"{name}.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path


def experts(folder, engine: str, latency: list[float], distribution: list[str], tokens: list[int], **changed: object):
    rows = len(latency)
    columns = {
        "moe_dtype": "fp8_block", "kernel_source": "any", "hidden_size": 7168, "inter_size": 2048, "topk": 8,
        "num_experts": 256, "moe_tp_size": 1, "moe_ep_size": 1, **changed,
    }  # fmt: skip
    return written(
        folder, "moe", engine, "moe_perf", latency=latency, distribution=distribution, num_tokens=tokens,
        **{name: [value] * rows for name, value in columns.items()},
    )  # fmt: skip


def test_attention_over_caches_of_both_types(tmp_path):
    path = written(
        tmp_path, "attention", "trtllm", "generation_attention_perf",
        kernel_source=["torch_flow"] * 3, attn_dtype=["bfloat16"] * 3, kv_cache_dtype=["bfloat16", "fp8", "fp8"],
        batch_size=[4] * 3, isl=[1] * 3, step=[1023] * 3, num_heads=[32] * 3, num_key_value_heads=[8] * 3,
        head_dim=[128, 128, 512], window_size=[0] * 3, latency=[0.02, 0.01, 0.01],
    )  # fmt: skip
    assert engine_files(tmp_path) == [path]
    (table,) = read_engine_tables(tmp_path)
    plain = Attention(4, 32, 1, 1024, 128, 8, True, "bfloat16", kernel="trtllm", paged=True)
    assert table.name == "trtllm-decode"
    assert table.operators[0] == plain
    assert (table.operators[1].cached, table.operators[1].read_bytes) == (
        "float8",
        plain.read_bytes - 4 * 8 * 1024 * 256,
    )
    assert table.seconds.tolist() == [0.02e-3, 0.01e-3]


def test_a_power_law_meets_most_experts(tmp_path):
    experts(tmp_path, "trtllm", [0.3] * 3, ["power_law_1.01"] * 3, [16, 32, 64], num_experts=128)
    (table,) = read_engine_tables(tmp_path)
    assert table.name == "experts-trtllm"
    assert [sum(each.counts) for each in table.operators] == [128, 256, 512]
    assert [each.products[0].active for each in table.operators] == [64, 104, 113]
    assert (table.operators[0].kernel, table.operators[0].scaling) == ("trtllm", "block")


def test_weights_of_4_bits_are_read_as_stored(tmp_path):
    experts(tmp_path, "vllm", [3.0], ["balanced"], [64], moe_dtype="w4a16_mxfp4")
    (layer,) = next(read_engine_tables(tmp_path)).operators
    assert (layer.dtype, layer.stored) == ("bfloat16", "mxfp4")
    assert layer.products[0].weight_bytes == 256 * 7168 * 4096 * 4.25 / 8
