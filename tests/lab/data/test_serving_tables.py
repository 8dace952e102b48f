"""Kernels of serving engines: which rows of aiconfigurator's tables are taken, and what they say."""

from __future__ import annotations

import pytest

from costmodel.operators.attention import Attention
from lab.data.aiconfigurator import read_serving, serving_files


def written(folder, kind: str, engine: str, name: str, **columns: list[object]):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder / "aiconfigurator" / "h100_sxm" / kind / engine / "1.0" / f"{name}.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_latent_attention_of_one_token(tmp_path):
    path = written(
        tmp_path, "mla", "trtllm", "generation_mla_perf",
        mla_dtype=["bfloat16"] * 2, kv_cache_dtype=["bfloat16", "fp8"], num_heads=[128, 128], batch_size=[4, 4],
        isl=[1, 1], step=[1023, 1023], latency=[0.05, 0.03],
    )  # fmt: skip
    assert serving_files(tmp_path) == [path]
    (table,) = read_serving(tmp_path)
    assert (table.name, table.machine, table.seconds.tolist()) == ("mla-decode", "h100-sxm", [0.05e-3])
    assert table.operators == (
        Attention(4, 128, 1, 1024, 576, 1, dtype="bfloat16", kernel="mla", value_dim=512, paged=True),
    )


def test_the_third_flash_attention_over_a_cache_in_8_bits(tmp_path):
    written(
        tmp_path, "attention", "vllm", "context_attention_perf",
        kernel_source=["vllm_flash_attn_fa3"] * 2, attn_dtype=["fp8", "bfloat16"], kv_cache_dtype=["fp8", "fp8"],
        batch_size=[2, 2], isl=[512, 512], step=[0, 0], num_heads=[8, 8], num_key_value_heads=[2, 2],
        head_dim=[128, 128], window_size=[0, 0], latency=[0.5, 0.9],
    )  # fmt: skip
    (table,) = read_serving(tmp_path)
    assert (table.name, table.seconds.tolist()) == ("flash3-fp8-paged", [0.5e-3])
    assert table.operators[0].dtype == "float8"
