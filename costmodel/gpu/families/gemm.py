"""Matrix products on GPUs: tile and wave quantisation, split-K, traffic through L2 and DRAM, choice of the tile.

A library kernel covers the (m, n) output with tiles, one thread block each, ``split`` blocks along k where the output
is small. With B = batch * ceil(m/tm) * ceil(n/tn) * split blocks on S multiprocessors the arithmetic takes

    ceil(B / S) * 2 * tm * tn * ceil(k/split) / (rate / S * efficiency(tile))

the quantised form of flops / rate. Every block reads (tm + tn) * k operands through L2; blocks that run at the same
time share theirs, so DRAM delivers per wave the perimeter of the rectangle that the wave covers (all operands once if
they fit L2). The three overlap but not perfectly: their cubes are added, then the kernel floor; split-K adds the
partial sums and a second kernel. The tile with the least time is taken, as libraries' heuristics try to. The terms
follow "Matrix Multiplication Background" (NVIDIA deep-learning performance guide) and NeuSight (Lee et al., ASPLOS
2025).

**Thin products** of 16-bit matrices are a few elements wide and millions long: bound by memory, not by tiles. Talking
heads (CaiT) and gated positions (ConViT) multiply every score of an attention by a matrix as wide as there are heads:
(pixels, 4) x (4, 4) forward, (4, pixels) x (pixels, 4) for the gradient of that matrix. A tile of the tensor cores
would compute almost nothing but padding, and no table holds such shapes. Libraries have kernels that stream the long
operand once:

    seconds = factor * bytes / DRAM bandwidth + launch

with the factors of long rows and of long sums inverted from whole steps
(:class:`~costmodel.gpu.families.family.InvertedShares`).

**TF32** multiplies operands of four bytes at half the rate: an instruction takes the same bytes and the same cycles as
one in 16 bits (``mma.m16n8k8`` for ``m16n8k16``, PTX ISA). So a product of depth k passes through shared memory, L2 and
the tensor cores as one in 16 bits of depth 2 k does, with results of four instead of two bytes. Tables hold 16 bits
only: what their residual says of that product holds for TF32 too, and rows are aligned by bytes.

**8-bit products** with scales run at the 8-bit rate of the tensor cores, with operands of one byte and results of
two. Scales of blocks are multiplied in between (the sums of 128 k are promoted to FP32 outside the tensor cores:
DeepSeek-V3, arXiv 2412.19437, section 3.3.2); the residual learned from the tables accounts for that. In the tables
sums stay in the tensor cores, as in inference; Hopper's gradients with one scale per tensor are promoted to FP32,
which costs more arithmetic time (:data:`SPLIT_SUMS`). Blackwell's sums are FP32 in any case. The casts that make
8-bit operands are memory-bound: they read the wide values once and write narrow ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.gpu.families.family import Family, Grade, InvertedShares, KernelAnalysis, inverted_shares, safe_log2
from costmodel.gpu.families.memory_bound import memory_analysis
from costmodel.gpu.families.rates import (
    benchmark_clock,
    dram_bandwidth,
    has_stacked_memory,
    kernel_floor,
    l2_bandwidth,
    l2_bytes,
    latency,
    long_load_shares,
    matrix_rate,
    uses_tensor_cores,
)
from costmodel.gpu.residual import axes_of
from costmodel.machines.machine_records import USABLE_SHARE, Machine
from costmodel.operators.device_work import Gemm, ScaledCast, ScaledGemm, StoredGemm
from costmodel.operators.layers import element_bytes

_WIDEST = 16  # elements of both short sides
_SHORTEST = 1 << 17  # of the long side: twice the longest in the tables of products


class ThinProducts(Family[Gemm]):
    """Single products with one long and two short sides (:func:`is_thin`)."""

    name = "gemm-thin"
    clock_bound = False

    def __init__(self, shares: InvertedShares | None = None) -> None:
        self._shares = shares

    def analyse(self, operators: Sequence[Gemm], machine: Machine) -> KernelAnalysis:
        shares = self._shares or inverted_shares()
        return shares.scaled(plain_thin_analysis(operators, machine), [thin_class(each) for each in operators], machine)

    def covers(self, operator: Gemm) -> bool:
        """False: no table holds single kernels of these shapes."""
        return False


def plain_thin_analysis(operators: Sequence[Gemm], machine: Machine) -> KernelAnalysis:
    """Analysis of ``operators`` before any factor."""
    traffic = np.array([each.read_bytes + each.write_bytes for each in operators], dtype=float)
    return memory_analysis(traffic, np.zeros(len(operators)), machine)


def is_thin(operator: object) -> bool:
    """True if :class:`ThinProducts` prices ``operator``."""
    if not isinstance(operator, Gemm) or operator.batch > 1 or operator.dtype not in ("float16", "bfloat16"):
        return False
    _, middle, longest = sorted((operator.m, operator.n, operator.k))
    return middle <= _WIDEST and longest >= _SHORTEST


def thin_class(operator: Gemm) -> str:
    """Class name: a long sum, as in the gradient of a narrow matrix, or long rows."""
    return "thin sum" if operator.k == max(operator.m, operator.n, operator.k) else "thin rows"


@dataclass(frozen=True)
class Tile:
    """Output tile of one thread block."""

    m: int
    n: int
    # Share of the SM's rate that its inner loop reaches.
    efficiency: float
    # Blocks of it that one SM holds at a time.
    resident: int
    # Computed on the tensor cores.
    tensor: bool = False
    # Share of the SM's rate that one block alone reaches: a small one has too few warps.
    alone: float = 1.0


# FP32 tiles of cuBLAS 12 with their share of the sustained rate, padding counted: medians over those rows of NeuSight
# op_latency (V100, A100) whose kernel name gives the tile: volta_sgemm_128x64_tn covers 64 rows and 128 columns of a
# row-major output. A smaller tile reuses a loaded operand less. Pascal runs kernels made for Maxwell, which reach less.
_LARGE, _WIDE, _SQUARE = Tile(128, 128, 1.05, 2), Tile(64, 128, 1.0, 3), Tile(64, 64, 0.85, 5)
_TALL, _FLAT, _LOW, _SMALL = Tile(128, 32, 0.9, 3), Tile(32, 128, 0.88, 3), Tile(32, 64, 0.82, 5), Tile(32, 32, 0.7, 6)
_SINGLE_TILES = (_LARGE, _WIDE, _TALL, _FLAT, _LOW, _SMALL)
# Hopper's, with the share of one block: 32 x 32 of H200 compute at 0.25 of the rate that full multiprocessors have
# (adapters of rank 8, 2,048 x 2,048: 12 to 24 us).
_HOPPER_TILES = tuple(
    dataclasses.replace(tile, alone=share)
    for tile, share in zip(_SINGLE_TILES, (0.8, 0.6, 0.4, 0.4, 0.3, 0.25), strict=True)
)
_MAXWELL_TILES = (Tile(128, 32, 0.8, 3), Tile(64, 64, 0.67, 5), Tile(32, 128, 0.66, 3))
# By architecture: the tiles of single products, then the fewer ones of batched products. Later chips than Ampere run
# Ampere's kernels, of which cuBLAS 13 chooses smaller ones for batched products too (``sm80_xmma_gemm_f32f32_..`` with
# tiles of 64 x 64, 64 x 128 and 256 x 64 in traces of H200).
SIMT_TILES = {
    "pascal": (_MAXWELL_TILES, (_WIDE,)),
    "volta": (_SINGLE_TILES, (_SQUARE, _TALL, _FLAT)),
    "turing": (_SINGLE_TILES, (_WIDE, _SQUARE, _FLAT)),
    "ampere": (_SINGLE_TILES, (_LARGE,)),
    "hopper": (_HOPPER_TILES, (_LARGE, _WIDE, _SQUARE)),
}
# Tensor-core tiles of cuBLAS and CUTLASS, down to narrow ones for few rows.
TENSOR_TILES = (
    Tile(128, 256, 1.0, 1, True),
    Tile(256, 128, 1.0, 1, True),
    Tile(128, 128, 0.95, 2, True),
    Tile(64, 128, 0.85, 2, True),
    Tile(128, 64, 0.85, 2, True),
    Tile(64, 64, 0.7, 4, True),
    Tile(16, 64, 0.3, 6, True),
)
SPLITS = (1, 2, 4, 8, 16)
STEP = 8  # k of one pass through shared memory; the pipeline fills for one of them
OVERLAP = 3.0  # norm in which arithmetic, L2 and DRAM are combined; 2, or no overlap, fits the tables worse
# Tensors of back-to-back kernels are still in L2 if they fill up to a tenth of it, and not at all from three tenths on
# (skinny BF16 GEMMs of aiconfigurator on A100, H100 and L40S).
_WARM_FILL = (0.1, 0.3)
# Blocks of a cluster receive a shared operand once (TMA multicast, CUDA C++ Programming Guide): clusters of 2 x 2.
CLUSTER_SHARE = {"hopper": 0.5, "blackwell": 0.5}
# Sequential waits of the blocks of a wave, in DRAM latencies: the first operands before the arithmetic, the stores
# after it; Hopper's kernels store one tile while they compute the next. aiconfigurator's BF16 products of 2,048 rows
# and more beyond L2: with these waits the mean deviation from the median of measured over analytic times is 0.040
# instead of 0.081 on A100 (64 long in k: +10 instead of -40 %), 0.059 instead of 0.091 on H200. Cards with GDDR show no
# such effect (L40S 0.116, 0.121; the RTX 3090's steps fit worse with it): their memory keeps all blocks waiting.
# Families with tables learn the effect from them; others enable it by `wave_seconds`.
_WAVE_LATENCIES, _STORING_LATENCIES = 4.5, 2.5
# Share of the DRAM time of accumulating into FP32 results that is not hidden: gradients of weights of the 35 shapes of
# 2,560 x 4,096 and more beside the mean of the other two products of their layers (SimuMax, A100, 4,096 tokens): 80 %
# of them 0.34 to 0.71, median 0.56.
ACCUMULATING_SHARE = 0.56


@dataclass(frozen=True)
class Products:
    """Columns of many matrix products (float arrays of equal length)."""

    batch: np.ndarray
    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    # Bytes of an element.
    size: np.ndarray
    # Flop/s before the clock drops.
    rate: np.ndarray
    # Share of that rate left under a long load, per product or for all.
    long_load: np.ndarray | float = 1.0
    # Additional seconds of each wave of blocks (:func:`wave_seconds`).
    wave_seconds: float = 0.0

    @property
    def flops(self) -> np.ndarray:
        """Floating-point operations of each product."""
        return np.asarray(2 * self.batch * self.m * self.n * self.k)

    @property
    def operand_bytes(self) -> np.ndarray:
        """Bytes of both operands of each product."""
        return np.asarray(self.batch * (self.m + self.n) * self.k * self.size)

    @property
    def output_bytes(self) -> np.ndarray:
        """Bytes of the result of each product."""
        return np.asarray(self.batch * self.m * self.n * self.size)


@dataclass(frozen=True)
class TileTimes:
    """Times of every candidate, shape (operators, tiles): seconds with the best split, their terms, waves, and that
    split.
    """

    seconds: np.ndarray
    compute: np.ndarray
    dram: np.ndarray
    l2: np.ndarray
    waves: np.ndarray
    split: np.ndarray


def tile_times(products: Products, tiles: Sequence[Tile], machine: Machine, splits: Sequence[int]) -> TileTimes:
    """Times of each product with each tile, every tile with its best split."""
    columns = []
    for tile in tiles:
        cube = np.stack([_candidate(products, tile, split, machine) for split in splits])  # (splits, terms, operators)
        best = np.argmin(cube[:, 0], axis=0)
        picked = cube[best, :, np.arange(cube.shape[2])].T
        columns.append(np.concatenate([picked, np.asarray(splits, dtype=float)[best][None]]))
    return TileTimes(*np.stack(columns, axis=2))


def _candidate(products: Products, tile: Tile, split: int, machine: Machine) -> np.ndarray:
    """Seconds, compute, DRAM and L2 time (seconds) and waves of one tile and split, shape (5, operators)."""
    sms = machine.chip().sm_count
    rows, columns = np.ceil(products.m / tile.m), np.ceil(products.n / tile.n)
    blocks = products.batch * rows * columns * split
    depth = np.ceil(products.k / split / STEP) * STEP + STEP
    busiest = np.ceil(blocks / sms)
    compute = busiest * 2 * tile.m * tile.n * depth / (products.rate / sms * tile.efficiency)
    compute = compute / np.minimum(tile.alone * busiest, 1.0)
    l2 = blocks * (tile.m + tile.n) * depth * products.size / l2_bandwidth(machine)
    l2 = l2 * (CLUSTER_SHARE.get(machine.chip().architecture, 1.0) if tile.tensor else 1.0)
    dram_bytes = operand_traffic(products, tile, split, machine) + products.output_bytes
    extra = 0.0
    if split > 1:
        # Partial sums in FP32, written and read again, and the kernel that adds them.
        dram_bytes = dram_bytes + 2 * split * products.batch * products.m * products.n * 4
        extra = kernel_floor(machine)
    dram = dram_bytes * _miss_share(products, machine) / dram_bandwidth(machine)
    seconds = (compute**OVERLAP + dram**OVERLAP + l2**OVERLAP) ** (1 / OVERLAP) + kernel_floor(machine) + extra
    waves = blocks / (sms * tile.resident)
    return np.stack([seconds + np.ceil(waves) * products.wave_seconds, compute, dram, l2, waves])


def wave_seconds(machine: Machine) -> float:
    """Seconds that the blocks of a wave wait for memory before and after their arithmetic, if nothing hides it."""
    if not has_stacked_memory(machine):
        return 0.0
    stores_aside = machine.chip().architecture in CLUSTER_SHARE
    return (_STORING_LATENCIES if stores_aside else _WAVE_LATENCIES) * latency(machine, 1)


def _miss_share(products: Products, machine: Machine) -> np.ndarray:
    """Share of the traffic not left in L2 by the previous kernel, by the share of L2 that the tensors fill."""
    fill = (products.operand_bytes + products.output_bytes) / l2_bytes(machine)
    return np.asarray(np.clip((fill - _WARM_FILL[0]) / (_WARM_FILL[1] - _WARM_FILL[0]), 0.0, 1.0))


def operand_traffic(products: Products, tile: Tile, split: int, machine: Machine) -> np.ndarray:
    """Bytes of both operands read from DRAM."""
    rows, columns = np.ceil(products.m / tile.m), np.ceil(products.n / tile.n)
    resident = float(machine.chip().sm_count * tile.resident)
    wave_rows = np.minimum(rows, np.ceil(np.sqrt(resident * tile.n / tile.m)))
    wave_columns = np.minimum(columns, np.ceil(resident / wave_rows))
    waves = products.batch * rows * columns / (wave_rows * wave_columns)
    perimeter = np.minimum(wave_rows * tile.m, products.m) + np.minimum(wave_columns * tile.n, products.n)
    streamed = waves * perimeter * products.k * products.size
    one_batch = products.operand_bytes / products.batch
    fits = one_batch <= USABLE_SHARE * l2_bytes(machine)
    return np.where(fits, products.operand_bytes, np.maximum(streamed, products.operand_bytes))


def analyse_products(
    products: Products, tiles: Sequence[Tile], machine: Machine, splits: Sequence[int] = SPLITS
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Seconds, terms and feature columns of matrix products with the best of ``tiles`` and ``splits``."""
    times = tile_times(products, tiles, machine, splits)
    best = np.argmin(times.seconds, axis=1)
    place = (np.arange(len(best)), best)
    terms = {"compute": times.compute[place], "memory:DRAM": times.dram[place], "memory:L2": times.l2[place]}
    terms["launch"] = kernel_floor(machine) + np.ceil(times.waves[place]) * products.wave_seconds
    sinking = 1 / benchmark_clock(times.seconds[place], products.long_load, machine)
    seconds = times.seconds[place] * sinking
    terms["compute"] = terms["compute"] * sinking
    features = {
        "m": safe_log2(products.m),
        "n": safe_log2(products.n),
        "k": safe_log2(products.k),
        "batch": safe_log2(products.batch),
        "seconds": safe_log2(seconds),
        "ideal": safe_log2(products.flops / products.rate / seconds),
        "dram": safe_log2(terms["memory:DRAM"] / seconds),
        "l2": safe_log2(terms["memory:L2"] / seconds),
        "waves": safe_log2(times.waves[place]),
        "wave_rest": np.ceil(times.waves[place]) - times.waves[place],
        "split": safe_log2(times.split[place]),
        "tile": best.astype(float),
        "l2_fill": safe_log2(products.operand_bytes / products.batch / l2_bytes(machine)),
        "misaligned": _misalignment(products),
    }
    return seconds, terms, features


