"""Softmax and normalisation: a thread block (or warp) per row, which it reads more than once.

Rows that fit a warp's registers are read once (softmax up to 1,024 columns in PyTorch); longer rows are read again for
the result, layer norm always is. The second reading finds only part of the row in L1 or L2:

    DRAM bytes = operands + (passes - 1) * read bytes
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.device_operators import Normalization, Softmax
from costmodel.gpu.family import Analysis, Family, safe_log2
from costmodel.gpu.memory_bound import memory_analysis
from costmodel.machine_records import Machine

_WARP_SOFTMAX_COLUMNS = 1024  # aten/src/ATen/native/cuda/PersistentSoftmax.cuh: dim_size <= 1024
# Readings of the input that reach DRAM, of NeuSight op_latency (V100, A100): softmax of longer rows, layer norm.
_BLOCK_PASSES = 2.0
_NORM_PASSES = 2.1


class SoftmaxRows(Family):
    """Softmax and log-softmax over rows."""

    name = "softmax"

    def analyse(self, operators: Sequence[Softmax], machine: Machine) -> Analysis:
        passes = [1.0 if each.columns <= _WARP_SOFTMAX_COLUMNS else _BLOCK_PASSES for each in operators]
        return _analyse(operators, passes, machine)

    def covers(self, operator: Softmax) -> bool:
        return operator.dtype == "float32" and operator.direction == "forward"


class NormRows(Family):
    """Layer, RMS and batch normalisation; batch norm in evaluation is element-wise."""

    name = "normalization"

    def analyse(self, operators: Sequence[Normalization], machine: Machine) -> Analysis:
        return _analyse(operators, [_norm_passes(each) for each in operators], machine)

    def covers(self, operator: Normalization) -> bool:
        forward = operator.direction == "forward"
        return operator.dtype == "float32" and forward and operator.kind == "layer_norm"


def _norm_passes(operator: Normalization) -> float:
    if operator.kind == "batch_norm" and not operator.training:
        return 1.0
    if operator.direction == "backward" and operator.kind != "batch_norm":
        # One kernel for the input's gradient and one for those of weight and bias: x and dy are read by both.
        return 2.5
    return _NORM_PASSES


def _analyse(operators: Sequence[Softmax | Normalization], passes: Sequence[float], machine: Machine) -> Analysis:
    traffic = [each.read_bytes * count + each.write_bytes for each, count in zip(operators, passes, strict=True)]
    flops = np.array([each.flops for each in operators], dtype=float)
    analysis = memory_analysis(np.array(traffic, dtype=float), flops, machine)
    rows = np.array([each.rows for each in operators], dtype=float)
    columns = np.array([each.columns for each in operators], dtype=float)
    features = {
        **analysis.features,
        "rows": safe_log2(rows),
        "columns": safe_log2(columns),
        "waves": safe_log2(rows / machine.chip().sm_count),
        "misaligned": (columns % 4 != 0).astype(float),
    }
    return Analysis(analysis.seconds, analysis.terms, features)
