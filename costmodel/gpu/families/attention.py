"""Fused attention by kernel and architecture: tiles of products and exponentials, blocks in waves, bytes.

Every multiprocessor works through tiles of queries x keys (:mod:`costmodel.gpu.families.attention_tiles`). A score of a
tile costs its products, at the kernel's share of the chip's rate, and the part of the softmax (exponentials, maxima,
conversions) that is not hidden behind them, in cycles:

    score = 2 * (width of queries + of values) / (rate * products) + softmax / (multiprocessors * clock)

so that narrow heads reach fewer flop/s. The busiest multiprocessor sets the pace: whole waves of equal blocks; blocks
of a causal mask, which differ, are scheduled longest first. Each block adds a fixed number of cycles (prologue,
epilogue). Decode (one token with a cache) splits the keys over blocks and is bound by their bytes. Backward, a score
has five products, and gradients of queries are added up in FP32. Data left in L2 is not read again from DRAM. ``math``
is the unfused form: products at the GEMM rate in FP32, scores written and read again by each kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from costmodel.base.errors import UnsupportedOperatorError
from costmodel.gpu.families.attention_choice import EIGHT_BITS, generation_of, kernel_of
from costmodel.gpu.families.attention_paces import KernelPace, pace_of
from costmodel.gpu.families.attention_tiles import TiledWork, padded, tiled
from costmodel.gpu.families.family import Family, KernelAnalysis, safe_log2
from costmodel.gpu.families.rates import dram_bandwidth, kernel_floor, l2_bytes, matrix_rate
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import Attention, AttentionKernel, AttentionPhase
from costmodel.operators.layers import element_bytes

# norm in which arithmetic and DRAM are combined; in both tables and the published figures one of them dominates
_OVERLAP = 4.0
# Fill of L2 below which all data of the previous launch is still in L2, and above which none is: decode of
# aiconfigurator, repeated over one cache.
_WARM_FILL = (0.3, 1.0)
_SCORE_BYTES = 4  # the unfused form computes 16-bit inputs in FP32 (aten/native/transformers/attention.cpp, math)
# Passes over the scores in the unfused form: written, scaled and masked (2), softmax (2), read; more for backward.
_SCORE_PASSES = {"forward": 6, "backward": 10}
_SINK_PASSES = 2  # passes to append the column of sinks and to remove it again, as models without a kernel for it do
# Cycles per 1,000 scores: ten rounds of Philox, about 60 integer instructions of 64 a cycle, make 16 numbers of 8 bits
# (flash-attention csrc, dropout.h).
_DROPOUT_CYCLES = 60.0


class FusedAttention(Family[Attention]):
    """Attention by one ``kernel`` in one ``phase``; the family name combines them, as in ``flash2-backward``."""

    def __init__(self, kernel: AttentionKernel, phase: AttentionPhase, pace: KernelPace | None = None) -> None:
        self.kernel = kernel
        self.phase = phase
        self._pace = pace
        self.name = f"{kernel}-{phase}"

    def analyse(self, operators: Sequence[Attention], machine: Machine) -> KernelAnalysis:
        if self.kernel == "math":
            return _unfused(operators, machine)
        sms = machine.chip().sm_count
        generation = generation_of(machine)
        works = [tiled(each, self.kernel, sms, generation) for each in operators]
        pace = self._pace or pace_of(self.kernel, self.phase, generation)
        pairs = list(zip(operators, works, strict=True))
        compute = np.array([_compute_seconds(each, work, pace, self.kernel, machine) for each, work in pairs])
        traffic = np.array([each.read_bytes + each.write_bytes for each in operators], dtype=float)
        missed = np.clip((traffic / l2_bytes(machine) - _WARM_FILL[0]) / (_WARM_FILL[1] - _WARM_FILL[0]), 0.0, 1.0)
        dram = traffic * missed / dram_bandwidth(machine)
        launch = np.full(len(operators), pace.launches * kernel_floor(machine))
        seconds = launch + (compute**_OVERLAP + dram**_OVERLAP) ** (1 / _OVERLAP)
        return KernelAnalysis(
            seconds, {"compute": compute, "memory:DRAM": dram, "launch": launch}, _features(operators, works, sms)
        )

    def with_pace(self, pace: KernelPace) -> FusedAttention:
        """The same family with another ``pace`` than the kernel's default."""
        return FusedAttention(self.kernel, self.phase, pace)

    def covers(self, operator: Attention) -> bool:
        """True for operators of the tables: BF16 or 8 bits, no masks or sinks; FP16 runs the same code."""
        measured = ("float8",) if self.kernel == EIGHT_BITS else ("bfloat16", "float16")
        return operator.dtype in measured and not operator.mask and not operator.sinks


