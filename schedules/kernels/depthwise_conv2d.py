"""Depthwise convolution, any window, stride and dilation, on blocked tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from tvm import tirx

from costmodel.operators.layers import Conv2d, Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, SummedBuild, Template, TensorSpec, blocks
from schedules.kernels.pointwise_kernel import conv_buffers, conv_signature, is_prepared
from schedules.loops import emit
from schedules.loops.config_space import (
    cheapest_first,
    depthwise_cycles,
    depthwise_widths,
    is_small,
    parallel_cycles,
    task_splits,
)
from schedules.loops.loop_nests import TiledExtent, depthwise_phase, store_finished, task_index
from schedules.loops.weight_packing import depthwise_weight_shape, pack_channel_constants, pack_depthwise_of

# A wider window has too many taps per row for the registers; the rows of a taller one are not unrolled.
_WIDE = 7
_TAPS = (4, 8)


class DepthwiseKnobs(NamedTuple):
    """Knobs of a depthwise convolution."""

    # Of the register tile.
    columns: int
    # Parallel tasks: ``channel_tasks`` x ``row_tasks``.
    channel_tasks: int
    row_tasks: int
    # Taps of a row at a time, for a wide or tall window.
    taps: int | None = None


class DepthwiseConv2d(Template):
    """Tasks of channel blocks x rows, one channel block after the other."""

    family = "depthwise"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, Conv2d) and operator.is_depthwise and not is_prepared(operator)

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        return conv_signature(operator, cpu.lanes, depthwise_weight_shape(operator, cpu.lanes))

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs = operator, DepthwiseKnobs(**config)
        channels, bands = _extents(conv, knobs, cpu)
        tasks = conv.batch * channels.tasks * bands.tasks
        return parallel_cycles(
            cpu, tasks, channels.per_task * depthwise_cycles(conv, knobs.columns, bands.size, knobs.taps)
        )

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        weight = pack_depthwise_of(operator, layer.weight, cpu.lanes)
        return [weight, pack_channel_constants(operator, layer, cpu.lanes)]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        return self._kernel(operator, config, cpu, summed=False)

    def build_summed(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> SummedBuild | None:
        """The parts are the rows of each task. None for bytes: their average is rounded as integers."""
        if operator.dtype == "int8":
            return None
        function = self._kernel(operator, config, cpu, summed=True)
        return SummedBuild(function, _sums_shape(operator, DepthwiseKnobs(**config), cpu))

    def _kernel(self, operator: Conv2d, config: Config, cpu: CpuTarget, summed: bool) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, DepthwiseKnobs(**config)
        channels, bands = _extents(conv, knobs, cpu)
        # Rows computed by two tasks are counted by the first.
        shared = bands.size * bands.tasks != conv.out_height

        def body(*buffers: Any) -> None:
            buffers, sums_of_rows = (buffers[:-1], buffers[-1]) if summed else (buffers, None)
            data, _, weight, bias, _, residual, output = conv_buffers(conv, buffers)
            with emit.tasks(conv.batch * channels.tasks * bands.tasks) as task:
                image, channel_task, band = task_index(task, conv.batch, channels.tasks, bands.tasks)
                first = bands.start(band, 0)
                with emit.loop(channels.per_task) as index:
                    block = channels.start(channel_task, index)
                    total = None
                    if summed:
                        ((total,),) = emit.registers(1, 1, lanes)
                        emit.store(total, emit.splat(0.0, lanes), lanes=lanes)

                    def sink(row: Any, column: Any, sums: Sequence[Any]) -> None:
                        at = (image, block, first + row, column)
                        values = store_finished(output, sums, at, conv, lanes, residual, channel=(bias, block))
                        for value in values if total is not None else ():
                            if shared:
                                one, nothing = (tirx.FloatImm("float32", each) for each in (1.0, 0.0))
                                own = tirx.Select(first + row >= band * bands.size, one, nothing)
                                value = value * emit.splat(own, lanes)
                            emit.store(total, emit.load(total, lanes=lanes) + value, lanes=lanes)

                    depthwise_phase(
                        conv,
                        knobs.columns,
                        lanes,
                        rows=bands.size,
                        first_row=first,
                        block=block,
                        data=data,
                        at=lambda row, column: (image, block, row, column),
                        weight=weight,
                        bias=bias,
                        sink=sink,
                        taps=knobs.taps,
                    )
                    if total is not None:
                        emit.store(sums_of_rows, emit.load(total, lanes=lanes), image, block, band, lanes=lanes)

        more = (TensorSpec(_sums_shape(conv, knobs, cpu)),) if summed else ()
        return emit.kernel("depthwise", self.signature(conv, cpu), body, more)


def _sums_shape(conv: Conv2d, knobs: DepthwiseKnobs, cpu: CpuTarget) -> tuple[int, int, int, int]:
    return (conv.batch, blocks(conv.in_channels, cpu.lanes), knobs.row_tasks, cpu.lanes)


def _extents(conv: Conv2d, knobs: DepthwiseKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Channel blocks, and one band of rows per task."""
    rows = -(-conv.out_height // knobs.row_tasks)
    return (
        TiledExtent(blocks(conv.in_channels, cpu.lanes), 1, knobs.channel_tasks),
        TiledExtent(conv.out_height, rows, knobs.row_tasks),
    )


def _taps(conv: Conv2d) -> tuple[int | None, ...]:
    """Taps of a row at a time; None: the whole window is unrolled."""
    if conv.kernel[1] > _WIDE:
        return _TAPS
    return (conv.kernel[1],) if conv.kernel[0] > _WIDE else (None,)


def _candidates(conv: Conv2d, cpu: CpuTarget) -> Iterator[Config]:
    count = blocks(conv.in_channels, cpu.lanes)
    for taps in _taps(conv):
        for columns in depthwise_widths(conv, cpu, taps):
            for channel_tasks, row_tasks in task_splits(count, conv.out_height, cpu, is_small(conv.flops)):
                knobs = DepthwiseKnobs(columns, channel_tasks, row_tasks, taps)._asdict()
                yield {knob: value for knob, value in knobs.items() if value is not None}
