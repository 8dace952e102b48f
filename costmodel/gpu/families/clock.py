"""Clock of a GPU under its power limit.

A GPU whose arithmetic would draw more than its limit lowers the clock until the average of the last tens of
milliseconds meets it. A machine file gives both ends: ``burst`` is the rate of kernels that finish before the clock
drops, ``sustained`` that of a long load of pure arithmetic. Intermediate cases (benchmarks that repeat kernels, steps
whose kernels wait for memory part of the time) follow from this module and from :mod:`costmodel.machines.power_law`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.gpu.families.rates import matrix_rate, stand_in
from costmodel.machines.machine_records import Machine
from costmodel.machines.power_law import unthrottled_share

# Power above rest of a kernel that waits for DRAM, in shares of (limit - rest). NeuSight op_latency, convolutions of 3
# to 10 ms on T4 against the same shape and kernels on V100, whose clock holds: where arithmetic is all (implicit GEMM)
# T4 takes 2.68 times as long; of 711 by Winograd 0.12 to 0.27 of V100's time are transforms, whose bytes take T4 3.44
# times as long; this share leaves the least absolute error of their log times (0.12; as much power as arithmetic 0.19).
MEMORY_POWER = 0.45
# For cards with GDDR memory and 128 lanes per multiprocessor: an RTX 5060 Ti draws 172.7 of its 180 W while it decodes
# one token at a time, and 147 of 150 W (inventivehq.com, "I capped my GPU to 150W", power by limit).
GDDR_MEMORY_POWER = 0.95
_GDDR_ARCHITECTURES = ("ampere", "ada", "blackwell-rtx")
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


def memory_power(machine: Machine) -> float:
    """Power above idle of a kernel that waits for DRAM, as a share of (limit - idle)."""
    chip = machine.chip()
    gddr = chip.architecture in _GDDR_ARCHITECTURES and chip.lanes == 128
    return GDDR_MEMORY_POWER if gddr else MEMORY_POWER


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
