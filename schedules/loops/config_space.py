"""Configurations of a template: candidates of register tiles and tasks, their analytic cost in cycles, and pruning.

Candidates fit into registers and caches and give a few tasks per thread with little imbalance; every list of them is
deterministic and not empty.

The cost is that of the loop nests: issue slots of the register tiles and exposed cache traffic. It orders a space
without any measurement, depends only on vectors and caches of the machine, and is corrected by the learned model of
the tuner. Costs are cycles of a core that issues two vector FMAs and two vector loads per cycle, as every AVX2 and
AVX-512 server core since Haswell; only their ratios are used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from costmodel.cost_model import Config, ConfigKey, config_key
from costmodel.operators.layers import Conv2d
from schedules.contract.cpu_target import CpuTarget
from schedules.loops.dot_products import BFLOAT16, FLOAT32, INT8, dot_product, quad_plan, sums_pairs, sums_quads

# FMA units have a latency of 4 and 2 ports: with fewer accumulators they are idle.
_LATENCY_HIDING = 8
# Registers for the inputs in flight of a depthwise tile.
_INPUTS = 4
# Numbers of unrolled steps of a reduction in the inner loop.
UNROLLS = (2, 4, 8)
# Maximum number of unrolled taps of a row times steps of a register tile: that of a 7x7 in eight steps. A window of
# 3x39 in eight steps took 21 s to compile, for a loop that needs only a few unrolled steps to hide its overhead.
_WRITTEN_OUT = 56


class RegisterTile(NamedTuple):
    """Sums of ``out_blocks`` output blocks x ``columns`` in registers, ``unroll`` steps of the sum unrolled."""

    out_blocks: int
    columns: int
    unroll: int


def register_tiles(
    out_blocks: int, extent: int, cpu: CpuTarget, most: int = 8, sizes: Collection[int] | None = None
) -> list[tuple[int, int]]:
    """(Output blocks, columns) whose accumulators, weights and one broadcast input fit into the registers; never empty.

    ``sizes``: allowed numbers of output blocks, including 1 (None: all up to ``most``).
    """
    found: list[tuple[int, int]] = []
    for size in range(1, min(most, out_blocks) + 1):
        if sizes is not None and size not in sizes:
            continue
        widest = (cpu.registers - 1) // size - 1
        found += [(size, width) for width in tile_widths(extent, widest)]
    busy = [tile for tile in found if tile[0] * tile[1] >= _LATENCY_HIDING]
    return busy or found


def tile_widths(extent: int, widest: int) -> list[int]:
    """The widest tile, the widest that divides ``extent``, and the widest balanced one."""
    if widest < 1:
        return []
    widest = min(widest, extent)
    divisor = max(width for width in range(1, widest + 1) if extent % width == 0)
    balanced = -(-extent // -(-extent // widest))
    return sorted({width for width in (widest, divisor, balanced) if 2 * width >= widest}, reverse=True)


def depthwise_widths(conv: Conv2d, cpu: CpuTarget, taps: int | None = None) -> list[int]:
    """Columns of the depthwise register tile, with ``taps`` (None: those of one row) and inputs in flight in
    registers.
    """
    widest = max(1, cpu.registers - (taps or conv.kernel[1]) - _INPUTS)
    return sorted({*tile_widths(conv.out_width, widest), *tile_widths(conv.out_width, max(1, widest // 2))})


def window_unrolls(columns: int, unrolls: Sequence[int] = UNROLLS) -> list[int]:
    """Allowed elements of ``unrolls``, steps over input channels with ``columns`` taps of a row each; never empty."""
    return [unroll for unroll in unrolls if unroll * columns <= _WRITTEN_OUT] or [1]


def row_blocks(height: int) -> list[int]:
    """Row tiles: powers of two, divisors of the height, and the whole image."""
    small = {rows for rows in (1, 2, 4, 8, 14, 16, 28) if rows <= height}
    return sorted({rows for rows in small if height % rows == 0 or rows <= 4} | {height, -(-height // 2)})


# Drop a division with more work, by overlapping tiles and groups, than this multiple.
_MAX_WASTE = 1.25
# Below this number of flops a parallel region may cost more than it saves.
_SMALL_FLOPS = 4_000_000


def task_splits(first: int, second: int, cpu: CpuTarget, small: bool = False) -> Iterator[tuple[int, int]]:
    """Parallel tasks along two axes of ``first`` and ``second`` units: a few per thread, little imbalance.

    With fewer units than threads, as many tasks as possible. ``small``: include a single task.
    """
    counts = sorted({factor * cpu.threads for factor in (1, 2, 4)} | ({1} if small or cpu.threads == 1 else set()))
    found = []
    for total in counts:
        for left in range(1, total + 1):
            right = total // left
            if left * right == total and left <= first and right <= second:
                waste = (-(-first // left) * left / first) * (-(-second // right) * right / second)
                found.append((waste, left, right))
    if first * second < cpu.threads:
        found.append((1.0, first, second))
    found = found or [(1.0, *_most_tasks(first, second, cpu.threads))]
    limit = max(_MAX_WASTE, min(found)[0])
    yield from dict.fromkeys((left, right) for waste, left, right in found if waste <= limit)


def _most_tasks(first: int, second: int, threads: int) -> tuple[int, int]:
    """Division with the most tasks, up to ``threads``."""
    splits = ((left, min(second, threads // left)) for left in range(1, min(first, threads) + 1))
    return max(splits, key=lambda split: split[0] * split[1])


def is_small(flops: int) -> bool:
    """True if a parallel region may cost more than it saves."""
    return flops < _SMALL_FLOPS


PORTS = 2.0
# Pipeline fill and drain of a tile: a mispredicted loop exit and the dependent stores.
TILE_CYCLES = 24.0
# Issue slots of a spilled operand per product, for storing or reloading it.
SPILL_SLOTS = 1.0
# The costs are features of the shipped rankings: after a change of a constant, `python -m lab.records train`.
# Share of cache traffic not hidden by out-of-order execution and hardware prefetchers.
_EXPOSED = 0.35
_L2_BYTES_PER_CYCLE = 32.0
_L3_BYTES_PER_CYCLE = 8.0
# Approximate cost of starting a parallel task.
_TASK_CYCLES = 600.0


@dataclass(frozen=True)
class EqualTiles:
    """``count`` register tiles of ``width`` columns."""

    width: int
    count: int


def equal_tiles(extent: int, width: int) -> Iterator[EqualTiles]:
    """Split ``extent`` columns into tiles of ``width``, and a narrower remainder."""
    full, rest = divmod(extent, width)
    if full:
        yield EqualTiles(width, full)
    if rest:
        yield EqualTiles(rest, 1)


@dataclass(frozen=True)
class TapRow:
    """The taps of a window along a row."""

    kernel: int
    stride: int
    dilation: int

    @staticmethod
    def of(conv: Conv2d) -> TapRow:
        """Taps along a row of ``conv``."""
        return TapRow(conv.kernel[1], conv.stride[1], conv.dilation[1])

    def spilled(self, cpu: CpuTarget, out_blocks: int, columns: int) -> int:
        """Number of operands of a tile that do not fit into registers besides its sums and weights.

        The compiler loads a column once for all taps that multiply it, and keeps it from the first to the last. 0 if no
        two taps read the same column.
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
    """Cycles of one pass of ``tile.out_blocks`` output blocks over ``extent`` columns, with ``depth`` multiply-adds
    each.

    ``dtype``: of stored values; ``data_bytes``: read by the pass; ``weight_bytes``: of these output blocks, read again
    for every tile; ``taps``: along a row of the window, if there is one. A spilled operand takes one issue slot per tap
    of a row: a store at the first, a reload at each other. Not counted for float32, where the
    shipped ranking was trained on costs without it.
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
    """Cycles of one channel block for ``rows`` output rows in tiles of ``columns``, ``taps`` of a row at a time.

    ``source``: dtype of the input, if not that of ``conv``.
    """
    narrow = (source or conv.dtype) != "float32"
    if sums_quads(conv):
        return rows * _quad_cycles(conv, columns)
    paired = narrow and taps is None and sums_pairs(conv)
    # A narrow vector needs two operations for conversion to FP32, or one for pairing with its neighbour.
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
    """Cycles of a row of bytes: two operations create the words shared by a group of outputs."""
    plan, cycles = quad_plan(conv), 0.0
    for tiles in equal_tiles(conv.out_width, columns):
        words = plan.words * -(-tiles.width // plan.outputs)
        row = max((tiles.width * plan.products + 2 * words) / PORTS, INT8.latency * plan.words)
        cycles += tiles.count * (conv.kernel[0] * row + 1.5 * tiles.width + TILE_CYCLES)
    return cycles


def exposed_traffic(cpu: CpuTarget, bytes_moved: float, working_set: float) -> float:
    """Exposed cycles of reading ``bytes_moved`` that were last used ``working_set`` bytes ago."""
    if working_set <= 0.6 * cpu.l1_bytes:
        return 0.0
    rate = _L2_BYTES_PER_CYCLE if working_set <= 0.6 * cpu.l2_bytes else _L3_BYTES_PER_CYCLE
    return _EXPOSED * bytes_moved / rate


def parallel_cycles(cpu: CpuTarget, tasks: int, cycles: float) -> float:
    """Cycles until the last thread finishes ``tasks`` of ``cycles`` each, evenly distributed."""
    return -(-tasks // cpu.threads) * (cycles + (_TASK_CYCLES if tasks > 1 else 0.0))


# The analytic cost is approximate: drop only candidates above this multiple of the smallest cost.
_FAR = 2.0


def cheapest_first(configs: Iterable[Config], cost: Callable[[Config], float]) -> tuple[Config, ...]:
    """Distinct configurations, the cheapest first; those far from the cheapest are dropped. Empty if ``configs`` is."""
    seen: dict[ConfigKey, Config] = {}
    for config in configs:
        seen.setdefault(config_key(config), config)
    costs = {key: cost(config) for key, config in seen.items()}
    limit = _FAR * min(costs.values(), default=0.0)
    kept = sorted((value, key) for key, value in costs.items() if value <= limit)
    return tuple(seen[key] for _, key in kept)
