"""Reader of the tables of fused layers of experts of aiconfigurator (ai-dynamo/aiconfigurator, Apache-2.0).

Milliseconds of both products with activation, gathering and the sum of results, forward, in a CUDA graph. Rows whose
work is known are taken: of TensorRT-LLM (``cutlass``) those with all experts or a balanced part of them, of vLLM
(``triton``) those with all experts; of a rank of a random routing the table does not say what it got. Layers with 4-bit
weights are left out. The rows of experts are those of :mod:`costmodel.operators.expert_routing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costmodel.datasets.csv_table import KernelTable
from costmodel.datasets.named_files import Wanted, everything
from costmodel.datasets.parquet_table import files_of, machine_of, read_columns
from costmodel.operators.expert_routing import ExpertRouting
from costmodel.operators.expert_work import ExpertKernel, ExpertLayer

KERNELS: dict[str, ExpertKernel] = {"trtllm": "cutlass", "vllm": "triton"}
SCALINGS = {"bfloat16": ("bfloat16", ""), "fp8": ("float8", "tensor"), "fp8_block": ("float8", "block")}
ROWS = 3000  # of one table and number type, evenly: a layer takes a millisecond to analyse
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
    """The tables of the engines whose kernels are known."""
    return [path for path in files_of(data, "moe", "moe_perf.parquet") if path.parts[-3] in KERNELS]


def read_expert_layers(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """A table for each file, once for 16 bits (``moe``) and once for 8 (``moe-8bit``)."""
    for path in expert_files(data):
        if wanted(path):
            columns = dict(zip(_EXPERT_COLUMNS, read_columns(path, _EXPERT_COLUMNS, "a table of expert layers"), strict=True))
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
