"""Readers of measured attention: aiconfigurator's prefill, decode and encoder tables, and SimuMax's shares of the peak.

aiconfigurator (ai-dynamo, Apache-2.0): milliseconds of kernel time in a CUDA graph, forward, causal but for encoders.
Rows count whose column ``kernel_source`` names a kernel that training has too (FlashAttention 2 and 3), in BF16 over a
BF16 cache. A table of each file is thinned to :data:`MOST_ROWS`, evenly.

SimuMax (MooreThreads, Apache-2.0): share of 312 TFLOP/s that causal attention of an A100 PCIe reaches, counted as if
every query saw every key, five products backward. Backward its two passes beside the kernel (row sums of output x
gradient; the query gradient in FP32 to 16 bits), which are operators of their own here, are taken off at the bandwidth
of the card.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError, MissingDependencyError
from costmodel.datasets.aiconfigurator import MACHINES
from costmodel.datasets.csv_table import KernelTable
from costmodel.datasets.data_folder import AGAIN
from costmodel.datasets.named_files import Wanted, everything
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
_SIMUMAX = ("simumax/kernel_efficiency_a100_pcie.csv", "a100-pcie-80gb", 1.7e12)  # sustained bytes/s of that card


def attention_files(data: Path) -> list[Path]:
    """Every attention table of aiconfigurator and SimuMax's file, of those that ``data`` has."""
    found: list[Path] = []
    for system in MACHINES:
        for folder, engine in product(("attention", "encoder_attention"), _engines(system)):
            found += sorted((data / "aiconfigurator" / system / folder / engine).glob("*/*_attention_perf.parquet"))
    simumax = data / _SIMUMAX[0]
    return [*found, *([simumax] if simumax.exists() else [])]


def _engines(system: str) -> tuple[str, ...]:
    """Engines whose tables of ``system`` name kernels that training has too."""
    return ("sglang", "vllm") if system in _HOPPER else ("vllm",)


def read_attention(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """A table per wanted file of aiconfigurator, kernel and phase, named as the family that prices it.

    ``InputError`` for a malformed file, ``MissingDependencyError`` without pyarrow.
    """
    for path in attention_files(data):
        if path.suffix == ".parquet" and wanted(path):
            yield from read_served(path, MACHINES[path.relative_to(data).parts[1]])


def read_attention_points(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """SimuMax's rows forward and backward, if its file is there and wanted."""
    path = data / _SIMUMAX[0]
    if path.exists() and wanted(path):
        yield from read_simumax(path, *_SIMUMAX[1:])


def read_served(path: Path, machine: str) -> Iterator[KernelTable]:
    """The tables of one file of aiconfigurator."""
    columns = _columns(path)
    names = [_KERNELS.get(name) for name in columns["kernel_source"]]
    plain = [
        name is not None and columns["attn_dtype"][place] == columns["kv_cache_dtype"][place] == "bfloat16"
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
        return Attention(batch, heads, queries, queries, width, heads, dtype="bfloat16", kernel=kernel)
    grouped, cached = int(columns["num_key_value_heads"][place]), int(columns["step"][place])
    window = int(columns["window_size"][place])
    return Attention(
        batch, heads, queries, queries + cached, width, grouped, True, "bfloat16",
        kernel=kernel, window=window, paged=True,
    )  # fmt: skip


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


def read_simumax(path: Path, machine: str, bandwidth: float) -> Iterator[KernelTable]:
    """The attention rows of SimuMax's file; ``bandwidth`` (bytes/s) of the passes beside the backward kernel."""
    operators, seconds = [], []
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                if row["op"] in ("sdp_fwd", "sdp_bwd"):
                    operator = _simumax_operator(row)
                    peak = float(row["efficiency"]) * float(row["peak_tflops_used"]) * 1e12
                    operators.append(operator)
                    seconds.append(_full_flops(operator) / peak - side_passes_bytes(operator) / bandwidth)
    except (OSError, KeyError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{path}: not SimuMax's table of shares ({error!r}); {AGAIN}") from None
    yield from named_rows(operators, seconds, machine, path)


def side_passes_bytes(operator: Attention) -> int:
    """Bytes of the passes beside a backward kernel: output and gradient read; query gradient, FP32 to 16 bits."""
    if operator.direction == "forward":
        return 0
    scored, mixed = operator.widths
    return operator.batch * operator.heads * operator.query_length * (4 * mixed + 6 * scored)


def _full_flops(operator: Attention) -> float:
    scored, mixed = operator.widths
    factor = 1.0 if operator.direction == "forward" else 2.5
    return 2.0 * factor * operator.batch * operator.heads * operator.query_length**2 * (scored + mixed)


def _simumax_operator(row: Mapping[str, str]) -> Attention:
    shape = dict(part.split("=") for part in row["shape_key"].split(", "))
    batch, length, heads, grouped, scored, mixed = (
        int(shape[name]) for name in ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
    )
    direction: Any = "forward" if row["op"] == "sdp_fwd" else "backward"
    return Attention(
        batch, heads, length, length, scored, grouped, True, "bfloat16", direction, kernel="flash2", value_dim=mixed
    )
