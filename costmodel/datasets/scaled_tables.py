"""Readers of what aiconfigurator (ai-dynamo/aiconfigurator, Apache-2.0) measured in FP8: linear layers and casts.

A row ``fp8`` or ``fp8_block`` of ``gemm/gemm_perf.parquet`` is a linear layer of vLLM, which casts its input first. How
long the cast takes is seen where there is little else: layers of 128 outputs, less six tenths of the same product in
BF16 (half of its bytes). Their median by the size of the input, in doublings, is the file's own cast; it is taken off
every row, and rows are used where it takes at most a fifth of the time of the product in BF16. With six tenths, as
once, 759 of L40S's 27,765 rows were left with less time than the datasheet allows, down to 0.02 us, and 21 of H100's
and H200's; with a fifth none is. (On H100 and H200 vLLM 0.14 casts by several PyTorch kernels, 8 us and 10 ps an
element; on L40S 0.24 by one, in 3 us and 4 ps. Layers with scales of blocks were timed without a CUDA graph.)

``quantize``: casts by themselves. ``scale_matrix`` has the scale given, ``compute_scale`` of vLLM is what finding one
for each row takes besides. (SGLang's cast is a tenth as fast and left out, as are eager searches of TensorRT-LLM.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costmodel.datasets.aiconfigurator import disturbed, gemm_files
from costmodel.datasets.csv_table import KernelTable
from costmodel.datasets.named_files import Wanted, everything
from costmodel.datasets.parquet_table import MACHINES, files_of, machine_of, read_columns
from costmodel.operators.scaled_work import ScaledCast, ScaledGemm

_GEMM = ("gemm_dtype", "m", "n", "k", "latency")
_CAST = ("m", "k", "latency")
_FEW_OUTPUTS, _SHARE_OF_BF16 = 128, 0.6
_LONGEST_CAST = 0.2  # of the same product in BF16
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
        rows = np.flatnonzero(dtype == name)
        if not len(rows):
            continue
        size, taken = np.log2((m * k).astype(float)), latency.astype(float) * 1e-3
        wide = np.flatnonzero(dtype == "bfloat16")
        cast = _cast_seconds(rows, wide, size, (m, n, k), taken)
        # By the product in BF16, not by the row itself: rows that happened to be slow would be kept, others not.
        products = {(m[i], n[i], k[i]): taken[i] for i in wide}
        expected = np.array([products.get((m[i], n[i], k[i]), 0.0) for i in rows])
        alone = taken[rows] - cast
        alike = ~disturbed(m[rows], n[rows], k[rows], taken[rows])
        mask = (cast <= _LONGEST_CAST * expected) & (alone > 0) & alike
        kept, alone = rows[mask], alone[mask]
        operators += [ScaledGemm(int(m[i]), int(n[i]), int(k[i]), "float8", scaling) for i in kept]
        seconds += [float(each) for each in alone]
    counted = np.ones(len(operators), dtype=bool)
    return KernelTable("gemm-8bit", machine, tuple(operators), np.array(seconds), counted, str(path))


def _cast_seconds(
    rows: np.ndarray, wide: np.ndarray, size: np.ndarray, shape: tuple[np.ndarray, ...], taken: np.ndarray
) -> np.ndarray:
    """Of the inputs of ``rows``: interpolated between the medians of layers of few outputs, over doublings of ``size``.

    ``wide``: rows of the same products in BF16. The longest inputs continue the last doubling in proportion.
    """
    m, n, k = shape
    known = {(m[i], k[i]): taken[i] for i in wide if n[i] == _FEW_OUTPUTS}
    few = [i for i in rows if n[i] == _FEW_OUTPUTS and (m[i], k[i]) in known]
    if not few:
        return np.zeros(len(rows))
    cast = np.array([max(taken[i] - _SHARE_OF_BF16 * known[m[i], k[i]], 1e-7) for i in few])
    doublings = np.round(size[few])
    places = np.unique(doublings)
    medians = np.array([np.median(cast[doublings == place]) for place in places])
    beyond = np.maximum(size[rows] - places[-1], 0.0)
    return np.asarray(np.exp(np.interp(size[rows], places, np.log(medians))) * 2**beyond)


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
