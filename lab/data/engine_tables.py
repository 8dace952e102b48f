"""Readers of aiconfigurator's tables engine by engine: softmax attention and layers of experts by the kernels that
vLLM, SGLang and TensorRT-LLM select (its licence and units: :mod:`lab.data.aiconfigurator`).

**Attention** (``attention/<engine>/<version>/{context,generation}_attention_perf.parquet``): 16-bit queries, over a
cache of 16 bits or of 8; for prompts over 8 bits, where a table has no such rows, those with 8-bit queries. Heads of
512 (for which engines leave their usual kernel) are left out.

**Experts** (``moe/<engine>/<version>/moe_perf.parquet``): BF16, FP8 by tensors and by blocks, weights in MXFP4 and INT4
multiplied in BF16. Rows whose work is known: all experts, or a balanced part of them with a row for each at least.

Rows of experts follow the collector (``collector/helper.py``): balanced ones are dealt out in turn; of a power law x is
drawn between 1 and 0.8 of the tokens (0.01 and 2 below a row per expert), here its quantiles, and rows are shared in
proportion. By the time of layers bound by their weights (BF16, 128 experts of 4096 x 1536, 8 of them chosen) 32 and 64
tokens meet 103 and 114 experts, by this 104 and 113. Balanced rows of vLLM and SGLang with the grouped choice of
DeepSeek meet half of the experts (in FP8 7168 x 2048 on H200 all 256 would need 8 TB/s): sizes of which any row needs
more than the memory's datasheet has are left out; so are rows that take longer than more tokens of the same size do,
which something disturbed (TensorRT-LLM's of a part of the experts: 6.5 ms for 48 tokens, 1.5 for 64).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.machines.machine_file import load_machine
from costmodel.operators.attention import ENGINES, Attention
from costmodel.operators.experts import BALANCED, ExpertKernel, ExpertLayer
from costmodel.operators.layers import stored_bytes
from lab.data.aiconfigurator import named_rows
from lab.data.data_folder import Wanted, everything, reading
from lab.data.kernel_table import KernelTable, files_of, machine_of, read_parquet

# Rows of one file and type of the cache, and of one file and type of experts, spread evenly.
MOST_ATTENTION, MOST_EXPERTS = 2000, 1200
_WIDEST = 256
# Bytes of weights above which no cache explains a bandwidth.
_IN_CACHE = 4e8
# Hidden and inner size of models without a gate (Nemotron), which TensorRT-LLM's table names and the others do not.
_UNGATED = ((2688, 1856), (2048, 5120), (8192, 5120))
# Type of products, scaling, and type of stored weights, by the tables' name.
EXPERT_TYPES: Mapping[str, tuple[str, str, str]] = {
    "bfloat16": ("bfloat16", "", ""),
    "fp8": ("float8", "tensor", ""),
    "fp8_block": ("float8", "block", ""),
    "w4a16_mxfp4": ("bfloat16", "", "mxfp4"),
    "int4_wo": ("bfloat16", "", "int4"),
}


def engine_files(data: Path) -> list[Path]:
    """All tables in ``data`` of attention and experts by engine."""
    names = ("context_attention_perf.parquet", "generation_attention_perf.parquet")
    found = [path for name in names for path in files_of(data, "attention", name)]
    found += files_of(data, "moe", "moe_perf.parquet")
    return [path for path in found if path.parts[-3] in ENGINES]


def read_engine_tables(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """Yield tables of the wanted ones of :func:`engine_files`, named as the families that price them."""
    for path in engine_files(data):
        if wanted(path):
            read = _experts if path.name == "moe_perf.parquet" else _attention
            yield from read(path, machine_of(path, data))


def _thinned(places: np.ndarray, most: int) -> np.ndarray:
    return places if len(places) <= most else places[np.linspace(0, len(places) - 1, most).astype(int)]


def _columns(path: Path, what: str) -> dict[str, np.ndarray]:
    table = read_parquet(path, what)
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def _attention(path: Path, machine: str) -> Iterator[KernelTable]:
    what = "a table of attention"
    columns = _columns(path, what)
    engine: Any = path.parts[-3]
    with reading(path, what):
        rows = len(columns["latency"])
        columns = {"window_size": np.zeros(rows, dtype=int), **columns}
        usual = (columns["latency"] > 0) & (columns["head_dim"] <= _WIDEST)
        wide = columns["attn_dtype"] == "bfloat16"
        chosen: list[tuple[int, str]] = []
        for cache, name in (("bfloat16", ""), ("fp8", "float8")):
            stored = usual & (columns["kv_cache_dtype"] == cache)
            of_wide = stored & wide
            places = np.flatnonzero(of_wide if of_wide.sum() * 2 >= stored.sum() or not name else stored & ~wide)
            chosen += [(int(place), name) for place in _thinned(places, MOST_ATTENTION)]
        rows_of = [({key: each[place] for key, each in columns.items()}, name) for place, name in chosen]
        operators = [_served(row, engine, name) for row, name in rows_of]
        seconds = [float(columns["latency"][place]) * 1e-3 for place, _ in chosen]
    yield from named_rows(operators, seconds, machine, path)


def _served(row: Mapping[str, Any], engine: Any, cached: str) -> Attention:
    queries = int(row["isl"])
    return Attention(
        int(row["batch_size"]), int(row["num_heads"]), queries, queries + int(row["step"]), int(row["head_dim"]),
        int(row["num_key_value_heads"]), True, "bfloat16", kernel=engine, window=int(row["window_size"]), paged=True,
        cached=cached,
    )  # fmt: skip


def _experts(path: Path, machine: str) -> Iterator[KernelTable]:
    what = "a table of expert layers"
    columns = _columns(path, what)
    engine: Any = path.parts[-3]
    with reading(path, what):
        apart = columns["moe_ep_size"] > 1
        enough = columns["num_tokens"] * columns["topk"] >= columns["num_experts"]
        known = ~apart | ((columns["distribution"] == "balanced") & enough)
        sizes = zip(columns["hidden_size"].tolist(), columns["inter_size"].tolist(), strict=True)
        gated = np.array([each not in _UNGATED for each in sizes], dtype=bool)
        possible = ~_restricted(columns, machine) & ~_disturbed(columns)
        layers: list[ExpertLayer] = []
        seconds: list[float] = []
        for name in EXPERT_TYPES:
            mask = (columns["moe_dtype"] == name) & known & gated & possible & (columns["latency"] > 0)
            places = _thinned(np.flatnonzero(mask & ~apart), MOST_EXPERTS * 2 // 3)
            for place in (*places, *_thinned(np.flatnonzero(mask & apart), MOST_EXPERTS // 3)):
                layers.append(_layer({key: each[place] for key, each in columns.items()}, engine))
                seconds.append(float(columns["latency"][place]) * 1e-3)
    counted = np.ones(len(layers), dtype=bool)
    yield KernelTable(f"experts-{engine}", machine, tuple(layers), np.array(seconds), counted, str(path))


def _restricted(columns: Mapping[str, np.ndarray], machine: str) -> np.ndarray:
    """Mask (rows,) of balanced rows of a size for which some row meets fewer experts than it should: their weights
    would need more than the datasheet's bandwidth.
    """
    bandwidth = load_machine(machine).memory[-1].datasheet or np.inf
    types = [EXPERT_TYPES[name] for name in columns["moe_dtype"]]
    weight = np.array([stored_bytes(stored, dtype) for dtype, _, stored in types])
    local = columns["num_experts"] / columns["moe_ep_size"]
    met = np.minimum(columns["num_tokens"] * columns["topk"] / columns["moe_ep_size"], local)
    size = met * 3 * columns["hidden_size"] * columns["inter_size"] / columns["moe_tp_size"] * weight
    balanced = columns["distribution"] == "balanced"
    beyond = balanced & (size > bandwidth * columns["latency"] * 1e-3) & (size > _IN_CACHE)
    names = ("moe_dtype", "hidden_size", "inter_size", "topk", "num_experts")
    sizes = list(zip(*(columns[name].tolist() for name in names), strict=True))
    wrong = {key for key, each in zip(sizes, beyond, strict=True) if each}
    return np.asarray(balanced & np.array([key in wrong for key in sizes], dtype=bool))


_LONGER = 1.3  # times the least time of more tokens


def _disturbed(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Mask (rows,) of rows that take longer than more tokens of the same size, kernel and distribution."""
    names = [name for name in columns if name not in ("num_tokens", "latency")]
    order = np.lexsort((columns["num_tokens"], *(columns[name].astype(str) for name in names)))
    keys = list(zip(*(columns[name][order].tolist() for name in names), strict=True))
    seconds, found = columns["latency"][order], np.zeros(len(order), dtype=bool)
    least = np.inf
    for place in range(len(order) - 1, -1, -1):
        if place + 1 < len(order) and keys[place] != keys[place + 1]:
            least = np.inf
        found[place] = seconds[place] > _LONGER * least
        least = min(least, float(seconds[place]))
    mask = np.zeros(len(order), dtype=bool)
    mask[order] = found
    return mask


