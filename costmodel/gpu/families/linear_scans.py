"""Linear attention and its preceding short convolutions, by kernel.

Whole sequences: matrix products of chunks at a share of the GEMM rate, the tensors between the kernels of one call
(states of every chunk, scores within chunks) through DRAM, and the sequential scan over the chunks that passes the
states on. The scan has a block per sequence, head and part of the values, and each block processes all chunks in
turn:

    seconds = launches * floor + |products, bytes|_2 + chunks * ceil(blocks / multiprocessors) * cycles / clock

Mamba 1 computes token by token outside the tensor cores: an exponential and two multiply-adds per state. One token
with a cache, and the convolutions, are bound by the bytes that they move.

No table has a backward pass. That of the gated delta rule is published for flash-linear-attention 0.5.1 in a CUDA
graph (QwenLM/FlashQLA, benchmark_results_H200.txt and _GB200.txt; MIT): 2.98 to 3.09 times the forward pass on H200,
2.96 to 3.15 on GB200; of Kimi's 3.7 on H100 (meta-pytorch/attention-gym pull request 438) and 3.8 to 4.1 on B200
through autograd, by which the gated rule's is 3.4 to 3.7 (pytorch/helion, examples/linear/BENCHMARKS.md). Of Mamba 1
and 2 nobody has published it: three times the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from costmodel.base.errors import UnsupportedOperatorError
from costmodel.gpu.families.attention import generation_of
from costmodel.gpu.families.family import Family, Grade, KernelAnalysis, safe_log2
from costmodel.gpu.families.memory_bound import memory_analysis
from costmodel.gpu.families.rates import dram_bandwidth, kernel_floor, l2_bytes, matrix_rate, vector_rate
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import CausalConvolution, LinearAttention, LinearKind
from costmodel.operators.layers import element_bytes
from costmodel.operators.lookups import Direction

_HALVES = ("bfloat16", "float16")
_VALUE_PART = 64  # values of a head kept by one block of the scan over chunks


@dataclass(frozen=True)
class ScanPace:
    """Pace of one kind of linear attention."""

    # Share of the sustained GEMM rate (for ``selective``: of the FP32 rate).
    products: float
    # Cycles of one step of the scan over chunks.
    cycles: float
    # Kernels of one call.
    launches: float


PACES: MappingProxyType[LinearKind, ScanPace] = MappingProxyType({
    # Mamba 2 as published: vLLM's Triton kernels, which are those of mamba_ssm, on H100 (vllm-project/vllm pull request
    # 27299: 128 heads of 64, 128 states, chunks of 256, 4,096 to 16,384 tokens, which are not bound by launches).
    "ssd": ScanPace(0.105, 100.0, 5.0),
    # TensorRT-LLM's table of H100 and H200 (7 %).
    "gated_delta": ScanPace(0.70, 4000.0, 6.6),
    "kimi_delta": ScanPace(0.70, 4000.0, 6.6),
    # Without measurements: half of what exponentials alone would take (16 a cycle of a multiprocessor of 128 lanes).
    "selective": ScanPace(0.25, 0.0, 1.0),
})  # fmt: skip
# Fitted for flash-linear-attention 0.5.1 to the rows of QwenLM/FlashQLA (mean error): GB200 forward, 45 rows (5.5 %),
# and backward, 8 rows each of H200 and GB200 (0.6 and 0.5 %; the long ones by a fit to the short ones 0.9 and 0.6 %,
# few heads by a fit to many 2.4 and 0.8 %). Triton's kernels take as long on datacenter Blackwell as on Hopper.
_OWN: MappingProxyType[tuple[LinearKind, Direction, str], ScanPace] = MappingProxyType({
    ("gated_delta", "forward", "blackwell"): ScanPace(0.096, 2380.0, 11.8),
    ("kimi_delta", "forward", "blackwell"): ScanPace(0.096, 2380.0, 11.8),
    ("gated_delta", "backward", "hopper"): ScanPace(0.293, 2280.0, 5.8),
    ("gated_delta", "backward", "blackwell"): ScanPace(0.107, 2760.0, 4.1),
})  # fmt: skip
# Work of a backward pass relative to the forward pass, where it has a pace of its own: the forward pass again, and the
# gradients of both sides of every product. For Kimi's rule, the published ratio.
BACKWARD: MappingProxyType[LinearKind, float] = MappingProxyType(
    {"gated_delta": 3.0, "kimi_delta": 3.7, "ssd": 3.0, "selective": 3.0}
)


def scan_pace(kind: LinearKind, direction: Direction, generation: str) -> ScanPace:
    """Pace of ``kind`` in one ``direction`` on a ``generation`` of GPUs; by default that of the forward pass."""
    for way in (direction, "forward"):
        found = _OWN.get((kind, way, generation))
        if found is not None:
            return found
    return PACES[kind]


class ChunkedScan(Family[LinearAttention]):
    """Whole sequences of one ``kind``, with a ``pace``."""

    def __init__(self, kind: LinearKind, pace: ScanPace | None = None) -> None:
        self.kind = kind
        self._pace = pace
        self.name = f"scan-{kind.replace('_', '-')}"

    def analyse(self, operators: Sequence[LinearAttention], machine: Machine) -> KernelAnalysis:
        chip = machine.chip()
        generation = generation_of(machine)
        paces = [self._pace or scan_pace(self.kind, each.direction, generation) for each in operators]
        share, cycles, launches = (
            np.array([getattr(each, name) for each in paces]) for name in ("products", "cycles", "launches")
        )
        passes = np.array([1.0 if each.direction == "forward" else BACKWARD[self.kind] for each in operators])
        operators = [replace(each, direction="forward") for each in operators]
        columns = {name: np.array([getattr(each, name) for each in operators], dtype=float) for name in _FIELDS}
        rates = np.array(
            [
                vector_rate(machine) if each.kind == "selective" else matrix_rate(machine, each.dtype)
                for each in operators
            ]
        )
        compute = passes * columns["flops"] / (rates * share)
        between = np.array([_between_bytes(each) for each in operators])
        moved = passes * (columns["read_bytes"] + columns["write_bytes"] + between)
        dram = np.maximum(moved - _WARM * l2_bytes(machine), 0.0) / dram_bandwidth(machine)
        heads = columns["batch"] * columns["value_heads"]
        blocks = heads * np.ceil(columns["value_dim"] / _VALUE_PART)
        waves = np.ceil(blocks / chip.sm_count)
        walk = passes * columns["chunks"] * waves * cycles / chip.clock_hz
        launch = passes * launches * kernel_floor(machine)
        seconds = launch + np.hypot(compute, dram) + walk
        features = {
            "seconds": safe_log2(seconds),
            "tokens": safe_log2(columns["batch"] * columns["length"]),
            "chunks": safe_log2(columns["chunks"]),
            "chunk": safe_log2(columns["chunk"]),
            "heads": safe_log2(columns["value_heads"]),
            "group": safe_log2(columns["value_heads"] / columns["key_heads"]),
            "widths": safe_log2(columns["key_dim"] * columns["value_dim"]),
            "waves": safe_log2(blocks / chip.sm_count),
        }
        return KernelAnalysis(
            seconds, {"compute": compute, "memory:DRAM": dram, "latency": walk, "launch": launch}, features
        )

    def covers(self, operator: LinearAttention) -> bool:
        """True for the operators in the tables: BF16, forward, Mamba 2 and the gated delta rule."""
        return operator.kind in ("ssd", "gated_delta") and operator.direction == "forward" and operator.dtype in _HALVES

    def grade(self, operator: LinearAttention) -> Grade:
        published = operator.kind == "gated_delta" and operator.dtype in _HALVES
        if published or self.covers(operator):
            return "measured"
        return "unknown" if operator.kind == "selective" else "kind"


_FIELDS = ("batch", "length", "chunks", "chunk", "key_heads", "key_dim", "value_heads", "value_dim", "flops") + (
    "read_bytes",
    "write_bytes",
)
_WARM = 0.25


def _between_bytes(operator: LinearAttention) -> float:
    """Bytes of intermediate tensors between the kernels of one call. ``ssd``: states of every chunk in FP32 and, passed
    on, in the dtype of the operands; scores within chunks by group. Delta rules: keys and values after the inverse,
    values less the states' predictions, states of every chunk, scores and the inverse by head.
    """
    size, tokens = element_bytes(operator.dtype), operator.batch * operator.length
    within = min(operator.chunk, operator.length)
    states = operator.states * operator.chunks
    if operator.kind == "selective":
        return 0.0
    if operator.kind == "ssd":
        return float(states * 2 * (4 + size) + tokens * within * operator.key_heads * 2 * 4)
    rows = 2 * (operator.key_dim + 2 * operator.value_dim) * size + within * (2 * 4 + 2 * size)
    if operator.kind == "kimi_delta":  # sums of the decays, written once, read by four kernels
        rows += 5 * 4 * operator.key_dim
    return float(states * 2 * size + tokens * operator.value_heads * rows)


def _bound_by_memory(operators: Sequence[LinearAttention | CausalConvolution], machine: Machine) -> KernelAnalysis:
    """Analysis of kernels that read and write each of their tensors once."""
    traffic = np.array([each.read_bytes + each.write_bytes for each in operators], dtype=float)
    return memory_analysis(traffic, np.array([each.flops for each in operators], dtype=float), machine)


class StateUpdates(Family[LinearAttention]):
    """One token with a cache: every state is read and written."""

    name = "scan-step"
    clock_bound = False

    def analyse(self, operators: Sequence[LinearAttention], machine: Machine) -> KernelAnalysis:
        analysis = _bound_by_memory(operators, machine)
        features = {
            **analysis.features,
            "delta": np.array([float(each.kind != "ssd") for each in operators]),
            "batch": safe_log2(np.array([each.batch for each in operators])),
            "heads": safe_log2(np.array([each.value_heads for each in operators])),
            "widths": safe_log2(np.array([each.key_dim * each.value_dim for each in operators])),
        }
        return KernelAnalysis(analysis.seconds, analysis.terms, features)

    def covers(self, operator: LinearAttention) -> bool:
        return operator.dtype in _HALVES and operator.kind in ("ssd", "gated_delta")


class CausalConvolutions(Family[CausalConvolution]):
    """Short convolutions over time, of whole sequences and of one token with a cache."""

    name = "causal-conv"
    clock_bound = False

    def analyse(self, operators: Sequence[CausalConvolution], machine: Machine) -> KernelAnalysis:
        analysis = _bound_by_memory(operators, machine)
        features = {
            **analysis.features,
            "batch": safe_log2(np.array([each.batch for each in operators])),
            "length": safe_log2(np.array([each.length for each in operators])),
            "channels": safe_log2(np.array([each.channels for each in operators])),
            "update": np.array([float(each.update) for each in operators]),
        }
        return KernelAnalysis(analysis.seconds, analysis.terms, features)

    def covers(self, operator: CausalConvolution) -> bool:
        return operator.dtype in _HALVES and operator.direction == "forward"

    def grade(self, operator: CausalConvolution) -> Grade:
        if operator.direction != "forward":
            return "kind"
        return "measured" if self.covers(operator) else "dtype"


_SCANS: dict[LinearKind, ChunkedScan] = {kind: ChunkedScan(kind) for kind in PACES}
_STEPS, _CONVOLUTIONS = StateUpdates(), CausalConvolutions()


def linear_family(operator: AnyOperator) -> Family[LinearAttention] | Family[CausalConvolution]:
    """Family whose kernels compute ``operator``."""
    if isinstance(operator, CausalConvolution):
        return _CONVOLUTIONS
    if not isinstance(operator, LinearAttention):
        raise UnsupportedOperatorError(
            f"no linear attention: {type(operator).__name__}; ask gpu_cost_model, which prices all kinds"
        )
    return _STEPS if operator.one_token else _SCANS[operator.kind]


def linear_families() -> dict[str, Family[LinearAttention] | Family[CausalConvolution]]:
    """All families that have tables, by name."""
    found: dict[str, Family[LinearAttention] | Family[CausalConvolution]] = {e.name: e for e in _SCANS.values()}
    return found | {_STEPS.name: _STEPS, _CONVOLUTIONS.name: _CONVOLUTIONS}
