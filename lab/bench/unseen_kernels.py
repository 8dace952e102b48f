"""Measured against predicted times of kernels that others have published and to which few or no constants are fitted.

    python -m lab.bench.unseen_kernels [liger frontier scans lookups measured] [--data FOLDER]

**liger**: Liger-Kernel's benchmarks (``liger/kernels.csv.gz``; sealed groups of rows are skipped): norms, softmax,
rotary and squared ReLU forward and backward, by PyTorch (``torch``, ``huggingface``) and in one kernel (``liger``).

**frontier**: attention of engines over a cache, products in 8 bits. Rows of both shorter than their host launch times
depend on the host rather than on kernels and are skipped.

**scans**: gated delta rule and Kimi's rule. Kernels of flash-linear-attention in BF16, heads of 128. H200 and GB200:
QwenLM/FlashQLA, benchmark_results_H200.txt and _GB200.txt (MIT; version 0.5.1 in a CUDA graph, kernels called without
autograd). B200: pytorch/helion, examples/linear/BENCHMARKS.md (BSD-3; through autograd; backward is forward and
backward less forward). Paces are fitted to the rows of GB200 and the backward rows of H200; no fit uses those of B200.

**lookups** of embedding tables. The eight ranks of a DLRM job (facebookresearch/param, MIT; ``traces/dlrm_8xV100``):
FBGEMM's kernels; single constants of the backward stages stem from this run (costmodel/gpu/families/lookups.py says
which), the forward pass has none from it. The profile has the kernels, the execution trace their sizes, neither has the
tables. Of the 26 tables of MLPerf's DLRM v2 (rows of Criteo 1TB cut at 40 million, lookups per sample:
mlcommons/training, recommendation_v2), exactly one choice of three has the rows and lookups that the execution trace of
a rank shows. 128 samples, 16 values, FP32, Adagrad. Which rows were looked up is not known: some more than 32 times,
because the kernel for such rows takes 15 to 37 us on every rank (4 us where it finds none). So indices are taken for
even, for even but for the least that this says, one row of every table looked up 33 times, and for Zipf distributed.
And pytorch/pytorch pull request 49913: `embedding_dense_backward` on A100 (GA100), 64 to 8,192 values, the kernel
without a sort; one constant, two loads per step, stems from its column of 64 values. The rows of the table are not
stated; the change was made for MLPerf's BERT, which has 30,522.

**measured**: kernels that `costmodel measure --suite kernels` timed for this project (lab/bench/measured), as `e2e` has
the call that was timed: captured, lowered, all its kernels. Every third row of a family, by its text, is left out:
nobody looked at these when mechanisms were mended after the rest.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from costmodel.cost_model import CostModel
from costmodel.gpu import gpu_cost_model
from costmodel.gpu.families.lookups import entries_of, reuse_of, stages_of
from costmodel.machines.machine_file import load_machine
from costmodel.operators.any_operator import dtype_of, from_record
from costmodel.operators.attention import Attention, LinearAttention, LinearKind
from costmodel.operators.device_work import Elementwise, MemoryCopy, Normalization, Reduction, ScaledGemm, Softmax
from costmodel.operators.lookups import Direction, EmbeddingLookup, IndexStatistics, TableLookup, zipf
from lab.command_line import chosen, program, run
from lab.data.data_folder import csv_rows, data_folder, reading
from lab.data.selection import is_sealed


class Row(NamedTuple):
    """Kernels of one measurement. ``inside``: True if the measured time lies in the interval, None without one."""

    what: str
    machine: str
    predicted: float
    measured: float
    inside: bool | None = None


@cache
def _model(machine: str) -> CostModel:
    return gpu_cost_model(load_machine(machine))


def _row(what: str, machine: str, operators: Sequence[Any], seconds: float) -> Row:
    """Row of ``operators`` that took ``seconds`` together."""
    estimates = _model(machine).estimate(operators)
    predicted, low, high = (sum(getattr(each, name) for each in estimates) for name in ("seconds", "lower", "upper"))
    return Row(what, machine, predicted, seconds, low <= seconds <= high)


LIGER = "liger/kernels.csv.gz"
GPUS = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
}
HOST_SECONDS = {"forward": 2e-5, "backward": 1.5e-4}  # of a launch; of autograd and its launches
MOST_ROWS = 400


def liger_rows(data: Path) -> Iterator[Row]:
    """Rows of Liger whose kernels are known."""
    for row in csv_rows(data / LIGER, "a table of kernels"):
        told = row["metric_name"], row["gpu_name"], row["kernel_operation_mode"]
        if told[0] != "speed" or told[1] not in GPUS or told[2] not in HOST_SECONDS or is_sealed(LIGER, row):
            continue
        seconds, works = float(row["y_value_50"]) * 1e-3, _liger_kernels(row)
        if works and seconds >= HOST_SECONDS[told[2]]:
            yield _row(f"{row['kernel_name']} {told[2]}, {row['kernel_provider']}", GPUS[told[1]], works, seconds)


def _liger_kernels(row: Mapping[str, str]) -> tuple[Any, ...]:
    told = json.loads(row["extra_benchmark_config_str"])
    size, dtype = int(float(row["x_value"])), told.get("dtype", "float32").removeprefix("torch.")
    name, alone, forward = (
        row["kernel_name"],
        row["kernel_provider"] == "liger",
        row["kernel_operation_mode"] == "forward",
    )
    if name == "layer_norm" or (name == "rms_norm" and alone):
        rows, parameters = told["M"], 2 if name == "layer_norm" else 1
        if forward:
            return (Normalization(name, rows, size, dtype),)
        sums = Reduction("norm_parameters", 2 * rows * size, parameters * size, dtype, contiguous=False)
        return Normalization(name, rows, size, dtype, "backward"), sums
    if name == "softmax" and forward:
        return (Softmax(told["M"], size, dtype),)
    if name == "relu_squared" and alone:
        return (Elementwise("relu_squared", told["M"] * size, 1 if forward else 2, dtype=dtype),)
    if name == "rope" and alone:
        hidden, tokens = (size, told["seq_len"]) if row["x_name"] == "H" else (told["hidden_size"], size)
        keys = hidden * told["num_kv_heads"] // told["num_q_heads"]
        return (Elementwise("rotary", tokens * (hidden + keys), dtype=dtype),)
    return ()


def frontier_rows(data: Path) -> Iterator[Row]:
    """Rows of Frontier: attention of new tokens over a cache on A100 and H100, products in 8 bits on H800 (H100's
    chip).
    """
    for gpu, machine in (("a100", "a100-sxm-80gb"), ("h100", "h100-sxm")):
        for row in _thinned(
            csv_rows(data / "frontier" / gpu / "qwen2_moe_example" / "attention.csv.gz", "a table of kernels")
        ):
            seconds = float(row["time_stats.attn_prefill.median"] or 0) * 1e-3
            if row["is_prefill"] != "True" or seconds < HOST_SECONDS["forward"]:
                continue
            new, cached = int(row["prefill_chunk_size"]), int(row["kv_cache_size"])
            heads, degree = int(row["n_q_head"]), int(row["num_tensor_parallel_workers"])
            width, keys = int(row["n_embd"]) // heads, int(row["n_kv_head"]) // degree
            whole = new + cached
            work = Attention(int(row["batch_size"]), heads // degree, new, whole, width, keys, causal=True, paged=True)
            yield _row("attention over a cache (FlashInfer)", machine, [work], seconds)
    path = data / "frontier" / "h800" / "Llama-3.1-405B-Instruct-FP8" / "linear_op_kernel_only.csv.gz"
    for row in _thinned(csv_rows(path, "a table of kernels")):
        tokens, degree = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
        hidden, inner = int(row["n_embd"]), int(row["n_expanded_embd"]) // degree
        for name, n, k in (("mlp_up_proj", 2 * inner, hidden), ("mlp_down_proj", hidden, inner)):
            seconds = float(row[f"time_stats.{name}.median"] or 0) * 1e-3
            if seconds >= HOST_SECONDS["forward"]:
                yield _row("products in 8 bits (405B)", "h100-sxm", [ScaledGemm(tokens, n, k, scaling="row")], seconds)


def _thinned(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    return [rows[place] for place in np.unique(np.linspace(0, len(rows) - 1, MOST_ROWS).astype(int))]


WIDTH = 128
# GPU -> (key heads, value heads) -> milliseconds forward of one sequence of 32,768, 16,384, 8,192, 4,096, 2,048 tokens,
# and of four of 8,192, eight of 4,096, four of 2,048, eight of 1,024.
SHAPES = ((1, 32768), (1, 16384), (1, 8192), (1, 4096), (1, 2048), (4, 8192), (8, 4096), (4, 2048), (8, 1024))
FORWARD: dict[str, dict[tuple[int, int], tuple[float, ...]]] = {
    "h200-sxm": {
        (2, 8): (0.902, 0.455, 0.234, 0.132, 0.081, 0.467, 0.471, 0.126, 0.131),
        (4, 16): (1.241, 0.614, 0.316, 0.166, 0.098, 0.935, 0.945, 0.244, 0.252),
        (16, 32): (1.890, 0.930, 0.472, 0.247, 0.132, 1.898, 1.914, 0.485, 0.501),
        (16, 48): (2.711, 1.311, 0.665, 0.344, 0.191, 2.532, 2.550, 0.629, 0.650),
        (16, 64): (3.331, 1.598, 0.814, 0.417, 0.220, 3.362, 3.390, 0.829, 0.854),
    },
    "gb200": {
        (2, 8): (1.016, 0.519, 0.264, 0.147, 0.089, 0.455, 0.458, 0.124, 0.128),
        (4, 16): (1.253, 0.642, 0.333, 0.171, 0.100, 0.879, 0.882, 0.243, 0.249),
        (16, 32): (1.770, 0.901, 0.468, 0.245, 0.128, 1.764, 1.687, 0.476, 0.467),
        (16, 48): (2.521, 1.275, 0.655, 0.341, 0.189, 2.283, 2.296, 0.607, 0.622),
        (16, 64): (2.943, 1.478, 0.755, 0.396, 0.211, 2.956, 2.852, 0.772, 0.759),
    },
}
# One sequence of 8,192 and of 32,768 tokens, backward.
BACKWARD: dict[str, dict[tuple[int, int], tuple[float, float]]] = {
    "h200-sxm": {(16, 32): (1.444, 5.697), (8, 16): (0.957, 3.701), (4, 8): (0.722, 2.743), (2, 4): (0.606, 2.311)},
    "gb200": {(32, 32): (1.446, 5.714), (16, 16): (1.013, 3.934), (8, 8): (0.798, 3.068), (4, 4): (0.671, 2.640)},
}
# (sequences, tokens, heads) -> forward, forward and backward, on B200.
AUTOGRAD: dict[LinearKind, dict[tuple[int, int, int], tuple[float, float]]] = {
    "gated_delta": {
        (1, 8192, 96): (1.204, 5.388), (2, 16384, 16): (0.925, 4.072), (4, 2048, 16): (0.347, 1.820),
        (4, 4096, 64): (1.517, 6.945),
    },
    "kimi_delta": {
        (1, 8192, 96): (2.241, 11.204), (2, 16384, 16): (1.609, 7.777), (4, 2048, 16): (0.503, 2.111),
        (4, 4096, 64): (2.925, 14.615),
    },
}  # fmt: skip


def scan_rows(data: Path) -> Iterator[Row]:
    """Rows of linear attention; they are all here."""
    for gpu, table in FORWARD.items():
        for heads, times in table.items():
            for shape, milliseconds in zip(SHAPES, times, strict=True):
                yield _scan(gpu, "gated_delta", "forward", *shape, *heads, milliseconds)
    for gpu, backward in BACKWARD.items():
        for heads, both in backward.items():
            for length, milliseconds in zip((8192, 32768), both, strict=True):
                yield _scan(gpu, "gated_delta", "backward", 1, length, *heads, milliseconds)
    for kind, measured in AUTOGRAD.items():
        for (batch, length, count), (forward, whole) in measured.items():
            yield _scan("b200-sxm", kind, "forward", batch, length, count, count, forward)
            yield _scan("b200-sxm", kind, "backward", batch, length, count, count, whole - forward)


def _scan(
    gpu: str,
    kind: LinearKind,
    direction: Direction,
    batch: int,
    length: int,
    keys: int,
    heads: int,
    milliseconds: float,
) -> Row:
    """Row of ``batch`` sequences of ``length`` tokens; ``keys`` heads are shared by ``heads`` value heads."""
    keeps = gpu != "b200-sxm" and direction == "forward"
    operator = LinearAttention(kind, batch, length, keys, WIDTH, heads, WIDTH, direction=direction, keeps_states=keeps)
    return _row(f"{kind} {direction}", gpu, [operator], milliseconds * 1e-3)


MACHINE = "v100-sxm2-32gb"
FILE = Path("traces") / "dlrm_8xV100" / "dlrm_kineto.tar.gz"
SAMPLES, DIM, OPTIMIZER = 128, 16, "adagrad"
# Rows and lookups per sample of the three tables of every rank.
RANKS = (
    ((40_000_000, 3), (39_060, 2), (1_543, 1)),
    ((20_265, 6), (40_000_000, 7), (976, 1)),
    ((17_295, 1), (155, 5), (40_000_000, 12)),
    ((40_000_000, 100), (12_973, 3), (108, 1)),
    ((63, 1), (11_938, 9), (40_000_000, 27)),
    ((7_424, 2), (3_067_956, 3), (36, 1)),
    ((7_122, 1), (14, 1), (590_152, 10)),
    ((405_282, 8), (10, 1), (2_209, 6)),
)
_MEMBER = re.compile(r".*worker(\d+)_.*\.json")
_COMPUTE_STREAM = 7


@dataclass(frozen=True)
class RankKernels:
    """Lookups of one rank and seconds of their kernels: ``forward``; in the backward pass ``linearize`` (row numbers
    made global), ``sort`` (and runs found), ``update`` (gradients summed, rows updated).
    """

    rank: int
    tables: tuple[TableLookup, ...]
    forward: float
    linearize: float
    sort: float
    update: float

    @property
    def backward(self) -> float:
        """Seconds of all kernels of the backward pass."""
        return self.linearize + self.sort + self.update

    def operator(self, direction: Any) -> EmbeddingLookup:
        """Operator of the forward kernel, or of the whole backward pass, with uniform indices."""
        backward = direction == "backward"
        return EmbeddingLookup.of(self.tables, direction, OPTIMIZER if backward else "", whole_pass=backward)


def read_dlrm_trace(data: Path) -> tuple[RankKernels, ...]:
    """Read every rank of the run below ``data``; ``InputError`` if the file is missing or malformed."""
    path = data / FILE
    with reading(path, "the profiles of the eight ranks"):
        try:
            with tarfile.open(path) as archive:
                members = {int(match[1]): name for name in archive.getnames() if (match := _MEMBER.fullmatch(name))}
                files: list[Any] = [archive.extractfile(members[rank]) for rank in range(len(RANKS))]
                return tuple(_rank_kernels(rank, json.load(file)) for rank, file in enumerate(files))
        except tarfile.TarError as error:
            raise ValueError(error) from None


def _rank_kernels(rank: int, profile: Mapping[str, Any]) -> RankKernels:
    kernels = [event for event in profile["traceEvents"] if event.get("cat") == "kernel"]
    kernels.sort(key=lambda event: event["ts"])
    # The data-parallel tables' backward pass comes first.
    start = [place for place, event in enumerate(kernels) if "linearize_index" in event["name"]][1]
    after = [event for event in kernels[start:] if event["args"]["stream"] == _COMPUTE_STREAM]
    own = [event for event in after if "at_cuda_detail" not in event["name"]]  # a sort of PyTorch's own

    def seconds(events: list[Any], word: str) -> float:
        return float(1e-6 * sum(event["dur"] for event in events if word in event["name"]))

    tables = tuple(TableLookup(rows, DIM, SAMPLES * pooling, SAMPLES) for rows, pooling in RANKS[rank])
    forward = seconds(kernels, "split_embedding_codegen_forward")
    update = seconds(after, "backward_codegen_adagrad")
    return RankKernels(rank, tables, forward, seconds(after, "linearize_index"), seconds(own, "cub::Device"), update)


BERT_ROWS = 30_522
# (lookups, values): seconds, pytorch/pytorch pull request 49913, table "GA100-fp32 embedding", column "cuda kernel".
PULL_REQUEST_49913 = {
    (1024, 64): 7.03e-5, (1024, 256): 1.10e-4, (1024, 1024): 1.80e-4, (1024, 2048): 2.71e-4, (1024, 4096): 4.59e-4,
    (1024, 8192): 8.92e-4, (2048, 64): 1.11e-4, (2048, 256): 1.76e-4, (2048, 1024): 2.48e-4, (2048, 2048): 3.44e-4,
    (2048, 4096): 5.40e-4, (2048, 8192): 1.033e-3, (3072, 64): 1.70e-4, (3072, 256): 2.45e-4, (3072, 1024): 3.22e-4,
    (3072, 2048): 4.19e-4,
}  # fmt: skip
STAGES = {"linearize": 2, "sort": 3, "update": 4}
LONG_ROW = 33  # lookups of a row processed by FBGEMM's second update kernel
Popularity = Callable[[TableLookup], IndexStatistics | None]


POPULARITIES: dict[str, Popularity] = {
    "even indices": lambda table: None,
    "even but for one row": lambda table: one_popular_row(table, LONG_ROW),
    "Zipf 1.2": lambda table: zipf(table.rows, 1.2),
}


def one_popular_row(table: TableLookup, count: float) -> IndexStatistics:
    """Statistics with one row accessed ``count`` times (more, if uniform lookups are), all others uniformly."""
    share = min(max(count / table.indices, 1 / table.rows), 1.0)
    return IndexStatistics(table.rows, (1.0, table.rows - 1.0), (share, 1 - share), "one popular row")


def lookup_rows(data: Path) -> Iterator[Row]:
    """Rows of the DLRM job, a stage of a rank each, for every distribution of indices; then the pull request's."""
    ranks = read_dlrm_trace(data)
    for title, popularity in POPULARITIES.items():
        for rank in ranks:
            for stage, seconds in predicted_stages(rank, popularity).items():
                yield Row(f"DLRM, {title}: {stage}", MACHINE, seconds, getattr(rank, stage))
    for (count, width), seconds in PULL_REQUEST_49913.items():
        operator = EmbeddingLookup(BERT_ROWS, width, count, count, direction="backward", whole_pass=True)
        yield _row("embedding_dense_backward (pull request 49913)", "a100-sxm-40gb", [operator], seconds)


