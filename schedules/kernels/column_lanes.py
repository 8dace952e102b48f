"""k x k convolution to few output channels: the lanes of a vector hold several adjacent columns of each channel.

The direct kernel gives every output channel a lane; with few channels, most lanes are idle. Here A columns of a row are
A times as many channels of a wider convolution, with A times the stride and a window as wide as those of the A columns
together. Its weights are those of the window, shifted by a column from lane to lane, with zeros beside them (a Toeplitz
matrix), so that an input is multiplied once for all columns that read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.register_tile import columns_reach, lane_columns
from costmodel.operators.layers import Conv2d, Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template, TensorSpec
from schedules.kernels.direct_conv2d import DirectConv2d, DirectConv2dKnobs, reads_plain_input
from schedules.kernels.pointwise_kernel import conv_signature
from schedules.loops import emit
from schedules.loops.dot_products import FLOAT32
from schedules.loops.emit import Expr
from schedules.loops.loop_nests import TiledExtent, conv_phase, store_finished, task_index
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.weight_packing import (
    channel_vectors,
    conv_weight_shape,
    pack_channel_constants,
    pack_conv,
    pack_plain_input,
    plain_weight_shape,
)

# Knob of this algorithm only: adjacent columns in a vector. There is one template per value.
LANE_COLUMNS = "lane_columns"
COLUMNS_OF_A_VECTOR = (2, 4, 8, 16)


class ColumnLanes(Template):
    """Direct kernel of the convolution widened to ``columns`` columns at a time (:func:`widened`).

    An output of few channels is plain, the layout that kernels of few channels read; other outputs are blocked.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.family = f"column-lanes-{columns}"
        self._direct = DirectConv2d()

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, Conv2d) and self.columns in lane_columns(operator, cpu.lanes)

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        """Signature of a convolution with one more constant: the initial sums of the lanes of a vector."""
        lanes, wide, plain = cpu.lanes, widened(operator, self.columns), reads_plain_input(operator, cpu.lanes)
        shape = plain_weight_shape(wide, lanes) if plain else conv_weight_shape(wide, lanes)
        signature = conv_signature(operator, lanes, shape, plain_input=plain)
        output = TensorSpec(operator.output_shape) if _writes_plain(operator, lanes) else signature.output
        residual = output if operator.epilogue.residual else None
        constants = (*signature.constants, TensorSpec((1, lanes)))
        return replace(signature, constants=constants, output=output, residual=residual)

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        wide = self._direct.space(widened(operator, self.columns), cpu)
        configs = [{LANE_COLUMNS: self.columns, **config} for config in wide]
        return cheapest_first(configs, partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        return self._direct.cost(widened(operator, self.columns), _direct_knobs(config)._asdict(), cpu)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,), lanes = parameters, cpu.lanes
        wide = widened(operator, self.columns)
        weight = np.zeros((operator.out_channels, self.columns, *wide.weight_shape[1:]), np.float32)
        for column in range(self.columns):
            first = column * operator.stride[1]
            weight[:, column, :, :, first : first + operator.kernel[1]] = layer.weight
        pack = pack_plain_input if reads_plain_input(operator, lanes) else pack_conv
        packed = pack(wide, weight.reshape(wide.weight_shape), lanes)
        first_sums = np.zeros((1, lanes), np.float32)
        if layer.bias is not None:
            first_sums[0, : wide.out_channels] = np.repeat(layer.bias.reshape(-1), self.columns)
        return [packed, pack_channel_constants(operator, layer, lanes), first_sums]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, _direct_knobs(config)
        wide = widened(conv, self.columns)
        bands = TiledExtent(wide.out_height, knobs.rows, knobs.row_tasks)
        plain = reads_plain_input(conv, lanes)

        def body(*arguments: Any) -> None:
            data, weight, constants, first_sums, *others = arguments
            residual, output = others if conv.epilogue.residual else (None, *others)
            with emit.tasks(conv.batch * bands.tasks) as task:
                image, row_task = task_index(task, conv.batch, bands.tasks)
                with emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)

                    def source(block: Any, lane: Any, row: Any, column: Any) -> Any:
                        return data[image, block, row, column] if plain else data[image, block, row, column, lane]

                    def weights(out_block: Any, block: Any, step: Any, ky: Any, kx: int) -> Any:
                        step_index = () if plain else (step,)
                        return FLOAT32.weights(weight, out_block, block, ky, kx, *step_index, lanes=lanes)

                    def sink(_block: Any, row: Any, column: Any, sums: Any) -> None:
                        self._store(conv, lanes, sums[0], (image, first_row + row, column), constants, residual, output)

                    conv_phase(
                        wide,
                        knobs.tile,
                        lanes,
                        rows=knobs.rows,
                        first_row=first_row,
                        first_block=0,
                        channels=wide.in_channels,
                        block_lanes=1 if plain else lanes,
                        source=source,
                        weight=weights,
                        bias=first_sums,
                        sink=sink,
                    )

        return emit.kernel("column_lanes", self.signature(conv, cpu), body)

    def _store(
        self,
        conv: Conv2d,
        lanes: int,
        sums: Any,
        at: tuple[Expr, Expr, Expr],
        constants: Any,
        residual: Any | None,
        output: Any,
    ) -> None:
        """Emit the epilogue of a vector of ``sums``, which include the bias, and its store; ``at``: image, row, place
        in a row. The last vector of a partially filled row reaches beyond the image: it is emitted separately, with a
        constant place.
        """
        image, row, place = at
        count = min(self.columns, conv.out_width - place * self.columns) if isinstance(place, int) else self.columns
        first, sums = place * self.columns, T.bind(sums)
        if _writes_plain(conv, lanes):
            for channel in range(conv.out_channels):
                for start, size in _powers_of_two(count):
                    begin = channel * self.columns + start
                    part = sums if size == lanes else T.bind(emit.shuffle([sums], range(begin, begin + size)))
                    where = (image, channel, row, first + start)
                    _store_plain(conv, part, size, where, constants, residual, output)
            return
        zeros = emit.splat(0.0, lanes)
        for column in range(count):
            order = [channel * self.columns + column for channel in range(conv.out_channels)]
            order += [lanes] * (lanes - len(order))
            where = (image, 0, row, first + column)
            vector = T.bind(emit.shuffle([sums, zeros], order))
            store_finished(output, [vector], where, conv, lanes, residual, channel=(constants, 0))