@lru_cache(maxsize=4096)
def _power_law(tokens: int, chosen: int, experts: int, alpha: float) -> tuple[int, ...]:
    """Rows of each expert, fewest first."""
    rows = tokens * chosen
    low, high = (1.0, max(0.8 * tokens, 2.0)) if rows > experts else (0.01, 2.0)
    power, places = 1 - alpha, (np.arange(experts) + 0.5) / experts
    shares = ((high**power - low**power) * places + low**power) ** (1 / power)
    ends = np.round(np.concatenate([[0.0], np.cumsum(shares[::-1]) * rows / shares.sum()]))
    return tuple(int(each) for each in np.diff(ends)[::-1])


def _layer(row: Mapping[str, Any], engine: ExpertKernel) -> ExpertLayer:
    tokens, chosen, experts, ranks = (int(row[name]) for name in ("num_tokens", "topk", "num_experts", "moe_ep_size"))
    law = str(row["distribution"])
    dtype, scaling, stored = EXPERT_TYPES[str(row["moe_dtype"])]
    inner = int(row["inter_size"]) // int(row["moe_tp_size"])
    if law == "balanced":
        counts = BALANCED.counts(tokens * chosen // ranks, experts // ranks)
    else:
        counts = _power_law(tokens, chosen, experts, float(law.rpartition("_")[2]))
    return ExpertLayer(counts, tokens, int(row["hidden_size"]), inner, dtype, engine, True, scaling, stored)
