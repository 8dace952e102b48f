"""Batch norm and pooling: memory-bound kernels over images, by memory layout.

Batch norm in training takes its statistics first, then reads again; its gradient reads both tensors twice. What
implementations do better (persistent kernels of cuDNN that keep a channel on the chip) or worse is a factor by
direction and layout, inverted from whole steps (:mod:`costmodel.gpu.families.inverted_shares`).

In NCHW one block of threads takes one channel (``bn_fw_tr_1C11`` of cuDNN, ``batch_norm_collect_statistics`` of
PyTorch) and has so many bytes on their way; with few channels that, not DRAM, is the limit:

    bandwidth = min(DRAM bandwidth, channels * bytes on their way / latency)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.gpu.families.family import Family, KernelAnalysis
from costmodel.gpu.families.inverted_shares import InvertedShares, inverted_shares, layout_name
from costmodel.gpu.families.memory_bound import memory_analysis
from costmodel.machines.machine_records import Machine
from costmodel.operators.device_work import Normalization, Pooling

ImageOperator = Normalization | Pooling
# Further readings of the input: of the statistics; of x and dy by the kernel of the input's gradient.
_STATISTICS_AGAIN, _BACKWARD_AGAIN = 1.0, 1.0


class ImageKernels(Family[ImageOperator]):
    """Batch norm and pooling, forward and backward."""

    name = "image"
    clock_bound = False

    def __init__(self, shares: InvertedShares | None = None) -> None:
        self._shares = shares

    def analyse(self, operators: Sequence[ImageOperator], machine: Machine) -> KernelAnalysis:
        shares = self._shares or inverted_shares()
        return shares.scaled(
            plain_image_analysis(operators, machine), [image_class(each) for each in operators], machine
        )

    def covers(self, operator: ImageOperator) -> bool:
        """No table holds single kernels of these kinds."""
        return False


def plain_image_analysis(operators: Sequence[ImageOperator], machine: Machine) -> KernelAnalysis:
    """Analysis of ``operators`` before any factor."""
    traffic = np.array([_traffic(each) for each in operators], dtype=float)
    flops = np.array([each.flops for each in operators], dtype=float)
    return memory_analysis(traffic, flops, machine, [_blocks(each) for each in operators])


def _blocks(operator: ImageOperator) -> float:
    """Blocks of threads of a kernel that gives one to each channel; of the others more than enough."""
    if isinstance(operator, Normalization) and operator.training and not operator.channels_last:
        return float(operator.columns)
    return np.inf


def image_class(operator: ImageOperator) -> str:
    """Kind, direction and layout."""
    layout = layout_name(operator.channels_last)
    if isinstance(operator, Pooling):
        return f"{operator.kind}-pooling {operator.direction} {layout}"
    how = "" if operator.takes_statistics else " evaluation"
    return f"batch-norm {operator.direction}{how} {layout}"


def is_image_work(operator: object) -> bool:
    """Whether :class:`ImageKernels` prices ``operator``."""
    return isinstance(operator, Pooling) or (isinstance(operator, Normalization) and operator.kind == "batch_norm")


def _traffic(operator: ImageOperator) -> float:
    size = float(operator.read_bytes + operator.write_bytes)
    if isinstance(operator, Pooling):
        # Gradients are added where windows overlap, into a zeroed tensor.
        return size + operator.write_bytes if operator.direction == "backward" else size
    if operator.direction == "backward":
        return size + _BACKWARD_AGAIN * operator.read_bytes
    return size + (_STATISTICS_AGAIN * operator.read_bytes if operator.training else 0.0)
