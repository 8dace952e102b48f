"""Reader of measured attention: aiconfigurator's prefill, decode and encoder tables.

aiconfigurator (ai-dynamo, Apache-2.0): milliseconds of kernel time in a CUDA graph, forward, causal but for encoders.
Rows count whose column ``kernel_source`` names a kernel that training has too (FlashAttention 2 and 3), in BF16 over a
BF16 cache. A table of each file is thinned to :data:`MOST_ROWS`, evenly.

LLMServingSim's tables are not read: decode rows of its H100 would need up to 48 TB/s of the card's memory, so that the
sequences must share the pages of one cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError, MissingDependencyError
from costmodel.datasets.csv_table import KernelTable
from costmodel.datasets.data_folder import AGAIN
from costmodel.datasets.named_files import Wanted, everything
from costmodel.datasets.parquet_table import MACHINES
from costmodel.operators.attention import Attention, AttentionKernel

MOST_ROWS = 3000
_KERNELS: Mapping[str, AttentionKernel] = {
    "vllm_flash_attn": "flash2",
    "vllm_flash_attn_fa2": "flash2",
    "vllm_vit_flash_attn_fa2": "flash2",
    "vllm_flash_attn_fa3": "flash3",
    "vllm_vit_flash_attn_fa3": "flash3",
    "flash_attention_v3": "flash3",
    "fa3": "flash3",
}
_HOPPER = ("h100_sxm", "h200_sxm")


def attention_files(data: Path) -> list[Path]:
    """Every table of attention that ``data`` has of engines whose kernels training has too."""
    found: list[Path] = []
    for system in MACHINES:
        for folder, engine in product(("attention", "encoder_attention"), _engines(system)):
            found += sorted((data / "aiconfigurator" / system / folder / engine).glob("*/*_attention_perf.parquet"))
    return found


def _engines(system: str) -> tuple[str, ...]:
    """Engines whose tables of ``system`` name kernels that training has too."""
    return ("sglang", "vllm") if system in _HOPPER else ("vllm",)


def read_attention(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """A table per wanted file of aiconfigurator, kernel and phase, named as the family that prices it.

    ``InputError`` for a malformed file, ``MissingDependencyError`` without pyarrow.
    """
    for path in attention_files(data):
        if wanted(path):
            yield from read_served(path, MACHINES[path.relative_to(data).parts[1]])


def read_served(path: Path, machine: str, eight_bits: bool = False) -> Iterator[KernelTable]:
    """The tables of one file of aiconfigurator: rows in BF16, or of FlashAttention 3 over a cache in ``eight_bits``."""
    columns = _columns(path)
    names = [_KERNELS.get(name) for name in columns["kernel_source"]]
    if eight_bits:
        names = ["flash3-fp8" if name == "flash3" else None for name in names]
    kept = "fp8" if eight_bits else "bfloat16"
    # A token is cast to the type of the cache whatever it says of itself; of more, the cast would count.
    plain = [
        name is not None
        and columns["kv_cache_dtype"][place] == kept
        and (columns["attn_dtype"][place] == kept or (eight_bits and columns["isl"][place] == 1))
        for place, name in enumerate(names)
    ]
    places = [place for place, keep in enumerate(plain) if keep and columns["latency"][place] > 0]
    if len(places) > MOST_ROWS:
        places = [places[each] for each in np.linspace(0, len(places) - 1, MOST_ROWS).astype(int)]
    operators = [_served(columns, place, names[place] or "flash", path.name.startswith("encoder")) for place in places]
    yield from named_rows(operators, [columns["latency"][place] * 1e-3 for place in places], machine, path)


def named_rows(
    operators: Sequence[Attention], seconds: Sequence[float], machine: str, path: Path
) -> Iterator[KernelTable]:
    """Tables of ``operators`` by kernel and phase."""
    names = [f"{each.kernel}-{each.phase}" for each in operators]
    for name in dict.fromkeys(names):
        rows = [place for place, each in enumerate(names) if each == name]
        times = np.array([seconds[place] for place in rows], dtype=float)
        counted = np.ones(len(rows), dtype=bool)
        yield KernelTable(name, machine, tuple(operators[place] for place in rows), times, counted, str(path))


def _served(columns: Mapping[str, list[Any]], place: int, kernel: AttentionKernel, encoder: bool) -> Attention:
    batch, heads, width, queries = (
        int(columns[name][place]) for name in ("batch_size", "num_heads", "head_dim", "isl")
    )
    if encoder:
        return Attention(batch, heads, queries, queries, width, heads, dtype=_dtype(kernel), kernel=kernel)
    grouped, cached = int(columns["num_key_value_heads"][place]), int(columns["step"][place])
    window = int(columns["window_size"][place])
    return Attention(
        batch, heads, queries, queries + cached, width, grouped, True, _dtype(kernel),
        kernel=kernel, window=window, paged=True,
    )  # fmt: skip


def _dtype(kernel: AttentionKernel) -> str:
    return "float8" if kernel == "flash3-fp8" else "bfloat16"


def _columns(path: Path) -> dict[str, list[Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingDependencyError("reading .parquet tables needs pyarrow: pip install pyarrow") from None
    try:
        table = pyarrow.parquet.read_table(path)
        columns = {name: table[name].to_pylist() for name in table.column_names}
        known = [columns[name] for name in ("kernel_source", "batch_size", "num_heads", "head_dim", "isl", "latency")]
    except (OSError, KeyError, ValueError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: not a table of attention ({' '.join(str(error).split())}); {AGAIN}") from None
    rows = len(known[0])
    bf16, zeros = ["bfloat16"] * rows, [0] * rows
    defaults = {"attn_dtype": bf16, "kv_cache_dtype": bf16, "window_size": zeros, "step": zeros}
    return {**defaults, "num_key_value_heads": columns["num_heads"], **columns}
