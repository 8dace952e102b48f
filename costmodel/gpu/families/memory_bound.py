"""Memory-bound kernels: time is bytes over the bandwidth of the memory they come from.

    seconds = launch + max(DRAM bytes / DRAM bandwidth, all bytes / L2 bandwidth, flops / FP32 rate)

All bytes count against DRAM except a quarter of L2: data left there by the previous kernel, and the last writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.gpu.families.family import Family, Grade, KernelAnalysis, safe_log2
from costmodel.gpu.families.rates import dram_bandwidth, kernel_floor, l2_bandwidth, l2_bytes, latency, vector_rate
from costmodel.machines.machine_records import Machine
from costmodel.operators.device_work import Elementwise, Loss, MemoryCopy, OptimizerStep, Rearrangement, Reduction
from costmodel.operators.layers import Pool2d, element_bytes

# Bytes fetched per byte used when runs of a few elements are read or written at scattered places: DRAM delivers 32-byte
# sectors (CUDA C++ Best Practices Guide, coalesced access). Transposes go through shared memory and lose less.
_SECTOR_BYTES = 32
_UNKNOWN = "unknown"
# Share of L2 whose content a kernel finds or leaves. Vidur's additions in FP16 within layers: bytes over (time -
# launch) against the DRAM bandwidth give 0.19 to 0.21 of L2 on A100 for traffic of 0.5 to 1 times L2, 0.20 to 0.35 on
# H100 for 0.5 to 2 times, LLMServingSim's activations on RTX 4090 0.24 to 0.31 for 0.7 to 2 times.
WARM_SHARE = 0.25
# Element-wise operations with kernels of their own rather than PyTorch's TensorIterator, which was measured.
_OWN_KERNELS = ("rotary", "silu_mul", "fused")
# A one-pass reduction reads once; along strided dimensions the partial sums of few outputs occupy few multiprocessors.
# A judgement, which Liger's layer norms backward do not contradict (:mod:`costmodel.gpu.families.row_wise`).
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
        return memory_analysis(traffic, flops, machine, [_blocks(each) for each in operators])

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
