"""1x1 convolution, stride 1: a matrix product over the pixels of the image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from tvm import tirx

from costmodel.operators.layers import Conv2d, Operator, element_bytes
from schedules.contract.blocked_layout import blocked_shape, blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template, TensorSpec
from schedules.loops import emit
from schedules.loops.dot_products import dot_product
from schedules.loops.issue_slots import dense_cycles, parallel_cycles
from schedules.loops.loop_nests import TiledExtent, pointwise_phase, store_finished, task_index
from schedules.loops.register_tiling import UNROLLS, RegisterTile, register_tiles
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits
from schedules.loops.weight_packing import (
    channel_constants_shape,
    conv_weight_shape,
    pack_channel_constants,
    pack_conv,
    pack_prologue,
    packed_dtype,
    prologue_shapes,
)

# The hardware prefetcher restarts for every run of pixels of a channel block.
_STREAM_CYCLES = 40.0


def conv_signature(
    conv: Conv2d, lanes: int, weight_shape: tuple[int, ...], plain_input: bool = False, weight_dtype: str | None = None
) -> Signature:
    """Return the signature: input and output blocked (``plain_input``: NCHW input, as in the first layer); packed
    weights, bias, and the parameters of a prologue.

    Parameters per channel are float32, the weights ``weight_dtype`` (default: packed for the dtype of ``conv``), and
    all other tensors of the dtype of ``conv``.
    """
    output = TensorSpec(blocked_shape(conv.output_shape, lanes), "blocked", conv.dtype)
    data = (
        TensorSpec(conv.input_shape, "plain", conv.dtype)
        if plain_input
        else TensorSpec(blocked_shape(conv.input_shape, lanes), "blocked", conv.dtype)
    )
    weight = TensorSpec(weight_shape, dtype=weight_dtype or packed_dtype(conv))
    bias = TensorSpec(channel_constants_shape(conv, lanes))
    residual = output if conv.epilogue.residual else None
    gate = TensorSpec(blocked_shape(conv.gate_shape, lanes), "blocked", conv.dtype) if conv.gated else None
    before = (TensorSpec(shape) for shape in prologue_shapes(conv, lanes))
    return Signature(data, (weight, bias, *before), residual, output, gate)


class ConvBuffers(NamedTuple):
    """Buffers of a kernel with the arguments of :func:`conv_signature`; None for those that it lacks."""

    data: Any
    gate: Any | None
    weight: Any
    bias: Any
    prologue: Any | None
    residual: Any | None
    output: Any


def conv_buffers(conv: Conv2d, buffers: Sequence[Any]) -> ConvBuffers:
    """Return ``buffers``, in the order of :func:`conv_signature`, by name."""
    rest = list(buffers)
    data = rest.pop(0)
    gate = rest.pop(0) if conv.gated else None
    weight, bias = rest.pop(0), rest.pop(0)
    prologue = rest.pop(0) if conv.prologue is not None and conv.prologue.affine else None
    residual = rest.pop(0) if conv.epilogue.residual else None
    (output,) = rest
    return ConvBuffers(data, gate, weight, bias, prologue, residual, output)


def is_prepared(conv: Conv2d) -> bool:
    """True if the input has a gate or a prologue."""
    return conv.gated or conv.prologue is not None


class PointwiseKnobs(NamedTuple):
    """Knobs: ``out_blocks`` x ``columns`` register tile, ``unroll`` of the reduction, ``pixel_block`` pixels per pass
    over the weights, ``channel_tasks`` x ``pixel_tasks`` parallel tasks.
    """

    out_blocks: int
    columns: int
    unroll: int
    pixel_block: int
    channel_tasks: int
    pixel_tasks: int

    @property
    def tile(self) -> RegisterTile:
        return RegisterTile(self.out_blocks, self.columns, self.unroll)


class Pointwise(Template):
    """1x1 convolution with tasks of output blocks x pixels; each passes over its weights once per block of pixels."""

    family = "pointwise"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        # Few input channels are read as plain NCHW, which only the k x k template supports.
        if not isinstance(operator, Conv2d) or is_prepared(operator) or not operator.is_pointwise:
            return False
        return operator.in_channels >= cpu.lanes // 2

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        return conv_signature(operator, cpu.lanes, conv_weight_shape(operator, cpu.lanes))

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(pointwise_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs = operator, PointwiseKnobs(**config)
        groups, tiles = pointwise_extents(conv, knobs, cpu)
        in_bytes = element_bytes(conv.dtype) * conv.in_channels
        one = dense_cycles(
            cpu,
            knobs.tile,
            knobs.pixel_block,
            conv.in_channels,
            data_bytes=knobs.pixel_block * in_bytes,
            weight_bytes=knobs.out_blocks * cpu.lanes * in_bytes,
            dtype=conv.dtype,
        )
        one += _STREAM_CYCLES * blocks(conv.in_channels, cpu.lanes)
        return parallel_cycles(cpu, conv.batch * groups.tasks * tiles.tasks, groups.per_task * tiles.per_task * one)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        weight = pack_conv(operator, layer.weight, cpu.lanes)
        return [weight, pack_channel_constants(operator, layer, cpu.lanes), *pack_prologue(operator, layer, cpu.lanes)]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, PointwiseKnobs(**config)
        groups, tiles = pointwise_extents(conv, knobs, cpu)
        operand = dot_product(conv.dtype).operand

        def body(*buffers: Any) -> None:
            data, _, weight, bias, _, residual, output = conv_buffers(conv, buffers)
            with emit.tasks(conv.batch * groups.tasks * tiles.tasks) as task:
                image, channel_task, pixel_task = task_index(task, conv.batch, groups.tasks, tiles.tasks)
                with emit.loop(tiles.per_task) as tile:
                    first = tiles.start(pixel_task, tile)
                    finished_pixels(
                        conv,
                        knobs,
                        lanes,
                        groups=groups,
                        task=channel_task,
                        image=image,
                        first=first,
                        source=lambda block, pixel, lane: operand(data, image, block, 0, first + pixel, lane),
                        weight=weight,
                        bias=bias,
                        residual=residual,
                        output=output,
                    )

        return emit.kernel("pointwise", self.signature(conv, cpu), body)


def finished_pixels(
    conv: Conv2d,
    knobs: PointwiseKnobs,
    lanes: int,
    *,
    groups: TiledExtent,
    task: Any,
    image: Any,
    first: Any,
    source: Callable[[Any, Any, Any], Any],
    weight: Any,
    bias: Any,
    residual: Any | None,
    output: Any,
) -> None:
    """Emit a block of pixels from ``first``, for the output blocks of ``task``, with the epilogue.

    ``source(block, pixel of the block, lane)`` as in :func:`pointwise_phase`; ``residual`` and ``output`` are blocked.
    """

    def sink(block: Any, pixel: Any, sums: Any) -> None:
        at = (image, block, 0, first + pixel)
        store_finished(output, sums, at, conv, lanes, residual, channel=(bias, block))

    with emit.loop(groups.per_task) as group:
        pointwise_phase(
            conv,
            knobs.tile,
            lanes,
            pixels=knobs.pixel_block,
            first_block=groups.start(task, group),
            source=source,
            weight=weight,
            bias=bias,
            sink=sink,
        )


def pointwise_extents(conv: Conv2d, knobs: PointwiseKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Return output blocks and pixels, each divided among tasks."""
    return (
        TiledExtent(blocks(conv.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(conv.height * conv.width, knobs.pixel_block, knobs.pixel_tasks),
    )


def pointwise_candidates(conv: Conv2d, cpu: CpuTarget) -> Iterator[Config]:
    """Yield every legal configuration of a 1x1 convolution, in no order."""
    pixels, count = conv.height * conv.width, blocks(conv.out_channels, cpu.lanes)
    in_bytes = blocks(conv.in_channels, cpu.lanes) * cpu.lanes * element_bytes(conv.dtype)
    for (size, width), unroll in product(register_tiles(count, pixels, cpu), UNROLLS):
        for pixel_block in pixel_blocks(pixels, width, in_bytes, cpu):
            groups, tiles = -(-count // size), -(-pixels // pixel_block)
            for channel_tasks, pixel_tasks in task_splits(groups, tiles, cpu, is_small(conv.flops)):
                yield PointwiseKnobs(size, width, unroll, pixel_block, channel_tasks, pixel_tasks)._asdict()


def pixel_blocks(pixels: int, width: int, in_bytes: int, cpu: CpuTarget) -> list[int]:
    """Return choices of pixels per pass over the weights: all, one share per thread, and the capacity of L1 and L2."""
    found = {pixels, -(-pixels // cpu.threads)}
    for capacity in (cpu.l1_bytes // 2, cpu.l2_bytes // 4):
        fitting = max(1, min(pixels, capacity // in_bytes) // width) * width
        # Even blocks: otherwise the last one would overlap the one before it.
        count = -(-pixels // min(fitting, pixels))
        share = -(-pixels // count)
        found.add(min(pixels, -(-share // width) * width))
    return sorted(found)