def predicted_stages(rank: RankKernels, popularity: Popularity) -> dict[str, float]:
    """Predicted seconds of every stage, by name."""
    machine = load_machine(MACHINE)
    rank = replace(rank, tables=tuple(replace(each, statistics=popularity(each)) for each in rank.tables))
    forward = gpu_cost_model(machine).estimate([rank.operator("forward")])[0].seconds
    entries = entries_of([rank.operator("backward")])
    stages = [float(each.seconds(entries)[0]) for each in stages_of(entries, reuse_of(entries, machine), machine)]
    return {"forward": forward, **{name: stages[place] for name, place in STAGES.items()}, "backward": sum(stages)}


MEASURED = Path(__file__).with_name("measured")


def measured_rows(data: Path) -> Iterator[Row]:
    """Rows of kernels measured for this project."""
    for path in sorted(MEASURED.glob("*/kernels.csv.gz")):
        families: dict[str, list[dict[str, str]]] = defaultdict(list)
        for row in csv_rows(path, "a table of kernels"):
            if not row["error"]:
                families[row["family"]].append(row)
        for family, rows in families.items():
            for place, row in enumerate(sorted(rows, key=lambda each: each["operator"])):
                operator = from_record(json.loads(row["operator"]))
                what = f"{family} {getattr(operator, 'direction', getattr(operator, 'wrt', ''))}".rstrip()
                what += ", left out" if place % 3 == 2 else ""
                yield _row(what, path.parent.name, _called(operator, path.parent.name), float(row["median_s"]))


