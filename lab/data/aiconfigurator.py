"""Readers of the kernels that aiconfigurator measured (ai-dynamo/aiconfigurator, Apache-2.0): milliseconds of kernel
time without the gaps of launches, most in a CUDA graph.

**Products in BF16**, ``gemm/gemm_perf.parquet``. Inference layout (weights transposed). Shapes are a grid: powers of
two and some between them along m, n and k. Rows that something disturbed stand out from it: less than half as fast as
their neighbours (:func:`disturbed`). Of products of 50 us and more these are 2 % of H100's in BF16 (2048 x 8192 x
16384: 233 TFLOP/s, between 874 and 851) and none to 0.1 % of the other systems'.

**Products in FP8**: linear layers and casts. A row ``fp8`` or ``fp8_block`` of the same file is a linear layer of
vLLM, which casts its input first. How long the cast takes is seen where there is little else: layers of 128 outputs,
less six tenths of the same product in BF16 (half of its bytes). Their median by the size of the input, in doublings,
is the file's own cast; it is taken off every row, and rows are used where it takes at most a fifth of the time of the
product in BF16. With six tenths, as once, 759 of L40S's 27,765 rows were left with less time than the datasheet
allows, down to 0.02 us, and 21 of H100's and H200's; with a fifth none is. (On H100 and H200 vLLM 0.14 casts by
several PyTorch kernels, 8 us and 10 ps an element; on L40S 0.24 by one, in 3 us and 4 ps. Layers with scales of
blocks were timed without a CUDA graph.) ``quantize``: casts by themselves. ``scale_matrix`` has the scale given,
``compute_scale`` of vLLM is what finding one for each row takes besides. (SGLang's cast is a tenth as fast and left
out, as are eager searches of TensorRT-LLM.)

**Fused layers of experts**: both products with activation, gathering and the sum of results, forward. Rows whose work
is known are taken: of TensorRT-LLM (``cutlass``) those with all experts or a balanced part of them, of vLLM
(``triton``) those with all experts; of a rank of a random routing the table does not say what it got. Layers with
4-bit weights are left out. The rows of experts are those of :mod:`costmodel.operators.experts`.

**Prefill, decode and encoder attention**: forward, causal but for encoders. Rows count whose column
``kernel_source`` names a kernel that training has too (FlashAttention 2 and 3), in BF16 over a BF16 cache. A table of
each file is thinned to :data:`MOST_ROWS`, evenly. LLMServingSim's tables are not read: decode rows of its H100 would
need up to 48 TB/s of the card's memory, so that the sequences must share the pages of one cache.

**Attention only used in serving**: in the latent space, and FlashAttention 3 in 8 bits.
``mla/trtllm/*/generation_mla_perf.parquet``: one token of ``batch_size`` sequences with a cache of ``step`` tokens,
``num_heads`` of this GPU, ranks of 512 and 64 (DeepSeek), the rotary embedding and the writing of the cache with it.
TensorRT-LLM runs FlashMLA on Hopper (its 668 TFLOP/s there are those that FlashMLA publishes) and a kernel of its own
elsewhere, which splits no sequence. vLLM's tables were taken launch by launch, with the projections around the
kernel: 0.1 to 0.3 ms at least. ``attention``: rows of FlashAttention 3 over a cache in 8 bits, with queries in 8 bits
but for single tokens.

**Linear attention**, ``linear_attention/<engine>/<version>/{mamba2,gdn}_perf.parquet``: BF16, whole sequences
(``context``) and one token with a cache (``generation``). The tables of Mamba 2 have no scan. Rows used, and reasons
for skipping the others:

* ``chunk_gated_delta_rule`` of TensorRT-LLM, which agrees with what flash-linear-attention itself takes on H800
  (PaddlePaddle/flash-attention pull request 133: 2.6 ns per token and head of 128, here 2.5 on H100). The forks of
  SGLang and vLLM take 1.1 to 1.6 times as long; SGLang's of H200 and L40S were disturbed (H200 up to 3.7 times H100,
  the same chip); FlashInfer's kernel is none that training has.
* One token: TensorRT-LLM's and vLLM's.
* Convolutions: SGLang's, and those of TensorRT-LLM's Mamba 2 (in its other table they see a part of the channels that
  it does not tell), but for rows that were disturbed: of more than 50 us at less than 0.35 of the memory's bandwidth,
  where others of their size reach 0.8; TensorRT-LLM's below 30 us, which were launched one by one and show it (5 us at
  least, SGLang's 2). vLLM's and A100's were all launched so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.machines.machine_file import load_machine
from costmodel.operators.attention import Attention, AttentionKernel, CausalConvolution, LinearAttention
from costmodel.operators.device_work import Gemm, ScaledCast, ScaledGemm
from costmodel.operators.experts import ExpertKernel, ExpertLayer, ExpertRouting
from lab.data.data_folder import BROUGHT, Wanted, everything, reading
from lab.data.kernel_table import MACHINES, KernelTable, files_of, machine_of, read_columns, read_parquet

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
        yield read_wide_products(path, MACHINES[path.parent.parent.name])


def read_wide_products(path: Path, machine: str) -> KernelTable:
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
                yield _expert_table(columns, path, machine_of(path, data), name, dtypes)


def _expert_table(
    columns: dict[str, np.ndarray], path: Path, machine: str, name: str, dtypes: tuple[str, ...]
) -> KernelTable:
    kernel = KERNELS[path.parts[-3]]
    apart = columns["moe_ep_size"] > 1
    known = ~apart | ((columns["distribution"] == "balanced") & (kernel == "cutlass"))
    enough = columns["num_tokens"] * columns["topk"] >= columns["num_experts"]  # of a part of them, a row for each
    mask = np.isin(columns["moe_dtype"], dtypes) & known & (enough | ~apart) & (columns["latency"] > 0)
    places = np.flatnonzero(mask)
    places = places[np.linspace(0, len(places) - 1, min(ROWS, len(places))).astype(int)] if len(places) else places
    layers = tuple(_expert_layer({key: column[place] for key, column in columns.items()}, kernel) for place in places)
    seconds = columns["latency"][places].astype(float) * 1e-3
    return KernelTable(name, machine, layers, seconds, np.ones(len(places), dtype=bool), str(path))


def _expert_layer(row: dict[str, object], kernel: ExpertKernel) -> ExpertLayer:
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
    """All attention tables in ``data`` of engines whose kernels are also used in training."""
    found: list[Path] = []
    for system in MACHINES:
        for folder, engine in product(("attention", "encoder_attention"), _engines(system)):
            found += sorted((data / "aiconfigurator" / system / folder / engine).glob("*/*_attention_perf.parquet"))
    return found


def _engines(system: str) -> tuple[str, ...]:
    """Engines whose tables of ``system`` name kernels also used in training."""
    return ("sglang", "vllm") if system in _HOPPER else ("vllm",)


def read_attention(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """Yield a table per wanted file of aiconfigurator, kernel and phase, named as the family that prices it."""
    for path in attention_files(data):
        if wanted(path):
            yield from read_served(path, MACHINES[path.relative_to(data).parts[1]])


def read_served(path: Path, machine: str, eight_bits: bool = False) -> Iterator[KernelTable]:
    """Yield the tables of one file of aiconfigurator: rows in BF16, or of FlashAttention 3 over a cache in
    ``eight_bits``.
    """
    columns = _columns(path)
    names = [_KERNELS.get(name) for name in columns["kernel_source"]]
    if eight_bits:
        names = ["flash3-fp8" if name == "flash3" else None for name in names]
    kept = "fp8" if eight_bits else "bfloat16"
    # A single token is cast to the type of the cache whatever its row states; for more tokens the cast would count.
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
    """Yield tables of ``operators`` by kernel and phase."""
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
    table = read_parquet(path, "a table of attention")
    columns: dict[str, list[Any]] = {name: table[name].to_pylist() for name in table.column_names}
    with reading(path, "a table of attention"):
        known = [columns[name] for name in ("kernel_source", "batch_size", "num_heads", "head_dim", "isl", "latency")]
    rows = len(known[0])
    bf16, zeros = ["bfloat16"] * rows, [0] * rows
    defaults: dict[str, list[Any]] = {"attn_dtype": bf16, "kv_cache_dtype": bf16, "window_size": zeros, "step": zeros}
    return {**defaults, "num_key_value_heads": columns["num_heads"], **columns}


_RANK, _ROTARY = 512, 64
_LATENT = ("mla_dtype", "kv_cache_dtype", "num_heads", "batch_size", "step", "latency")


def serving_files(data: Path) -> list[Path]:
    """All tables in ``data`` of kernels only used in serving."""
    return [*_latent_files(data), *_eight_bit_files(data)]


def _latent_files(data: Path) -> list[Path]:
    return [path for path in files_of(data, "mla", "generation_mla_perf.parquet") if path.parts[-3] == "trtllm"]


def _eight_bit_files(data: Path) -> list[Path]:
    hopper = [path for path in attention_files(data) if path.relative_to(data).parts[1] in ("h100_sxm", "h200_sxm")]
    return [path for path in hopper if not path.name.startswith("encoder")]


def read_serving(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """Yield a table per wanted file, kernel and phase, named as the family that prices it."""
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


_FOLDER = "linear_attention"
_SHARED = ("phase", "kernel_source", "batch_size", "seq_len", "d_conv", "latency")
_SSD = ("n_groups", "d_state", "nheads", "head_dim", "chunk_size")
_RULE = ("num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim")
_MAMBA, _DELTA = (*_SHARED, *_SSD), (*_SHARED, *_RULE)
_SCANS = ("mamba_chunk_scan_combined", "selective_state_update")
# Engines whose rows of whole sequences, of one token, and of convolutions are used.
_WHOLE, _TOKEN, _CONVOLUTIONS = ("trtllm",), ("trtllm", "vllm"), ("sglang", "trtllm")
_CONVOLUTION = "causal-conv"
_BY_LAUNCH = ("a100-sxm-80gb",)  # timed launch by launch, including the gaps
_LONG_CONVOLUTION_SECONDS, _LEAST_BANDWIDTH = 50e-6, 0.35
_LAUNCHED_SECONDS = 30e-6


def linear_files(data: Path) -> list[Path]:
    """All tables of linear attention in ``data``."""
    return [
        path
        for name in ("mamba2_perf", "gdn_perf")
        for path in files_of(data, _FOLDER, f"{name}.parquet")
        if machine_of(path, data) not in _BY_LAUNCH
    ]


def read_linear(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """Yield a table per wanted file and family of kernels, named as the family that prices it."""
    for path in linear_files(data):
        if wanted(path):
            yield from _linear_tables(path, machine_of(path, data))


def _linear_tables(path: Path, machine: str) -> Iterator[KernelTable]:
    names = _MAMBA if path.name.startswith("mamba2") else _DELTA
    columns = dict(zip(names, read_columns(path, names, "a table of linear attention"), strict=True))
    groups: dict[str, list[tuple[LinearAttention | CausalConvolution, float]]] = {}
    for place in range(len(columns["latency"])):
        row = {name: column[place] for name, column in columns.items()}
        found = _linear_operator(row, path)
        if found is not None and row["latency"] > 0:
            groups.setdefault(found[0], []).append((found[1], float(row["latency"]) * 1e-3))
    bandwidth = load_machine(machine).memory[-1].bandwidth.at(1)
    for name, rows in groups.items():
        operators = tuple(operator for operator, _ in rows)
        seconds = np.array([taken for _, taken in rows])
        shortest = _LAUNCHED_SECONDS if name == _CONVOLUTION and path.parts[-3] == "trtllm" else 0.0
        counted = np.array([each[1] >= shortest and not _is_disturbed(*each, bandwidth) for each in rows])
        yield KernelTable(name, machine, operators, seconds, counted, str(path))


def _is_disturbed(operator: LinearAttention | CausalConvolution, seconds: float, bandwidth: float) -> bool:
    moved = operator.read_bytes + operator.write_bytes
    slow = moved < _LEAST_BANDWIDTH * bandwidth * seconds
    return isinstance(operator, CausalConvolution) and seconds > _LONG_CONVOLUTION_SECONDS and slow


def _linear_operator(row: Mapping[str, Any], path: Path) -> tuple[str, LinearAttention | CausalConvolution] | None:
    """Family and operator record of a row; ``None`` for a kernel that is skipped."""
    kernel, whole = str(row["kernel_source"]), row["phase"] == "context"
    batch, length = int(row["batch_size"]), int(row["seq_len"]) if whole else 1
    engine = path.parts[-3]
    if kernel.startswith("causal_conv1d"):
        if engine not in _CONVOLUTIONS or (engine == "trtllm" and "nheads" not in row):
            return None
        channels = _conv_channels(row)
        return _CONVOLUTION, CausalConvolution(batch, channels, length, int(row["d_conv"]), update=not whole)
    if engine not in (_WHOLE if whole else _TOKEN) or (whole and length == 1):
        return None
    if kernel in _SCANS:
        keys, states, heads, width, chunk = (int(row[name]) for name in _SSD)
        record = LinearAttention("ssd", batch, length, keys, states, heads, width, chunk, keeps_states=True)
    elif kernel.startswith(("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")):
        keys, states, heads, width = (int(row[name]) for name in _RULE)
        record = LinearAttention("gated_delta", batch, length, keys, states, heads, width, keeps_states=True)
    else:
        return None
    if not whole:
        return "scan-step", replace(record, state_dtype="bfloat16" if record.kind == "gated_delta" else "float32")
    return f"scan-{record.kind.replace('_', '-')}", record


def _conv_channels(row: Mapping[str, Any]) -> int:
    """Channels of the convolution: for Mamba 2 the values, B and C, for the gated delta rule queries, keys and
    values.
    """
    if "nheads" in row:
        return int(row["nheads"] * row["head_dim"] + 2 * row["n_groups"] * row["d_state"])
    return int(2 * row["num_k_heads"] * row["head_k_dim"] + row["num_v_heads"] * row["head_v_dim"])
