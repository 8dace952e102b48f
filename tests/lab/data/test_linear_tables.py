"""Tables of linear attention: which rows are taken, and as which work."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodel.operators.attention import CausalConvolution, LinearAttention
from lab.data.aiconfigurator import read_linear

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(folder, place, rows, shape):
    """``rows``: phase, kernel, batch, length and milliseconds of each."""
    path = folder / "aiconfigurator" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("phase", "kernel_source", "batch_size", "seq_len", "latency")
    columns = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    columns |= {name: [value] * len(rows) for name, value in (*shape.items(), ("d_conv", 4))}
    parquet.write_table(pyarrow.table(columns), path)


MAMBA = {"nheads": 8, "head_dim": 64, "n_groups": 2, "d_state": 128, "chunk_size": 256}
DELTA = {"num_k_heads": 2, "head_k_dim": 128, "num_v_heads": 4, "head_v_dim": 64}


def test_scans_steps_and_convolutions_of_mamba(tmp_path):
    rows = [
        ("context", "mamba_chunk_scan_combined", 2, 1024, 3.0),
        ("generation", "selective_state_update", 16, 1, 0.5),
        ("context", "causal_conv1d_fn", 2, 1024, 0.04),
        ("context", "causal_conv1d_fn", 2, 2048, 0.02),  # launched by itself: the host is in it
        ("context", "causal_conv1d_fn", 2, 4096, 9.0),  # disturbed: 16 MB at 2 GB/s
        ("context", "some_other_kernel", 2, 1024, 1.0),
        ("context", "mamba_chunk_scan_combined", 2, 2048, 0.0),
    ]
    write(tmp_path, "l40s/linear_attention/trtllm/1/mamba2_perf.parquet", rows, MAMBA)
    tables = {each.name: each for each in read_linear(tmp_path)}
    assert set(tables) == {"scan-ssd", "scan-step", "causal-conv"}
    assert tables["scan-ssd"].operators == (LinearAttention("ssd", 2, 1024, 2, 128, 8, 64, 256, keeps_states=True),)
    assert tables["scan-ssd"].seconds.tolist() == [3e-3] and tables["scan-ssd"].machine == "l40s"
    (step,) = tables["scan-step"].operators
    assert step.one_token and step.states == 16 * 8 * 64 * 128
    channels = 8 * 64 + 2 * 2 * 128
    assert tables["causal-conv"].operators[0] == CausalConvolution(2, channels, 1024, 4)
    assert tables["causal-conv"].counted.tolist() == [True, False, False]


def test_of_the_gated_delta_rule_the_engine_whose_kernel_is_the_librarys(tmp_path):
    rows = [
        ("context", "chunk_gated_delta_rule", 1, 4096, 2.0),
        ("context", "chunk_gated_delta_rule", 1, 1, 2.0),  # one token is no chunk
        ("context", "causal_conv1d_fn", 1, 4096, 0.25),  # of channels that the table does not tell
        ("generation", "fused_recurrent_gated_delta_rule", 8, 1, 0.5),
    ]
    for engine in ("trtllm", "sglang"):
        write(tmp_path, f"h100_sxm/linear_attention/{engine}/1/gdn_perf.parquet", rows, DELTA)
    write(tmp_path, "a100_sxm/linear_attention/sglang/1/gdn_perf.parquet", rows, DELTA)
    tables = [(each.name, Path(each.source).parts[-3], each) for each in read_linear(tmp_path)]
    assert {(name, engine) for name, engine, _ in tables} == {
        ("causal-conv", "sglang"), ("scan-gated-delta", "trtllm"), ("scan-step", "trtllm")
    }  # fmt: skip
    known = {name: each.operators for name, _, each in tables}
    assert known["scan-gated-delta"] == (LinearAttention("gated_delta", 1, 4096, 2, 128, 4, 64, keeps_states=True),)
    assert known["scan-step"][0].state_bytes == 8 * 4 * 128 * 64 * 2
    assert known["causal-conv"] == (CausalConvolution(1, 2 * 2 * 128 + 4 * 64, 4096, 4),)
