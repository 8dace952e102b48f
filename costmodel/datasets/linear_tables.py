"""Reader of the tables of linear attention of aiconfigurator (ai-dynamo/aiconfigurator, Apache-2.0).

``linear_attention/<engine>/<version>/{mamba2,gdn}_perf.parquet``: milliseconds in BF16 of whole sequences (``context``)
and of one token behind a cache (``generation``). What is taken, and why the rest is not:

* ``chunk_gated_delta_rule`` of TensorRT-LLM, which agrees with what flash-linear-attention itself takes on H800
  (PaddlePaddle/flash-attention pull request 133: 2.6 ns per token and head of 128, here 2.5 on H100). The forks of
  SGLang and vLLM take 1.1 to 1.6 times as long; SGLang's of H200 and L40S were disturbed (H200 up to 3.7 times H100,
  the same chip); FlashInfer's kernel is none that training has.
* One token: TensorRT-LLM's and vLLM's.
* Convolutions: SGLang's, and those of TensorRT-LLM's Mamba 2 (in its other table they see a part of the channels that
  it does not tell), but for rows that were disturbed: of more than 50 us at less than 0.35 of the memory's bandwidth,
  where others of their size reach 0.8; TensorRT-LLM's below 30 us, which were launched one by one and show it (5 us at
  least, SGLang's 2). vLLM's and A100's were all launched so.

The tables of Mamba 2 have no scan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.datasets.csv_table import KernelTable
from costmodel.datasets.named_files import Wanted, everything
from costmodel.datasets.parquet_table import files_of, machine_of, read_columns
from costmodel.machines.machine_catalog import load_machine
from costmodel.operators.linear_attention import CausalConvolution, LinearAttention

_FOLDER = "linear_attention"
_SHARED = ("phase", "kernel_source", "batch_size", "seq_len", "d_conv", "latency")
_SSD = ("n_groups", "d_state", "nheads", "head_dim", "chunk_size")
_RULE = ("num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim")
_MAMBA, _DELTA = (*_SHARED, *_SSD), (*_SHARED, *_RULE)
_SCANS = ("mamba_chunk_scan_combined", "selective_state_update")
# Engines whose rows of whole sequences, of one token, and of convolutions are taken.
_WHOLE, _TOKEN, _CONVOLUTIONS = ("trtllm",), ("trtllm", "vllm"), ("sglang", "trtllm")
_CONVOLUTION = "causal-conv"
_BY_LAUNCH = ("a100-sxm-80gb",)  # timed launch by launch, with the gaps
_LONG_SECONDS, _LEAST_BANDWIDTH = 50e-6, 0.35
_LAUNCHED_SECONDS = 30e-6


def linear_files(data: Path) -> list[Path]:
    """Every table of linear attention that ``data`` has."""
    return [
        path
        for name in ("mamba2_perf", "gdn_perf")
        for path in files_of(data, _FOLDER, f"{name}.parquet")
        if machine_of(path, data) not in _BY_LAUNCH
    ]


def read_linear(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """A table per wanted file and family of kernels, named as the family that prices it.

    ``InputError`` for a malformed file, ``MissingDependencyError`` without pyarrow.
    """
    for path in linear_files(data):
        if wanted(path):
            yield from _tables(path, machine_of(path, data))


def _tables(path: Path, machine: str) -> Iterator[KernelTable]:
    names = _MAMBA if path.name.startswith("mamba2") else _DELTA
    columns = dict(zip(names, read_columns(path, names, "a table of linear attention"), strict=True))
    groups: dict[str, list[tuple[LinearAttention | CausalConvolution, float]]] = {}
    for place in range(len(columns["latency"])):
        row = {name: column[place] for name, column in columns.items()}
        found = _operator(row, path)
        if found is not None and row["latency"] > 0:
            groups.setdefault(found[0], []).append((found[1], float(row["latency"]) * 1e-3))
    bandwidth = load_machine(machine).memory[-1].bandwidth.at(1)
    for name, rows in groups.items():
        operators = tuple(operator for operator, _ in rows)
        seconds = np.array([taken for _, taken in rows])
        shortest = _LAUNCHED_SECONDS if name == _CONVOLUTION and path.parts[-3] == "trtllm" else 0.0
        counted = np.array([each[1] >= shortest and not _is_disturbed(*each, bandwidth) for each in rows])
        yield KernelTable(name, machine, operators, seconds, counted, str(path))


def _is_disturbed(operator: LinearAttention | CausalConvolution, seconds: float, bandwidth: float) -> bool:
    moved = operator.read_bytes + operator.write_bytes
    slow = moved < _LEAST_BANDWIDTH * bandwidth * seconds
    return isinstance(operator, CausalConvolution) and seconds > _LONG_SECONDS and slow


def _operator(row: Mapping[str, Any], path: Path) -> tuple[str, LinearAttention | CausalConvolution] | None:
    """The family and the record of a row; ``None`` of a kernel that is left out."""
    kernel, whole = str(row["kernel_source"]), row["phase"] == "context"
    batch, length = int(row["batch_size"]), int(row["seq_len"]) if whole else 1
    engine = path.parts[-3]
    if kernel.startswith("causal_conv1d"):
        if engine not in _CONVOLUTIONS or (engine == "trtllm" and "nheads" not in row):
            return None
        channels = _conv_channels(row)
        return _CONVOLUTION, CausalConvolution(batch, channels, length, int(row["d_conv"]), update=not whole)
    if engine not in (_WHOLE if whole else _TOKEN) or (whole and length == 1):
        return None
    if kernel in _SCANS:
        keys, states, heads, width, chunk = (int(row[name]) for name in _SSD)
        record = LinearAttention("ssd", batch, length, keys, states, heads, width, chunk, keeps_states=True)
    elif kernel.startswith(("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")):
        keys, states, heads, width = (int(row[name]) for name in _RULE)
        record = LinearAttention("gated_delta", batch, length, keys, states, heads, width, keeps_states=True)
    else:
        return None
    if not whole:
        return "scan-step", replace(record, state_dtype="bfloat16" if record.kind == "gated_delta" else "float32")
    return f"scan-{record.kind.replace('_', '-')}", record


def _conv_channels(row: Mapping[str, Any]) -> int:
    """Of Mamba 2 the values, B and C, of the gated delta rule queries, keys and values: what the convolution sees."""
    if "nheads" in row:
        return int(row["nheads"] * row["head_dim"] + 2 * row["n_groups"] * row["d_state"])
    return int(2 * row["num_k_heads"] * row["head_k_dim"] + row["num_v_heads"] * row["head_v_dim"])
