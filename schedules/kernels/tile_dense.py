"""Fully connected layer in the tile registers of AMX: rows of a tile are rows of the matrix, read directly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Dense, Operator, element_bytes
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template, tensor_dtype
from schedules.contract.tile_operations import ROW_BYTES
from schedules.kernels.dense_kernel import dense_signature, pack_dense, store_features
from schedules.loops import emit
from schedules.loops.issue_slots import exposed_traffic, parallel_cycles
from schedules.loops.loop_nests import TiledExtent, task_index
from schedules.loops.requantised_sums import initial_sums
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits
from schedules.loops.tile_products import TileShape, block_cycles, has_tile_products, tile_product, tile_shapes

# With fewer rows, a tile is no faster than a vector: every row of weights is read for that few products.
_LEAST_ROWS = 4


class TileDenseKnobs(NamedTuple):
    """Knobs: ``row_tiles`` x ``out_blocks`` tiles of sums of ``tile_rows`` rows each, ``row_block`` rows per pass over
    the weights, ``channel_tasks`` x ``row_tasks`` parallel tasks.
    """

    row_tiles: int
    out_blocks: int
    tile_rows: int
    row_block: int
    channel_tasks: int
    row_tasks: int


class TileDense(Template):
    """Fully connected layer with tasks of output blocks x rows. A partial row of a tile is first copied and filled up
    with zeros.
    """

    family = "tile-dense"

    def __init__(self, vectors: Template) -> None:
        """Create the template; ``vectors``: the template of kernels without tiles for the same layers."""
        self._vectors = vectors

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        if not isinstance(operator, Dense) or not has_tile_products(operator.dtype, cpu):
            return False
        return operator.rows >= _LEAST_ROWS and self._vectors.covers(operator, cpu)

    def signature(self, operator: Dense, cpu: CpuTarget) -> Signature:
        return dense_signature(operator, cpu.lanes, _steps(operator))

    def space(self, operator: Dense, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Dense, config: Config, cpu: CpuTarget) -> float:
        layer, knobs = operator, TileDenseKnobs(**config)
        groups, bands = _extents(layer, knobs, cpu)
        shape = _shape(knobs)
        row_bytes = ROW_BYTES * _runs(layer)
        data_bytes, weight_bytes = knobs.row_block * row_bytes, knobs.out_blocks * cpu.lanes * row_bytes
        passes = -(-knobs.row_block // shape.all_rows)
        one = passes * block_cycles(shape, _runs(layer))
        one += passes * exposed_traffic(cpu, weight_bytes, weight_bytes + shape.all_rows * row_bytes)
        # First pass over weights from beyond L2, which dominates if rows are few.
        one += exposed_traffic(cpu, weight_bytes, layer.weight_bytes / groups.tasks)
        one += exposed_traffic(cpu, data_bytes, data_bytes + weight_bytes)
        return parallel_cycles(cpu, groups.tasks * bands.tasks, groups.per_task * bands.per_task * one)

    def pack(self, operator: Dense, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        return pack_dense(operator, layer, cpu.lanes, _steps(operator))

    def build(self, operator: Dense, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        layer, lanes, knobs = operator, cpu.lanes, TileDenseKnobs(**config)
        groups, bands = _extents(layer, knobs, cpu)
        shape, size = _shape(knobs), element_bytes(layer.dtype)
        depth, run_steps = ROW_BYTES // size, ROW_BYTES // 4
        full, rest = divmod(layer.in_features, depth)
        passes = TiledExtent(knobs.row_block, shape.all_rows, 1)

        def body(data: Any, weight: Any, bias: Any, *more: Any) -> None:
            residual, output = (more[0], more[1]) if layer.epilogue.residual else (None, more[0])
            with emit.tasks(groups.tasks * bands.tasks) as task:
                channel_task, row_task = task_index(task, groups.tasks, bands.tasks)
                # Nothing is read after a row: memory after the last row is not part of the tensor.
                ends = T.alloc_buffer((knobs.row_block, depth), tensor_dtype(layer.dtype)) if rest else None
                with tile_product(shape, layer.dtype) as product, emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    if ends is not None:
                        _copy_ends(data, ends, first_row, full * depth, rest)
                    with emit.loop(groups.per_task) as group, emit.loop(passes.per_task) as part:
                        block, start = groups.start(channel_task, group), passes.start(0, part)
                        product.zero()
                        if full:
                            with emit.loop(full) as run:
                                product.add(
                                    lambda tile: data[first_row + start + tile * shape.rows, run * depth],
                                    lambda out: weight[block + out, run * run_steps, 0],
                                    layer.in_features * size,
                                )
                        if ends is not None:
                            product.add(
                                lambda tile: ends[start + tile * shape.rows, 0],
                                lambda out: weight[block + out, full * run_steps, 0],
                                ROW_BYTES,
                            )

                        def sink(tile: int, row: Any, out: int, sums: Any) -> None:
                            at = first_row + start + tile * shape.rows + row
                            total = sums + initial_sums(layer, bias, block + out, lanes)
                            store_features(layer, output, residual, bias, at, block + out, total, lanes)

                        product.finish(sink)

        return emit.kernel("tile_dense", self.signature(layer, cpu), body, tiles=True)


def _copy_ends(data: Any, ends: Any, first_row: Any, first: int, count: int) -> None:
    """Copy the last ``count`` features, from feature ``first`` on, of each row to ``ends``, followed by zeros."""
    zero = (
        tirx.const(0, str(ends.dtype))
        if ends.dtype != "bfloat16"
        else tirx.reinterpret("bfloat16", tirx.const(0, "uint16"))
    )
    with emit.loop(int(ends.shape[0])) as row:
        with emit.loop(count) as feature:
            T.buffer_store(ends, data[first_row + row, first + feature], [row, feature])
        with emit.span(count, int(ends.shape[1])) as feature:
            T.buffer_store(ends, zero, [row, feature])


def _runs(layer: Dense) -> int:
    """Return the steps of a block of sums."""
    return -(-layer.in_features * element_bytes(layer.dtype) // ROW_BYTES)


def _steps(layer: Dense) -> int:
    """Return the rows of the weights of an output block, rounded up to whole tiles."""
    return _runs(layer) * (ROW_BYTES // 4)


def _shape(knobs: TileDenseKnobs) -> TileShape:
    return TileShape(knobs.row_tiles, knobs.out_blocks, knobs.tile_rows, ROW_BYTES)


def _extents(layer: Dense, knobs: TileDenseKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Return output blocks and rows, each divided among tasks."""
    return (
        TiledExtent(blocks(layer.out_features, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(layer.rows, knobs.row_block, knobs.row_tasks),
    )


def _candidates(layer: Dense, cpu: CpuTarget) -> Iterator[Config]:
    count, row_bytes = blocks(layer.out_features, cpu.lanes), ROW_BYTES * _runs(layer)
    for shape in tile_shapes(count, layer.rows, ROW_BYTES):
        fitting = max(1, min(layer.rows, cpu.l2_bytes // 4 // row_bytes) // shape.all_rows) * shape.all_rows
        for row_block in {layer.rows, -(-layer.rows // cpu.threads), fitting}:
            if row_block < shape.all_rows:
                continue
            groups, bands = -(-count // shape.out_blocks), -(-layer.rows // row_block)
            for channel_tasks, row_tasks in task_splits(groups, bands, cpu, is_small(layer.flops)):
                yield TileDenseKnobs(
                    shape.row_tiles, shape.out_blocks, shape.rows, row_block, channel_tasks, row_tasks
                )._asdict()