def widened(conv: Conv2d, columns: int) -> Conv2d:
    """Return ``conv`` with ``columns`` adjacent columns as that many channels, those of one channel together."""
    stride, left = conv.stride[1], conv.padding[1]
    width, kernel = -(-conv.out_width // columns), columns_reach(conv, columns)
    right = (width - 1) * columns * stride + kernel - conv.width - left
    return replace(
        conv,
        out_channels=conv.out_channels * columns,
        kernel=(conv.kernel[0], kernel),
        stride=(conv.stride[0], columns * stride),
        padding=(conv.padding[0], left, conv.padding[2], right),
    )


def _writes_plain(conv: Conv2d, lanes: int) -> bool:
    """True if the output has few channels, by the same limit as in :func:`reads_plain_input`."""
    return conv.out_channels < lanes // 2


def _powers_of_two(count: int) -> Iterator[tuple[int, int]]:
    """Yield ``count`` columns in runs of (first, length), with lengths that are powers of two, the longest first."""
    start = 0
    for power in reversed(range(count.bit_length())):
        if count >> power & 1:
            yield start, 1 << power
            start += 1 << power


def _store_plain(
    conv: Conv2d, part: Any, size: int, at: tuple[Expr, ...], constants: Any, residual: Any | None, output: Any
) -> None:
    """Emit the epilogue of ``size`` columns of one channel and their store, from the indices ``at`` on."""
    index = (*at[:-1], at[-1] if size == 1 else tirx.Ramp(at[-1], 1, size))
    names = channel_vectors(conv.epilogue)

    def constant(name: str) -> Any:
        return emit.splat(constants[names.index(name), at[1]], size)

    def read() -> Any:
        assert residual is not None
        return residual[index]

    T.buffer_store(output, emit.finish(part, conv.epilogue, read, size, constant), [*index])


def _direct_knobs(config: Config) -> DirectConv2dKnobs:
    return DirectConv2dKnobs(**{knob: value for knob, value in config.items() if knob != LANE_COLUMNS})