def accumulating_seconds(operators: Sequence[Gemm | ScaledGemm], machine: Machine) -> np.ndarray:
    """Additional seconds of products that accumulate into their output, relative to products that write 16 bits: the
    previous values are read, and in FP32 twice as many bytes are written.
    """
    narrow = element_bytes("bfloat16")
    more = [
        each.m * each.n * (2 * element_bytes(each.accumulates) - narrow) if each.accumulates else 0
        for each in operators
    ]
    return ACCUMULATING_SHARE * np.array(more, dtype=float) / dram_bandwidth(machine)


def _misalignment(products: Products) -> np.ndarray:
    """Misalignment of the operands' rows, from 0 (aligned to 8 elements) to 3."""
    inner = np.gcd(np.gcd(products.k.astype(np.int64), products.n.astype(np.int64)), 8)
    return 3 - np.log2(inner)


def products_of(operators: Sequence[Gemm], machine: Machine) -> Products:
    """Columns of ``operators``."""
    shapes = np.array([(each.batch, each.m, each.n, each.k) for each in operators], dtype=float).reshape(-1, 4).T
    sizes = np.array([element_bytes(each.dtype) for each in operators], dtype=float)
    rates = {dtype: matrix_rate(machine, dtype) for dtype in {each.dtype for each in operators}}
    rate = np.array([rates[each.dtype] for each in operators])
    loads = long_load_shares(machine, [each.dtype for each in operators])
    return Products(shapes[0], shapes[1], shapes[2], shapes[3], sizes, rate, loads)


