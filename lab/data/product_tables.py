"""Readers of the products of aiconfigurator (ai-dynamo/aiconfigurator, Apache-2.0): BF16, FP8, layers of experts.

**BF16**, ``gemm/gemm_perf.parquet``. Inference layout (weights transposed), milliseconds of kernel time without the gap
of a launch.

Shapes are a grid: powers of two and some between them along m, n and k. Rows that something disturbed stand out from
it: less than half as fast as their neighbours (:func:`disturbed`). Of products of 50 us and more these are 2 % of
H100's in BF16 (2048 x 8192 x 16384: 233 TFLOP/s, between 874 and 851) and none to 0.1 % of the other systems'.

**FP8**, linear layers and casts. A row ``fp8`` or ``fp8_block`` of ``gemm/gemm_perf.parquet`` is a linear layer of
vLLM, which casts its input first. How long the cast takes is seen where there is little else: layers of 128 outputs,
less six tenths of the same product in BF16 (half of its bytes). Their median by the size of the input, in doublings, is
the file's own cast; it is taken off every row, and rows are used where it takes at most a fifth of the time of the
product in BF16. With six tenths, as once, 759 of L40S's 27,765 rows were left with less time than the datasheet allows,
down to 0.02 us, and 21 of H100's and H200's; with a fifth none is. (On H100 and H200 vLLM 0.14 casts by several PyTorch
kernels, 8 us and 10 ps an element; on L40S 0.24 by one, in 3 us and 4 ps. Layers with scales of blocks were timed
without a CUDA graph.)

``quantize``: casts by themselves. ``scale_matrix`` has the scale given, ``compute_scale`` of vLLM is what finding one
for each row takes besides. (SGLang's cast is a tenth as fast and left out, as are eager searches of TensorRT-LLM.)

**Fused layers of experts.** Milliseconds of both products with activation, gathering and the sum of results, forward,
in a CUDA graph. Rows whose work is known are taken: of TensorRT-LLM (``cutlass``) those with all experts or a balanced
part of them, of vLLM (``triton``) those with all experts; of a rank of a random routing the table does not say what it
got. Layers with 4-bit weights are left out. The rows of experts are those of :mod:`costmodel.operators.experts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costmodel.base.errors import InputError
from costmodel.operators.device_work import Gemm, ScaledCast, ScaledGemm
from costmodel.operators.experts import ExpertKernel, ExpertLayer, ExpertRouting
from lab.data.data_folder import BROUGHT
from lab.data.kernel_table import MACHINES, KernelTable, files_of, machine_of, read_columns
from lab.data.selection import Wanted, everything

_COLUMNS = ("gemm_dtype", "m", "n", "k", "latency")
# Below this time sizes matter more than rates; with this many neighbours two may be disturbed themselves.
_LONG_SECONDS, _NEIGHBOURS, _SLOW = 50e-6, 4, 0.5


def gemm_files(data: Path) -> list[Path]:
    """The GEMM table of every known system under ``data/aiconfigurator``, if it exists."""
    files = (data / "aiconfigurator" / name / "gemm" / "gemm_perf.parquet" for name in MACHINES)
    return [path for path in files if path.exists()]


def read_aiconfigurator(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """Yield the BF16 rows of the wanted ones of :func:`gemm_files`.

    ``InputError`` if there are none or one is malformed, ``MissingDependencyError`` without pyarrow.
    """
    files = [path for path in gemm_files(data) if wanted(path)]
    if not files:
        raise InputError(f"{data / 'aiconfigurator'}: no GEMM tables; {BROUGHT}")
    for path in files:
        yield read_table(path, MACHINES[path.parent.parent.name])


def read_table(path: Path, machine: str) -> KernelTable:
    """BF16 rows of one file."""
    dtype, m, n, k, latency = read_columns(path, _COLUMNS, "a GEMM table")
    rows = [place for place, name in enumerate(dtype) if name == "bfloat16" and latency[place] > 0]
    operators = tuple(Gemm(1, int(m[i]), int(n[i]), int(k[i]), "bfloat16", transpose_b=True) for i in rows)
    seconds = np.array([latency[i] for i in rows], dtype=float) * 1e-3
    counted = ~disturbed(m[rows], n[rows], k[rows], seconds)
    return KernelTable("gemm-bf16", machine, operators, seconds, counted, str(path))


def disturbed(m: np.ndarray, n: np.ndarray, k: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Mask (rows,) of the products of a grid of sizes that took more than twice as long for their arithmetic as the
    median of their neighbours, the next sizes along each axis. Short products, and those with few neighbours, are never
    marked.
    """
    on_axes = [np.unique(each, return_inverse=True)[1].tolist() for each in (m, n, k)]
    places = list(zip(*on_axes, strict=True))
    rates = m.astype(float) * n * k / seconds
    fastest: dict[tuple[int, ...], float] = {}
    for place, rate in zip(places, rates, strict=True):
        fastest[place] = max(rate, fastest.get(place, 0.0))
    found = np.zeros(len(rates), dtype=bool)
    for row in np.flatnonzero(seconds >= _LONG_SECONDS):
        around = [
            fastest[near]
            for axis in range(3)
            for step in (-1, 1)
            if (near := (*places[row][:axis], places[row][axis] + step, *places[row][axis + 1 :])) in fastest
        ]
        found[row] = len(around) >= _NEIGHBOURS and rates[row] < _SLOW * float(np.median(around))
    return found


