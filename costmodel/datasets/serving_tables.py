"""Reader of kernels that serving engines have and training has not, of aiconfigurator (ai-dynamo, Apache-2.0): latent
attention in the space of the latents, and FlashAttention 3 in 8 bits.

``mla/trtllm/*/generation_mla_perf.parquet``: milliseconds of kernel time in a CUDA graph; one token of ``batch_size``
sequences behind a cache of ``step`` tokens, ``num_heads`` of this GPU, ranks of 512 and 64 (DeepSeek), the rotary
embedding and the writing of the cache with it. TensorRT-LLM runs FlashMLA on Hopper (its 668 TFLOP/s there are those
that FlashMLA publishes) and a kernel of its own elsewhere, which splits no sequence. vLLM's tables were taken launch by
launch, with the projections around the kernel: 0.1 to 0.3 ms at least.

``attention``: rows of FlashAttention 3 over a cache in 8 bits, with queries in 8 bits but for single tokens
(:mod:`costmodel.datasets.attention_tables` has those in 16).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from costmodel.datasets.attention_tables import MOST_ROWS, attention_files, named_rows, read_served
from costmodel.datasets.csv_table import KernelTable
from costmodel.datasets.named_files import Wanted, everything
from costmodel.datasets.parquet_table import MACHINES, files_of, machine_of, read_columns
from costmodel.operators.attention import Attention

_RANK, _ROTARY = 512, 64
_LATENT = ("mla_dtype", "kv_cache_dtype", "num_heads", "batch_size", "step", "latency")


def serving_files(data: Path) -> list[Path]:
    """Every table of such kernels that ``data`` has."""
    return [*_latent_files(data), *_eight_bit_files(data)]


def _latent_files(data: Path) -> list[Path]:
    return [path for path in files_of(data, "mla", "generation_mla_perf.parquet") if path.parts[-3] == "trtllm"]


def _eight_bit_files(data: Path) -> list[Path]:
    hopper = [path for path in attention_files(data) if path.relative_to(data).parts[1] in ("h100_sxm", "h200_sxm")]
    return [path for path in hopper if not path.name.startswith("encoder")]


def read_serving(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """A table per wanted file, kernel and phase, named as the family that prices it.

    ``InputError`` for a malformed file, ``MissingDependencyError`` without pyarrow.
    """
    for path in _latent_files(data):
        if wanted(path):
            yield from _latent(path, machine_of(path, data))
    for path in _eight_bit_files(data):
        if wanted(path):
            yield from read_served(path, MACHINES[path.relative_to(data).parts[1]], eight_bits=True)


def _latent(path: Path, machine: str) -> Iterator[KernelTable]:
    columns = dict(zip(_LATENT, read_columns(path, _LATENT, "a table of latent attention"), strict=True))
    plain = (columns["mla_dtype"] == "bfloat16") & (columns["kv_cache_dtype"] == "bfloat16") & (columns["latency"] > 0)
    places = np.flatnonzero(plain)
    if len(places) > MOST_ROWS:
        places = places[np.linspace(0, len(places) - 1, MOST_ROWS).astype(int)]
    first = Attention(
        1, 1, 1, 1, _RANK + _ROTARY, 1, dtype="bfloat16", kernel="mla", value_dim=_RANK, paged=True
    )  # fmt: skip
    operators = [
        replace(
            first,
            batch=int(columns["batch_size"][place]),
            heads=int(columns["num_heads"][place]),
            key_length=int(columns["step"][place]) + 1,
        )
        for place in places
    ]
    yield from named_rows(operators, [float(columns["latency"][place]) * 1e-3 for place in places], machine, path)