def simt_tiles(machine: Machine, batched: bool) -> tuple[Tile, ...]:
    """FP32 tiles of the libraries on ``machine``."""
    return SIMT_TILES.get(machine.chip().architecture, SIMT_TILES["ampere"])[batched]


_WIDTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
_GRID_DTYPE = "bfloat16"


class SimtGemm(Family[Gemm]):
    """Single product in FP32, or in FP64, which the tensor cores of datacenter chips compute in tiles of the
    same kind.
    """

    name = "gemm"

    def grade(self, operator: Gemm) -> Grade:
        return "measured" if self.covers(operator) else "dtype"

    def analyse(self, operators: Sequence[Gemm], machine: Machine) -> KernelAnalysis:
        return KernelAnalysis(*analyse_products(products_of(operators, machine), simt_tiles(machine, False), machine))


class BatchedSimtGemm(Family[Gemm]):
    """Batched products in one kernel; libraries have fewer tiles for them, and no split-K."""

    name = "gemm-batched"

    def analyse(self, operators: Sequence[Gemm], machine: Machine) -> KernelAnalysis:
        return KernelAnalysis(
            *analyse_products(products_of(operators, machine), simt_tiles(machine, True), machine, (1,))
        )


class TensorGemm(Family[Gemm]):
    """Products in TF32, FP16 or BF16 on the tensor cores. Features are those of 16 bits (:func:`_in_16_bits`)."""

    name = "gemm-tensor"
    axes = axes_of((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768), _WIDTHS, _WIDTHS)

    def analyse(self, operators: Sequence[Gemm], machine: Machine) -> KernelAnalysis:
        products = products_of(operators, machine)
        products = dataclasses.replace(products, rate=products.rate * _aligned_shares(operators, machine))
        seconds, terms, features = analyse_products(products, TENSOR_TILES, machine)
        if any(each.dtype == _TF32 for each in operators):
            narrow = products_of([_in_16_bits(each) for each in operators], machine)
            narrow = dataclasses.replace(narrow, rate=narrow.rate * _aligned_shares(operators, machine))
            features = analyse_products(narrow, TENSOR_TILES, machine)[2]
        more = accumulating_seconds(operators, machine)
        counters = _counter_seconds(operators, machine)
        terms = {**terms, "memory:DRAM": terms["memory:DRAM"] + more, "launch": terms["launch"] + counters}
        return KernelAnalysis(seconds + more + counters, terms, features)

    def sizes(self, operators: Sequence[Gemm]) -> np.ndarray:
        # A batched product has the work of one product of all its rows, and reads and writes no less.
        narrow = [_in_16_bits(each) for each in operators]
        return np.array([(each.batch * each.m, each.n, each.k) for each in narrow], dtype=float).reshape(-1, 3)

    def at_sizes(self, sizes: np.ndarray, machine: Machine) -> KernelAnalysis:
        m, n, k = sizes.T
        ones, rate = np.ones(len(sizes)), matrix_rate(machine, _GRID_DTYPE)
        loads = float(long_load_shares(machine, [_GRID_DTYPE])[0])
        products = Products(ones, m, n, k, ones * element_bytes(_GRID_DTYPE), ones * rate, loads)
        return KernelAnalysis(*analyse_products(products, TENSOR_TILES, machine))

    def from_lattice(self, operators: Sequence[Gemm], plain: np.ndarray, machine: Machine) -> np.ndarray:
        shares = _aligned_shares(operators, machine)
        slower = np.ones(len(operators))
        narrow = [_in_16_bits(each) for each in operators]
        if (shares < 1).any() or narrow != list(operators):
            dense, skewed = (products_of(each, machine) for each in (narrow, operators))
            skewed = dataclasses.replace(skewed, rate=skewed.rate * shares)
            slower, plainly = (analyse_products(each, TENSOR_TILES, machine)[0] for each in (skewed, dense))
            slower = slower / plainly
        more = accumulating_seconds(operators, machine) + _counter_seconds(operators, machine)
        return np.asarray(plain * slower + more)

    def covers(self, operator: Gemm) -> bool:
        # Measured in BF16; FP16 runs the same kernels.
        return operator.dtype in ("bfloat16", "float16") and operator.batch == 1

    def follows(self, operator: Gemm) -> bool:
        return self.covers(_in_16_bits(operator))

    def grade(self, operator: Gemm) -> Grade:
        return "measured" if self.covers(operator) else "dtype"


