"""Cycles of the loop nests of kernels: issue slots of the register tiles and exposed cache traffic.

These are the terms of every template's analytic cost, which orders its space. They need no measurement and no
information about the machine except its vectors and caches; the learned model of the tuner corrects them. Costs are
cycles of a core that issues two vector FMAs and two vector loads per cycle, as every AVX2 and AVX-512 server core since
Haswell does; only their ratios are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from costmodel.operators.layers import Conv2d
from schedules.contract.cpu_target import CpuTarget
from schedules.loops.column_words import quad_plan, sums_pairs, sums_quads
from schedules.loops.dot_products import BFLOAT16, FLOAT32, INT8, dot_product
from schedules.loops.register_tiling import RegisterTile

PORTS = 2.0
# Cycles of filling and draining the pipeline of a tile: a mispredicted loop exit and the dependent stores.
TILE_CYCLES = 24.0
# Issue slots, in multiples of a product, of storing an operand or reading it again.
SPILL_SLOTS = 1.0
# Share of cache traffic that out-of-order execution and hardware prefetchers do not hide.
_EXPOSED = 0.35
_L2_BYTES_PER_CYCLE = 32.0
_L3_BYTES_PER_CYCLE = 8.0
# Cycles of starting a parallel task.
_TASK_CYCLES = 600.0


@dataclass(frozen=True)
class EqualTiles:
    """``count`` register tiles of ``width`` columns."""

    width: int
    count: int


def equal_tiles(extent: int, width: int) -> Iterator[EqualTiles]:
    """Yield ``extent`` columns in tiles of ``width``, and the narrower tile of the rest."""
    full, rest = divmod(extent, width)
    if full:
        yield EqualTiles(width, full)
    if rest:
        yield EqualTiles(rest, 1)


@dataclass(frozen=True)
class TapRow:
    """Taps of a window along a row."""

    kernel: int
    stride: int
    dilation: int

    @staticmethod
    def of(conv: Conv2d) -> TapRow:
        """Return the taps of a row of ``conv``."""
        return TapRow(conv.kernel[1], conv.stride[1], conv.dilation[1])

    def spilled(self, cpu: CpuTarget, out_blocks: int, columns: int) -> int:
        """Return the number of operands of a tile that do not fit in the registers with its sums and weights: the
        compiler reads a column once for all taps that multiply it, and keeps it from the first of them to the last. 0
        if no two taps read the same column.
        """
        read = {column * self.stride + tap * self.dilation for column in range(columns) for tap in range(self.kernel)}
        if len(read) == columns * self.kernel:
            return 0
        return max(0, out_blocks * columns + out_blocks + len(read) - cpu.registers)


def dense_cycles(
    cpu: CpuTarget,
    tile: RegisterTile,
    extent: int,
    depth: int,
    *,
    data_bytes: float,
    weight_bytes: float,
    dtype: str = "float32",
    taps: TapRow | None = None,
) -> float:
    """Return the cycles of one pass of ``tile.out_blocks`` output blocks over ``extent`` columns, ``depth``
    multiply-adds each of values stored as ``dtype``.

    ``data_bytes``: read by the pass; ``weight_bytes``: of these output blocks, read again for every tile; ``taps``: of
    a row of the window, if the layer has one. Each spilled operand takes a slot of every step: it is stored once for a
    row of taps, and read again for each of the others. This is not counted for float32, for which the shipped ranking
    was trained on costs without it.
    """
    dot, cycles = dot_product(dtype), 0.0
    for tiles in equal_tiles(extent, tile.columns):
        sums = tile.out_blocks * tiles.width
        spilled = taps.spilled(cpu, tile.out_blocks, tiles.width) if taps and dtype != "float32" else 0
        step = max((sums + SPILL_SLOTS * spilled) / PORTS, (tile.out_blocks + tiles.width) / PORTS, dot.latency)
        per_tile = dot.steps(depth) * (step + 0.5 / tile.unroll) + 1.5 * sums + TILE_CYCLES
        per_tile += exposed_traffic(cpu, weight_bytes, weight_bytes + data_bytes * tiles.width / extent)
        cycles += tiles.count * per_tile
    return cycles + exposed_traffic(cpu, data_bytes, data_bytes + weight_bytes)


def depthwise_cycles(
    conv: Conv2d, columns: int, rows: int, taps: int | None = None, source: str | None = None
) -> float:
    """Return the cycles of one channel block for ``rows`` output rows in tiles of ``columns``, ``taps`` of a row at a
    time.

    ``source``: dtype of the input, if not that of ``conv``.
    """
    narrow = (source or conv.dtype) != "float32"
    if sums_quads(conv):
        return rows * _quad_cycles(conv, columns)
    paired = narrow and taps is None and sums_pairs(conv)
    # A vector of a narrow dtype takes two operations to become FP32, one to be paired with the next column.
    preparing = (1 if paired else 2) if narrow else 0
    kernel_height, kernel_width = conv.kernel
    steps = -(-kernel_width // 2) if paired else kernel_width
    latency = (BFLOAT16 if paired else FLOAT32).latency
    parts = -(-kernel_width // (taps or kernel_width))
    cycles = 0.0
    for tiles in equal_tiles(conv.out_width, columns):
        loads = parts * (tiles.width - 1) * conv.stride[1] + kernel_width + kernel_width
        row = max((tiles.width * steps + preparing * loads) / PORTS, loads / PORTS, latency * steps)
        cycles += tiles.count * (kernel_height * row + 1.5 * tiles.width + TILE_CYCLES)
    return rows * cycles


def _quad_cycles(conv: Conv2d, columns: int) -> float:
    """Return the cycles of a row of bytes: two operations make the words that a group of outputs shares."""
    plan, cycles = quad_plan(conv), 0.0
    for tiles in equal_tiles(conv.out_width, columns):
        words = plan.words * -(-tiles.width // plan.outputs)
        row = max((tiles.width * plan.products + 2 * words) / PORTS, INT8.latency * plan.words)
        cycles += tiles.count * (conv.kernel[0] * row + 1.5 * tiles.width + TILE_CYCLES)
    return cycles


def exposed_traffic(cpu: CpuTarget, bytes_moved: float, working_set: float) -> float:
    """Return the exposed cycles of reading ``bytes_moved`` that were last used ``working_set`` bytes ago."""
    if working_set <= 0.6 * cpu.l1_bytes:
        return 0.0
    rate = _L2_BYTES_PER_CYCLE if working_set <= 0.6 * cpu.l2_bytes else _L3_BYTES_PER_CYCLE
    return _EXPOSED * bytes_moved / rate


def parallel_cycles(cpu: CpuTarget, tasks: int, cycles: float) -> float:
    """Return the cycles until the last thread finishes ``tasks`` of ``cycles`` each, divided evenly."""
    return -(-tasks // cpu.threads) * (cycles + (_TASK_CYCLES if tasks > 1 else 0.0))
