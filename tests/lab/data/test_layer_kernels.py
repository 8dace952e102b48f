"""Readers of kernels measured layer by layer."""

from __future__ import annotations

import gzip

import pytest

from costmodel.operators.device_work import Elementwise, Gemm, Normalization
from lab.data.profiled_kernels import layer_files, read_layer_kernels


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as stream:
        stream.write(text)
    return path


def by_name(data):
    return {table.name: table for table in read_layer_kernels(data)}


def test_modules_of_hugging_face_are_products_in_nanoseconds(tmp_path):
    written(
        tmp_path / "llmservingsim/A6000/meta-llama/Llama-3.1-8B/tp2/layers.csv.gz",
        "layer_name,input,kv_cache,tp_size,latency(ns)\nq_proj,64,0,2,20000\ndown_proj,64,0,2,50000\nrope,64,0,2,9\n",
    )
    tables = by_name(tmp_path)
    assert tables.keys() == {"gemm-bf16"} and tables["gemm-bf16"].machine == "a6000"
    query, down = tables["gemm-bf16"].operators
    assert query == Gemm(1, 64, 2048, 4096, "bfloat16", transpose_b=True)
    assert (down.n, down.k) == (4096, 7168) and tables["gemm-bf16"].seconds.tolist() == [20e-6, 50e-6]


def test_kernels_of_vllm_are_in_microseconds(tmp_path):
    written(
        tmp_path / "llmservingsim/RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1/dense.csv.gz",
        "layer,tokens,time_us\nqkv_proj,8,50\nact_fn,8,3\nfinal_layernorm,8,2\n",
    )
    tables = by_name(tmp_path)
    assert tables["gemm-bf16"].operators[0].n == 4096 + 2 * 1024
    assert tables["gated-activation"].operators == (Elementwise("silu_mul", 8 * 14336, inputs=2, dtype="bfloat16"),)
    assert tables["rms-norm"].operators == (Normalization("rms_norm", 8, 4096, "bfloat16"),)
    assert tables["rms-norm"].machine == "rtx-4090" and tables["rms-norm"].seconds[0] == pytest.approx(2e-6)


VIDUR = "n_head,n_kv_head,n_embd,n_expanded_embd,use_gated_mlp,num_tokens,num_tensor_parallel_workers,"
LAYERS = "time_stats.attn_pre_proj.median,time_stats.mlp_up_proj.median,time_stats.add.median\n"


def test_vidur_counts_in_whole_microseconds(tmp_path):
    path = tmp_path / "vidur/compute/h100/meta-llama/Llama-2-7b-hf/mlp.csv.gz"
    written(path, VIDUR + LAYERS + "32,8,4096,11008,True,128,4,0.05,0.08,0.002\n")
    tables = by_name(tmp_path)
    before, up = tables["gemm-bf16"].operators
    assert before.n == 1024 + 2 * 2 * 128 and up.n == 2 * 11008 // 4 and before.dtype == "float16"
    assert tables["gemm-bf16"].counted.all() and not tables["add"].counted.any()


def test_other_gpus_are_left_alone_and_no_folder_is_no_table(tmp_path):
    assert layer_files(tmp_path) == [] and list(read_layer_kernels(tmp_path)) == []
    written(tmp_path / "llmservingsim/TPU/meta-llama/Llama-3.1-8B/tp1/layers.csv.gz", "x\n")
    assert layer_files(tmp_path) == []
