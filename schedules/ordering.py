"""A first guess at the order of a space: issue slots of the register tiles plus a share of the cache traffic.

It needs no measurement and knows nothing of the machine but its vectors and caches; the learned model of the tuner
corrects it. Costs are cycles of a core that issues two vector FMAs and two vector loads per cycle, as every AVX2
and AVX-512 server core since Haswell does; only their ratios are used.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.operators import Conv2d, Dense, FusedConvs, Operator, Pool2d
from schedules.layout import blocks
from schedules.target import CpuTarget
from schedules.template import Config

_PORTS = 2.0
_FMA_LATENCY = 4.0
# Filling and draining the pipeline of a tile: a mispredicted loop exit and the dependent stores.
_TILE_CYCLES = 24.0
# Share of cache traffic that out-of-order execution and hardware prefetchers do not hide.
_EXPOSED = 0.35
_L2_BYTES_PER_CYCLE = 32.0
_L3_BYTES_PER_CYCLE = 8.0
# A prefetcher starts anew for every run of pixels of a channel block.
_STREAM_CYCLES = 40.0
# A parallel task costs about as much as its start.
_TASK_CYCLES = 600.0


@dataclass(frozen=True)
class _Tiles:
    """``count`` register tiles of ``width`` columns."""

    width: int
    count: int


def _columns(extent: int, width: int) -> list[_Tiles]:
    full, rest = divmod(extent, width)
    return [tiles for tiles in (_Tiles(width, full), _Tiles(rest, 1)) if tiles.width and tiles.count]


def _dense_phase(
    cpu: CpuTarget, size: int, extent: int, width: int, steps: int, unroll: int, data_bytes: float, weight_bytes: float
) -> float:
    """Cycles of one pass of ``size`` output blocks over ``extent`` columns with ``steps`` multiply-adds each.

    ``data_bytes``: what the pass reads; ``weight_bytes``: of the ``size`` blocks, read again for every tile.
    """
    cycles = 0.0
    for tiles in _columns(extent, width):
        sums = size * tiles.width
        step = max(sums / _PORTS, (size + tiles.width) / _PORTS, _FMA_LATENCY)
        per_tile = steps * (step + 0.5 / unroll) + 1.5 * sums + _TILE_CYCLES
        per_tile += _traffic(cpu, weight_bytes, weight_bytes + data_bytes * tiles.width / extent)
        cycles += tiles.count * per_tile
    return cycles + _traffic(cpu, data_bytes, data_bytes + weight_bytes)


def _traffic(cpu: CpuTarget, bytes_moved: float, working_set: float) -> float:
    """Exposed cycles of reading ``bytes_moved`` that were last used ``working_set`` bytes ago."""
    if working_set <= 0.6 * cpu.l1_bytes:
        return 0.0
    rate = _L2_BYTES_PER_CYCLE if working_set <= 0.6 * cpu.l2_bytes else _L3_BYTES_PER_CYCLE
    return _EXPOSED * bytes_moved / rate


def _depthwise_phase(conv: Conv2d, width: int, rows: int) -> float:
    """Cycles of one channel block for ``rows`` output rows."""
    kernel_height, kernel_width = conv.kernel
    cycles = 0.0
    for tiles in _columns(conv.out_width, width):
        loads = (tiles.width - 1) * conv.stride[1] + kernel_width + kernel_width
        row = max(tiles.width * kernel_width / _PORTS, loads / _PORTS, _FMA_LATENCY * kernel_width)
        cycles += tiles.count * (kernel_height * row + 1.5 * tiles.width + _TILE_CYCLES)
    return rows * cycles


def _parallel(cpu: CpuTarget, tasks: int, cycles: float) -> float:
    """Cycles until the last thread is done with ``tasks`` of ``cycles`` each, dealt out evenly."""
    return -(-tasks // cpu.threads) * (cycles + (_TASK_CYCLES if tasks > 1 else 0.0))


def _shares(extent: int, size: int, tasks: int) -> int:
    """Steps of ``size`` that each of ``tasks`` tasks takes over ``extent``."""
    steps = -(-extent // size)
    return -(-steps // tasks)


def config_cost(operator: Operator, config: Config, cpu: CpuTarget) -> float:
    """Relative cost of one configuration of any operator that a template covers."""
    if isinstance(operator, FusedConvs):
        by_kind = {
            "depthwise-pointwise": depthwise_pointwise,
            "pointwise-depthwise": pointwise_depthwise,
            "pointwise-depthwise-pointwise": sliding_window,
            "conv-depthwise-pointwise": sliding_window,
        }
        return by_kind[operator.kind](operator, config, cpu)
    if isinstance(operator, Dense):
        return dense(operator, config, cpu)
    if isinstance(operator, Pool2d):
        return pool2d(operator, config, cpu)
    if operator.is_depthwise:
        return depthwise(operator, config, cpu)
    return pointwise(operator, config, cpu) if "pixel_block" in config else conv2d(operator, config, cpu)


def pointwise(conv: Conv2d, config: Config, cpu: CpuTarget) -> float:
    size, block = config["out_blocks"], config["pixel_block"]
    in_bytes = 4 * conv.in_channels
    one = _dense_phase(
        cpu, size, block, config["columns"], conv.in_channels, config["unroll"],
        block * in_bytes, size * cpu.lanes * in_bytes,
    )  # fmt: skip
    one += _STREAM_CYCLES * blocks(conv.in_channels, cpu.lanes)
    groups = _shares(blocks(conv.out_channels, cpu.lanes), size, config["channel_tasks"])
    tiles = _shares(conv.height * conv.width, block, config["pixel_tasks"])
    tasks = conv.batch * config["channel_tasks"] * config["pixel_tasks"]
    return _parallel(cpu, tasks, groups * tiles * one)


def conv2d(conv: Conv2d, config: Config, cpu: CpuTarget) -> float:
    size, rows = config["out_blocks"], config["rows"]
    steps = conv.in_channels // conv.groups * conv.kernel[0] * conv.kernel[1]
    if conv.groups > 1:
        steps = max(steps, cpu.lanes * conv.kernel[0] * conv.kernel[1])
    row_bytes = 4 * conv.in_channels // conv.groups * conv.width * conv.stride[0]
    row = _dense_phase(
        cpu, size, conv.out_width, config["columns"], steps, config["unroll"], row_bytes, 4 * size * cpu.lanes * steps
    )
    reread = _traffic(cpu, rows * row_bytes, rows * row_bytes)
    groups = _shares(blocks(conv.out_channels, cpu.lanes), size, config["channel_tasks"])
    bands = _shares(conv.out_height, rows, config["row_tasks"])
    tasks = conv.batch * config["channel_tasks"] * config["row_tasks"]
    return _parallel(cpu, tasks, groups * bands * (rows * row + reread))


def depthwise(conv: Conv2d, config: Config, cpu: CpuTarget) -> float:
    rows = -(-conv.out_height // config["row_tasks"])
    channels = _shares(blocks(conv.in_channels, cpu.lanes), 1, config["channel_tasks"])
    tasks = conv.batch * config["channel_tasks"] * config["row_tasks"]
    return _parallel(cpu, tasks, channels * _depthwise_phase(conv, config["columns"], rows))


def depthwise_pointwise(fused: FusedConvs, config: Config, cpu: CpuTarget) -> float:
    first, second = fused.convs
    size, rows = config["out_blocks"], config["rows"]
    mid = blocks(first.out_channels, cpu.lanes)
    tile_bytes = 4 * rows * second.width * mid * cpu.lanes
    filter_ = mid * _depthwise_phase(first, config["depthwise_columns"], rows) + _traffic(cpu, tile_bytes, tile_bytes)
    one = _dense_phase(
        cpu, size, rows * second.width, config["columns"], second.in_channels, config["unroll"],
        tile_bytes, 4 * size * cpu.lanes * second.in_channels,
    )  # fmt: skip
    groups = _shares(blocks(second.out_channels, cpu.lanes), size, config["channel_tasks"])
    bands = _shares(second.height, rows, config["row_tasks"])
    all_weights = 4 * groups * size * cpu.lanes * second.in_channels
    again = _traffic(cpu, all_weights, all_weights + tile_bytes)
    tasks = first.batch * config["channel_tasks"] * config["row_tasks"]
    return _parallel(cpu, tasks, bands * (filter_ + groups * one + again))


def pointwise_depthwise(fused: FusedConvs, config: Config, cpu: CpuTarget) -> float:
    first, second = fused.convs
    size, rows = config["out_blocks"], config["rows"]
    pixels = source_rows(second, rows) * first.width
    in_bytes = 4 * first.in_channels
    one = _dense_phase(
        cpu, size, pixels, config["columns"], first.in_channels, config["unroll"],
        pixels * in_bytes, size * cpu.lanes * in_bytes,
    )  # fmt: skip
    tile_bytes = 4 * pixels * size * cpu.lanes
    filter_ = size * _depthwise_phase(second, config["depthwise_columns"], rows)
    filter_ += 2 * _traffic(cpu, tile_bytes, tile_bytes)
    groups = _shares(blocks(first.out_channels, cpu.lanes), size, config["channel_tasks"])
    bands = _shares(second.out_height, rows, config["row_tasks"])
    tasks = first.batch * config["channel_tasks"] * config["row_tasks"]
    return _parallel(cpu, tasks, bands * groups * (one + filter_))


def sliding_window(fused: FusedConvs, config: Config, cpu: CpuTarget) -> float:
    expand, depthwise_conv, project = fused.convs
    steps = window_steps(depthwise_conv, config["rows"], config["row_tasks"])
    rows, mid = config["rows"], blocks(expand.out_channels, cpu.lanes)
    depth = expand.in_channels * expand.kernel[0] * expand.kernel[1]
    row_bytes, weight_bytes = 4 * expand.in_channels * expand.width, 4 * config["expand_blocks"] * cpu.lanes * depth
    ring_bytes = 4 * ring_rows(depthwise_conv, rows) * expand.out_width * mid * cpu.lanes
    row = _dense_phase(
        cpu, config["expand_blocks"], expand.out_width, config["expand_columns"], depth, config["unroll"],
        row_bytes, weight_bytes,
    )  # fmt: skip
    all_weights = 4 * mid * cpu.lanes * depth
    widen = _shares(mid, config["expand_blocks"], 1) * row + _traffic(cpu, all_weights, all_weights + ring_bytes)
    filter_ = mid * _depthwise_phase(depthwise_conv, config["depthwise_columns"], rows)
    filter_ += _traffic(cpu, ring_bytes, ring_bytes)
    tile_bytes = 4 * rows * project.width * mid * cpu.lanes
    one = _dense_phase(
        cpu, config["out_blocks"], rows * project.width, config["columns"], project.in_channels, config["unroll"],
        tile_bytes, 4 * config["out_blocks"] * cpu.lanes * project.in_channels,
    )  # fmt: skip
    groups = _shares(blocks(project.out_channels, cpu.lanes), config["out_blocks"], 1)
    widened_rows = source_rows(depthwise_conv, steps * rows)
    return _parallel(cpu, expand.batch * config["row_tasks"], widened_rows * widen + steps * (filter_ + groups * one))


def dense(layer: Dense, config: Config, cpu: CpuTarget) -> float:
    size, rows = config["out_blocks"], config["rows"]
    weight_bytes = 4 * size * cpu.lanes * layer.in_features
    one = _dense_phase(cpu, size, rows, rows, layer.in_features, config["unroll"], 4 * layer.in_features, weight_bytes)
    groups = _shares(blocks(layer.out_features, cpu.lanes), size, config["channel_tasks"])
    bands = _shares(layer.rows, rows, config["row_tasks"])
    return _parallel(cpu, config["channel_tasks"] * config["row_tasks"], groups * bands * one)


def pool2d(pool: Pool2d, config: Config, cpu: CpuTarget) -> float:
    rows = -(-pool.out_height // config["row_tasks"])
    channels = _shares(blocks(pool.channels, cpu.lanes), 1, config["channel_tasks"])
    tiles = sum(t.count * (t.width * pool.kernel[0] * pool.kernel[1] / _PORTS + _TILE_CYCLES)
                for t in _columns(pool.out_width, config["columns"]))  # fmt: skip
    return _parallel(cpu, pool.batch * config["channel_tasks"] * config["row_tasks"], channels * rows * tiles)


def source_rows(conv: Conv2d, rows: int) -> int:
    """Input rows that ``rows`` output rows read, at most the image."""
    return min(conv.height, (rows - 1) * conv.stride[0] + (conv.kernel[0] - 1) * conv.dilation[0] + 1)


def window_steps(conv: Conv2d, rows: int, tasks: int) -> int:
    """Steps of ``rows`` output rows in which each of ``tasks`` tasks walks down its part of the image."""
    return -(-(-(-conv.out_height // rows)) // tasks)


def ring_rows(conv: Conv2d, rows: int) -> int:
    """Source rows that a step of ``rows`` output rows reads, as a power of two: the remainder is then a mask."""
    return 1 << ((rows - 1) * conv.stride[0] + (conv.kernel[0] - 1) * conv.dilation[0]).bit_length()
