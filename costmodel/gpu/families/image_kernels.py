"""Batch norm and pooling: memory-bound kernels over images, by memory layout.

Batch norm in training takes its statistics first, then reads again; its gradient reads both tensors twice. What
implementations do better (persistent kernels of cuDNN that keep a channel on the chip) or worse is a factor by
direction and layout, inverted from whole steps (:mod:`costmodel.gpu.families.inverted_shares`).

In NCHW one block of threads takes one channel (``bn_fw_tr_1C11`` of cuDNN, ``batch_norm_collect_statistics`` of
PyTorch) with a fixed number of bytes in flight; with few channels that, not DRAM, is the limit:

    bandwidth = min(DRAM bandwidth, channels * bytes in flight / latency)

The gradient of max pooling in NCHW (``max_pool_backward_nchw``, a thread per pixel of the image) is built for eight
blocks of 256 threads on a multiprocessor. Chips that hold 2,048 threads have 32 registers for each, and on three of
them that is too few: what the compiler spills goes to L2 and comes back from there,

    seconds = max(bytes / DRAM bandwidth, (bytes + pixels * spilled bytes) / L2 bandwidth) + launch
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
# Bytes that a thread of ``max_pool_backward_nchw`` spills and reads back, as reported by ptxas of CUDA 11.8, 12.8 and
# 13.0 for the kernel of PyTorch 1.11 to 2.9 (64-bit sizes), in FP32 and FP16: 32 + 40 for sm_60, 44 + 44 for sm_70, 52
# + 52 for sm_80, nothing for sm_75, sm_86, sm_89 (more registers per thread), sm_90, sm_100 and sm_120. With them
# recorded ResNet-50 steps are predicted on both chips (V100 1.11 ms, A100 0.60) at the published bandwidths of their
# L2.
_SPILLED_BYTES = {"pascal": 72, "volta": 88, "ampere": 104}
_SPILLING_THREADS = 2048
# Additional reads of the input: for the statistics; of x and dy by the kernel of the input's gradient.
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
        """False: no table holds single kernels of these kinds."""
        return False


def plain_image_analysis(operators: Sequence[ImageOperator], machine: Machine) -> KernelAnalysis:
    """Analysis of ``operators`` before any factor."""
    traffic = np.array([_traffic(each) for each in operators], dtype=float)
    flops = np.array([each.flops for each in operators], dtype=float)
    spilled = np.array([_spilled(each, machine) for each in operators], dtype=float)
    return memory_analysis(traffic, flops, machine, [_blocks(each) for each in operators], spilled)


def _spilled(operator: ImageOperator, machine: Machine) -> float:
    """Bytes of register spills that the threads of ``operator`` move between registers and L2."""
    if not isinstance(operator, Pooling) or operator.channels_last:
        return 0.0
    chip = machine.chip()
    if (operator.kind, operator.direction) != ("max", "backward") or chip.max_threads < _SPILLING_THREADS:
        return 0.0
    pixels = operator.batch * operator.channels * operator.height * operator.width
    return float(pixels * _SPILLED_BYTES.get(chip.architecture, 0))


def _blocks(operator: ImageOperator) -> float:
    """Number of thread blocks of a kernel with one block per channel; infinite for other kernels."""
    if isinstance(operator, Normalization) and operator.training and not operator.channels_last:
        return float(operator.columns)
    return np.inf


def image_class(operator: ImageOperator) -> str:
    """Class name: kind, direction and layout."""
    layout = layout_name(operator.channels_last)
    if isinstance(operator, Pooling):
        return f"{operator.kind}-pooling {operator.direction} {layout}"
    how = "" if operator.takes_statistics else " evaluation"
    return f"batch-norm {operator.direction}{how} {layout}"


def is_image_work(operator: object) -> bool:
    """True if :class:`ImageKernels` prices ``operator``."""
    return isinstance(operator, Pooling) or (isinstance(operator, Normalization) and operator.kind == "batch_norm")


def _traffic(operator: ImageOperator) -> float:
    size = float(operator.read_bytes + operator.write_bytes)
    if isinstance(operator, Pooling):
        # Gradients are accumulated where windows overlap, into a zeroed tensor.
        return size + operator.write_bytes if operator.direction == "backward" else size
    if operator.direction == "backward":
        return size + _BACKWARD_AGAIN * operator.read_bytes
    return size + (_STATISTICS_AGAIN * operator.read_bytes if operator.training else 0.0)
