"""Knobs and their legal values: pruned by registers, caches, parallel extent and work done twice.

Every function returns a deterministic, non-empty tuple of configurations, the most promising by
:mod:`schedules.ordering` first; the tuner's cost model ranks them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import product
from typing import Literal

from costmodel.operators import Conv2d, Dense, FusedConvs, Pool2d
from schedules import ordering
from schedules.layout import blocks
from schedules.ordering import ring_rows, source_rows, window_steps
from schedules.target import CpuTarget
from schedules.template import Config

# FMA units have a latency of 4 and 2 ports: fewer accumulators than this leave them idle.
_LATENCY_HIDING = 8
# Work of overlapping tiles and groups that may be done twice before a configuration is dropped.
_MAX_WASTE = 1.25
# The ordering is a guess: only what it puts this far behind is given up unmeasured.
_FAR = 2.0
_UNROLLS = (2, 4, 8)


def register_tiles(
    out_blocks: int, extent: int, cpu: CpuTarget, most: int = 8, sizes: Collection[int] | None = None
) -> list[tuple[int, int]]:
    """(output blocks, columns) whose accumulators, weights and one broadcast input fit the registers; never empty.

    ``sizes``: the numbers of output blocks that a tile may have, 1 among them (``None``: all up to ``most``).
    """
    found: list[tuple[int, int]] = []
    for size in range(1, min(most, out_blocks) + 1):
        if sizes is not None and size not in sizes:
            continue
        widest = (cpu.registers - 1) // size - 1
        found += [(size, width) for width in _widths(extent, widest)]
    busy = [tile for tile in found if tile[0] * tile[1] >= _LATENCY_HIDING]
    return busy or found


def _widths(extent: int, widest: int) -> list[int]:
    """The widest tile, the widest that divides ``extent``, and the widest balanced one."""
    if widest < 1:
        return []
    widest = min(widest, extent)
    divisor = max(width for width in range(1, widest + 1) if extent % width == 0)
    balanced = -(-extent // -(-extent // widest))
    return sorted({width for width in (widest, divisor, balanced) if 2 * width >= widest}, reverse=True)


def task_splits(first: int, second: int, cpu: CpuTarget, small: bool = False) -> Iterator[tuple[int, int]]:
    """Parallel tasks along two axes of ``first`` and ``second`` units: a few per thread, little imbalance.

    Where there are fewer units than threads, as many tasks as there can be.
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
    """The split into most tasks that is none of more than ``threads``."""
    splits = ((left, min(second, threads // left)) for left in range(1, min(first, threads) + 1))
    return max(splits, key=lambda split: split[0] * split[1])


def work_split(config: Config, cpu: CpuTarget) -> Literal["channels", "pixels", "both"]:
    """By what the threads share the output of a kernel: each takes consecutive tasks, pixels counted fastest.

    A kernel that splits otherwise than the one before it reads what another core has in its cache.
    """
    channel_tasks = config.get("channel_tasks", 1)
    if channel_tasks == 1:
        return "pixels"
    return "channels" if channel_tasks % cpu.threads == 0 else "both"


def _ordered(configs: Iterable[Config], cost: Callable[[Config], float]) -> tuple[Config, ...]:
    """Distinct configurations, the cheapest first; those far from the cheapest are dropped."""
    seen: dict[tuple[tuple[str, int], ...], Config] = {}
    for config in configs:
        seen.setdefault(tuple(sorted(config.items())), config)
    costs = {key: cost(config) for key, config in seen.items()}
    limit = _FAR * min(costs.values(), default=0.0)
    kept = sorted((value, key) for key, value in costs.items() if value <= limit)
    return tuple(seen[key] for _, key in kept)


def _small(flops: int) -> bool:
    """So little work that a parallel region may cost more than it saves."""
    return flops < 4_000_000


def pointwise(conv: Conv2d, cpu: CpuTarget) -> tuple[Config, ...]:
    pixels = conv.height * conv.width
    count = blocks(conv.out_channels, cpu.lanes)
    in_bytes = blocks(conv.in_channels, cpu.lanes) * cpu.lanes * 4

    def candidates() -> Iterator[Config]:
        for (size, width), unroll in product(register_tiles(count, pixels, cpu), _UNROLLS):
            for pixel_block in _pixel_blocks(pixels, width, in_bytes, cpu):
                groups, tiles = -(-count // size), -(-pixels // pixel_block)
                for channel_tasks, pixel_tasks in task_splits(groups, tiles, cpu, _small(conv.flops)):
                    yield {
                        "out_blocks": size,
                        "columns": width,
                        "unroll": unroll,
                        "pixel_block": pixel_block,
                        "channel_tasks": channel_tasks,
                        "pixel_tasks": pixel_tasks,
                    }

    return _ordered(candidates(), lambda config: ordering.pointwise(conv, config, cpu))


def _pixel_blocks(pixels: int, width: int, in_bytes: int, cpu: CpuTarget) -> list[int]:
    """Pixels per pass over the weights: all, one share per thread, and what L1 and L2 hold."""
    found = {pixels, -(-pixels // cpu.threads)}
    for capacity in (cpu.l1_bytes // 2, cpu.l2_bytes // 4):
        fitting = max(1, min(pixels, capacity // in_bytes) // width) * width
        # Even blocks: the last one would overlap its neighbour otherwise.
        count = -(-pixels // min(fitting, pixels))
        share = -(-pixels // count)
        found.add(min(pixels, -(-share // width) * width))
    return sorted(found)


def depthwise(conv: Conv2d, cpu: CpuTarget) -> tuple[Config, ...]:
    count = blocks(conv.in_channels, cpu.lanes)

    def candidates() -> Iterator[Config]:
        for columns in depthwise_columns(conv, cpu):
            for channel_tasks, row_tasks in task_splits(count, conv.out_height, cpu, _small(conv.flops)):
                yield {"columns": columns, "channel_tasks": channel_tasks, "row_tasks": row_tasks}

    return _ordered(candidates(), lambda config: ordering.depthwise(conv, config, cpu))


def depthwise_columns(conv: Conv2d, cpu: CpuTarget) -> list[int]:
    """Columns of the depthwise register tile: sums, taps of one row and the inputs in flight."""
    widest = max(1, cpu.registers - conv.kernel[1] - 4)
    return sorted({*_widths(conv.out_width, widest), *_widths(conv.out_width, max(1, widest // 2))})


def conv2d(conv: Conv2d, cpu: CpuTarget) -> tuple[Config, ...]:
    count = blocks(conv.out_channels, cpu.lanes)

    sizes = [size for size in range(1, 9) if _shares_window(conv, size, cpu.lanes)]

    def candidates() -> Iterator[Config]:
        for (size, width), unroll in product(register_tiles(count, conv.out_width, cpu, sizes=sizes), _UNROLLS):
            for rows in row_blocks(conv.out_height):
                groups, bands = -(-count // size), -(-conv.out_height // rows)
                for channel_tasks, row_tasks in task_splits(groups, bands, cpu, _small(conv.flops)):
                    yield {
                        "out_blocks": size,
                        "columns": width,
                        "unroll": unroll,
                        "rows": rows,
                        "channel_tasks": channel_tasks,
                        "row_tasks": row_tasks,
                    }

    return _ordered(candidates(), lambda config: ordering.conv2d(conv, config, cpu))


def _shares_window(conv: Conv2d, size: int, lanes: int) -> bool:
    """Whether ``size`` output blocks of a grouped convolution read the same input blocks."""
    per_group = conv.out_channels // conv.groups
    return conv.groups == 1 or size == 1 or per_group % (lanes * size) == 0


def row_blocks(height: int) -> list[int]:
    """Row tiles: powers of two, the divisors of the height and the whole image."""
    small = {rows for rows in (1, 2, 4, 8, 14, 16, 28) if rows <= height}
    return sorted({rows for rows in small if height % rows == 0 or rows <= 4} | {height, -(-height // 2)})


def depthwise_pointwise(fused: FusedConvs, cpu: CpuTarget) -> tuple[Config, ...]:
    depthwise_conv, pointwise_conv = fused.convs
    count = blocks(pointwise_conv.out_channels, cpu.lanes)
    row_bytes = pointwise_conv.width * blocks(pointwise_conv.in_channels, cpu.lanes) * cpu.lanes * 4
    height, width = pointwise_conv.height, pointwise_conv.width

    def candidates() -> Iterator[Config]:
        for rows in fitting_rows(row_blocks(height), row_bytes, cpu):
            for (size, columns), unroll in product(register_tiles(count, rows * width, cpu), _UNROLLS):
                groups, bands = -(-count // size), -(-height // rows)
                splits = [*task_splits(groups, bands, cpu, _small(fused.flops))]
                if bands < cpu.threads < 2 * bands:
                    splits.append((1, bands))  # most threads busy, and nothing done twice
                for channel_tasks, row_tasks in dict.fromkeys(splits):
                    if depthwise_conv.flops * channel_tasks > 0.5 * fused.flops and channel_tasks > 1:
                        continue
                    for depthwise_width in depthwise_columns(depthwise_conv, cpu)[-2:]:
                        yield {
                            "out_blocks": size,
                            "columns": columns,
                            "unroll": unroll,
                            "rows": rows,
                            "depthwise_columns": depthwise_width,
                            "channel_tasks": channel_tasks,
                            "row_tasks": row_tasks,
                        }

    # An image of few rows, whose depthwise part is most of the work, cannot be shared without doing that twice.
    return _ordered(candidates(), lambda config: ordering.depthwise_pointwise(fused, config, cpu)) or (
        _smallest(pointwise_conv, depthwise_conv, cpu),
    )


def fitting_rows(rows: list[int], row_bytes: int, cpu: CpuTarget) -> list[int]:
    """Row tiles whose intermediate stays in half of L2; at least the smallest."""
    return [count for count in rows if count * row_bytes <= cpu.l2_bytes // 2] or rows[:1]


def pointwise_depthwise(fused: FusedConvs, cpu: CpuTarget) -> tuple[Config, ...]:
    pointwise_conv, depthwise_conv = fused.convs
    count = blocks(pointwise_conv.out_channels, cpu.lanes)
    height = depthwise_conv.out_height

    def candidates() -> Iterator[Config]:
        for rows in row_blocks(height):
            in_rows = source_rows(depthwise_conv, rows)
            waste = in_rows * -(-height // rows) / depthwise_conv.height
            for (size, columns), unroll in product(
                register_tiles(count, in_rows * pointwise_conv.width, cpu), _UNROLLS
            ):
                tile_bytes = in_rows * pointwise_conv.width * size * cpu.lanes * 4
                if (waste > 1.6 and rows < height) or tile_bytes > cpu.l2_bytes // 2:
                    continue
                groups, bands = -(-count // size), -(-height // rows)
                for channel_tasks, row_tasks in task_splits(groups, bands, cpu, _small(fused.flops)):
                    for depthwise_width in depthwise_columns(depthwise_conv, cpu)[-2:]:
                        yield {
                            "out_blocks": size,
                            "columns": columns,
                            "unroll": unroll,
                            "rows": rows,
                            "depthwise_columns": depthwise_width,
                            "channel_tasks": channel_tasks,
                            "row_tasks": row_tasks,
                        }

    return _ordered(candidates(), lambda config: ordering.pointwise_depthwise(fused, config, cpu)) or (
        _smallest(pointwise_conv, depthwise_conv, cpu),
    )


def sliding_window(fused: FusedConvs, cpu: CpuTarget) -> tuple[Config, ...]:
    expand, depthwise_conv, project = fused.convs
    wide, outs = blocks(expand.out_channels, cpu.lanes), blocks(project.out_channels, cpu.lanes)
    height = depthwise_conv.out_height
    columns = depthwise_columns(depthwise_conv, cpu)[-2:]

    def resident(rows: int) -> int:
        pixels = ring_rows(depthwise_conv, rows) * expand.out_width + rows * project.width
        return pixels * wide * cpu.lanes * 4

    def candidates() -> Iterator[Config]:
        steps = [rows for rows in (1, 2, 3, 4, 7, 8) if rows <= height]
        for rows in [rows for rows in steps if resident(rows) <= cpu.l2_bytes // 2] or steps[:1]:
            tiles = product(
                register_tiles(wide, expand.out_width, cpu, most=6),
                register_tiles(outs, rows * project.width, cpu, most=5),
                (2, 4, 8) if expand.is_pointwise else (1, 2),
                columns,
            )
            splits = [
                row_tasks
                for _, row_tasks in task_splits(1, -(-height // rows), cpu, _small(fused.flops))
                if window_steps(depthwise_conv, rows, row_tasks) * rows <= height
            ]
            for (expand_tile, project_tile, unroll, width), row_tasks in product(tiles, splits):
                yield {
                    "expand_blocks": expand_tile[0],
                    "expand_columns": expand_tile[1],
                    "out_blocks": project_tile[0],
                    "columns": project_tile[1],
                    "unroll": unroll,
                    "rows": rows,
                    "depthwise_columns": width,
                    "row_tasks": row_tasks,
                }

    # One row at a time by a single task walks down any image.
    fallback = {"expand_blocks": 1, "expand_columns": min(8, expand.out_width), "out_blocks": 1}
    fallback |= {"columns": min(8, project.width), "unroll": 2, "rows": 1, "depthwise_columns": columns[0]}
    return _ordered(candidates(), lambda config: ordering.sliding_window(fused, config, cpu)) or (
        {**fallback, "row_tasks": 1},
    )


def _smallest(pointwise_conv: Conv2d, depthwise_conv: Conv2d, cpu: CpuTarget) -> dict[str, int]:
    return {
        "out_blocks": 1,
        "columns": min(8, pointwise_conv.width),
        "unroll": 2,
        "rows": 1,
        "depthwise_columns": depthwise_columns(depthwise_conv, cpu)[0],
        "channel_tasks": 1,
        "row_tasks": min(cpu.threads, depthwise_conv.out_height),  # either order: a 1x1 keeps the height
    }


def dense(layer: Dense, cpu: CpuTarget) -> tuple[Config, ...]:
    count = blocks(layer.out_features, cpu.lanes)

    def candidates() -> Iterator[Config]:
        for (size, rows), unroll in product(register_tiles(count, layer.rows, cpu), _UNROLLS):
            groups = -(-count // size)
            for channel_tasks, row_tasks in task_splits(groups, -(-layer.rows // rows), cpu, _small(layer.flops)):
                yield {
                    "out_blocks": size,
                    "rows": rows,
                    "unroll": unroll,
                    "channel_tasks": channel_tasks,
                    "row_tasks": row_tasks,
                }

    return _ordered(candidates(), lambda config: ordering.dense(layer, config, cpu))


def pool2d(pool: Pool2d, cpu: CpuTarget) -> tuple[Config, ...]:
    count = blocks(pool.channels, cpu.lanes)
    widths = [1] if pool.is_global else _widths(pool.out_width, cpu.registers // 2)
    configs = (
        {"columns": columns, "channel_tasks": channel_tasks, "row_tasks": row_tasks}
        for columns in widths
        for channel_tasks, row_tasks in task_splits(count, pool.out_height, cpu, small=True)
    )
    return _ordered(configs, lambda config: ordering.pool2d(pool, config, cpu))