_TF32 = "tf32"


def _counter_seconds(operators: Sequence[Gemm], machine: Machine) -> np.ndarray:
    """Seconds by which products in TF32 take longer on Hopper than those in 16 bits of which tables are: cuBLAS splits
    them along k, after a memset of counters (traces of H200). 31 of 36 products there took 1.5 to 5 us longer.
    """
    split = machine.chip().architecture in _OLD_INSTRUCTIONS
    return np.array([kernel_floor(machine) * (split and each.dtype == _TF32) for each in operators])


def _in_16_bits(operator: Gemm) -> Gemm:
    """Product in 16 bits that does what ``operator`` does before it writes: ``operator`` itself unless it is TF32."""
    return dataclasses.replace(operator, k=2 * operator.k, dtype=_GRID_DTYPE) if operator.dtype == _TF32 else operator


# Share of the rate of products whose rows begin at multiples of this many times two bytes: 16-byte loads need 8, and
# without them no kernel fills the tensor cores (NVIDIA, "Matrix Multiplication Background", section on alignment). From
# the output layers of width 1024 with 50,257 and 12,564 columns in vtrain/iteration_times_2_4_gpus.csv (A100, FP16);
# those of width 2048 agree. 2 is interpolated.
_ALIGNED_SHARE = {8: 1.0, 4: 0.45, 2: 0.4, 1: 0.36}
# Hopper's instructions take operands in TF32 with the summed dimension innermost (PTX ISA, ``wgmma``); others turn
# on the way. Share of the rate with one and with two of these, as in gradients: layers of an LSTM and of a language
# model of 896 to 4,864 columns, on H200 compute 270 to 290 and 160 to 250 TFLOP/s instead of 375.
_DEPTH_FIRST = ("hopper",)
_TURNED_SHARE = (1.0, 0.7, 0.55)
# Their kernels are Turing's and Ampere's (``cutlass_75_tensorop_bf16_s1688gemm_.._align1`` in traces of H200), whose
# instructions use less than half of later chips' tensor cores: output layers of 50,257 columns of GPT-2 (H200, BF16,
# 4,096 tokens) compute 94, 132 and 146 TFLOP/s, products aligned to 2 and to 4 206 and 203.
_OLD_INSTRUCTIONS = {"hopper": 0.42, "blackwell": 0.42}


