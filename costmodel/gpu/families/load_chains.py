"""Chains of loads: kernels whose threads wait for one load after the other, however few bytes there are.

**Reductions** by PyTorch's ``reduce_kernel`` (aten/src/ATen/native/cuda/Reduce.cuh, ``setReduceConfig``): a thread
adds up its values four at a time, each time after a load. Where outputs are few, several blocks share one: each writes
its part, and the last of them adds the parts, one load per row of its threads after the other. So the sum of a matrix's
columns, the gradient of a bias, takes microseconds, and milliseconds from many rows to few columns.

**Scans** along an outer dimension, and **softmax** along one, give a column to a thread (ScanUtils.cuh,
``tensor_kernel_scan_outer_dim``; SoftMax.cu): as many loads, one after the other, as the column is long, times the
passes.

**Multi-tensor kernels** (MultiTensorApply.cuh): a block of 512 threads takes 65,536 elements of one tensor, 2,048 at a
time. A few small tensors leave most multiprocessors idle.

    chain = waves of blocks * loads of a thread * latency,    seconds = |chain, memory|_3 + parts handed over + launch

The latency is that of L2 for data that the previous kernel left there, else that of DRAM. Compared with 321 kernels and
the traces of 17 programs of H200 (lab/bench/measured).
"""

from __future__ import annotations

import math

from costmodel.gpu.families.rates import kernel_floor, latency
from costmodel.machines.machine_records import Machine
from costmodel.operators.device_work import Elementwise, Loss, OptimizerStep, Rearrangement, Reduction
from costmodel.operators.layers import element_bytes

_WARP = 32
_MOST_THREADS, _UNROLLED = 512, 4  # MAX_NUM_THREADS; vt0, and the outputs of a thread where they lie side by side
_LEAST_SPLIT, _MOST_SPLIT = 16, 256  # min_values_per_thread, max_values_per_thread
# Kernels of their own, not ``reduce_kernel``.
_NORM_PARAMETERS = ("norm_parameters", "norm_weight")
_OWN_REDUCTIONS = ("moments", "statistics", "count", *_NORM_PARAMETERS)
# L2 latencies of four loads and the additions and addresses that follow, from H200: 16 to 60 rounds of 0.13 to 0.25 us.
_ROUND = 1.6
_NARROW = 2  # rows of 16 bits: twice as many values at a time (H200: 29 to 57 rounds of four in 3.6 to 10.5 us)
_CHUNK, _CHUNK_STEP = 65536, 512 * 4  # kChunkSize; kBlockSize * kILP
# Instructions per element: of the pieces of the foreach form, and of a fused update with its root and division (H200:
# 1.2 to 1.5 us for 2,048 elements of Adam, 0.45 of a root alone).
_PIECE, _UPDATE = 10, 90
_FUSED = ("adam", "adamw")
# Bytes a cycle that a multiprocessor loads (of 64; 84 GB/s on H200, where 69 and 107 were measured); rows from
# which blocks share the columns.
_LOADED_BYTES, _SPLIT_ROWS = 48, 65536
_GATHERED = 4  # elements of a thread of ``_scatter_gather_elementwise_kernel``: an index each, then the value
_LANES = 128  # a multiprocessor's FP32 lanes since Ampere
# Latencies of DRAM between the parts of a split reduction and their sum: written, fenced, counted (H200: 12 to 19 us
# for gradients of biases whose bytes and rounds take 4 to 10, with the memset of the counters).
_HANDED_OVER = 5


def chain_seconds(operator: object, machine: Machine, warm_bytes: float) -> float:
    """Seconds of the loads of a thread of ``operator``, one after the other, beyond the launch; 0 for kernels that
    stream. ``warm_bytes`` of its traffic are in L2.
    """
    if isinstance(operator, Reduction) and operator.kind not in _OWN_REDUCTIONS:
        return _reduction_seconds(operator, machine, _load_seconds(operator, machine, warm_bytes))[0]
    if isinstance(operator, Reduction) and operator.kind in _NORM_PARAMETERS:
        return _norm_parameters_seconds(operator, machine)
    if isinstance(operator, Loss):
        return _picking_seconds(operator, machine, warm_bytes)
    if isinstance(operator, Elementwise) and operator.chained:
        threads = operator.elements / operator.column
        waves = max(threads / (machine.chip().sm_count * machine.chip().max_threads), 1.0)
        return waves * operator.chained * _load_seconds(operator, machine, warm_bytes)
    if isinstance(operator, Rearrangement) and operator.is_by_element:
        return _GATHERED * 2 * _ROUND * latency(machine, 0)
    if isinstance(operator, OptimizerStep):
        return _multi_tensor_seconds(operator, machine)
    return 0.0


def handing_seconds(operator: object, machine: Machine) -> float:
    """Seconds in which the parts of a split reduction are written, counted and added; 0 for other kernels."""
    if not isinstance(operator, Reduction) or operator.kind in _OWN_REDUCTIONS:
        return 0.0
    return _reduction_seconds(operator, machine, 0.0)[1]


