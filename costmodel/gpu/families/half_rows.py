"""Two FP16 kernels of image models that the tables hold only in FP32: layer norm of short rows, transposing copies.

In FP32, layer norm forward of up to 1,024 columns is bound by instructions rather than bytes
(:mod:`costmodel.gpu.families.row_wise`); its cost in FP16 is inferred from image models:

Layer norm forward of up to 1,024 columns costs instructions rather than bytes in FP32
(:mod:`costmodel.gpu.families.row_wise`); what it costs in FP16 image models say:

    seconds = factor * seconds in FP32's model + launch

A copy of a permuted tensor whose neighbours do not stay together (NHWC to NCHW, windows of attention) fetches a sector
of L2 for every element of two bytes:

    seconds = factor * max(bytes / DRAM bandwidth, elements * 32 bytes / L2 bandwidth) + launch

The factors are inverted from whole steps in FP16 (:mod:`costmodel.gpu.families.inverted_shares`). BF16, which none of
those steps has, is priced as before, as are longer rows and runs of several elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.gpu.families.family import Family, KernelAnalysis, safe_log2
from costmodel.gpu.families.inverted_shares import InvertedShares, inverted_shares
from costmodel.gpu.families.memory_bound import MemoryBound
from costmodel.gpu.families.rates import kernel_floor, l2_bandwidth
from costmodel.gpu.families.row_wise import NormRows
from costmodel.machines.machine_records import Machine
from costmodel.operators.device_work import Normalization, Rearrangement

HalfOperator = Normalization | Rearrangement
_COLUMNS = 1024  # longest row for which instructions dominate
_SECTOR_BYTES = 32
_TERMS = ("memory:DRAM", "memory:L2", "compute", "launch")
_NORMS, _COPIES = NormRows(), MemoryBound()


class HalfRows(Family[HalfOperator]):
    """Layer norm of short rows and copies of single elements, in FP16 (:func:`is_half_work`)."""

    name = "half-rows"
    clock_bound = False

    def __init__(self, shares: InvertedShares | None = None) -> None:
        self._shares = shares

    def analyse(self, operators: Sequence[HalfOperator], machine: Machine) -> KernelAnalysis:
        shares = self._shares or inverted_shares()
        return shares.scaled(plain_half_analysis(operators, machine), [half_class(each) for each in operators], machine)

    def covers(self, operator: HalfOperator) -> bool:
        """False: no table holds single FP16 kernels."""
        return False


def plain_half_analysis(operators: Sequence[HalfOperator], machine: Machine) -> KernelAnalysis:
    """Analysis of ``operators`` before any factor."""
    norms = [each for each in operators if isinstance(each, Normalization)]
    copies = [each for each in operators if isinstance(each, Rearrangement)]
    first = np.array([isinstance(each, Normalization) for each in operators])
    seconds = np.zeros(len(operators))
    terms = {name: np.zeros(len(operators)) for name in _TERMS}
    for places, found in ((first, _NORMS.analyse(norms, machine)), (~first, _copies_analysis(copies, machine))):
        seconds[places] = found.seconds
        for name in _TERMS:
            terms[name][places] = found.terms[name]
    return KernelAnalysis(seconds, terms, {"seconds": safe_log2(seconds)})


def _copies_analysis(copies: Sequence[Rearrangement], machine: Machine) -> KernelAnalysis:
    """Analysis of copies as in FP32, with the sectors that L2 delivers added."""
    plain = _COPIES.analyse(copies, machine)
    sectors = np.array([each.elements for each in copies], dtype=float) * _SECTOR_BYTES / l2_bandwidth(machine)
    seconds = np.maximum(plain.seconds, sectors + kernel_floor(machine))
    return KernelAnalysis(seconds, {**plain.terms, "memory:L2": sectors}, plain.features)


def is_half_work(operator: object) -> bool:
    """True if :class:`HalfRows` prices ``operator``."""
    if isinstance(operator, Normalization):
        forward = operator.kind == "layer_norm" and operator.direction == "forward"
        return forward and operator.dtype == "float16" and operator.columns <= _COLUMNS
    if isinstance(operator, Rearrangement):
        return operator.kind == "transpose" and operator.dtype == "float16" and operator.inner == 1
    return False


def half_class(operator: HalfOperator) -> str:
    """Class name: kind, direction and dtype."""
    kind = "layer-norm" if isinstance(operator, Normalization) else "transpose"
    return f"{kind} forward float16"
