"""Rates of a GPU as kernels see them, with substitutes for dtypes that the machine file does not list, and its clock
while a benchmark repeats a kernel: short kernels finish before the clock drops, long ones run at the clock that a
sustained load of their kind allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.machines.machine_records import Machine
from costmodel.machines.power_law import unthrottled_share

BEFORE_AMPERE = ("pascal", "volta", "turing")
# A dtype without its own units is computed with those of the next one: TF32 off or absent means FP32; BF16 before
# Ampere is converted to FP32, FP16 on Pascal's small chips runs in FP32 (cuBLAS compute types).
_FULL_DOUBLE = 0.3  # FP64 over FP32 of chips with full units is 1/2; others have 1/32 and less
_STACKED = ("volta", "hopper", "blackwell")
_FALLBACK = {"tf32": "float32", "bfloat16": "float32", "float16": "float32", "int8": "float32"}


def matrix_rate(machine: Machine, dtype: str) -> float:
    """Flop/s of short matrix products of ``dtype``; ``MachineError`` if neither it nor its substitute is listed.

    For the rate under a long load see :func:`long_load_share`.
    """
    dtype = stand_in(machine, dtype)
    machine.peak_flops(dtype, 1)
    return machine.compute[dtype].short_load * _on_double_tensor_cores(machine, dtype)


def _on_double_tensor_cores(machine: Machine, dtype: str) -> float:
    """Ratio of the FP64 rate of matrix products to that of the vector units: 2 on datacenter chips of Ampere and Hopper
    (19.5 for 9.7 TFLOP/s on A100, 67 for 33.5 on H100, by their datasheets), 1 on Blackwell and others.
    """
    single = machine.compute.get("float32")
    double = machine.compute.get("float64")
    if dtype != "float64" or machine.gpu is None or single is None or double is None:
        return 1.0
    fast = double.short_load > _FULL_DOUBLE * single.short_load
    return 2.0 if fast and machine.gpu.architecture in ("ampere", "hopper") else 1.0


def stand_in(machine: Machine, dtype: str) -> str:
    """Dtype whose units compute products of ``dtype`` on ``machine``."""
    return dtype if dtype in machine.compute else _FALLBACK.get(dtype, dtype)


def dense_peak(machine: Machine, dtype: str) -> float | None:
    """Flop/s of dense products of ``dtype``, or of its substitute, in the vendor's datasheet; ``None`` if the machine
    file has no datasheet rate.
    """
    known = machine.compute.get(stand_in(machine, dtype))
    if known is None or known.datasheet is None:
        return None
    return known.datasheet * _on_double_tensor_cores(machine, stand_in(machine, dtype))


def vector_rate(machine: Machine) -> float:
    """FP32 flop/s outside the tensor cores, the rate of element-wise kernels."""
    return matrix_rate(machine, "float32")


def uses_tensor_cores(machine: Machine, dtype: str) -> bool:
    """True if matrix products of ``dtype`` run on the tensor cores of ``machine``."""
    return dtype in ("tf32", "float16", "bfloat16") and machine.compute.get(dtype) is not None


def dram_bandwidth(machine: Machine) -> float:
    """Sustained bytes/s of the device memory."""
    return machine.memory[-1].bandwidth.at(1)


def has_stacked_memory(machine: Machine) -> bool:
    """True if the memory is HBM; for Pascal and Ampere that holds for chips with 64 lanes per multiprocessor."""
    chip = machine.chip()
    return chip.architecture in _STACKED or (chip.architecture in ("pascal", "ampere") and chip.lanes == 64)


def l2_bandwidth(machine: Machine) -> float:
    """Sustained bytes/s of the last-level cache."""
    return machine.memory[0].bandwidth.at(1)


def l2_bytes(machine: Machine) -> float:
    """Capacity of the last-level cache in bytes."""
    return machine.memory[0].capacity_bytes


def latency(machine: Machine, level: int) -> float:
    """Seconds of one load at a random address served by ``machine.memory[level]`` (0: L2, 1: DRAM).

    If the machine file lacks it: a quarter of the shortest kernel for DRAM (V100: 0.65 us of 2.6), a quarter of that
    for L2 (as published for V100 and A100).
    """
    known = machine.memory[level].latency_seconds
    return known if known is not None else kernel_floor(machine) / (4 if level else 16)


def kernel_floor(machine: Machine) -> float:
    """Seconds of the shortest kernel."""
    return machine.region_seconds(1)


# A benchmark repeats each kernel a few dozen times: shorter kernels finish before the clock drops; after this many
# doublings it has dropped fully. aiconfigurator gemm_perf, 99th percentile of the rate by duration: H200 911 TFLOP/s up
# to 0.7 ms and 784 from 2 ms on, A100 272 and 257; NeuSight op_latency, T4 and P4, median rate 0.3 ms to 10 ms.
_FROM_SECONDS, _DOUBLINGS = 5e-4, 2.0
_LIMITED_FROM_SECONDS, _LIMITED_DOUBLINGS = 3e-4, 5.0


def long_load_share(machine: Machine, dtype: str) -> float:
    """Ratio of the rate of a long load of products of ``dtype`` to that of a burst, at most 1."""
    known = machine.compute.get(stand_in(machine, dtype))
    return 1.0 if known is None or known.burst is None else min(known.sustained.at(1) / known.burst, 1.0)


def long_load_shares(machine: Machine, dtypes: Sequence[str]) -> np.ndarray:
    """:func:`long_load_share` of each of ``dtypes``."""
    shares = {dtype: long_load_share(machine, dtype) for dtype in dict.fromkeys(dtypes)}
    return np.array([shares[dtype] for dtype in dtypes])


def burst_clock(machine: Machine, dtype: str) -> float:
    """Share of the boost clock at which a burst of ``dtype`` runs: below 1 on cards that are power-limited at once."""
    name = stand_in(machine, dtype)
    known = machine.compute.get(name)
    if known is None or known.datasheet is None:
        return 1.0
    ceiling = unthrottled_share(name, machine.chip().lanes)
    return float(min(1.0, matrix_rate(machine, dtype) / (known.datasheet * ceiling)))


def benchmark_clock(seconds: np.ndarray, long_load: np.ndarray | float, machine: Machine) -> np.ndarray:
    """Clock, relative to a burst's, at which kernels of ``seconds`` (at that clock) run in a repeated benchmark.

    ``long_load``: :func:`long_load_share` of each.
    """
    limited = machine.chip().power_limited
    start = _LIMITED_FROM_SECONDS if limited else _FROM_SECONDS
    doublings = np.log2(np.maximum(seconds, start) / start) / (_LIMITED_DOUBLINGS if limited else _DOUBLINGS)
    sunk = 1 / long_load - 1
    return np.asarray(1 / (1 + sunk * np.minimum(doublings, 1.0)))
