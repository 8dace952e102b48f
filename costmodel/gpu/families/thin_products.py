"""Products of 16-bit matrices that are a few elements wide and millions long: bound by memory, not by tiles.

Talking heads (CaiT) and gated positions (ConViT) multiply every score of an attention by a matrix as wide as there are
heads: (pixels, 4) x (4, 4) forward, (4, pixels) x (pixels, 4) for the gradient of that matrix. A tile of the tensor
cores would compute almost nothing but padding, and no table holds such shapes. Libraries have kernels that stream the
long operand once:

    seconds = factor * bytes / DRAM bandwidth + launch

with the factors of long rows and of long sums inverted from whole steps
(:mod:`costmodel.gpu.families.inverted_shares`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.gpu.families.family import Family, KernelAnalysis
from costmodel.gpu.families.inverted_shares import InvertedShares, inverted_shares
from costmodel.gpu.families.memory_bound import memory_analysis
from costmodel.machines.machine_records import Machine
from costmodel.operators.device_work import Gemm

_WIDEST = 16  # elements of both short sides
_SHORTEST = 1 << 17  # of the long side: twice the longest in the tables of products


class ThinProducts(Family[Gemm]):
    """Single products with one long and two short sides (:func:`is_thin`)."""

    name = "gemm-thin"
    clock_bound = False

    def __init__(self, shares: InvertedShares | None = None) -> None:
        self._shares = shares

    def analyse(self, operators: Sequence[Gemm], machine: Machine) -> KernelAnalysis:
        shares = self._shares or inverted_shares()
        return shares.scaled(plain_thin_analysis(operators, machine), [thin_class(each) for each in operators], machine)

    def covers(self, operator: Gemm) -> bool:
        """False: no table holds single kernels of these shapes."""
        return False


def plain_thin_analysis(operators: Sequence[Gemm], machine: Machine) -> KernelAnalysis:
    """Analysis of ``operators`` before any factor."""
    traffic = np.array([each.read_bytes + each.write_bytes for each in operators], dtype=float)
    return memory_analysis(traffic, np.zeros(len(operators)), machine)


def is_thin(operator: object) -> bool:
    """True if :class:`ThinProducts` prices ``operator``."""
    if not isinstance(operator, Gemm) or operator.batch > 1 or operator.dtype not in ("float16", "bfloat16"):
        return False
    _, middle, longest = sorted((operator.m, operator.n, operator.k))
    return middle <= _WIDEST and longest >= _SHORTEST


def thin_class(operator: Gemm) -> str:
    """Class name: a long sum, as in the gradient of a narrow matrix, or long rows."""
    return "thin sum" if operator.k == max(operator.m, operator.n, operator.k) else "thin rows"
