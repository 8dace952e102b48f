"""Measured against predicted times of kernels to which no model is fitted: ``python -m lab.bench.unseen_kernels``.

Liger-Kernel's benchmarks (``liger/kernels.csv.gz``; sealed groups of rows are skipped): norms, softmax, rotary and
squared ReLU forward and backward, by PyTorch (``torch``, ``huggingface``) and in one kernel (``liger``). Frontier's
tables (``frontier``): attention of engines over a cache, products in 8 bits. Rows shorter than their host launch times
depend on the host rather than on kernels and are skipped.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.gpu import gpu_cost_model
from costmodel.machines.machine_file import load_machine
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import Elementwise, Normalization, Reduction, ScaledGemm, Softmax
from lab.data.data_folder import data_folder
from lab.data.selection import is_sealed

LIGER = "liger/kernels.csv.gz"
GPUS = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
}
HOST_SECONDS = {"forward": 2e-5, "backward": 1.5e-4}  # of a launch; of autograd and its launches
MOST_ROWS = 400
Row = tuple[str, str, tuple[Any, ...], float]  # what, GPU, kernels, seconds


def liger_rows(data: Path) -> Iterator[Row]:
    """Rows of Liger whose kernels are known."""
    for row in _read(data / LIGER):
        told = row["metric_name"], row["gpu_name"], row["kernel_operation_mode"]
        if told[0] != "speed" or told[1] not in GPUS or told[2] not in HOST_SECONDS or is_sealed(LIGER, row):
            continue
        seconds, works = float(row["y_value_50"]) * 1e-3, _liger_kernels(row)
        if works and seconds >= HOST_SECONDS[told[2]]:
            yield f"{row['kernel_name']} {told[2]}, {row['kernel_provider']}", GPUS[told[1]], works, seconds


def _liger_kernels(row: Mapping[str, str]) -> tuple[Any, ...]:
    told = json.loads(row["extra_benchmark_config_str"])
    size, dtype = int(float(row["x_value"])), told.get("dtype", "float32").removeprefix("torch.")
    name, alone, forward = (
        row["kernel_name"],
        row["kernel_provider"] == "liger",
        row["kernel_operation_mode"] == "forward",
    )
    if name == "layer_norm" or (name == "rms_norm" and alone):
        rows, parameters = told["M"], 2 if name == "layer_norm" else 1
        if forward:
            return (Normalization(name, rows, size, dtype),)
        sums = Reduction("norm_parameters", 2 * rows * size, parameters * size, dtype, contiguous=False)
        return Normalization(name, rows, size, dtype, "backward"), sums
    if name == "softmax" and forward:
        return (Softmax(told["M"], size, dtype),)
    if name == "relu_squared" and alone:
        return (Elementwise("relu_squared", told["M"] * size, 1 if forward else 2, dtype=dtype),)
    if name == "rope" and alone:
        hidden, tokens = (size, told["seq_len"]) if row["x_name"] == "H" else (told["hidden_size"], size)
        keys = hidden * told["num_kv_heads"] // told["num_q_heads"]
        return (Elementwise("rotary", tokens * (hidden + keys), dtype=dtype),)
    return ()


def frontier_rows(data: Path) -> Iterator[Row]:
    """Rows of Frontier: attention of new tokens over a cache on A100 and H100, products in 8 bits on H800 (H100's
    chip).
    """
    for gpu, machine in (("a100", "a100-sxm-80gb"), ("h100", "h100-sxm")):
        for row in _thinned(_read(data / "frontier" / gpu / "qwen2_moe_example" / "attention.csv.gz")):
            seconds = float(row["time_stats.attn_prefill.median"] or 0) * 1e-3
            if row["is_prefill"] != "True" or seconds < HOST_SECONDS["forward"]:
                continue
            new, cached = int(row["prefill_chunk_size"]), int(row["kv_cache_size"])
            heads, degree = int(row["n_q_head"]), int(row["num_tensor_parallel_workers"])
            width, keys = int(row["n_embd"]) // heads, int(row["n_kv_head"]) // degree
            whole = new + cached
            work = Attention(int(row["batch_size"]), heads // degree, new, whole, width, keys, causal=True, paged=True)
            yield "attention over a cache (FlashInfer)", machine, (work,), seconds
    path = data / "frontier" / "h800" / "Llama-3.1-405B-Instruct-FP8" / "linear_op_kernel_only.csv.gz"
    for row in _thinned(_read(path)):
        tokens, degree = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
        hidden, inner = int(row["n_embd"]), int(row["n_expanded_embd"]) // degree
        for name, n, k in (("mlp_up_proj", 2 * inner, hidden), ("mlp_down_proj", hidden, inner)):
            seconds = float(row[f"time_stats.{name}.median"] or 0) * 1e-3
            if seconds >= HOST_SECONDS["forward"]:
                yield "products in 8 bits (405B)", "h100-sxm", (ScaledGemm(tokens, n, k, scaling="row"),), seconds


def _read(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _thinned(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    return [rows[place] for place in np.unique(np.linspace(0, len(rows) - 1, MOST_ROWS).astype(int))]


def main() -> None:
    """Print a line for each kind of kernel and GPU."""
    data = data_folder(None)
    groups: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
    for what, machine, works, seconds in (*liger_rows(data), *frontier_rows(data)):
        found = gpu_cost_model(load_machine(machine)).estimate(works)
        predicted, low, high = (sum(getattr(each, name) for each in found) for name in ("seconds", "lower", "upper"))
        groups[what, machine].append((predicted / seconds - 1, low <= seconds <= high))
    print("| kernels | GPU | rows | mean error | bias | in the 80 % interval |\n|---|---|---|---|---|---|")
    for (what, machine), rows in sorted(groups.items()):
        errors, inside = np.array([error for error, _ in rows]), np.mean([told for _, told in rows])
        print(f"| {what} | {machine} | {len(rows)} | {abs(errors).mean():.0%} | {errors.mean():+.0%} | {inside:.0%} |")


if __name__ == "__main__":
    main()
