"""Readers of what aiconfigurator (ai-dynamo/aiconfigurator, Apache-2.0) measured in FP8: linear layers and casts.

A row ``fp8`` or ``fp8_block`` of ``gemm/gemm_perf.parquet`` is a linear layer of vLLM, which casts its input first. How
long the cast takes is seen where there is little else: of layers with few outputs, by the elements of the input. That
many seconds per element, the file's own, are taken off every row; rows are used where that is a quarter at most. (On
H100 and H200 vLLM 0.14 casts by seven PyTorch kernels, 11 and 9 ps an element; on L40S 0.24 by one.)

``quantize``: casts by themselves. ``scale_matrix`` has the scale given, ``compute_scale`` of vLLM is what finding one for
each row takes besides. (SGLang's cast is a tenth as fast and left out, as are eager searches of TensorRT-LLM.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costmodel.datasets.aiconfigurator import gemm_files
from costmodel.datasets.csv_table import KernelTable
from costmodel.datasets.named_files import Wanted, everything
from costmodel.datasets.parquet_table import MACHINES, files_of, machine_of, read_columns
from costmodel.operators.scaled_work import ScaledCast, ScaledGemm

_GEMM = ("gemm_dtype", "m", "n", "k", "latency")
_CAST = ("m", "k", "latency")
_FEW_OUTPUTS, _MANY_INPUTS = (128, 256), 3e7
_MOST_OF_CAST = 0.25
# Shorter rows, as multiples of the shortest twentieth, are mostly launches: several small kernels cast, and layers with
# scales of blocks were timed without a CUDA graph.
_SHORT, _LEAST = 0.05, 5.0
_SCALING = {"fp8": "tensor", "fp8_block": "block"}
CASTING = ("vllm", "trtllm")


def cast_files(data: Path) -> list[Path]:
    """The tables of casts that are used."""
    names = ("scale_matrix_perf.parquet", "computescale_perf.parquet")
    found = [path for name in names for path in files_of(data, "quantize", name) if path.parts[-3] in CASTING]
    return [path for path in found if path.name == names[0] or path.parts[-3] == "vllm"]


def read_scaled(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """Products (``gemm-8bit``) and casts (``quantize``) of the wanted files."""
    for path in gemm_files(data):
        if wanted(path):
            yield read_products(path, MACHINES[path.parent.parent.name])
    for path in cast_files(data):
        if wanted(path):
            yield _casts(path, machine_of(path, data))


def read_products(path: Path, machine: str) -> KernelTable:
    """The 8-bit products of one file, less the casts before them."""
    dtype, m, n, k, latency = read_columns(path, _GEMM, "a GEMM table")
    operators: list[ScaledGemm] = []
    seconds: list[float] = []
    for name, scaling in _SCALING.items():
        inputs, taken = (m * k).astype(float), latency.astype(float) * 1e-3
        rows = dtype == name
        if not rows.any():
            continue
        rows &= taken > _LEAST * np.quantile(taken[rows], _SHORT)
        cast = inputs * _cast_seconds(rows, inputs, n, taken)
        kept = np.flatnonzero(rows & (cast <= _MOST_OF_CAST * taken))
        operators += [ScaledGemm(int(m[i]), int(n[i]), int(k[i]), "float8", scaling) for i in kept]
        seconds += [float(taken[i] - cast[i]) for i in kept]
    counted = np.ones(len(operators), dtype=bool)
    return KernelTable("gemm-8bit", machine, tuple(operators), np.array(seconds), counted, str(path))


def _cast_seconds(rows: np.ndarray, inputs: np.ndarray, n: np.ndarray, seconds: np.ndarray) -> float:
    """Of one element of the input: the intercept of the time per element over the number of outputs."""
    few = rows & np.isin(n, _FEW_OUTPUTS) & (inputs > _MANY_INPUTS)
    by_width = [float(np.median(seconds[few & (n == width)] / inputs[few & (n == width)])) for width in _FEW_OUTPUTS
                if (few & (n == width)).any()]
    if len(by_width) < len(_FEW_OUTPUTS):
        return by_width[0] if by_width else 0.0
    return max(2 * by_width[0] - by_width[1], 0.0)  # widths 128 and 256, continued to 0


def _casts(path: Path, machine: str) -> KernelTable:
    m, k, latency = read_columns(path, _CAST, "a table of casts")
    seconds = latency.astype(float) * 1e-3
    dynamic = path.name.startswith("computescale")
    if dynamic:
        static = path.with_name("scale_matrix_perf.parquet")
        known = {(a, b): c for a, b, c in zip(*read_columns(static, _CAST, "a table of casts"), strict=True)}
        seconds = seconds + np.array([known.get(pair, np.nan) for pair in zip(m, k, strict=True)]) * 1e-3
    kept = np.flatnonzero(np.isfinite(seconds) & (seconds > 0) & (latency > 0))
    operators = tuple(
        ScaledCast(int(m[i]), int(k[i]), scaling="row" if dynamic else "tensor", dynamic=dynamic) for i in kept
    )
    return KernelTable("quantize", machine, operators, seconds[kept], np.ones(len(kept), dtype=bool), str(path))
