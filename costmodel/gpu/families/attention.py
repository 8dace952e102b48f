"""Fused attention: the two products of a tile of queries with all keys, nothing of the scores leaves the chip.

Forward, the tensor cores reach a share of their GEMM rate that grows with the head dimension and falls for few blocks
(quantised by multiprocessors over batch x heads x query tiles); exponentials take turns with the products. The backward
pass does five products instead of two at a lower share. Shares from FlashAttention-2 (Dao, arXiv 2307.08691, figures 4
and 6: A100, 50 to 73 % forward, 45 to 63 % backward of the datasheet rate).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.gpu.families.family import Family, KernelAnalysis, safe_log2
from costmodel.gpu.families.memory_bound import memory_analysis
from costmodel.gpu.families.rates import kernel_floor, matrix_rate
from costmodel.machines.machine_records import Machine
from costmodel.operators.device_work import Attention

_QUERY_TILE = 128
# Share of the sustained GEMM rate at head dimension 128; half of it is lost towards dimension 0.
_FORWARD_SHARE, _BACKWARD_SHARE = 0.85, 0.68


class FusedAttention(Family[Attention]):
    """Flash and memory-efficient attention."""

    name = "attention"

    def analyse(self, operators: Sequence[Attention], machine: Machine) -> KernelAnalysis:
        traffic = np.array([each.read_bytes + each.write_bytes for each in operators], dtype=float)
        memory = memory_analysis(traffic, np.zeros(len(operators)), machine)
        compute = np.array([_compute_seconds(each, machine) for each in operators])
        terms = {**memory.terms, "compute": compute}
        seconds = np.maximum(memory.seconds, compute + kernel_floor(machine))
        features = {
            **memory.features,
            "query_length": safe_log2(np.array([each.query_length for each in operators])),
            "key_length": safe_log2(np.array([each.key_length for each in operators])),
        }
        return KernelAnalysis(seconds, terms, features)

    def covers(self, operator: Attention) -> bool:
        return False  # no measured tables yet


def _compute_seconds(operator: Attention, machine: Machine) -> float:
    sms = machine.chip().sm_count
    blocks = operator.batch * operator.heads * -(-operator.query_length // _QUERY_TILE)
    idle = -(-blocks // sms) * sms / blocks
    share = _FORWARD_SHARE if operator.direction == "forward" else _BACKWARD_SHARE
    # Exponentials per score are the same for every head dimension, products are not.
    share *= operator.head_dim / (operator.head_dim + 32) * (128 + 32) / 128
    return operator.flops * min(idle, 2.0) / (matrix_rate(machine, operator.dtype) * min(share, 1.0))
