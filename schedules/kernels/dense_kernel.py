"""Fully connected layers on plain (rows, features) tensors, limited by reading the weights once.

In vector registers (``DenseLayer``), or in the tile registers of AMX (``TileDense``), where rows of a tile are rows of
the matrix, read in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Dense, Operator, element_bytes
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template, TensorSpec, blocks, tensor_dtype
from schedules.contract.tile_operations import ROW_BYTES
from schedules.loops import emit
from schedules.loops.config_space import (
    UNROLLS,
    RegisterTile,
    cheapest_first,
    dense_cycles,
    exposed_traffic,
    is_small,
    parallel_cycles,
    register_tiles,
    task_splits,
)
from schedules.loops.dot_products import dot_product
from schedules.loops.loop_nests import PREFETCH_VECTORS, TiledExtent, task_index
from schedules.loops.register_kernels import DenseTile
from schedules.loops.requantised_sums import emit_requantised, initial_sums, pack_requantisation, requantisation_rows
from schedules.loops.tile_products import TileShape, block_cycles, has_tile_products, tile_product, tile_shapes


class DenseKnobs(NamedTuple):
    """Knobs: ``out_blocks`` x ``rows`` register tile, ``unroll``, ``channel_tasks`` x ``row_tasks`` parallel tasks."""

    out_blocks: int
    rows: int
    unroll: int
    channel_tasks: int
    row_tasks: int


class DenseLayer(Template):
    """Tasks of output blocks x rows.

    The last block of output features is shifted to end with the row, so that every store is a full vector; fewer
    features than one vector go through a scratch vector.
    """

    family = "dense"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, Dense) and not operator.epilogue.affine and operator.epilogue.activation != "prelu"

    def signature(self, operator: Dense, cpu: CpuTarget) -> Signature:
        return dense_signature(operator, cpu.lanes, dot_product(operator.dtype).steps(operator.in_features))

    def space(self, operator: Dense, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Dense, config: Config, cpu: CpuTarget) -> float:
        layer, knobs = operator, DenseKnobs(**config)
        groups, bands = _extents(layer, knobs, cpu)
        size = element_bytes(layer.dtype)
        one = dense_cycles(
            cpu,
            RegisterTile(knobs.out_blocks, knobs.rows, knobs.unroll),
            knobs.rows,
            layer.in_features,
            data_bytes=size * layer.in_features,
            weight_bytes=size * knobs.out_blocks * cpu.lanes * layer.in_features,
            dtype=layer.dtype,
        )
        return parallel_cycles(cpu, groups.tasks * bands.tasks, groups.per_task * bands.per_task * one)

    def pack(self, operator: Dense, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[np.ndarray]:
        (layer,) = parameters
        return pack_dense(operator, layer, cpu.lanes, dot_product(operator.dtype).steps(operator.in_features))

    def build(self, operator: Dense, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        layer, lanes, knobs = operator, cpu.lanes, DenseKnobs(**config)
        groups, bands = _extents(layer, knobs, cpu)
        dot = dot_product(layer.dtype)

        def body(data: Any, weight: Any, bias: Any, *rest: Any) -> None:
            residual, output = (rest[0], rest[1]) if layer.epilogue.residual else (None, rest[0])
            with emit.tasks(groups.tasks * bands.tasks) as task:
                channel_task, row_task = task_index(task, groups.tasks, bands.tasks)
                with emit.loop(groups.per_task) as group, emit.loop(bands.per_task) as band:
                    first_block = groups.start(channel_task, group)
                    first_row = bands.start(row_task, band)

                    def operand(block: Any, lane: Any, row: int) -> Any:
                        feature = block * lanes + lane
                        # Only the last group of a row may be partial; it is processed separately, with a constant
                        # index.
                        rest = layer.in_features - feature if isinstance(feature, int) else dot.group
                        return dot.last_operand(data, first_row + row, feature, count=min(dot.group, rest))

                    def sink(o: int, row: int, sums: Sequence[Any]) -> None:
                        store_features(layer, output, residual, bias, first_row + row, first_block + o, sums[0], lanes)

                    DenseTile(
                        out_blocks=knobs.out_blocks,
                        width=knobs.rows,
                        lanes=lanes,
                        unroll=knobs.unroll,
                        x=lambda block, lane, _ky, _kx, row: operand(block, lane, row),
                        weight=lambda o, block, step, _ky, _kx: dot.weights(
                            weight,
                            first_block + o,
                            block * dot.steps(lanes) + step,
                            lanes=lanes,
                            ahead=PREFETCH_VECTORS,
                        ),  # fmt: skip
                        initial=lambda o, _column: initial_sums(layer, bias, first_block + o, lanes),
                        finish=sink,
                        dot=dot,
                    ).emit(layer.in_features, (0, 1), 1, lanes)

        return emit.kernel("dense", self.signature(layer, cpu), body)


def dense_signature(layer: Dense, lanes: int, steps: int) -> Signature:
    """Signature of a kernel on plain (rows, features), with weights (blocks, ``steps``, V x group) from
    :func:`pack_dense`.
    """
    count = blocks(layer.out_features, lanes)
    weight_shape = (count, steps, lanes * dot_product(layer.dtype).group)
    output = TensorSpec(layer.output_shape, dtype=layer.dtype)
    return Signature(
        data=TensorSpec(layer.input_shape, dtype=layer.dtype),
        constants=(
            TensorSpec(weight_shape, dtype=layer.dtype),
            TensorSpec((count if layer.dtype != "int8" else requantisation_rows(layer, lanes), lanes)),
        ),
        residual=output if layer.epilogue.residual else None,
        output=output,
    )


def pack_dense(layer: Dense, parameters: Parameters, lanes: int, steps: int) -> list[np.ndarray]:
    """Weights and bias of :func:`dense_signature`, padded with zeros."""
    count, dot = blocks(layer.out_features, lanes), dot_product(layer.dtype)
    weight = np.zeros((count, steps * dot.group, lanes), np.float32)
    bias = np.zeros((count, lanes), np.float32)
    for block in range(count):
        start = _first_feature(layer, block, lanes)
        stop = min(start + lanes, layer.out_features)
        weight[block, : layer.in_features, : stop - start] = parameters.weight[start:stop].T
        if parameters.bias is not None:
            bias[block, : stop - start] = parameters.bias.reshape(-1)[start:stop]
    if layer.dtype == "int8":
        firsts = [_first_feature(layer, block, lanes) for block in range(count)]
        bias = pack_requantisation(layer, parameters, lanes, firsts)
    return [dot.pack_steps(weight), bias]


def _first_feature(layer: Dense, block: Any, lanes: int) -> Any:
    if layer.out_features < lanes:
        return 0
    return emit.smaller(block * lanes, layer.out_features - lanes)


def store_features(
    layer: Dense, output: Any, residual: Any, constants: Any, row: Any, block: Any, sums: Any, lanes: int
) -> None:
    """Apply the epilogue to a vector of ``sums`` of output ``block`` in ``row`` and store it."""

    def finished(read: Callable[[], Any] | None) -> Any:
        if layer.dtype == "int8":
            return emit_requantised(sums, read, constants, block, lanes, layer.epilogue).astype(f"uint8x{lanes}")
        return emit.finish(sums, layer.epilogue, read, lanes, coarse=layer.dtype == "bfloat16")

    if layer.out_features >= lanes:
        column = emit.bind(_first_feature(layer, block, lanes))
        at = tirx.Ramp(column if not isinstance(column, int) else tirx.const(column, "int32"), 1, lanes)
        read = None if residual is None else lambda: emit.load_at(residual, row, at, lanes=lanes)
        emit.store_at(output, finished(read), row, at, lanes=lanes)
        return
    scratch = T.alloc_buffer((lanes,), tensor_dtype(layer.dtype), scope="local")
    if residual is not None:
        for lane in range(lanes):
            T.buffer_store(scratch, residual[row, min(lane, layer.out_features - 1)], [lane])
    added = None if residual is None else lambda: emit.load(scratch, lanes=lanes)
    emit.store(scratch, finished(added), lanes=lanes)
    for lane in range(layer.out_features):
        T.buffer_store(output, scratch[lane], [row, lane])


def _extents(layer: Dense, knobs: DenseKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Output blocks and rows, each distributed over tasks."""
    return (
        TiledExtent(blocks(layer.out_features, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(layer.rows, knobs.rows, knobs.row_tasks),
    )


def _candidates(layer: Dense, cpu: CpuTarget) -> Iterator[Config]:
    count = blocks(layer.out_features, cpu.lanes)
    for (size, rows), unroll in product(register_tiles(count, layer.rows, cpu), UNROLLS):
        groups, bands = -(-count // size), -(-layer.rows // rows)
        for channel_tasks, row_tasks in task_splits(groups, bands, cpu, is_small(layer.flops)):
            yield DenseKnobs(size, rows, unroll, channel_tasks, row_tasks)._asdict()


# Minimum number of rows: with fewer, each row of weights is used by too few products.
_LEAST_ROWS = 4


class TileDenseKnobs(NamedTuple):
    """Knobs of the tile layer."""

    # Tiles of sums: ``row_tiles`` x ``out_blocks``, of ``tile_rows`` rows each.
    row_tiles: int
    out_blocks: int
    tile_rows: int
    # Rows per pass over the weights.
    row_block: int
    # Parallel tasks: ``channel_tasks`` x ``row_tasks``.
    channel_tasks: int
    row_tasks: int


class TileDense(Template):
    """Tasks of output blocks x rows. Features that do not fill a tile's row are first copied and padded with zeros."""

    family = "tile-dense"

    def __init__(self, vectors: Template) -> None:
        """``vectors``: template of the kernels in vector registers for the same layers."""
        self._vectors = vectors

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        if not isinstance(operator, Dense) or not has_tile_products(operator.dtype, cpu):
            return False
        return operator.rows >= _LEAST_ROWS and self._vectors.covers(operator, cpu)

    def signature(self, operator: Dense, cpu: CpuTarget) -> Signature:
        return dense_signature(operator, cpu.lanes, _weight_rows(operator))

    def space(self, operator: Dense, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(_tile_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Dense, config: Config, cpu: CpuTarget) -> float:
        layer, knobs = operator, TileDenseKnobs(**config)
        groups, bands = _tile_extents(layer, knobs, cpu)
        shape = _tile_shape(knobs)
        row_bytes = ROW_BYTES * _tile_steps(layer)
        data_bytes, weight_bytes = knobs.row_block * row_bytes, knobs.out_blocks * cpu.lanes * row_bytes
        passes = -(-knobs.row_block // shape.all_rows)
        one = passes * block_cycles(shape, _tile_steps(layer))
        one += passes * exposed_traffic(cpu, weight_bytes, weight_bytes + shape.all_rows * row_bytes)
        # First pass over weights from beyond L2, as for few rows.
        one += exposed_traffic(cpu, weight_bytes, layer.weight_bytes / groups.tasks)
        one += exposed_traffic(cpu, data_bytes, data_bytes + weight_bytes)
        return parallel_cycles(cpu, groups.tasks * bands.tasks, groups.per_task * bands.per_task * one)

    def pack(self, operator: Dense, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        return pack_dense(operator, layer, cpu.lanes, _weight_rows(operator))

    def build(self, operator: Dense, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        layer, lanes, knobs = operator, cpu.lanes, TileDenseKnobs(**config)
        groups, bands = _tile_extents(layer, knobs, cpu)
        shape, size = _tile_shape(knobs), element_bytes(layer.dtype)
        depth, run_steps = ROW_BYTES // size, ROW_BYTES // 4
        full, rest = divmod(layer.in_features, depth)
        passes = TiledExtent(knobs.row_block, shape.all_rows, 1)

        def body(data: Any, weight: Any, bias: Any, *more: Any) -> None:
            residual, output = (more[0], more[1]) if layer.epilogue.residual else (None, more[0])
            with emit.tasks(groups.tasks * bands.tasks) as task:
                channel_task, row_task = task_index(task, groups.tasks, bands.tasks)
                # Never read beyond a row: memory after the last one is not ours.
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
    """Copy the last ``count`` features of the rows of ``ends``, from feature ``first`` on, padded with zeros."""
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


def _tile_steps(layer: Dense) -> int:
    """Steps of a block of sums."""
    return -(-layer.in_features * element_bytes(layer.dtype) // ROW_BYTES)


def _weight_rows(layer: Dense) -> int:
    """Rows of the weights of an output block, padded to whole tiles."""
    return _tile_steps(layer) * (ROW_BYTES // 4)


def _tile_shape(knobs: TileDenseKnobs) -> TileShape:
    return TileShape(knobs.row_tiles, knobs.out_blocks, knobs.tile_rows, ROW_BYTES)


def _tile_extents(layer: Dense, knobs: TileDenseKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Output blocks and rows, each distributed over tasks."""
    return (
        TiledExtent(blocks(layer.out_features, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(layer.rows, knobs.row_block, knobs.row_tasks),
    )


def _tile_candidates(layer: Dense, cpu: CpuTarget) -> Iterator[Config]:
    count, row_bytes = blocks(layer.out_features, cpu.lanes), ROW_BYTES * _tile_steps(layer)
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
