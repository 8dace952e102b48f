"""Fused attention by kernel and architecture: tiles of products and exponentials, blocks in waves, bytes.

Every multiprocessor works through tiles of queries x keys. A score of a tile costs its products, at the kernel's
share of the chip's rate, and the part of the softmax (exponentials, maxima, conversions) that is not hidden behind
them, in cycles:

    score = 2 * (width of queries + of values) / (rate * products) + softmax / (multiprocessors * clock)

so that narrow heads reach fewer flop/s. The busiest multiprocessor sets the pace: whole waves of equal blocks; blocks
of a causal mask, which differ, are scheduled longest first. Each block adds a fixed number of cycles (prologue,
epilogue). Decode (one token with a cache) splits the keys over blocks and is bound by their bytes. Backward, a score
has five products, and gradients of queries are added up in FP32. Data left in L2 is not read again from DRAM.
``math`` is the unfused form: products at the GEMM rate in FP32, scores written and read again by each kernel.

**Tiles.** Forward, a block owns some queries of a head and iterates over the keys visible to them; backward, it owns
some keys. Tiles without visible scores are skipped, partly visible ones are computed whole.

**Paces** of a kernel per tile on each GPU generation are fitted to the rows named, least absolute error of log times,
where a source is named (mean error of the fit in brackets); 62.5 cycles per 1,000 scores would be exponentials alone,
16 a cycle (CUDA C++ Programming Guide, throughput of arithmetic instructions). Values without measurements are
estimated as stated beside them.

**Choice of the kernel** of ``scaled_dot_product_attention`` by GPU, dtype, shape, mask and PyTorch version, after
``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` of the versions named. The order is flash, memory-efficient,
math; cuDNN is tried first on Hopper and datacenter Blackwell by version 2.5.0, which 2.5.1 reverted (pytorch issues
138340 and 138522), and from 2.11 on, whose cuDNN is newer than the required 9.15 (pytorch pull request 162073;
huggingface/transformers pull request 48163). Version 2.2 introduced FlashAttention 2; 2.0 and 2.1 have the first.
Flash needs Ampere or later, 16 bits, no mask and heads of up to 256 (128 in the first); the memory-efficient kernel
supports masks and FP32, but no grouped heads, and BF16 only from Ampere on; all other cases run as separate products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import get_args

import numpy as np

from costmodel.base.errors import MachineError, UnsupportedOperatorError
from costmodel.gpu.families.family import Family, KernelAnalysis, safe_log2
from costmodel.gpu.families.rates import (
    BEFORE_AMPERE,
    dram_bandwidth,
    kernel_floor,
    l2_bytes,
    matrix_rate,
    uses_tensor_cores,
)
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import ENGINES, Attention, AttentionKernel, AttentionPhase, CausalPlace, seen_keys
from costmodel.operators.layers import element_bytes

Release = tuple[int, int, int]
LATEST: Release = (2, 13, 0)
_CUDNN_FIRST = ("hopper", "blackwell")
_CUDNN_BRIEFLY, _CUDNN_AGAIN, _FLASH_2, _GROUPED = (2, 5, 0), (2, 11, 0), (2, 2, 0), (2, 5, 0)
_HALVES = ("float16", "bfloat16")
_WIDEST = 256
_LATENT = (192, 128)  # of DeepSeek V2 and V3
EIGHT_BITS: AttentionKernel = "flash3-fp8"


def kernel_of(operator: Attention, machine: Machine, release: Release = LATEST) -> AttentionKernel:
    """Kernel named by ``operator``, or the one that PyTorch ``release`` selects for it on ``machine``.

    ``MachineError`` if a named kernel does not run there.
    """
    if operator.dtype == "float8" and operator.kernel != EIGHT_BITS:
        raise UnsupportedOperatorError(
            f"attention in 8 bits by {operator.kernel!r} has no model; name `{EIGHT_BITS}` (Hopper, forward) or give "
            "16 bits"
        )
    if operator.kernel == "sdpa":
        return sdpa_kernel(operator, machine, release)
    kernel = _flash(release) if operator.kernel == "flash" else operator.kernel
    architecture = machine.chip().architecture
    if kernel in ("flash3", EIGHT_BITS) and architecture != "hopper":
        raise MachineError(f"{machine.name}: FlashAttention 3 runs on Hopper alone; name another kernel of attention")
    if kernel == "flash4" and architecture != "blackwell":
        raise MachineError(
            f"{machine.name}: FlashAttention 4 is for B200 and its like; name another kernel of attention"
        )
    if kernel == EIGHT_BITS and operator.direction == "backward":
        raise UnsupportedOperatorError("FlashAttention 3 has no gradients in 8 bits; name `flash3`")
    if kernel in ("flash1", "flash2", "cudnn", "mla", *ENGINES) and architecture in BEFORE_AMPERE:
        other = "eager" if kernel == "mla" else "efficient"
        raise MachineError(f"{machine.name}: has no kernel {kernel!r}, which needs Ampere or later; name `{other}`")
    return kernel


def _like(kernel: AttentionKernel, phase: AttentionPhase, generation: str) -> AttentionKernel:
    """Kernel whose tiles and paces describe that of a serving engine: FlashAttention 3 on Hopper, cuDNN's for prompts
    on datacenter Blackwell, else FlashAttention 2; ``kernel`` itself if it is no engine.
    """
    if kernel not in ENGINES:
        return kernel
    if generation == "blackwell" and phase != "decode":
        return "cudnn"
    return "flash3" if generation in ("hopper", "blackwell") else "flash2"


def generation_of(machine: Machine) -> str:
    """Architecture whose kernels a GPU runs: its own, except that consumer Blackwell (capability 12.0: no tensor
    memory, and PyTorch does not prefer cuDNN there) runs those of Ada.
    """
    architecture = machine.chip().architecture
    return "ada" if architecture == "blackwell-rtx" else architecture


def sdpa_kernel(operator: Attention, machine: Machine, release: Release = LATEST) -> AttentionKernel:
    """Kernel that ``scaled_dot_product_attention`` of PyTorch ``release`` selects for the shapes of ``operator``."""
    architecture = machine.chip().architecture
    half, modern = operator.dtype in _HALVES, architecture not in BEFORE_AMPERE
    even = len(set(operator.widths)) == 1
    grouped = operator.kv_heads != operator.heads
    plain = not operator.sinks and not operator.window and not (grouped and release < _GROUPED)
    if _prefers_cudnn(machine, release) and half and plain and _fits_cudnn(operator.widths, machine, release):
        return "cudnn"
    widest = _WIDEST if release >= _FLASH_2 else 128
    square = operator.query_length == operator.key_length or not operator.causal or operator.placed == "spread"
    fits = even and square and max(operator.widths) <= widest
    if modern and half and fits and plain and not operator.mask:
        return _flash(release)
    if not operator.sinks and not operator.window and not grouped and (operator.dtype != "bfloat16" or modern):
        return "efficient"
    return "math"


def _flash(release: Release) -> AttentionKernel:
    return "flash2" if release >= _FLASH_2 else "flash1"


def _fits_cudnn(widths: tuple[int, int], machine: Machine, release: Release) -> bool:
    """True if ``check_cudnn_tensor_shapes`` accepts the head dimensions of queries and values, which may differ. Above
    128 on Hopper with cuDNN 9.10, on Blackwell for latent attention only.
    """
    wide = release >= _CUDNN_AGAIN and (generation_of(machine) == "hopper" or widths == _LATENT)
    return max(widths) <= (_WIDEST if wide else _WIDEST // 2) and all(width % 8 == 0 for width in widths)


def _prefers_cudnn(machine: Machine, release: Release) -> bool:
    return (release == _CUDNN_BRIEFLY or release >= _CUDNN_AGAIN) and generation_of(machine) in _CUDNN_FIRST


@dataclass(frozen=True)
class KernelPace:
    """Pace of an attention kernel."""

    # Share of the sustained GEMM rate.
    products: float
    # Cycles of a multiprocessor per 1,000 scores that are not hidden behind products.
    softmax: float
    # Additional cycles per block.
    block: float
    # Cost of launching the call, in shortest kernels.
    launches: float = 1.0


_TABLE: MappingProxyType[tuple[str, str, str], KernelPace] = MappingProxyType({
    # FlashAttention-3 paper, arXiv 2407.08608, figures 5 and 6: H100 SXM5, 16k tokens of width 2,048 (2 to 8 %).
    ("flash2", "forward", "hopper"): KernelPace(0.380, 5.0, 3800, 2.0),
    ("flash3", "forward", "hopper"): KernelPace(0.959, 48.3, 4470, 2.0),
    ("cudnn", "forward", "hopper"): KernelPace(0.764, 54.0, 2580, 1.8),
    ("flash2", "encoder", "hopper"): KernelPace(0.454, 39.7, 1610, 2.0),
    ("cudnn", "encoder", "hopper"): KernelPace(0.592, 33.6, 2080, 2.0),
    ("flash2", "backward", "hopper"): KernelPace(0.414, 113.6, 10200, 2.0),
    ("flash3", "backward", "hopper"): KernelPace(0.771, 90.4, 10400, 2.0),
    ("cudnn", "backward", "hopper"): KernelPace(0.816, 122.0, 11300, 2.0),
    # SimuMax, A100 PCIe 80 GB: causal, 4,096 tokens, widths 128 and 192 with 128 (3 to 5 %).
    ("flash2", "forward", "ampere"): KernelPace(1.05, 105.8, 50, 2.0),
    ("flash2", "backward", "ampere"): KernelPace(0.654, 0.5, 50, 2.0),
    # SimuMax, B200: the same and up to 131,072 tokens (10 and 12 %).
    ("cudnn", "forward", "blackwell"): KernelPace(1.05, 45.9, 50, 2.0),
    ("cudnn", "backward", "blackwell"): KernelPace(0.616, 0.5, 50, 1.0),
    # Dao-AILab/flash-attention pull request 2280, B200: 8,192 tokens of width 128, causal and not (1 and 4 %).
    ("flash4", "forward", "blackwell"): KernelPace(0.905, 0.5, 50, 2.0),
    ("flash4", "backward", "blackwell"): KernelPace(0.77, 0.5, 50, 2.0),
    # aiconfigurator, every so many rows: encoders of vLLM and SGLang (9 to 11 %), prefill and decode (15 to 39 %, which
    # trees correct).
    ("flash2", "encoder", "ada"): KernelPace(0.949, 51.7, 5810, 1.0),
    ("flash3", "encoder", "hopper"): KernelPace(1.05, 51.2, 8600, 2.0),
    ("flash2", "paged", "ampere"): KernelPace(0.693, 28.5, 4830, 4.0),
    ("flash2", "paged", "ada"): KernelPace(0.898, 214.1, 11400, 1.0),
    ("flash3", "paged", "hopper"): KernelPace(0.812, 35.2, 7900, 4.0),
    ("flash2", "decode", "ampere"): KernelPace(0.465, 32.6, 4130, 4.0),
    ("flash2", "decode", "ada"): KernelPace(0.316, 300.0, 10600, 1.0),
    ("flash3", "decode", "hopper"): KernelPace(0.355, 0.5, 4540, 3.6),
    # TensorRT-LLM (FlashMLA on Hopper, its own kernel on the others: 11 to 14 %) and FlashAttention 3 in 8 bits (15 and
    # 28 %; whole sequences as over a cache).
    ("mla", "decode", "hopper"): KernelPace(0.602, 4.8, 10600, 3.1),
    ("mla", "decode", "ampere"): KernelPace(0.430, 27.7, 7430, 1.0),
    ("mla", "decode", "ada"): KernelPace(0.929, 1.4, 9720, 1.0),
    ("flash3-fp8", "paged", "hopper"): KernelPace(0.574, 41.4, 60, 4.0),
    ("flash3-fp8", "decode", "hopper"): KernelPace(0.223, 0.5, 4260, 4.0),
    ("flash3-fp8", "forward", "hopper"): KernelPace(0.574, 41.4, 60, 2.0),
    # Estimated: Ada as its encoders and as A100 backward; FlashAttention 2 uses Ampere's instructions, which later
    # datacenter chips run at Hopper's rate (0.38 of 929 TFLOP/s there, 0.22 of 1,700 on B200).
    ("flash2", "forward", "ada"): KernelPace(0.949, 51.7, 5810, 1.0),
    ("flash2", "backward", "ada"): KernelPace(0.654, 0.5, 50, 2.0),
    ("flash2", "forward", "blackwell"): KernelPace(0.22, 5.0, 3800, 2.0),
    ("flash2", "backward", "blackwell"): KernelPace(0.23, 113.6, 10200, 2.0),
    ("cudnn", "forward", "ampere"): KernelPace(1.05, 105.8, 50, 2.0),
    ("cudnn", "backward", "ampere"): KernelPace(0.654, 0.5, 50, 2.0),
    ("cudnn", "forward", "ada"): KernelPace(0.949, 51.7, 5810, 1.0),
    ("cudnn", "backward", "ada"): KernelPace(0.654, 0.5, 50, 2.0),
    # Text of the FlashAttention-2 paper, arXiv 2307.08691, section 1: FlashAttention reaches 30 to 50 % of A100's peak
    # forward and 25 to 35 % backward; the middle of both at width 128. Hopper by the ratio that the second one has of
    # its share there to that on A100, 0.58. xFormers' kernel is as fast as FlashAttention there (figures 4 to 6).
    **{
        (kernel, phase, architecture): KernelPace(products, 60.0, 3000, 2.0)
        for kernel in ("flash1", "efficient")
        for architecture, forward, backward in (
            ("volta", 0.517, 0.36),
            ("ampere", 0.517, 0.36),
            ("hopper", 0.30, 0.21),
            ("blackwell", 0.17, 0.12),
        )
        for phase, products in (("forward", forward), ("backward", backward))
    },
})  # fmt: skip

# Substitutes for a phase or a generation without a line of its own.
_AS_PHASE: MappingProxyType[str, AttentionPhase] = MappingProxyType(
    {"encoder": "forward", "paged": "forward", "decode": "forward"}
)
_AS_GENERATION = MappingProxyType(
    {"ada": "ampere", "turing": "volta", "pascal": "volta", "blackwell": "hopper", "blackwell-rtx": "ampere"}
)


def pace_of(kernel: AttentionKernel, phase: AttentionPhase, generation: str) -> KernelPace:
    """Pace of ``kernel`` in ``phase`` on a ``generation`` of GPUs, or that of the nearest known phase and
    generation.
    """
    if kernel == "math":
        raise KeyError("the unfused form has no pace of its own")
    for name in (generation, _AS_GENERATION.get(generation, "ampere"), "ampere", "hopper"):
        for kind in (phase, _AS_PHASE.get(phase, phase)):
            found = _TABLE.get((kernel, kind, name))
            if found is not None:
                return found
    raise KeyError((kernel, phase, generation))


# Head dimensions supported by kernels; others are padded (flash-attention, csrc: hdim32 ... hdim256; FlashMLA: 576 of
# keys, 512 of values).
_WIDTHS = (32, 64, 96, 128, 192, 256, 512, 576)
# Least rows of queries of a tensor-core instruction, four warps together.
_LEAST_ROWS = 64


@dataclass(frozen=True)
class TileSize:
    """Queries and keys of a tile, by padded head dimension."""

    queries: Mapping[int, int]
    keys: Mapping[int, int]

    def __post_init__(self) -> None:
        if set(self.queries) != set(self.keys):
            raise ValueError(f"tiles of queries for {sorted(self.queries)}, of keys for {sorted(self.keys)}")

    def of(self, width: int) -> tuple[int, int]:
        """Queries and keys of a tile for head dimension ``width``; beyond the widest known one, those of the widest."""
        known = max(self.queries) if width > max(self.queries) else min(each for each in self.queries if each >= width)
        return self.queries[known], self.keys[known]


# flash-attention csrc (flash_fwd_launch_template.h, hopper/tile_size.h, flash_bwd_launch_template.h), FlashMLA's
# (BLOCK_SIZE_M and PAGE_BLOCK_SIZE of 64, csrc/sm90/decode) and PyTorch's
# mem_eff_attention (kernel_forward.h); cuDNN does not say, Triton's tutorial kernel has 128 x 64. Backward the second
# FlashAttention fits 64 x 64 better than the 64 x 128 of its source (H100 0.2 % against 2.0, A100 2.8 against 4.2).
FORWARD_TILES: dict[str, TileSize] = {
    "flash1": TileSize({64: 128, 128: 128}, {64: 128, 128: 128}),
    "flash2": TileSize({64: 128, 128: 128, 256: 128}, {64: 128, 128: 64, 256: 64}),
    "flash3": TileSize({64: 192, 128: 128, 256: 128}, {64: 128, 128: 128, 256: 80}),
    "flash4": TileSize({256: 256}, {256: 128}),  # two tiles of 128 queries, alternating
    "cudnn": TileSize({256: 128}, {256: 128}),
    "efficient": TileSize({64: 64, 256: 32}, {64: 64, 256: 128}),
    "flash3-fp8": TileSize({64: 192, 128: 128, 256: 128}, {64: 160, 128: 192, 256: 128}),
    "mla": TileSize({576: 64}, {576: 64}),
}
# Two alternating tiles of queries, as in datacenter Blackwell's kernels (times of SimuMax's B200 do not fall below 16
# heads of 4,096 queries).
_BLACKWELL_TILES = {"cudnn": TileSize({256: 256}, {256: 128})}
BACKWARD_TILES: dict[str, TileSize] = {
    "flash1": TileSize({64: 128, 128: 128}, {64: 128, 128: 128}),
    "flash2": TileSize({64: 128, 256: 64}, {64: 128, 256: 64}),
    "flash3": TileSize({64: 128, 128: 80, 256: 64}, {64: 128, 128: 128, 256: 80}),
    "flash4": TileSize({256: 128}, {256: 128}),
    "cudnn": TileSize({256: 64}, {256: 128}),
    "efficient": TileSize({256: 64}, {256: 64}),
}


@dataclass(frozen=True)
class TiledWork:
    """Tiles and blocks of one attention operator."""

    # Thread blocks of the whole operator.
    blocks: float
    # Tiles of all blocks, and of the longest block.
    tiles: float
    longest: float
    # Queries and keys of a tile.
    shape: tuple[int, int]
    # True if all blocks take equally long.
    equal: bool
    # Rows of queries in a block, grouped heads together.
    rows: float
    # Number of blocks that share the keys of the same queries.
    splits: int = 1


def padded(width: int) -> int:
    """Head dimension that is computed for ``width``."""
    return next((each for each in _WIDTHS if each >= width), -(-width // 256) * 256)


def tiled(operator: Attention, kernel: str, sms: int, generation: str) -> TiledWork:
    """Work of ``operator`` in tiles of ``kernel`` on a chip of ``sms`` multiprocessors of ``generation``."""
    width = padded(max(operator.widths))
    forward = operator.direction == "forward"
    sizes = FORWARD_TILES if forward else BACKWARD_TILES
    if forward and generation == "blackwell":
        sizes = FORWARD_TILES | _BLACKWELL_TILES
    shape = sizes[kernel].of(width)
    if forward:
        group = operator.heads // operator.kv_heads
        rows = operator.query_length * (group if operator.phase == "decode" else 1)
        shape = (min(shape[0], -(-rows // _LEAST_ROWS) * _LEAST_ROWS), shape[1])
    if operator.phase == "decode":
        # TensorRT-LLM's latent attention before Hopper processes the keys of a sequence in one block (its times on A100
        # and L40S do not grow from 1 to 32 sequences).
        return _split(operator, shape, 1 if kernel == "mla" and generation in ("ampere", "ada") else sms)
    parts = [
        _cut(*piece, operator.causal, operator.window, operator.placed, shape, forward) for piece in operator.pieces
    ]
    heads = operator.batch * operator.heads
    equal = len(set(operator.pieces)) == 1 and parts[0][1] == parts[0][0] * parts[0][2]
    blocks, tiles = (heads * sum(part[place] for part in parts) for place in (0, 1))
    rows = min(operator.query_length, shape[0])
    return TiledWork(blocks, tiles, max(part[2] for part in parts), shape, equal, rows)


def _split(operator: Attention, shape: tuple[int, int], sms: int) -> TiledWork:
    """Work of decode: one block per key-value head, sequence and tile of queries, or more if multiprocessors are left
    over.
    """
    queries = operator.query_length * operator.heads // operator.kv_heads
    pairs = operator.batch * operator.kv_heads * -(-queries // shape[0])
    seen = operator.window if 0 < operator.window < operator.key_length else operator.key_length
    tiles = -(-seen // shape[1])
    splits = int(np.clip(sms // pairs, 1, tiles))
    return TiledWork(pairs * splits, pairs * tiles, -(-tiles // splits), shape, True, queries, splits)


@lru_cache(maxsize=65536)
def _cut(
    queries: int, keys: int, causal: bool, window: int, placed: CausalPlace, shape: tuple[int, int], forward: bool
) -> tuple[int, float, float]:
    """Blocks, tiles and the largest number of tiles of a block, for one sequence and head."""
    if placed == "spread" and causal and keys > queries:
        blocks, tiles, longest = _cut(keys, keys, causal, window, "end", shape, forward)
        return max(blocks * queries // keys, 1), tiles * queries / keys, longest
    starts = np.arange(0, queries, shape[0])
    ends = np.minimum(starts + shape[0], queries) - 1
    first, _ = seen_keys(starts, queries, keys, causal, window, placed)
    _, last = seen_keys(ends, queries, keys, causal, window, placed)
    low, high = first // shape[1], -(-last // shape[1])
    if forward:
        count = np.maximum(high - low, 1)
        return len(count), float(count.sum()), float(count.max())
    columns = -(-keys // shape[1])
    change = np.zeros(columns + 1)
    seen = high > low
    np.add.at(change, low[seen], 1)
    np.add.at(change, high[seen], -1)
    count = np.maximum(np.cumsum(change)[:columns], 1)
    return columns, float(count.sum()), float(count.max())


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
# cuDNN takes a number of 32 bits for each score (GPT-2 on H200: 62 us instead of 30 forward, 89 instead of 66).
_CUDNN_NUMBERS = {"forward": 4.0, "backward": 3.0}
# Kernels of cuDNN's gradient besides its own on Hopper: products of results and their gradients (``compute_dot_do_o``),
# conversion of the gradient of queries (``convert_dq_to_16bits``).
_APART_LAUNCHES = 1.5


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
        kernel = _like(self.kernel, self.phase, generation)
        works = [tiled(each, kernel, sms, generation) for each in operators]
        pace = self._pace or pace_of(kernel, self.phase, generation)
        pairs = list(zip(operators, works, strict=True))
        compute = np.array([_compute_seconds(each, work, pace, kernel, machine) for each, work in pairs])
        traffic = np.array([each.read_bytes + each.write_bytes for each in operators], dtype=float)
        missed = np.clip((traffic / l2_bytes(machine) - _WARM_FILL[0]) / (_WARM_FILL[1] - _WARM_FILL[0]), 0.0, 1.0)
        dram = traffic * missed / dram_bandwidth(machine)
        launch = np.full(len(operators), pace.launches * kernel_floor(machine))
        apart = np.zeros(len(operators))
        if kernel == "cudnn" and self.phase == "backward" and generation == "hopper":
            apart = np.array([_apart_bytes(each) for each in operators]) / dram_bandwidth(machine)
            launch = launch + _APART_LAUNCHES * kernel_floor(machine)
        seconds = launch + apart + (compute**_OVERLAP + dram**_OVERLAP) ** (1 / _OVERLAP)
        features = _features(operators, works, sms)
        if self.kernel in ENGINES:
            features["bytes"] = np.array([float(element_bytes(each.cached or each.dtype)) for each in operators])
        return KernelAnalysis(seconds, {"compute": compute, "memory:DRAM": dram + apart, "launch": launch}, features)

    def with_pace(self, pace: KernelPace) -> FusedAttention:
        """The same family with another ``pace`` than the kernel's default."""
        return FusedAttention(self.kernel, self.phase, pace)

    def covers(self, operator: Attention) -> bool:
        """True if measurements are for ``operator``: no mask or sinks, and the kernel's types (8 bits, BF16, FP16)."""
        measured = ("float8",) if self.kernel == EIGHT_BITS else ("bfloat16", "float16")
        plain = not operator.mask and (not operator.sinks or self.kernel in ENGINES)
        return operator.dtype in measured and plain


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
    kernels: tuple[AttentionKernel, ...] = (*_MEASURED, *ENGINES)
    members = (named_family(kernel, phase) for kernel in kernels for phase in get_args(AttentionPhase))
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
    rate = _product_rate(operator, kernel, machine) / sms
    numbers = _CUDNN_NUMBERS[operator.direction] if kernel == "cudnn" else 1.0
    dropped = _DROPOUT_CYCLES * numbers if operator.dropout else 0.0
    cycles = (pace.softmax + dropped) / 1000
    score = products / (rate * pace.products) + cycles / chip.clock_hz
    return float(span * work.shape[0] * work.shape[1] * score + waves * pace.block / chip.clock_hz)


def _apart_bytes(operator: Attention) -> float:
    """Bytes of the kernels of cuDNN's gradient besides its own: results and their gradients, and the gradient of
    queries, read in FP32 and written in 16 bits.
    """
    queries = operator.batch * operator.heads * operator.query_length
    scored, mixed = operator.widths
    return queries * (2 * mixed * element_bytes(operator.dtype) + scored * (4 + element_bytes(operator.dtype)))


# xFormers' kernel multiplies FP32 on tensor cores as three products in TF32 (CUTLASS's ``OpMultiplyAddFastF32``).
_TF32_PRODUCTS = 3


def _product_rate(operator: Attention, kernel: str, machine: Machine) -> float:
    """Flop/s of the products of ``operator`` by ``kernel`` before the kernel's share."""
    if kernel == "efficient" and operator.dtype == "float32" and uses_tensor_cores(machine, "tf32"):
        return matrix_rate(machine, "tf32") / _TF32_PRODUCTS
    return matrix_rate(machine, operator.dtype)


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
