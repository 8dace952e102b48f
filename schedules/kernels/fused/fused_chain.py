"""Code shared by the fused templates: arguments of a chain of convolutions, knobs of a pair, and loops of the first and
the last layer.

V is the number of lanes of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from costmodel.operators.layers import Conv2d, FusedConvs, Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Parameters, Signature, Template, blocks
from schedules.kernels.depthwise_conv2d import DepthwiseConv2d
from schedules.kernels.direct_conv2d import reads_plain_input
from schedules.kernels.pointwise_kernel import Pointwise
from schedules.loops import emit
from schedules.loops.config_space import RegisterTile, depthwise_widths
from schedules.loops.dot_products import dot_product
from schedules.loops.emit import Expr
from schedules.loops.kernel_inputs import PlainOperands
from schedules.loops.loop_nests import TiledExtent, conv_phase, pointwise_phase, store_finished


class FusedTemplate(Template):
    """A chain of convolutions with the same constants as in their separate kernels. ``family`` is the kind of the
    chain.
    """

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, FusedConvs) and operator.kind == self.family

    def layer_templates(self, operator: FusedConvs, cpu: CpuTarget) -> list[Template]:
        """Templates of the separate convolutions, which define how weights are packed."""
        # Not `template_for`: a 1x1 inside a chain reads blocked data even with few channels.
        return [DepthwiseConv2d() if conv.is_depthwise else Pointwise() for conv in operator.convs]

    def signature(self, operator: FusedConvs, cpu: CpuTarget) -> Signature:
        """Data of the first convolution, weight and bias of each, residual (optional) and output of the last."""
        templates = self.layer_templates(operator, cpu)
        layers = [template.signature(conv, cpu) for template, conv in zip(templates, operator.convs, strict=True)]
        return Signature(
            data=layers[0].data,
            constants=tuple(spec for layer in layers for spec in layer.constants),
            residual=layers[-1].residual,
            output=layers[-1].output,
        )

    def pack(self, operator: FusedConvs, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[np.ndarray]:
        """Constants of :meth:`signature`; raises ``ValueError`` unless ``parameters`` has one entry per convolution."""
        layers = zip(self.layer_templates(operator, cpu), operator.convs, parameters, strict=True)
        return [array for template, conv, own in layers for array in template.pack(conv, [own], cpu)]


@dataclass(frozen=True)
class ChainLayer:
    """A convolution of the chain, and the buffers of its packed weight and bias."""

    conv: Conv2d
    weight: Any
    bias: Any


class PairKnobs(NamedTuple):
    """Knobs of a pair of a 1x1 and a depthwise convolution."""

    # Register tile of the 1x1: ``out_blocks`` x ``columns``.
    out_blocks: int
    columns: int
    # Of the reduction of the 1x1.
    unroll: int
    # Output rows of a tile.
    rows: int
    # Columns of the register tile of the depthwise convolution.
    depthwise_columns: int
    # Parallel tasks: ``channel_tasks`` x ``row_tasks``.
    channel_tasks: int
    row_tasks: int

    @property
    def tile(self) -> RegisterTile:
        return RegisterTile(self.out_blocks, self.columns, self.unroll)


def smallest_tiles(pointwise: Conv2d, depthwise: Conv2d, cpu: CpuTarget) -> PairKnobs:
    """Knobs that are legal for any pair: one block and one row at a time."""
    return PairKnobs(
        out_blocks=1,
        columns=min(8, pointwise.width),
        unroll=2,
        rows=1,
        depthwise_columns=depthwise_widths(depthwise, cpu)[0],
        channel_tasks=1,
        row_tasks=min(cpu.threads, depthwise.out_height),  # either order: a 1x1 keeps the height
    )


def split_arguments(operator: FusedConvs, buffers: Sequence[Any]) -> tuple[Any, list[ChainLayer], Any | None, Any]:
    """Split a kernel's ``buffers`` into (data, layers, residual or None, output).

    Raises ``ValueError`` if their number differs from the signature.
    """
    data, *constants, output = buffers
    residual = constants.pop() if operator.epilogue.residual else None
    layers = zip(operator.convs, constants[::2], constants[1::2], strict=True)
    return data, [ChainLayer(conv, weight, bias) for conv, weight, bias in layers], residual, output


def is_matrix(conv: Conv2d, lanes: int) -> bool:
    """True for a 1x1 convolution on blocked data."""
    return conv.is_pointwise and not reads_plain_input(conv, lanes)


class ChainInput:
    """Input of the first, dense convolution of a chain: blocked ``data``, or plain with few channels."""

    def __init__(self, conv: Conv2d, data: Any, lanes: int) -> None:
        """Construct inside the task, which may need a buffer."""
        self.data = data
        self._conv, self._lanes = conv, lanes
        self._dot = dot_product(conv.dtype)
        self._plain = PlainOperands(conv, data, 1, lanes) if reads_plain_input(conv, lanes) else None

    def row(
        self,
        layer: ChainLayer,
        tile: RegisterTile,
        image: Expr,
        row: Expr,
        first_block: Expr,
        sink: Callable[[Expr, Expr, Any], None],
    ) -> None:
        """Emit the output blocks from ``first_block`` of one output ``row``; ``sink(block, column, sums)`` stores."""
        conv, lanes, dot, data, plain = self._conv, self._lanes, self._dot, self.data, self._plain
        if is_matrix(conv, lanes):
            pointwise_phase(
                conv,
                tile,
                lanes,
                pixels=conv.width,
                first_block=first_block,
                source=lambda block, column, lane: dot.operand(data, image, block, row, column, lane),
                weight=layer.weight,
                bias=layer.bias,
                sink=sink,
            )
            return
        if plain is not None:
            plain.fill(image, row)

        def source(block: Expr, lane: Expr, y: Expr, x: Expr) -> Any:
            if plain is not None:
                return plain.value(image, block, y, x)
            return dot.operand(data, image, block, y, x, lane)

        def weight(o: Expr, block: Expr, step: Expr, ky: Expr, kx: int) -> Any:
            step_index = (step,) if plain is None else ()
            return dot.weights(layer.weight, o, block, ky, kx, *step_index, lanes=lanes)

        conv_phase(
            conv,
            tile,
            lanes,
            rows=1,
            first_row=row,
            first_block=first_block,
            channels=blocks(conv.in_channels, lanes) * lanes if plain is None else plain.channels,
            block_lanes=lanes if plain is None else 1,
            source=source,
            weight=weight,
            bias=layer.bias,
            sink=lambda block, _row, column, sums: sink(block, column, sums),
        )


def conv_output_phase(
    layer: ChainLayer,
    register_tile: RegisterTile,
    lanes: int,
    *,
    rows: int,
    groups: TiledExtent,
    image: Expr,
    first_row: Expr,
    tile: Any,
    position: Callable[[Expr], Expr],
    residual: Any | None,
    output: Any,
) -> None:
    """Emit the last k x k convolution of a chain: ``rows`` rows from ``first_row``, all output blocks.

    ``tile``, (input blocks, pixels, V), holds its input, each row starting at ``position(row)``; ``residual`` and
    ``output`` are blocked.
    """
    conv, dot = layer.conv, dot_product(layer.conv.dtype)

    def sink(block: Expr, row: Expr, column: Expr, sums: Any) -> None:
        at = (image, block, first_row + row, column)
        store_finished(output, sums, at, conv, lanes, residual, channel=(layer.bias, block))

    with emit.loop(groups.per_task) as group:
        conv_phase(
            conv,
            register_tile,
            lanes,
            rows=rows,
            first_row=first_row,
            first_block=groups.start(0, group),
            channels=conv.in_channels,
            block_lanes=lanes,
            source=lambda block, lane, row, column: dot.operand(tile, block, position(row) + column, lane),
            weight=lambda o, block, step, ky, kx: dot.weights(layer.weight, o, block, ky, kx, step, lanes=lanes),
            bias=layer.bias,
            sink=sink,
        )


def pointwise_output_phase(
    layer: ChainLayer,
    register_tile: RegisterTile,
    lanes: int,
    *,
    rows: int,
    groups: TiledExtent,
    task: Expr,
    image: Expr,
    first_row: Expr,
    tile: Any,
    residual: Any | None,
    output: Any,
) -> None:
    """Emit the last 1x1 of a chain: ``rows`` rows from ``first_row``, for the output blocks of ``task``.

    ``tile``, (input blocks, rows x width, V), holds its input; ``residual`` and ``output`` are blocked.
    """
    conv, operand = layer.conv, dot_product(layer.conv.dtype).operand

    def sink(block: Expr, pixel: Expr, sums: Any) -> None:
        at = (image, block, 0, first_row * conv.width + pixel)
        store_finished(output, sums, at, conv, lanes, residual, channel=(layer.bias, block))

    with emit.loop(groups.per_task) as group:
        pointwise_phase(
            conv,
            register_tile,
            lanes,
            pixels=rows * conv.width,
            first_block=groups.start(task, group),
            source=lambda block, pixel, lane: operand(tile, block, pixel, lane),
            weight=layer.weight,
            bias=layer.bias,
            sink=sink,
        )