def busy_multiprocessors(operator: Reduction, machine: Machine) -> int:
    """Multiprocessors that have blocks of ``operator``."""
    return min(_reduction_seconds(operator, machine, 0.0)[2], machine.chip().sm_count)


def _load_seconds(operator: Reduction | Elementwise, machine: Machine, warm_bytes: float) -> float:
    """Mean latency of the loads of ``operator``."""
    traffic = operator.read_bytes + operator.write_bytes
    cold = max(traffic - warm_bytes, 0.0) / max(traffic, 1)
    near = latency(machine, 0)
    return near + cold * (latency(machine, 1) - near)


def _reduction_seconds(operator: Reduction, machine: Machine, load: float) -> tuple[float, float, int]:
    """Seconds of the rounds of a thread, whose loads take ``load`` seconds each, and of its block's part after that,
    and the number of blocks.
    """
    chip = machine.chip()
    outputs = max(operator.outputs, 1)
    values = max(operator.elements // outputs, 1)
    wide = 1 if operator.contiguous else math.gcd(outputs, _UNROLLED)
    most = _MOST_THREADS // wide
    across = values if operator.contiguous else max(outputs // wide, 1)
    down = outputs if operator.contiguous else values
    if operator.contiguous and outputs == 1:
        across = max(across // _UNROLLED, 1)
    width, height = _block(across, down, most)
    each = values / width if operator.contiguous else float(values)
    blocks = outputs if operator.contiguous else math.ceil(outputs / wide / width)
    shared = each >= min(height * _LEAST_SPLIT, _MOST_SPLIT)
    if shared:
        each /= height
    else:
        blocks = math.ceil(blocks / height)
    resident = chip.sm_count * max(chip.max_threads // (width * height), 1)
    split = 1
    if shared and each >= _MOST_SPLIT and blocks <= resident:
        split = max(min(math.ceil(resident / blocks), math.ceil(each / _LEAST_SPLIT)), math.ceil(each / _MOST_SPLIT))
    waves = max(blocks * split / resident, 1.0)
    streams = operator.contiguous and not operator.one_by_one
    together = _UNROLLED * (_NARROW if streams and element_bytes(operator.dtype) <= _NARROW else 1)
    seconds = waves * math.ceil(each / split / together) * _ROUND * load
    if split == 1:
        return seconds, 0.0, blocks
    parts = math.ceil(split / (width * height if operator.contiguous else height))
    handed = _HANDED_OVER * latency(machine, 1) + kernel_floor(machine)
    return seconds, handed + parts * _ROUND * latency(machine, 0), blocks * split


def _block(across: int, down: int, most: int) -> tuple[int, int]:
    """Width and height of a block of at most ``most`` threads over ``across`` by ``down`` (``set_block_dimension``)."""
    across, down = (1 << min(each, most).bit_length() - 1 for each in (across, down))
    height = min(down, most // min(across, _WARP))
    return min(across, most // height), height


def _norm_parameters_seconds(operator: Reduction, machine: Machine) -> float:
    """Seconds of the bytes of the blocks, one for 32 columns (``GammaBetaBackwardCUDAKernel``), through one
    multiprocessor each; many rows are split.
    """
    chip = machine.chip()
    columns = operator.outputs / (2 if operator.kind == "norm_parameters" else 1)
    blocks = max(columns / _WARP, 1.0)
    if blocks >= chip.sm_count or operator.elements / 2 / columns >= _SPLIT_ROWS:
        return 0.0
    return operator.read_bytes / blocks / (_LOADED_BYTES * chip.clock_hz)


def _picking_seconds(operator: Loss, machine: Machine, warm_bytes: float) -> float:
    """Seconds of ``nll_loss_forward_reduce_cuda_kernel_2d``: one block, whose threads load a label and then a score of
    each of their rows, from DRAM where the scores do not fit L2; 0 for other losses.
    """
    if operator.kind != "nll" or operator.direction != "forward":
        return 0.0
    threads = 1 << int(min(max(math.log2(max(operator.rows, 1) / _LEAST_SPLIT), 5), 10))
    scores = operator.rows * operator.columns * element_bytes(operator.dtype)
    near = latency(machine, 0)
    load = near + max(1 - warm_bytes / scores, 0.0) * (latency(machine, 1) - near)
    return math.ceil(operator.rows / threads) * _ROUND * load


def _multi_tensor_seconds(operator: OptimizerStep, machine: Machine) -> float:
    chip = machine.chip()
    largest = min(operator.elements / max(operator.tensors, 1), float(_CHUNK))
    blocks = operator.elements / largest
    waves = max(blocks / (chip.sm_count * (chip.max_threads // _MOST_THREADS)), 1.0)
    instructions = _UPDATE if operator.kind in _FUSED else _PIECE
    step = latency(machine, 1) + _CHUNK_STEP * instructions / (_LANES * chip.clock_hz)
    return waves * math.ceil(largest / _CHUNK_STEP) * step
