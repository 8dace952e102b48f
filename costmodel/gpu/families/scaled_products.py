"""Products of 8-bit operands with scales, and the casts that make these operands.

A product is that of :mod:`costmodel.gpu.families.gemm` at the 8-bit rate of the tensor cores, its operands of one byte
and its result of two. Scales of blocks are multiplied in between (the sums of 128 k are promoted to FP32 outside the
tensor cores: DeepSeek-V3, arXiv 2412.19437, section 3.3.2); the residual learned from the tables accounts for that. In
the tables sums stay in the tensor cores, as in inference; Hopper's gradients with one scale per tensor are promoted to
FP32, which costs more arithmetic time (:data:`SPLIT_SUMS`). Blackwell's sums are FP32 in any case. A cast is
memory-bound: it reads the wide values once and writes narrow ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.gpu.families.clock import long_load_shares
from costmodel.gpu.families.family import Family, KernelAnalysis, safe_log2
from costmodel.gpu.families.gemm import TENSOR_TILES, Products, accumulating_seconds, analyse_products
from costmodel.gpu.families.memory_bound import memory_analysis
from costmodel.gpu.families.rates import matrix_rate
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import element_bytes
from costmodel.operators.scaled_work import ScaledCast, ScaledGemm

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
