"""Readers of kernels measured layer by layer inside transformers, in 16 bits, by a profiler: LLMServingSim (MIT) and
Vidur (MIT).

``llmservingsim/<GPU>/<model>/tp<N>/layers.csv.gz``   modules of Hugging Face, nanoseconds; norms and rotary are several
                                                      kernels there and are left out
``llmservingsim/<GPU>/<model>/bf16/tp<N>/dense.csv.gz``   vLLM's kernels, microseconds
``vidur/compute/<gpu>/<model>/mlp.csv.gz``            vLLM's kernels, milliseconds, median of several runs

Unlike a benchmark of one kernel after another they ran in the order of a layer, operands just written by the kernel
before. The last columns of a product are cut by the tensor-parallel degree.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.operators.device_work import Elementwise, Gemm, Normalization, Rearrangement
from lab.data.data_folder import AGAIN
from lab.data.kernel_table import KernelTable
from lab.data.selection import Wanted, everything

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
    try:
        with gzip.open(path, "rt", newline="", encoding="utf-8") as stream:
            records = list(csv.DictReader(stream))
        if parts[0] == "vidur":
            return _vidur(records)
        width, degree = _WIDTHS[parts[3]], int(parts[-2].removeprefix("tp"))
        return _served(records, width, degree, fused=path.name == "dense.csv.gz")
    except (OSError, EOFError) as error:
        raise InputError(f"{path}: cannot be read ({error}); {AGAIN}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"{path}: not a table of layer kernels ({error!r}); {AGAIN}") from None


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