def _alignment(operator: Gemm) -> int:
    """Greatest common alignment, 1 to 8 times two bytes, of the stored rows of both operands and of the output."""
    first = operator.m if operator.transpose_a else operator.k
    second = operator.k if operator.transpose_b else operator.n
    unit = element_bytes(operator.dtype) // element_bytes(_GRID_DTYPE)
    return math.gcd(unit * math.gcd(first, second, operator.n), 8)


def _aligned_shares(operators: Sequence[Gemm], machine: Machine) -> np.ndarray:
    shares = np.array([_ALIGNED_SHARE[_alignment(each)] for each in operators])
    shares = np.where(shares < 1, shares * _OLD_INSTRUCTIONS.get(machine.chip().architecture, 1.0), shares)
    if machine.chip().architecture not in _DEPTH_FIRST:
        return shares
    turned = [each.transpose_a + (not each.transpose_b) if each.dtype == _TF32 else 0 for each in operators]
    return np.asarray(shares * np.array([_TURNED_SHARE[count] for count in turned]))


Triple = tuple[np.ndarray, Mapping[str, np.ndarray], Mapping[str, np.ndarray]]


def choose_rows(mask: np.ndarray, if_true: Triple, if_false: Triple) -> Triple:
    """Row-wise selection: the first (seconds, terms, features) where ``mask`` is true, else the second."""
    terms, features = _columns(mask, if_true[1], if_false[1]), _columns(mask, if_true[2], if_false[2])
    return np.where(mask, if_true[0], if_false[0]), terms, features