_MEASURED: tuple[AttentionKernel, ...] = (
    "flash1",
    "flash2",
    "flash3",
    "flash3-fp8",
    "flash4",
    "cudnn",
    "efficient",
    "mla",
    "math",
)
_FAMILIES: dict[tuple[AttentionKernel, AttentionPhase], FusedAttention] = {}


def attention_family(operator: AnyOperator, machine: Machine) -> FusedAttention:
    """Family of the kernel that computes ``operator`` on ``machine``; always the same object for one kernel and phase.
    ``MachineError`` if ``machine`` is no GPU.
    """
    if not isinstance(operator, Attention):
        raise UnsupportedOperatorError(
            f"no attention: {type(operator).__name__}; ask gpu_cost_model, which prices all kinds"
        )
    return named_family(kernel_of(operator, machine), operator.phase)


def named_family(kernel: AttentionKernel, phase: AttentionPhase) -> FusedAttention:
    """The unique family object of ``kernel`` and ``phase``."""
    return _FAMILIES.setdefault((kernel, phase), FusedAttention(kernel, phase))


def attention_families() -> dict[str, FusedAttention]:
    """All families that have tables, by name."""
    members = (named_family(kernel, phase) for kernel in _MEASURED for phase in get_args(AttentionPhase))
    return {each.name: each for each in members}


def _compute_seconds(
    operator: Attention, work: TiledWork, pace: KernelPace, kernel: AttentionKernel, machine: Machine
) -> float:
    """Compute seconds of the busiest multiprocessor."""
    chip = machine.chip()
    sms = chip.sm_count
    waves = np.ceil(work.blocks / sms)
    span = waves * work.longest
    if not work.equal:
        span = max(work.longest, min(work.tiles / sms + work.longest / 2, span))
    scored, mixed = (padded(width) for width in operator.widths)
    if kernel in _ONE_WIDTH:
        scored = mixed = max(scored, mixed)
    products = 2 * (scored + mixed) if operator.direction == "forward" else 2 * (3 * scored + 2 * mixed)
    rate = matrix_rate(machine, operator.dtype) / sms
    cycles = (pace.softmax + (_DROPOUT_CYCLES if operator.dropout else 0.0)) / 1000
    score = products / (rate * pace.products) + cycles / chip.clock_hz
    return float(span * work.shape[0] * work.shape[1] * score + waves * pace.block / chip.clock_hz)


# FlashAttention 1 and 2 have one head dimension for queries, keys and values; narrower values are padded. cuDNN takes
# as long for 192 and 128 as for 192 and 192 (B200 of SimuMax).
_ONE_WIDTH = ("flash1", "flash2", "cudnn")


def _features(operators: Sequence[Attention], works: Sequence[TiledWork], sms: int) -> dict[str, np.ndarray]:
    """Features: shapes and their ratios to the number of multiprocessors, but no rate of the machine, so that a faster
    machine is never priced slower because of the learned residual.
    """
    sparse = [each.pairs / max(each.query_length * each.key_length, 1) for each in operators]
    columns: dict[str, list[float]] = {
        "queries": [each.query_length for each in operators],
        "keys": [each.keys_seen for each in operators],
        "width": [sum(each.widths) for each in operators],
        "group": [each.heads / each.kv_heads for each in operators],
        "rows": [each.batch * each.kv_heads for each in operators],
        "waves": [work.blocks / sms for work in works],
        "tiles": [work.tiles / sms for work in works],
        "seen": sparse,
        "window": [each.window + 1 for each in operators],
    }
    return {name: safe_log2(np.array(values, dtype=float)) for name, values in columns.items()}


def _unfused(operators: Sequence[Attention], machine: Machine) -> KernelAnalysis:
    """Analysis of the unfused form: products of all pairs, masked ones too, and the passes over the scores between
    them.
    """
    floor = kernel_floor(machine)
    compute, dram, launches = [], [], []
    for each in operators:
        scored, mixed = each.widths
        pairs = each.batch * each.heads * each.query_length * each.key_length
        products = scored + mixed if each.direction == "forward" else 2 * (scored + mixed)
        compute.append(2.0 * pairs * products / matrix_rate(machine, "float32"))
        passes = _SCORE_PASSES[each.direction] + (_SINK_PASSES if each.sinks else 0)
        ends = (each.read_bytes + each.write_bytes) * _SCORE_BYTES / element_bytes(each.dtype)
        dram.append((passes * pairs * _SCORE_BYTES + ends) / dram_bandwidth(machine))
        launches.append(passes * floor)
    terms = {name: np.array(values) for name, values in zip(_TERMS, (compute, dram, launches), strict=True)}
    works = [TiledWork(1, 1, 1, (1, 1), True, 1)] * len(operators)
    return KernelAnalysis(sum(terms.values(), np.zeros(len(operators))), terms, _features(operators, works, 1))


_TERMS = ("compute", "memory:DRAM", "launch")
