"""Sorting of (key, value) pairs on a GPU: the first half of most backward passes of embeddings.

cub sorts few pairs in one thread block, more of them in passes of eight bits over all, each of which reads and writes
every pair once (Onesweep: Adinets, Merrill, arXiv 2206.01784). A pass is a chain of dependent loads (look-back), which
dominates small sorts. Lengths of the chains in loads, and pairs sorted by one block: kernels of the eight ranks of
`traces/dlrm_8xV100` (facebookresearch/param), 32 to 13,312 pairs, on V100.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.gpu.families.family import Family, KernelAnalysis, safe_log2
from costmodel.gpu.families.rates import dram_bandwidth, kernel_floor, latency
from costmodel.machines.machine_records import Machine
from costmodel.operators.device_work import RadixSort

_BLOCK_PAIRS = 3072  # 2,304 pairs were sorted by one block, 4,736 in passes
_BLOCK_LOADS, _BLOCK_BITS, _BLOCK_PASS_CYCLES = 8, 6, 1400
_HISTOGRAM_LOADS, _PASS_LOADS, _FIRST_PASS_LOADS, _PASS_BITS = 6, 10, 12, 8


def sort_bits(rows: np.ndarray) -> np.ndarray:
    """Bits of a row number below ``rows``, at least one."""
    return np.asarray(np.maximum(np.ceil(np.log2(np.maximum(rows, 2))), 1))


def fixed_seconds(pairs: np.ndarray, bits: np.ndarray, machine: Machine) -> np.ndarray:
    """Seconds of launches and chains of loads, which do not grow with the number of pairs."""
    floor, load = kernel_floor(machine), latency(machine, 1)
    on_chip = np.ceil(bits / _BLOCK_BITS) * _BLOCK_PASS_CYCLES / machine.chip().clock_hz
    block = floor + _BLOCK_LOADS * load + on_chip
    passes = np.ceil(bits / _PASS_BITS)
    loads = _HISTOGRAM_LOADS + _FIRST_PASS_LOADS + passes * _PASS_LOADS
    return np.where(pairs <= _BLOCK_PAIRS, block, (passes + 2) * floor + loads * load)


def traffic_seconds(pairs: np.ndarray, bits: np.ndarray, pair_bytes: np.ndarray, machine: Machine) -> np.ndarray:
    """Seconds to read and write the pairs in DRAM, and to read them once for the histogram."""
    passes = np.ceil(bits / _PASS_BITS)
    return np.asarray((2 * passes + 1) * pairs * pair_bytes / dram_bandwidth(machine))


class Sorting(Family[RadixSort]):
    """Standalone sorts: those of the indices before gradients are accumulated."""

    name = "sort"

    def analyse(self, operators: Sequence[RadixSort], machine: Machine) -> KernelAnalysis:
        pairs, bits, size = (np.array([getattr(each, name) for each in operators], dtype=float) for name in _FIELDS)
        launch = fixed_seconds(pairs, bits, machine)
        dram = traffic_seconds(pairs, bits, size, machine)
        features = {"pairs": safe_log2(pairs), "bits": safe_log2(bits)}
        return KernelAnalysis(launch + dram, {"memory:DRAM": dram, "launch": launch}, features)

    def covers(self, operator: RadixSort) -> bool:
        return False  # no measured tables yet


_FIELDS = ("pairs", "bits", "pair_bytes")
