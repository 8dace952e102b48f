"""Fully connected layer on plain (rows, features) tensors: bound by reading the weights once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Dense, Operator, element_bytes
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template, TensorSpec, tensor_dtype
from schedules.loops import emit
from schedules.loops.dot_products import dot_product
from schedules.loops.issue_slots import dense_cycles, parallel_cycles
from schedules.loops.loop_nests import PREFETCH_VECTORS, TiledExtent, task_index
from schedules.loops.register_kernels import DenseTile
from schedules.loops.register_tiling import UNROLLS, RegisterTile, register_tiles
from schedules.loops.requantised_sums import initial_sums, pack_requantisation, requantisation_rows, requantised
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits


class DenseKnobs(NamedTuple):
    """Knobs: ``out_blocks`` x ``rows`` register tile, ``unroll``, ``channel_tasks`` x ``row_tasks`` parallel tasks."""

    out_blocks: int
    rows: int
    unroll: int
    channel_tasks: int
    row_tasks: int


class DenseLayer(Template):
    """Fully connected layer with tasks of output blocks x rows.

    The last block of output features is moved back to end with the row, so that every store is a full vector; fewer
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
                        # Only the last group of a row may be partial; it is emitted separately, with a constant
                        # position.
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
    """Return the signature of a kernel on plain (rows, features) with weights (blocks, ``steps``, V x group) from
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
    """Return weights and bias of :func:`dense_signature`; zeros beyond the features."""
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
    """Emit the epilogue and the store of a vector of ``sums`` of output ``block`` in ``row``."""

    def finished(read: Callable[[], Any] | None) -> Any:
        if layer.dtype == "int8":
            return requantised(sums, read, constants, block, lanes, layer.epilogue).astype(f"uint8x{lanes}")
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
    """Return output blocks and rows, each divided among tasks."""
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
