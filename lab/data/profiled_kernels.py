"""Readers of kernels timed by events or a profiler: NeuSight's operators, layers of LLMServingSim and Vidur (MIT).

**NeuSight** (sitar-lab/NeuSight), ``neusight/op_latency/<op>/<GPU>.csv.gz``. Torch 2.1, FP32 with TF32 off,
milliseconds. The column ``N`` is the contraction: bmm is (B, M, N) x (B, N, K), linear has N inputs and K outputs. A
latency is the time between two CUDA events around an eager call, so that it holds what the host needs before the
kernel starts: never less than a floor of 25 to 90 us, by operator and GPU. For kernels longer than the floor a part
of it remains, what the host does before the launch, and is taken off: 0.5 for most (intercept of latency over bytes
of the element-wise tables: 0.38 to 0.64 of the floor), 0.7 for layer norm and 0.6 for softmax, whose Python and
autograd wrappers come before the launch (intercepts 0.7 to 1.2 and 0.4 to 0.8, rows up to 1,024 columns). Rows below
twice the floor or 0.1 ms say more about the host and do not count. The floor of ``conv`` grows with the row:
convolutions of a few microseconds take 60 to 150 us in the first rows and 350 to 900 us in the last, on every GPU
(the table is in order of measurement, sizes in random order). It is taken from the fastest rows of each stretch, a
straight line through them, and 0.9 of it off: at that share what trees leave of rows above 1 ms no longer correlates
with the row.

**Layers** of transformers in 16 bits, measured inside the network by a profiler:

``llmservingsim/<GPU>/<model>/tp<N>/layers.csv.gz``   modules of Hugging Face, nanoseconds; norms and rotary are
                                                      several kernels there and are left out
``llmservingsim/<GPU>/<model>/bf16/tp<N>/dense.csv.gz``   vLLM's kernels, microseconds
``vidur/compute/<gpu>/<model>/mlp.csv.gz``            vLLM's kernels, milliseconds, median of several runs

Unlike a benchmark of one kernel after another they ran in the order of a layer, operands just written by the kernel
before. The last columns of a product are cut by the tensor-parallel degree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.operators.device_work import Elementwise, Gemm, Normalization, Rearrangement, Softmax
from costmodel.operators.layers import Conv2d
from lab.data.data_folder import AGAIN, BROUGHT, Wanted, csv_rows, everything, reading
from lab.data.kernel_table import KernelTable

NEUSIGHT_MACHINES = {
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla P4": "p4",
    "Tesla T4": "t4",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
}
LEAST_SECONDS = 1e-4
_FLOOR_QUANTILE, _FLOOR_SHARE, _FLOORS_COUNTED = 0.005, 0.5, 2.0
_FLOOR_SHARES = {"ln": 0.7, "softmax": 0.6, "conv": 0.9}
_DRIFTING = ("conv",)
_STRETCH_ROWS, _STRETCH_QUANTILE, _SWEEPS = 100, 0.03, 30

NeusightRow = Mapping[str, str]


def _elementwise(kind: str, inputs: int) -> Callable[[NeusightRow], Any]:
    return lambda row: Elementwise(kind, int(row["B"]) * int(row["H"]), inputs=inputs)


def _conv(row: NeusightRow) -> Conv2d:
    size, padding = int(row["Input_Size"]), int(row["Padding"])
    kernel, stride = int(row["Kernel_Szie"]), int(row["Stride"])  # sic: the column is misspelt
    channels = int(row["Input_Channel"]), int(row["Output_Channel"])
    paddings = (padding, padding, padding, padding)
    return Conv2d(
        int(row["B"]), channels[0], size, size, channels[1], (kernel, kernel), (stride, stride), padding=paddings
    )


OPERATORS: dict[str, Callable[[NeusightRow], Any]] = {
    "bmm": lambda row: Gemm(int(row["B"]), int(row["M"]), int(row["K"]), int(row["N"])),
    "linear": lambda row: Gemm(
        1, int(row["B"]) * int(row["M"]), int(row["K"]), int(row["N"]), transpose_b=True, bias=True
    ),
    "conv": _conv,
    "add": _elementwise("add", 2),
    "mul": _elementwise("mul", 2),
    "div": _elementwise("div", 2),
    "gelu": _elementwise("gelu", 1),
    "relu": _elementwise("relu", 1),
    "tanh": _elementwise("tanh", 1),
    "ln": lambda row: Normalization("layer_norm", int(row["B"]), int(row["H"])),
    "softmax": lambda row: Softmax(int(row["B"]), int(row["H"])),
}


def latency_files(data: Path) -> list[Path]:
    """Tables of known operators and GPUs under ``data/neusight/op_latency``."""
    directory = data / "neusight" / "op_latency"
    files = [path for name in OPERATORS for path in sorted((directory / name).glob("*.csv.gz"))]
    return [path for path in files if path.name.removesuffix(".csv.gz") in NEUSIGHT_MACHINES]


def read_neusight(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """Read the wanted ones of :func:`latency_files`; :class:`InputError` if there are none or one is malformed."""
    files = [path for path in latency_files(data) if wanted(path)]
    if not files:
        raise InputError(f"{data / 'neusight' / 'op_latency'}: no tables (<operator>/<GPU>.csv.gz); {BROUGHT}")
    for path in files:
        yield read_latencies(path)


def read_latencies(path: Path) -> KernelTable:
    """Read the table of one file; its folder names the operator, its name the GPU."""
    name, machine = path.parent.name, NEUSIGHT_MACHINES[path.name.removesuffix(".csv.gz")]
    what = "a table of operator latencies"
    rows = csv_rows(path, what)
    with reading(path, what):
        operators = tuple(OPERATORS[name](row) for row in rows)
        latency = np.array([float(row["Latency"]) for row in rows]) * 1e-3
    if not len(latency) or not (latency > 0).all():
        raise InputError(f"{path}: no rows, or times that are not above zero; {AGAIN}")
    steady = np.full(len(latency), np.quantile(latency, _FLOOR_QUANTILE))
    floor = _drifting_floor(latency) if name in _DRIFTING else steady
    counted = latency >= np.maximum(LEAST_SECONDS, _FLOORS_COUNTED * floor)
    kernel = np.where(counted, latency - _FLOOR_SHARES.get(name, _FLOOR_SHARE) * floor, latency)
    return KernelTable(name, machine, operators, kernel, counted, str(path))


def _drifting_floor(latency: np.ndarray) -> np.ndarray:
    """Line of least absolute deviation through the fastest rows of each stretch of the table, per row (rows,)."""
    starts = range(0, max(len(latency) - _STRETCH_ROWS, 1), _STRETCH_ROWS)
    centres = np.array([start + _STRETCH_ROWS / 2 for start in starts])
    fastest = np.array([np.quantile(latency[start : start + _STRETCH_ROWS], _STRETCH_QUANTILE) for start in starts])
    if len(centres) < 2:
        return np.full(len(latency), fastest[0])
    design, weights = np.column_stack([np.ones(len(centres)), centres]), np.ones(len(centres))
    line: np.ndarray = np.zeros(2)
    for _ in range(_SWEEPS):
        line = np.linalg.lstsq(design * weights[:, None], fastest * weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(fastest - design @ line), 1e-6))
    return np.asarray(np.maximum(line[0] + line[1] * np.arange(len(latency)), fastest.min()))


SIMULATED = {"RTX3090": "rtx-3090", "RTX4090": "rtx-4090", "A6000": "a6000", "H100": "h100-sxm"}
VIDUR = {"a100": "a100-sxm-80gb", "h100": "h100-sxm"}
# rows of one layer and file: token counts are dense there, and neighbours carry the same information
_MOST_TOKENS = 160
_VIDUR_SECONDS = 1e-5  # Vidur's times are whole microseconds: shorter kernels are inaccurate
Rows = Mapping[str, list[tuple[Any, float]]]


@dataclass(frozen=True)
class _Width:
    """Widths of a model: hidden, gated inner layer, queries, keys, and vocabulary size."""

    hidden: int
    inner: int
    queries: int
    keys: int
    words: int


_WIDTHS = {
    "Llama-3.1-8B": _Width(4096, 14336, 4096, 1024, 128256),
    "Llama-3.1-70B": _Width(8192, 28672, 8192, 1024, 128256),
    "Mixtral-8x7B-v0.1": _Width(4096, 14336, 4096, 1024, 32000),
    "Phi-mini-MoE-instruct": _Width(4096, 960, 4096, 1024, 32064),
}


def layer_files(data: Path) -> list[Path]:
    """Tables of known GPUs under ``data``."""
    root = data / "llmservingsim"
    found = [*root.glob("*/*/*/tp*/layers.csv.gz"), *root.glob("*/*/*/*/tp*/dense.csv.gz")]
    served = [path for path in sorted(found) if path.relative_to(root).parts[0] in SIMULATED]
    vidur = sorted((data / "vidur" / "compute").glob("*/*/*/mlp.csv.gz"))
    return [*served, *(path for path in vidur if path.relative_to(data / "vidur" / "compute").parts[0] in VIDUR)]


def read_layer_kernels(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """Yield tables of the wanted ones of :func:`layer_files`, one per file and kind of operator; empty if there are
    none.
    """
    for path in layer_files(data):
        if wanted(path):
            parts = path.relative_to(data).parts
            machine = VIDUR[parts[2]] if parts[0] == "vidur" else SIMULATED[parts[1]]
            for name, rows in _rows(path, parts).items():
                times = np.array([seconds for _, seconds in rows])
                operators = tuple(operator for operator, _ in rows)
                counted = times >= (_VIDUR_SECONDS if parts[0] == "vidur" else 0.0)
                yield KernelTable(name, machine, operators, times, counted, str(path))


def _rows(path: Path, parts: tuple[str, ...]) -> Rows:
    what = "a table of layer kernels"
    records = csv_rows(path, what)
    with reading(path, what):
        if parts[0] == "vidur":
            return _vidur(records)
        width, degree = _WIDTHS[parts[3]], int(parts[-2].removeprefix("tp"))
        return _served(records, width, degree, fused=path.name == "dense.csv.gz")


def _served(records: list[dict[str, str]], width: _Width, degree: int, fused: bool) -> Rows:
    """Rows of LLMServingSim; ``fused``: of vLLM's kernels, else of Hugging Face's modules."""
    names = ("layer", "tokens", "time_us") if fused else ("layer_name", "input", "latency(ns)")
    scale = 1e-6 if fused else 1e-9
    kept = _thinned(records, names[0], names[1])
    known = _fused_layers(width, degree) if fused else _module_layers(width, degree)
    rows: dict[str, list[tuple[Any, float]]] = defaultdict(list)
    for record in kept:
        if record[names[0]] in known:
            name, make = known[record[names[0]]]
            rows[name].append((make(int(record[names[1]])), float(record[names[2]]) * scale))
    return rows


def _thinned(records: list[dict[str, str]], layer: str, tokens: str) -> list[dict[str, str]]:
    """Records with at most ``_MOST_TOKENS`` token counts, spread evenly over their logarithms."""
    counts = sorted({int(record[tokens]) for record in records})
    places = np.unique(np.geomspace(1, len(counts), _MOST_TOKENS).astype(int)) - 1
    kept = {counts[place] for place in places}
    return [record for record in records if int(record[tokens]) in kept]


Layer = tuple[str, Callable[[int], Any]]


def _product(outputs: int, inputs: int, dtype: str = "bfloat16") -> Layer:
    return "gemm-bf16", lambda tokens: Gemm(1, tokens, outputs, inputs, dtype, transpose_b=True)


def _module_layers(width: _Width, degree: int) -> dict[str, Layer]:
    return {
        "q_proj": _product(width.queries // degree, width.hidden),
        "k_proj": _product(width.keys // degree, width.hidden),
        "o_proj": _product(width.hidden, width.queries // degree),
        "gate_proj": _product(width.inner // degree, width.hidden),
        "down_proj": _product(width.hidden, width.inner // degree),
        "lm_head": _product(width.words // degree, width.hidden),
    }


def _fused_layers(width: _Width, degree: int, dtype: str = "bfloat16") -> dict[str, Layer]:
    rows = {
        "qkv_proj": _product((width.queries + 2 * width.keys) // degree, width.hidden, dtype),
        "o_proj": _product(width.hidden, width.queries // degree, dtype),
        "gate_up_proj": _product(2 * width.inner // degree, width.hidden, dtype),
        "down_proj": _product(width.hidden, width.inner // degree, dtype),
        "final_layernorm": _norm(width.hidden, dtype),
        "act_fn": _gated(width.inner // degree, dtype),
        "rotary_emb": _rotary((width.queries + width.keys) // degree, dtype),
        "embedding": _embedding(width.hidden, dtype),
    }
    return rows


def _norm(columns: int, dtype: str) -> Layer:
    return "rms-norm", lambda tokens: Normalization("rms_norm", tokens, columns, dtype)


def _gated(columns: int, dtype: str) -> Layer:
    return "gated-activation", lambda tokens: Elementwise("silu_mul", tokens * columns, inputs=2, dtype=dtype)


def _rotary(columns: int, dtype: str) -> Layer:
    """Rotary embedding, in place over queries and keys."""
    return "rotary", lambda tokens: Elementwise("rotary", tokens * columns, dtype=dtype)


def _embedding(columns: int, dtype: str) -> Layer:
    return "embedding-rows", lambda tokens: Rearrangement("gather", tokens * columns, columns, dtype)


def _vidur(records: list[dict[str, str]]) -> Rows:
    """Rows of Vidur. Norms, rotary and additions are not split by the tensor-parallel degree of the products; kernels
    ran in FP16.
    """
    rows: dict[str, list[tuple[Any, float]]] = defaultdict(list)
    for record in records:
        for layer, (name, make) in _vidur_layers(record).items():
            text = record.get(f"time_stats.{layer}.median", "")
            if text and float(text) > 0:
                rows[name].append((make(int(record["num_tokens"])), float(text) * 1e-3))
    return {name: _every(each) for name, each in rows.items()}


def _every(rows: list[tuple[Any, float]]) -> list[tuple[Any, float]]:
    """At most some thousand rows, spread evenly."""
    places = np.unique(np.linspace(0, len(rows) - 1, 8 * _MOST_TOKENS).astype(int))
    return [rows[place] for place in places]


def _vidur_layers(record: Mapping[str, str]) -> dict[str, Layer]:
    degree, hidden, inner = (int(record[key]) for key in ("num_tensor_parallel_workers", "n_embd", "n_expanded_embd"))
    heads, keys = int(record["n_head"]), int(record["n_kv_head"])
    size, gated = hidden // heads, record["use_gated_mlp"] == "True"
    queries, keys = heads * size // degree, max(keys // degree, 1) * size
    dtype = "float16"
    layers = {
        "attn_pre_proj": _product(queries + 2 * keys, hidden, dtype),
        "attn_post_proj": _product(hidden, queries, dtype),
        "mlp_up_proj": _product((2 if gated else 1) * inner // degree, hidden, dtype),
        "mlp_down_proj": _product(hidden, inner // degree, dtype),
        "attn_rope": _rotary(queries + keys, dtype),
        "add": ("add", lambda tokens: Elementwise("add", tokens * hidden, inputs=2, dtype=dtype)),
    }
    if gated:
        layers |= {"input_layernorm": _norm(hidden, dtype), "mlp_act": _gated(inner // degree, dtype)}
    return layers
