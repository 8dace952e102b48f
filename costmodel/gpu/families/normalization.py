"""Softmax, normalisation and pooling: kernels that read a row or an image more than once.

**Rows** (softmax, layer and RMS norm): a thread block (or warp) per row. Rows that fit a warp's registers are read
once (softmax up to 1,024 columns in PyTorch); longer rows are read again for the result, layer norm always is.
Repeated reads come from L2 while the rows in flight on all multiprocessors fit there, else from DRAM:

    DRAM bytes = operands + read again * share of the rows in flight that L2 cannot hold

Layer norm also spends instructions on every row, however short (Welford reductions over warps with divisions), which
the schedulers of a multiprocessor issue one per cycle each:

    seconds = launch + |memory, rows / multiprocessors * instructions / (schedulers * clock)|_2

**Images** (batch norm, pooling), by memory layout. Batch norm in training takes its statistics first, then reads
again; its gradient reads both tensors twice. What implementations do better (persistent kernels of cuDNN that keep a
channel on the chip) or worse is a factor by direction and layout, inverted from whole steps
(:class:`~costmodel.gpu.families.family.InvertedShares`). In NCHW one block of threads takes one channel
(``bn_fw_tr_1C11`` of cuDNN, ``batch_norm_collect_statistics`` of PyTorch) with a fixed number of bytes in flight;
with few channels that, not DRAM, is the limit:

    bandwidth = min(DRAM bandwidth, channels * bytes in flight / latency)

Norms of one picture and of volumes have few channels of many values: instance norm is batch norm of one picture with a
channel for each of picture and channel, 64 blocks for two volumes of 32 channels, on any GPU. Their blocks' waits come
on top of the bytes,

    seconds = |factor * bytes / DRAM bandwidth, bytes / channels at once * latency / bytes in flight|_p + launch

with p = 1 up to a block on a multiprocessor, whose waits nothing fills, and p blocks where there are more. Batches of
pictures keep the first form: on RTX 3090 the second makes networks with many values to few channels (CSPNet,
DarkNet) 10 to 15 % too slow, whose factors hold their waits.

The gradient of max pooling in NCHW (``max_pool_backward_nchw``, a thread per pixel of the image) is built for eight
blocks of 256 threads on a multiprocessor. Chips that hold 2,048 threads have 32 registers for each, and on three of
them that is too few: what the compiler spills goes to L2 and comes back from there,

    seconds = max(bytes / DRAM bandwidth, (bytes + pixels * spilled bytes) / L2 bandwidth) + launch

**Two FP16 kernels of image models** that the tables hold only in FP32. Layer norm forward of up to 1,024 columns is
bound by instructions rather than bytes:

    seconds = factor * seconds in FP32's model + launch

A copy of a permuted tensor whose neighbours do not stay together (NHWC to NCHW, windows of attention) fetches a
sector of L2 for every element of two bytes:

    seconds = factor * max(bytes / DRAM bandwidth, elements * 32 bytes / L2 bandwidth) + launch

Their factors are inverted from whole steps in FP16 too. BF16, which none of those steps has, is priced as before, as
are longer rows and runs of several elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.gpu.families.family import (
    MEASURED_KERNELS,
    Family,
    Grade,
    InvertedShares,
    KernelAnalysis,
    inverted_shares,
    layout_name,
    safe_log2,
    shares_of,
)
from costmodel.gpu.families.memory_bound import MemoryBound, memory_analysis
from costmodel.gpu.families.rates import kernel_floor, l2_bandwidth, l2_bytes, latency
from costmodel.machines.machine_records import Machine
from costmodel.operators.device_work import Normalization, Pooling, Rearrangement, Softmax
from costmodel.operators.layers import element_bytes

_WARP_SOFTMAX_COLUMNS = 1024  # aten/src/ATen/native/cuda/PersistentSoftmax.cuh: dim_size <= 1024
_SOFTMAX_THREADS, _SOFTMAX_VOCABULARY = 1024, 30000  # threads of a long row; longer than rows in the tables
_SOFTMAX_ELEMENTS = 4  # elements of a row per thread (SoftMax.cu, SoftMax_getBlockSize)
_NORM_THREADS = 128  # four warps per row (layer_norm_kernel.cu)
_NORM_L1_COLUMNS = 1024  # the rows of the blocks of one multiprocessor stay in its L1 up to this length
_NORM_INSTRUCTIONS = 1800.0  # of warps per row
# Per row and, forward, per column, of layer and of RMS norm (H200: 2,600 to 6,100 for rows of 768 to 4,096, 1,200 of
# RMS for 512; gradients of the same rows 1,800 and 1,100).
_RECENT_INSTRUCTIONS = ((1600.0, 1.1), (900.0, 0.6))
# Columns of a load, sums of the threads in loads, and latencies of L2 per load (H200: 7 us for 144 rows of 3,328).
_NORM_VECTOR, _NORM_SUMS, _NORM_LOAD = 4, 5, 1.6


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
        columns = np.array([each.columns for each in operators], dtype=float)
        long = columns > _WARP_SOFTMAX_COLUMNS
        # Rows of a vocabulary fill L2 by themselves (H200: 3.2 readings of 4,096 rows of 50,257).
        whole = chip.sm_count * (chip.max_threads // _SOFTMAX_THREADS) * columns * sizes
        vocabulary = (columns >= _SOFTMAX_VOCABULARY) & np.array([each.direction == "forward" for each in operators])
        in_flight = np.where(vocabulary, np.maximum(in_flight, whole), in_flight)
        again = np.where(long, _SOFTMAX_AGAIN.readings(in_flight, machine), 0.0)
        return _analyse(operators, again, np.zeros(len(operators)), machine)

    def covers(self, operator: Softmax) -> bool:
        return operator.dtype == "float32" and operator.direction == "forward"

    def grade(self, operator: Softmax) -> Grade:
        if operator.direction != "forward":
            return "kind"
        return "measured" if self.covers(operator) else "dtype"


class NormRows(Family[Normalization]):
    """Layer and RMS normalisation; batch norm is in :mod:`costmodel.gpu.families.normalization`."""

    name = "normalization"
    clock_bound = False

    def analyse(self, operators: Sequence[Normalization], machine: Machine) -> KernelAnalysis:
        chip = machine.chip()
        columns = np.array([each.columns for each in operators], dtype=float)
        sizes = np.array([element_bytes(each.dtype) for each in operators], dtype=float)
        in_flight = chip.sm_count * (chip.max_threads // _NORM_THREADS) * columns * sizes
        again = self._again(operators, in_flight, machine)
        rows = np.array([each.rows for each in operators])
        issue = rows / chip.sm_count * self._instructions(operators) / (chip.schedulers * chip.clock_hz)
        return _analyse(operators, again, issue, machine)

    def _again(self, operators: Sequence[Normalization], in_flight: np.ndarray, machine: Machine) -> np.ndarray:
        """Repeated reads of the input from DRAM, where rows of ``in_flight`` bytes are read at a time."""
        columns = np.array([each.columns for each in operators], dtype=float)
        kept = np.where(columns <= _NORM_L1_COLUMNS, 0.0, _NORM_AGAIN.readings(in_flight, machine))
        return np.array([_norm_again(each, layer) for each, layer in zip(operators, kept, strict=True)])

    def _instructions(self, operators: Sequence[Normalization]) -> np.ndarray:
        """Instructions of warps per row."""
        return np.full(len(operators), _NORM_INSTRUCTIONS)

    def covers(self, operator: Normalization) -> bool:
        forward = operator.direction == "forward"
        return operator.dtype == "float32" and forward and operator.kind == "layer_norm"

    def grade(self, operator: Normalization) -> Grade:
        if operator.direction != "forward" or operator.kind != "layer_norm":
            return "kind"
        return "measured" if self.covers(operator) else "dtype"


class RecentNormRows(NormRows):
    """Layer and RMS norm on Hopper and its successor, whose times tables of older chips do not describe: PyTorch's
    kernels of 128 threads a row, four columns each (``vectorized_layer_norm_kernel``), unless rows are odd.

    Twice over the row, load after load, then the sums of the threads; rows that fill the chip hide it.
    """

    name = "normalization-recent"

    def analyse(self, operators: Sequence[Normalization], machine: Machine) -> KernelAnalysis:
        plain, chip, floor = super().analyse(operators, machine), machine.chip(), kernel_floor(machine)
        columns = np.array([each.columns for each in operators], dtype=float)
        rows = np.array([each.rows for each in operators], dtype=float)
        vector = np.where(columns % _NORM_VECTOR == 0, _NORM_VECTOR, 1)
        loads = 2 * np.ceil(columns / vector / _NORM_THREADS) + _NORM_SUMS
        waves = np.maximum(rows / (chip.sm_count * (chip.max_threads // _NORM_THREADS)), 1.0)
        chain = waves * loads * _NORM_LOAD * latency(machine, 0)
        waiting = np.maximum(plain.terms["memory:DRAM"], chain)
        terms = {**plain.terms, "memory:DRAM": waiting}
        return KernelAnalysis(np.maximum(plain.seconds, chain + floor), terms, plain.features)

    def _again(self, operators: Sequence[Normalization], in_flight: np.ndarray, machine: Machine) -> np.ndarray:
        backward = np.array([each.direction == "backward" for each in operators])
        twice = np.minimum(_NORM_AGAIN.readings(2 * in_flight, machine), _NORM_BACKWARD_AGAIN)
        return np.where(backward, twice, super()._again(operators, in_flight, machine))

    def _instructions(self, operators: Sequence[Normalization]) -> np.ndarray:
        return np.array([_recent_instructions(each) for each in operators])

    def covers(self, operator: Normalization) -> bool:
        """False: no table holds them."""
        return False


def _recent_instructions(operator: Normalization) -> float:
    fixed, each = _RECENT_INSTRUCTIONS[operator.kind == "rms_norm"]
    return fixed + each * operator.columns if operator.direction == "forward" else fixed


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


ImageOperator = Normalization | Pooling
# Bytes that a thread of ``max_pool_backward_nchw`` spills and reads back, as reported by ptxas of CUDA 11.8, 12.8 and
# 13.0 for the kernel of PyTorch 1.11 to 2.9 (64-bit sizes), in FP32 and FP16: 32 + 40 for sm_60, 44 + 44 for sm_70, 52
# + 52 for sm_80, nothing for sm_75, sm_86, sm_89 (more registers per thread), sm_90, sm_100 and sm_120. With them
# recorded ResNet-50 steps are predicted on both chips (V100 1.11 ms, A100 0.60) at the published bandwidths of their
# L2.
_SPILLED_BYTES = {"pascal": 72, "volta": 88, "ampere": 104}
_SPILLING_THREADS = 2048
_WARP = 32
# Bytes in flight of the 512 threads of such a block: 16 a thread forward, what is measured backward. From xwang233's
# times in FP16 on A100 and V100 (GitHub, code-snippet, batchnorm3d-channels-last, cuDNN 8.2) of 8 channels of 1.4 to 22
# million values each; 8 to 64 channels are within 21 %, and were predicted at 0.33 to 0.55 of what was measured.
_CHANNEL_THREADS = 512
_IN_FLIGHT = {"forward": 8192, "backward": 5200}
# Additional reads of the input: for the statistics; of x and dy by the kernel of the input's gradient.
_STATISTICS_AGAIN, _BACKWARD_AGAIN = 1.0, 1.0


class ImageKernels(Family[ImageOperator]):
    """Batch norm and pooling, forward and backward."""

    name = "image"
    clock_bound = False

    def __init__(self, shares: InvertedShares | None = None) -> None:
        self._shares = shares

    def analyse(self, operators: Sequence[ImageOperator], machine: Machine) -> KernelAnalysis:
        shares = self._shares or shares_of(machine)
        plain = plain_image_analysis(operators, machine)
        if machine.chip().architecture in MEASURED_KERNELS:
            plain = _measured_image_analysis(operators, plain, machine)
        scaled = shares.scaled(plain, [image_class(each) for each in operators], machine)
        seconds = scaled.seconds + _waiting_seconds(operators, scaled.seconds - kernel_floor(machine), machine)
        terms = {**scaled.terms, "memory:DRAM": scaled.terms["memory:DRAM"] + seconds - scaled.seconds}
        return KernelAnalysis(seconds, terms, {**scaled.features, "seconds": safe_log2(seconds)})

    def covers(self, operator: ImageOperator) -> bool:
        """False: no table holds single kernels of these kinds."""
        return False


def plain_image_analysis(operators: Sequence[ImageOperator], machine: Machine) -> KernelAnalysis:
    """Analysis of ``operators`` before any factor, without waiting."""
    traffic = np.array([_traffic(each) for each in operators], dtype=float)
    flops = np.array([each.flops for each in operators], dtype=float)
    spilled = np.array([_spilled(each, machine) for each in operators], dtype=float)
    return memory_analysis(traffic, flops, machine, [_blocks(each) for each in operators], spilled)


# NCHW on Hopper, from traces of H200 (cuDNN 9.19, FP32). Batch norm gives a block to a channel, and a multiprocessor
# one block at a time, forward, or two: a round takes a fixed time and that of the bytes in flight. Channels of few
# values stay in registers, so that they are read once. ResNet-50's 21 shapes forward are within 17 %, where DRAM
# alone says 0.44 to 0.8 of them.
_ROUND_SECONDS, _KEPT_VALUES = 1.2e-6, {"forward": 16384, "backward": 16383}
_ROUND_BYTES, _RESIDENT = {"forward": 12288, "backward": 7700}, {"forward": 1, "backward": 2}
_KEPT_ROUND_BYTES = 12288
# Pooling by PyTorch's kernels divides for every place: instructions of a result, and of each element of its window.
_POOLING_INSTRUCTIONS = {
    ("average", "forward"): (350, 0),
    ("average", "backward"): (580, 0),
    ("max", "forward"): (270, 22),
    ("max", "backward"): (330, 0),
}


def _measured_image_analysis(
    operators: Sequence[ImageOperator], plain: KernelAnalysis, machine: Machine
) -> KernelAnalysis:
    """``plain`` where a round of blocks, or the instructions of a result, take longer than the bytes."""
    floor = kernel_floor(machine)
    chains = np.array([_rounds_seconds(each, machine) for each in operators])
    issue = np.array([_pooling_seconds(each, machine) for each in operators])
    streams = np.maximum(plain.seconds - floor, chains)
    terms = {**plain.terms, "memory:DRAM": np.maximum(plain.terms["memory:DRAM"], chains), "issue": issue}
    return KernelAnalysis(np.maximum(streams, issue) + floor, terms, plain.features)


def _rounds_seconds(operator: ImageOperator, machine: Machine) -> float:
    """Seconds of the rounds of blocks of batch norm in NCHW; 0 for other kernels."""
    if not np.isfinite(_blocks(operator)) or not isinstance(operator, Normalization):
        return 0.0
    size, backward = element_bytes(operator.dtype), operator.direction == "backward"
    kept = operator.rows <= _KEPT_VALUES[operator.direction]
    tensors = (2 if backward else 1) * (1 if kept else 2) + 1
    in_flight = _KEPT_ROUND_BYTES if kept else _ROUND_BYTES[operator.direction]
    resident = 1 if kept else _RESIDENT[operator.direction]
    rounds = np.ceil(operator.columns / (machine.chip().sm_count * resident))
    waits = tensors * operator.rows * size / in_flight * latency(machine, 1)
    return float(rounds * (_ROUND_SECONDS + waits))


def _pooling_seconds(operator: ImageOperator, machine: Machine) -> float:
    """Seconds of instructions of pooling; 0 for normalisation."""
    if not isinstance(operator, Pooling):
        return 0.0
    fixed, each = _POOLING_INSTRUCTIONS[operator.kind, operator.direction]
    forward = operator.direction == "forward"
    places = operator.out_height * operator.out_width if forward else operator.height * operator.width
    count = operator.batch * operator.channels * places * (fixed + each * operator.kernel[0] * operator.kernel[1])
    chip = machine.chip()
    return float(count / (chip.sm_count * chip.schedulers * _WARP * chip.clock_hz))


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
    if isinstance(operator, Normalization) and operator.training and not operator.channels_last and not operator.apart:
        return float(operator.columns)
    return np.inf


def _waiting_seconds(operators: Sequence[ImageOperator], streaming: np.ndarray, machine: Machine) -> np.ndarray:
    """Seconds that waiting for memory adds to ``streaming``, the seconds of the bytes, in norms ``apart``."""
    chip = machine.chip()
    resident = chip.sm_count * (chip.max_threads // _CHANNEL_THREADS)
    added = np.zeros(len(operators))
    for place, operator in enumerate(operators):
        if not isinstance(operator, Normalization) or not operator.apart:
            continue
        if not operator.takes_statistics or operator.channels_last:
            continue
        chain = _traffic(operator) / min(operator.columns, resident) * latency(machine, 1)
        waits, streams = chain / _IN_FLIGHT[operator.direction], float(streaming[place])
        power = max(min(operator.columns, resident) / chip.sm_count, 1.0)
        longer, shorter = max(waits, streams), min(waits, streams)
        added[place] = longer * (1 + (shorter / longer) ** power) ** (1 / power) - streams
    return added


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
