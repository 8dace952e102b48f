"""Softmax and normalisation: a thread block (or warp) per row, which is read more than once.

Rows that fit a warp's registers are read once (softmax up to 1,024 columns in PyTorch); longer rows are read again for
the result, layer norm always is. Repeated reads come from L2 while the rows in flight on all multiprocessors fit there,
else from DRAM:

Rows that fit a warp's registers are read once (softmax up to 1,024 columns in PyTorch); longer rows are read again for
the result, layer norm always is. What is read again comes from L2 while the rows in flight on all multiprocessors fit
there, else from DRAM:

    DRAM bytes = operands + read again * share of the rows in flight that L2 cannot hold

Layer norm also spends instructions on every row, however short (Welford reductions over warps with divisions), which
the schedulers of a multiprocessor issue one per cycle each:

    seconds = launch + |memory, rows / multiprocessors * instructions / (schedulers * clock)|_2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.gpu.families.family import Family, Grade, KernelAnalysis, safe_log2
from costmodel.gpu.families.memory_bound import memory_analysis
from costmodel.gpu.families.rates import kernel_floor, l2_bytes
from costmodel.machines.machine_records import Machine
from costmodel.operators.device_work import Normalization, Softmax
from costmodel.operators.layers import element_bytes

_WARP_SOFTMAX_COLUMNS = 1024  # aten/src/ATen/native/cuda/PersistentSoftmax.cuh: dim_size <= 1024
_SOFTMAX_ELEMENTS = 4  # elements of a row per thread (SoftMax.cu, SoftMax_getBlockSize)
_NORM_THREADS = 128  # four warps per row (layer_norm_kernel.cu)
_NORM_L1_COLUMNS = 1024  # the rows of the blocks of one multiprocessor stay in its L1 up to this length
_NORM_INSTRUCTIONS = 1800.0  # of warps per row


@dataclass(frozen=True)
class _Again:
    """Repeated reads of the input that cost DRAM time."""

    # Reads if L2 holds the rows in flight.
    least: float
    # Additional reads if L2 holds none of them.
    more: float
    # Fills of L2 between which it holds a part of them.
    filling: tuple[float, float]

    def readings(self, in_flight_bytes: np.ndarray, machine: Machine) -> np.ndarray:
        low, high = self.filling
        missing = np.clip((in_flight_bytes / l2_bytes(machine) - low) / (high - low), 0.0, 1.0)
        return self.least + self.more * missing


# NeuSight op_latency (P100, V100, P4, T4, A100): slope of time over bytes, rows above 1,024 columns; instructions per
# row, and that L1 suffices, from the shorter ones (1,400 to 2,500 by GPU).
_SOFTMAX_AGAIN = _Again(0.4, 1.0, (0.35, 0.5))
_NORM_AGAIN = _Again(0.0, 1.1, (0.2, 0.8))
# Gradients: the kernel of the input's gradient reads x and dy twice, for the sums and for the result; weight and bias
# have a separate kernel (a `Reduction`). Layer norms of Liger's benchmarks (FP32, 4,096 rows of 4,096 to 16,384) move
# 7.2 to 8.1 tensors at the DRAM rate in both together on H100 and A100: 2 x 2 + 1 here, 2 x 1.3 there.
_NORM_BACKWARD_AGAIN = 1.0


class SoftmaxRows(Family[Softmax]):
    """Softmax and log-softmax over rows."""

    name = "softmax"
    clock_bound = False

    def analyse(self, operators: Sequence[Softmax], machine: Machine) -> KernelAnalysis:
        chip = machine.chip()
        sizes = np.array([element_bytes(each.dtype) for each in operators], dtype=float)
        in_flight = chip.sm_count * chip.max_threads * _SOFTMAX_ELEMENTS * sizes
        long = np.array([each.columns > _WARP_SOFTMAX_COLUMNS for each in operators])
        again = np.where(long, _SOFTMAX_AGAIN.readings(in_flight, machine), 0.0)
        return _analyse(operators, again, np.zeros(len(operators)), machine)

    def covers(self, operator: Softmax) -> bool:
        return operator.dtype == "float32" and operator.direction == "forward"

    def grade(self, operator: Softmax) -> Grade:
        if operator.direction != "forward":
            return "kind"
        return "measured" if self.covers(operator) else "dtype"


class NormRows(Family[Normalization]):
    """Layer and RMS normalisation; batch norm is in :mod:`costmodel.gpu.families.image_kernels`."""

    name = "normalization"
    clock_bound = False

    def analyse(self, operators: Sequence[Normalization], machine: Machine) -> KernelAnalysis:
        chip = machine.chip()
        columns = np.array([each.columns for each in operators], dtype=float)
        sizes = np.array([element_bytes(each.dtype) for each in operators], dtype=float)
        in_flight = chip.sm_count * (chip.max_threads // _NORM_THREADS) * columns * sizes
        kept = np.where(columns <= _NORM_L1_COLUMNS, 0.0, _NORM_AGAIN.readings(in_flight, machine))
        again = np.array([_norm_again(each, layer) for each, layer in zip(operators, kept, strict=True)])
        rows = np.array([each.rows for each in operators])
        issue = rows / chip.sm_count * _NORM_INSTRUCTIONS / (chip.schedulers * chip.clock_hz)
        return _analyse(operators, again, issue, machine)

    def covers(self, operator: Normalization) -> bool:
        forward = operator.direction == "forward"
        return operator.dtype == "float32" and forward and operator.kind == "layer_norm"

    def grade(self, operator: Normalization) -> Grade:
        if operator.direction != "forward" or operator.kind != "layer_norm":
            return "kind"
        return "measured" if self.covers(operator) else "dtype"


def _norm_again(operator: Normalization, layer_norm: float) -> float:
    return layer_norm if operator.direction == "forward" else _NORM_BACKWARD_AGAIN


def _analyse(
    operators: Sequence[Softmax | Normalization], again: np.ndarray, issue: np.ndarray, machine: Machine
) -> KernelAnalysis:
    """Analysis with ``again``, repeated reads of the input from DRAM, and ``issue``, seconds of instruction issue."""
    read = np.array([each.read_bytes for each in operators], dtype=float)
    written = np.array([each.write_bytes for each in operators], dtype=float)
    flops = np.array([each.flops for each in operators], dtype=float)
    analysis = memory_analysis(read * (1 + again) + written, flops, machine)
    floor = kernel_floor(machine)
    seconds = np.hypot(analysis.seconds - floor, issue) + floor
    rows = np.array([each.rows for each in operators], dtype=float)
    columns = np.array([each.columns for each in operators], dtype=float)
    features = {
        **analysis.features,
        "seconds": safe_log2(seconds),
        "rows": safe_log2(rows),
        "columns": safe_log2(columns),
        "waves": safe_log2(rows / machine.chip().sm_count),
        "misaligned": (columns % 4 != 0).astype(float),
    }
    return KernelAnalysis(seconds, {**analysis.terms, "issue": issue}, features)