_CAST = ("m", "k", "latency")
_FEW_OUTPUTS, _SHARE_OF_BF16 = 128, 0.6
_LONGEST_CAST = 0.2  # of the same product in BF16
_SCALING = {"fp8": "tensor", "fp8_block": "block"}
CASTING = ("vllm", "trtllm")


def cast_files(data: Path) -> list[Path]:
    """Tables of casts that are used."""
    names = ("scale_matrix_perf.parquet", "computescale_perf.parquet")
    found = [path for name in names for path in files_of(data, "quantize", name) if path.parts[-3] in CASTING]
    return [path for path in found if path.name == names[0] or path.parts[-3] == "vllm"]


def read_scaled(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """Yield products (``gemm-8bit``) and casts (``quantize``) of the wanted files."""
    for path in gemm_files(data):
        if wanted(path):
            yield read_products(path, MACHINES[path.parent.parent.name])
    for path in cast_files(data):
        if wanted(path):
            yield _casts(path, machine_of(path, data))


def read_products(path: Path, machine: str) -> KernelTable:
    """The 8-bit products of one file, without the preceding casts."""
    dtype, m, n, k, latency = read_columns(path, _COLUMNS, "a GEMM table")
    operators: list[ScaledGemm] = []
    seconds: list[float] = []
    for name, scaling in _SCALING.items():
        rows = np.flatnonzero(dtype == name)
        if not len(rows):
            continue
        size, taken = np.log2((m * k).astype(float)), latency.astype(float) * 1e-3
        wide = np.flatnonzero(dtype == "bfloat16")
        cast = _cast_seconds(rows, wide, size, (m, n, k), taken)
        # Selected by the BF16 product, not by the row itself, which would favour rows that happened to be slow.
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
    """Cast seconds of the inputs of ``rows``, interpolated between the medians of layers of few outputs, over doublings
    of ``size``.

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


KERNELS: dict[str, ExpertKernel] = {"trtllm": "cutlass", "vllm": "triton"}
SCALINGS = {"bfloat16": ("bfloat16", ""), "fp8": ("float8", "tensor"), "fp8_block": ("float8", "block")}
ROWS = 3000  # of one table and dtype, spread evenly: a layer takes a millisecond to analyse
_EXPERT_COLUMNS = (
    "moe_dtype",
    "kernel_source",
    "distribution",
    "num_tokens",
    "hidden_size",
    "inter_size",
    "topk",
    "num_experts",
) + ("moe_tp_size", "moe_ep_size", "latency")


def expert_files(data: Path) -> list[Path]:
    """Tables of the engines whose kernels are known."""
    return [path for path in files_of(data, "moe", "moe_perf.parquet") if path.parts[-3] in KERNELS]


def read_expert_layers(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """Yield a table for each file, once for 16 bits (``moe``) and once for 8 (``moe-8bit``)."""
    for path in expert_files(data):
        if wanted(path):
            columns = dict(
                zip(_EXPERT_COLUMNS, read_columns(path, _EXPERT_COLUMNS, "a table of expert layers"), strict=True)
            )
            for name, dtypes in (("moe", ("bfloat16",)), ("moe-8bit", ("fp8", "fp8_block"))):
                yield _table(columns, path, machine_of(path, data), name, dtypes)


def _table(columns: dict[str, np.ndarray], path: Path, machine: str, name: str, dtypes: tuple[str, ...]) -> KernelTable:
    kernel = KERNELS[path.parts[-3]]
    apart = columns["moe_ep_size"] > 1
    known = ~apart | ((columns["distribution"] == "balanced") & (kernel == "cutlass"))
    enough = columns["num_tokens"] * columns["topk"] >= columns["num_experts"]  # of a part of them, a row for each
    mask = np.isin(columns["moe_dtype"], dtypes) & known & (enough | ~apart) & (columns["latency"] > 0)
    places = np.flatnonzero(mask)
    places = places[np.linspace(0, len(places) - 1, min(ROWS, len(places))).astype(int)] if len(places) else places
    layers = tuple(_layer({key: column[place] for key, column in columns.items()}, kernel) for place in places)
    seconds = columns["latency"][places].astype(float) * 1e-3
    return KernelTable(name, machine, layers, seconds, np.ones(len(places), dtype=bool), str(path))


def _layer(row: dict[str, object], kernel: ExpertKernel) -> ExpertLayer:
    tokens, chosen, experts, ranks = (int(row[name]) for name in ("num_tokens", "topk", "num_experts", "moe_ep_size"))  # type: ignore[call-overload]
    law = str(row["distribution"])
    routing = ExpertRouting(None if law == "balanced" else float(law.rpartition("_")[2]))
    dtype, scaling = SCALINGS[str(row["moe_dtype"])]
    return ExpertLayer(
        routing.counts(tokens * chosen // ranks, experts // ranks),
        tokens,
        int(row["hidden_size"]),  # type: ignore[call-overload]
        int(row["inter_size"]) // int(row["moe_tp_size"]),  # type: ignore[call-overload]
        dtype,
        kernel,
        gated=not str(row["kernel_source"]).endswith("nongated"),
        scaling=scaling,
    )
