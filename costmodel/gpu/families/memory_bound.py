"""Memory-bound kernels: time is bytes over the bandwidth of the memory or the link that they come from.

    seconds = launch + max(DRAM bytes / DRAM bandwidth, all bytes / L2 bandwidth, flops / FP32 rate)

All bytes count against DRAM except a quarter of L2: data left there by the previous kernel, and the last writes.

**Copies** between host and device go over PCIe or NVLink-C2C, between devices over NVLink or PCIe. Copies within a
device are element-wise kernels.

**Sorting** of (key, value) pairs is the first half of most backward passes of embeddings. cub sorts few pairs in one
thread block, more of them in passes of eight bits over all, each of which reads and writes every pair once (Onesweep:
Adinets, Merrill, arXiv 2206.01784). A pass is a chain of dependent loads (look-back), which dominates small sorts.
Lengths of the chains in loads, and pairs sorted by one block: kernels of the eight ranks of `traces/dlrm_8xV100`
(facebookresearch/param), 32 to 13,312 pairs, on V100.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.base.errors import MachineError
from costmodel.gpu.families.family import Family, Grade, KernelAnalysis, safe_log2
from costmodel.gpu.families.load_chains import busy_multiprocessors, chain_seconds, handing_seconds
from costmodel.gpu.families.rates import dram_bandwidth, kernel_floor, l2_bandwidth, l2_bytes, latency, vector_rate
from costmodel.machines.machine_records import Link, Machine
from costmodel.operators.device_work import (
    Elementwise,
    Loss,
    MemoryCopy,
    OptimizerStep,
    RadixSort,
    Rearrangement,
    Reduction,
)
from costmodel.operators.layers import Pool2d, element_bytes

# Bytes fetched per byte used when runs of a few elements are read or written at scattered places: DRAM delivers 32-byte
# sectors (CUDA C++ Best Practices Guide, coalesced access). Transposes go through shared memory and lose less.
_SECTOR_BYTES = 32
_INDEX_BYTES = 8
_UNKNOWN = "unknown"
# Share of L2 whose content a kernel finds or leaves. Vidur's additions in FP16 within layers: bytes over (time -
# launch) against the DRAM bandwidth give 0.19 to 0.21 of L2 on A100 for traffic of 0.5 to 1 times L2, 0.20 to 0.35 on
# H100 for 0.5 to 2 times, LLMServingSim's activations on RTX 4090 0.24 to 0.31 for 0.7 to 2 times.
WARM_SHARE = 0.25
# Element-wise operations with kernels of their own rather than PyTorch's TensorIterator, which was measured.
_OWN_KERNELS = ("rotary", "silu_mul", "fused", "branches")
# Integer instructions per element, where they take time beside the bytes (root of the sum of squares); a multiprocessor
# has 64 units for them (CUDA C++ Programming Guide, throughput of arithmetic instructions).
# One by one: PyTorch's ``elementwise_kernel`` finds the place of every operand by divisions, ``unrolled_..`` converts
# each. A profile of Qwen1.5 0.5B on H100 (TraceLens, 9.2 million elements) has products with a broadcast operand at 32
# in FP32 and BF16, copies of permuted views, and sums and products of those, at 37 to 44, casts to FP32 at 35. Held
# out: RMS norms in parts and rotary embeddings of Liger on A100 go from -24 and -49 % to -8 and -20 %. Sums over
# several dimensions do so too (H200: the gradient of a bias, 16 sums of 2,048 values by one block, in 10.4 us).
_ONE_BY_ONE = 35.0
# ``CatArrayBatchedCopy`` for parts that are not contiguous (H200: rotated halves of 4.2 million elements in 18 us).
_CONCATENATED = 65.0
# Weights of 4 bits expanded by branches, all of which a warp takes (bitsandbytes before 0.48): 566 per 16 weights in
# the machine code of 0.41.0 for compute capability 8.0, 240 with its table since then. Its authors measured the table
# 1.36 to 2.07 times as fast on A100 (pull request 1747).
_BRANCHES = 566 / 16
_UNITS = 64
# A one-pass reduction reads once; along strided dimensions the partial sums of few outputs occupy few multiprocessors.
# A judgement, which Liger's layer norms backward do not contradict (:mod:`costmodel.gpu.families.normalization`).
_STRIDED_REDUCTION = 1.3
# Loss kernels of PyTorch give each row to one thread or warp; log-softmax is priced separately. A judgement: no table.
_LOSS_PASSES = 1.5
_BLOCK_BYTES = 1024 * 16  # bytes in flight of a block of 1,024 threads, 16 bytes each


MemoryBoundOperator = Elementwise | Reduction | Rearrangement | OptimizerStep | Loss | Pool2d | MemoryCopy


class MemoryBound(Family[MemoryBoundOperator]):
    """Element-wise kernels, optimizers, reductions, rearrangements, copies within a device, losses, and the CPU
    records' pooling.
    """

    name = "elementwise"
    clock_bound = False

    def analyse(self, operators: Sequence[MemoryBoundOperator], machine: Machine) -> KernelAnalysis:
        traffic = np.array([_traffic(each) + _lost_sectors(each, machine) for each in operators], dtype=float)
        flops = np.array([each.flops for each in operators], dtype=float)
        analysis = memory_analysis(traffic, flops, machine, [_blocks(each) for each in operators])
        issue = np.array([_issue(each, machine) for each in operators])
        chains = np.array([chain_seconds(each, machine, WARM_SHARE * l2_bytes(machine)) for each in operators])
        if not issue.any() and not chains.any():
            return analysis
        floor = kernel_floor(machine)
        handed = np.array([handing_seconds(each, machine) for each in operators])
        seconds = np.cbrt(np.hypot(analysis.seconds - floor, issue) ** 3 + chains**3) + handed + floor
        waiting = np.maximum(analysis.terms["memory:DRAM"], chains) + handed
        analysis = KernelAnalysis(analysis.seconds, {**analysis.terms, "memory:DRAM": waiting}, analysis.features)
        features = {**analysis.features, "seconds": safe_log2(seconds)}
        return KernelAnalysis(seconds, {**analysis.terms, "issue": issue}, features)

    def covers(self, operator: MemoryBoundOperator) -> bool:
        """True for measured kernels; ``unknown`` operators were not measured, whatever their bytes."""
        return isinstance(operator, Elementwise) and operator.dtype == "float32" and operator.kind != _UNKNOWN

    def grade(self, operator: MemoryBoundOperator) -> Grade:
        if isinstance(operator, Elementwise) and operator.kind == _UNKNOWN:
            return "unknown"
        if isinstance(operator, Elementwise) and operator.kind not in _OWN_KERNELS:
            return "measured" if operator.dtype == "float32" else "dtype"
        streams = isinstance(operator, Reduction) and operator.contiguous
        if streams or isinstance(operator, OptimizerStep | MemoryCopy):
            return "dtype"  # each byte once, as element-wise kernels do
        return "measured" if self.covers(operator) else "kind"


def _issue(operator: MemoryBoundOperator, machine: Machine) -> float:
    """Seconds of instructions of kernels that take an operand apart element by element, or filter; 0 for others."""
    chip = machine.chip()
    busy = chip.sm_count
    if isinstance(operator, Elementwise) and operator.instructions:
        count: float = operator.elements * operator.instructions
    elif isinstance(operator, Elementwise) and (operator.one_by_one or operator.kind == "branches"):
        count = operator.elements * (_BRANCHES if operator.kind == "branches" else _ONE_BY_ONE)
    elif isinstance(operator, Rearrangement) and (operator.kind == "transpose" or operator.is_by_element):
        count = operator.elements * _ONE_BY_ONE
    elif isinstance(operator, Rearrangement) and operator.kind == "strided_concat":
        count = operator.elements * _CONCATENATED
    elif isinstance(operator, Reduction) and operator.one_by_one:
        count, busy = operator.elements * _ONE_BY_ONE, busy_multiprocessors(operator, machine)
    else:
        return 0.0
    return count / (busy * _UNITS * chip.clock_hz)


def memory_analysis(
    traffic: np.ndarray,
    flops: np.ndarray,
    machine: Machine,
    blocks: Sequence[float] | float = np.inf,
    spilled: np.ndarray | float = 0.0,
) -> KernelAnalysis:
    """Analysis of kernels that move ``traffic`` bytes and do ``flops`` in ``blocks`` thread blocks, whose bandwidth is
    limited by their bytes in flight (Little's law), even for data in L2. ``spilled`` bytes of registers stay in L2.
    """
    floor = kernel_floor(machine)
    dram = np.maximum(traffic - WARM_SHARE * l2_bytes(machine), 0.0) / dram_bandwidth(machine)
    dram = np.maximum(dram, traffic * latency(machine, 1) / (np.array(blocks, dtype=float) * _BLOCK_BYTES))
    terms = {
        "memory:DRAM": dram,
        "memory:L2": (traffic + spilled) / l2_bandwidth(machine),
        "compute": flops / vector_rate(machine),
        "launch": np.full(len(traffic), floor),
    }
    seconds = np.maximum(np.maximum(dram, terms["memory:L2"]), terms["compute"]) + floor
    features = {"seconds": safe_log2(seconds), "l2_fill": safe_log2(traffic / l2_bytes(machine))}
    return KernelAnalysis(seconds, terms, features)


def _blocks(operator: MemoryBoundOperator) -> float:
    """Number of 1,024-thread blocks of a kernel that gives half of one to each pair of moments (``RowwiseMoments`` of
    group_norm_kernel.cu); infinite for other kernels.
    """
    moments = isinstance(operator, Reduction) and operator.kind == "moments"
    return operator.outputs / 4 if moments else np.inf  # type: ignore[union-attr]


def _traffic(operator: MemoryBoundOperator) -> float:
    """Bytes that ``operator`` moves, including the unused part of sectors."""
    size = float(operator.read_bytes + operator.write_bytes) if not isinstance(operator, Pool2d) else _pooled(operator)
    if isinstance(operator, Rearrangement) and operator.kind == "gather":
        read = size * _sector_loss(operator) - operator.write_bytes
        if operator.source_elements:  # sectors are used again
            source = operator.source_elements * element_bytes(operator.dtype)
            read = min(read, max(source, operator.read_bytes))
        return read + operator.write_bytes + _INDEX_BYTES * operator.elements / max(operator.inner, 1)
    if isinstance(operator, Rearrangement):
        return size * _sector_loss(operator)
    if isinstance(operator, Reduction) and not operator.contiguous:
        return size * _STRIDED_REDUCTION
    if isinstance(operator, Loss):
        return _loss_bytes(operator)
    return size


def _lost_sectors(operator: MemoryBoundOperator, machine: Machine) -> float:
    """Bytes of strided operands fetched in vain: the rest of each sector has left L2 before it is used."""
    if not isinstance(operator, Elementwise) or operator.reuse_bytes <= l2_bytes(machine):
        return 0.0
    return float(operator.strided_elements * (_SECTOR_BYTES - element_bytes(operator.dtype)))


def _sector_loss(operator: Rearrangement) -> float:
    """Factor by which scattered short runs increase the traffic, on the reading side only."""
    run = max(operator.inner, 1) * operator.write_bytes / max(operator.elements, 1)
    if operator.kind == "transpose" or run >= _SECTOR_BYTES:
        return 1.0 if run >= _SECTOR_BYTES else 1.25
    return (1.0 + _SECTOR_BYTES / run) / 2


def _loss_bytes(operator: Loss) -> float:
    """Bytes of a loss. ``nll`` reads one value per row forward and writes zeros and one value backward; other losses
    read all.
    """
    if operator.kind != "nll":
        return (operator.read_bytes + operator.write_bytes) * _LOSS_PASSES
    return operator.rows * (_SECTOR_BYTES + 8.0) + operator.write_bytes


def _pooled(operator: Pool2d) -> float:
    return float(operator.input_bytes + operator.output_bytes)


# The driver stages pageable memory through a pinned buffer: about half the rate of pinned memory remains
# (NVIDIA, "How to Optimize Data Transfers in CUDA C/C++"), and no more than a thread of the host copies (3 to 21 MB to
# an H200: 6 to 8.6 GB/s). Up to a mebibyte is staged before the copy begins (there at the link's rate).
_PAGEABLE_SHARE, _STAGED_RATE, _STAGED_FIRST = 0.5, 7e9, 1 << 20


class Copies(Family[MemoryCopy]):
    """Copies over a link."""

    name = "copy"

    def analyse(self, operators: Sequence[MemoryCopy], machine: Machine) -> KernelAnalysis:
        rows = [_terms(each, machine) for each in operators]
        names = ("memory:DRAM", "link", "launch")
        terms = {name: np.array([row[place] for row in rows], dtype=float) for place, name in enumerate(names)}
        features = {"size": safe_log2(np.array([each.size_bytes for each in operators]))}
        return KernelAnalysis(np.maximum(terms["memory:DRAM"], terms["link"]) + terms["launch"], terms, features)

    def least(self, operators: Sequence[MemoryCopy], machine: Machine) -> np.ndarray:
        return np.zeros(len(operators))  # one end is in another memory, and no table exists to learn from

    def covers(self, operator: MemoryCopy) -> bool:
        return False  # no measured tables yet


def _terms(operator: MemoryCopy, machine: Machine) -> tuple[float, float, float]:
    """Seconds in DRAM, on the link, and of the start."""
    link = _link(machine, operator.kind)
    direct = operator.pinned or operator.kind == "peer" or operator.size_bytes <= _STAGED_FIRST
    rate = link.bandwidth if direct else min(_PAGEABLE_SHARE * link.bandwidth, _STAGED_RATE)
    one_way = operator.size_bytes / dram_bandwidth(machine)
    return one_way, operator.size_bytes / rate, link.latency_seconds


def is_within_device(operator: MemoryCopy) -> bool:
    """True if no link is crossed."""
    return operator.kind in ("device_to_device", "memset")


def _link(machine: Machine, kind: str) -> Link:
    link = machine.link("nvlink" if kind == "peer" else "c2c") or machine.link("pcie")
    if link is None:
        raise MachineError(f"{machine.source or machine.name}: no link for copies ({kind}); add links: - kind: pcie")
    return link


# Of keys of eight bytes: 256 threads, nine pairs each (cub's policies; `dlrm_8xV100`: 2,304 in one block, 4,736 not).
_BLOCK_PAIRS = 2304
_BLOCK_LOADS, _BLOCK_BITS, _BLOCK_PASS_CYCLES = 8, 6, 1400
_HISTOGRAM_LOADS, _PASS_LOADS, _FIRST_PASS_LOADS, _PASS_BITS = 6, 10, 12, 8


def sort_bits(rows: np.ndarray) -> np.ndarray:
    """Bits of a row number below ``rows``, at least one."""
    return np.asarray(np.maximum(np.ceil(np.log2(np.maximum(rows, 2))), 1))


def sort_fixed_seconds(pairs: np.ndarray, bits: np.ndarray, machine: Machine) -> np.ndarray:
    """Seconds of launches and chains of loads, which do not grow with the number of pairs."""
    floor, load = kernel_floor(machine), latency(machine, 1)
    on_chip = np.ceil(bits / _BLOCK_BITS) * _BLOCK_PASS_CYCLES / machine.chip().clock_hz
    block = floor + _BLOCK_LOADS * load + on_chip
    passes = np.ceil(bits / _PASS_BITS)
    loads = _HISTOGRAM_LOADS + _FIRST_PASS_LOADS + passes * _PASS_LOADS
    return np.where(pairs <= _BLOCK_PAIRS, block, (passes + 2) * floor + loads * load)


def sort_traffic_seconds(pairs: np.ndarray, bits: np.ndarray, pair_bytes: np.ndarray, machine: Machine) -> np.ndarray:
    """Seconds to read and write the pairs in DRAM, and to read them once for the histogram."""
    passes = np.ceil(bits / _PASS_BITS)
    return np.asarray((2 * passes + 1) * pairs * pair_bytes / dram_bandwidth(machine))


class Sorting(Family[RadixSort]):
    """Standalone sorts: those of the indices before gradients are accumulated."""

    name = "sort"

    def analyse(self, operators: Sequence[RadixSort], machine: Machine) -> KernelAnalysis:
        pairs, bits, size = (np.array([getattr(each, name) for each in operators], dtype=float) for name in _FIELDS)
        launch = sort_fixed_seconds(pairs, bits, machine)
        dram = sort_traffic_seconds(pairs, bits, size, machine)
        features = {"pairs": safe_log2(pairs), "bits": safe_log2(bits)}
        return KernelAnalysis(launch + dram, {"memory:DRAM": dram, "launch": launch}, features)

    def covers(self, operator: RadixSort) -> bool:
        return False  # no measured tables yet


_FIELDS = ("pairs", "bits", "pair_bytes")