def _called(operator: Any, name: str) -> Sequence[Any]:
    """Kernels that `e2e` has for the measured call of ``operator`` on the machine ``name``."""
    if isinstance(operator, Attention | MemoryCopy):
        return [operator]  # no call on tensors without data: the kernel depends on the device, copies on both ends
    import torch

    from costmodel.measure.operator_calls import make_call
    from e2e.capture.session import CapturedWorkload, capture
    from e2e.lowering.lower_trace import lower
    from e2e.sources.user_script import seen_gpu
    from e2e.step.options import StepOptions, Tf32Switches

    call, tf32 = make_call(operator, torch.device("meta")), dtype_of(operator) == "tf32"
    assert call is not None
    options = StepOptions(seen_gpu=seen_gpu(load_machine(name)), tf32=Tf32Switches(tf32, tf32, tf32))
    trace = capture(CapturedWorkload("call", torch.nn.Identity(), call), options)
    return [record for task in lower(trace, options).tasks for record in task.operators]


SOURCES: dict[str, Callable[[Path], Iterator[Row]]] = {
    "liger": liger_rows,
    "frontier": frontier_rows,
    "scans": scan_rows,
    "lookups": lookup_rows,
    "measured": measured_rows,
}


def unseen_command(
    sources: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(SOURCES)}; default: all.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the measurements.")] = None,
) -> None:
    """Print the errors of each kind of kernel and GPU."""
    print(
        "| kernels | GPU | rows | mean error | bias | from | to | in the interval |\n|---|---|---|---|---|---|---|---|"
    )
    for source in chosen(sources or (), tuple(SOURCES)):
        groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in SOURCES[source](data_folder(data)):
            groups[row.what, row.machine].append(row)
        for (what, machine), rows in groups.items():
            errors = np.array([row.predicted / row.measured - 1 for row in rows])
            known = [row.inside for row in rows if row.inside is not None]
            inside = f"{np.mean(known):.0%}" if known else "-"
            figures = f"{abs(errors).mean():.1%} | {errors.mean():+.1%} | {errors.min():+.0%} | {errors.max():+.0%}"
            print(f"| {what} | {machine} | {len(rows)} | {figures} | {inside} |")


if __name__ == "__main__":
    sys.exit(run(program(unseen_command), "lab.bench.unseen_kernels"))