def _columns(
    mask: np.ndarray, if_true: Mapping[str, np.ndarray], if_false: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    return {name: np.where(mask, column, if_false[name]) for name, column in if_true.items()}


def gemm_family(operator: Gemm, machine: Machine) -> Family[Gemm]:
    """Family whose kernels compute ``operator`` on ``machine``."""
    if uses_tensor_cores(machine, operator.dtype):
        return _THIN if is_thin(operator) else _TENSOR
    return _BATCHED if operator.batch > 1 else _SINGLE


_SINGLE, _BATCHED, _TENSOR, _THIN = SimtGemm(), BatchedSimtGemm(), TensorGemm(), ThinProducts()


# Ratio of the arithmetic time of products whose sums are promoted to FP32 to that of others, on H100: the middle of 1.1
# to 1.2 (pytorch/ao issue 2377).
SPLIT_SUMS = 1.15


@dataclass(frozen=True)
class _WideResults(Products):
    """Products whose results have ``result`` bytes per element."""

    result: np.ndarray | float = 2.0

    @property
    def output_bytes(self) -> np.ndarray:
        """Bytes of the result of each product."""
        return np.asarray(self.batch * self.m * self.n * self.result)


class ScaledProducts(Family[ScaledGemm]):
    """8-bit products."""

    name = "gemm-8bit"

    def analyse(self, operators: Sequence[ScaledGemm], machine: Machine) -> KernelAnalysis:
        shapes = np.array([(1, each.m, each.n, each.k) for each in operators], dtype=float).reshape(-1, 4).T
        sizes = np.array([element_bytes(each.dtype) for each in operators], dtype=float)
        results = np.array([element_bytes(each.output_dtype) for each in operators], dtype=float)
        rate = np.array([matrix_rate(machine, each.dtype) for each in operators])
        load = long_load_shares(machine, [each.dtype for each in operators])
        columns = _WideResults(shapes[0], shapes[1], shapes[2], shapes[3], sizes, rate, load, result=results)
        seconds, terms, features = analyse_products(columns, TENSOR_TILES, machine)
        more = accumulating_seconds(operators, machine)
        seconds, terms = seconds + more, {**terms, "memory:DRAM": terms["memory:DRAM"] + more}
        promoting = _promoting_shares(operators, machine) * terms["compute"]
        seconds, terms = seconds + promoting, {**terms, "compute": terms["compute"] + promoting}
        block = np.array([float(each.scaling in ("block", "mx")) for each in operators])
        return KernelAnalysis(seconds, terms, {**features, "block": block})

    def covers(self, operator: ScaledGemm) -> bool:
        return operator.dtype == "float8"


def _promoting_shares(operators: Sequence[ScaledGemm], machine: Machine) -> np.ndarray:
    """Additional arithmetic time of promoting the sums to FP32, as a share of that of products in the tables."""
    hopper = machine.chip().architecture == "hopper"
    promoted = np.array([hopper and each.split_sums and each.scaling == "tensor" for each in operators], dtype=float)
    return (SPLIT_SUMS - 1) * promoted


# Shares of the memory's bandwidth that kernels reach which widen stored weights: gpt-fast reads 1,069 GB/s of whole
# steps in int8 and 862 in int4 where it reads 1,397 in BF16 (its README, A100); Marlin is 3.9 times as fast as 16 bits
# up to 16 rows (arXiv 2408.11743), and products of FP4 are not widened.
_WIDENED = {"int8": 0.8, "int4": 0.75}
# Share of the tensor cores' rate, of which unpacking takes a part.
_UNPACKED = 0.85
_LEAST_ROWS = 16


class StoredProducts(Family[StoredGemm]):
    """Products with weights stored in fewer bits, by physics: bytes as stored, arithmetic as multiplied."""

    name = "gemm-stored"

    def analyse(self, operators: Sequence[StoredGemm], machine: Machine) -> KernelAnalysis:
        rates = np.array([matrix_rate(machine, each.dtype) for each in operators])
        rows = np.array([float(max(each.m, _LEAST_ROWS)) for each in operators])
        weights = np.array([float(each.n * each.k) for each in operators])
        compute = 2 * rows * weights / (rates * np.where([each.dtype == "float4" for each in operators], 1, _UNPACKED))
        shares = np.array([_WIDENED.get(each.stored, 1.0) for each in operators])
        traffic = np.array([float(each.read_bytes + each.write_bytes) for each in operators])
        dram = traffic / (shares * dram_bandwidth(machine))
        launch = np.full(len(operators), kernel_floor(machine))
        seconds = (compute**OVERLAP + dram**OVERLAP) ** (1 / OVERLAP) + launch
        features = {"rows": safe_log2(rows), "weights": safe_log2(weights), "bytes": safe_log2(traffic)}
        return KernelAnalysis(seconds, {"compute": compute, "memory:DRAM": dram, "launch": launch}, features)

    def covers(self, operator: StoredGemm) -> bool:
        """False: no table holds them."""
        return False


class ScaledCasts(Family[ScaledCast]):
    """Casts to 8 bits, including the preceding search for the largest value."""

    name = "quantize"
    clock_bound = False

    def analyse(self, operators: Sequence[ScaledCast], machine: Machine) -> KernelAnalysis:
        traffic = np.array([each.read_bytes + each.write_bytes for each in operators], dtype=float)
        flops = np.array([each.flops for each in operators], dtype=float)
        analysis = memory_analysis(traffic, flops, machine)
        features = {
            **analysis.features,
            "rows": safe_log2(np.array([each.rows for each in operators])),
            "columns": safe_log2(np.array([each.columns for each in operators])),
            "dynamic": np.array([float(each.dynamic) for each in operators]),
        }
        return KernelAnalysis(analysis.seconds, analysis.terms, features)

    def covers(self, operator: ScaledCast) -> bool:
        """True for measured casts: one output, static or by rows. Casts with a transposed copy, and the search alone,
        are extrapolated by their bytes.
        """
        return operator.dtype in ("bfloat16", "float16")
