"""1x1 convolution over a run of pixels in tile registers, a part of unfused and fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from costmodel.operators.layers import Conv2d
from schedules.loops import emit
from schedules.loops.emit import Expr
from schedules.loops.loop_nests import Sink, TiledExtent
from schedules.loops.requantised_sums import initial_sums
from schedules.loops.tile_products import TILE_OUTPUTS, TileProduct


def pixels_phase(
    conv: Conv2d,
    product: TileProduct,
    *,
    pixels: int,
    first_block: Expr,
    source: Callable[[Expr, Expr], Any],
    weight: Any,
    bias: Any,
    sink: Sink,
) -> None:
    """Emit a 1x1 convolution as :func:`schedules.loops.loop_nests.pointwise_phase` does, for the output blocks of
    ``product`` from ``first_block``.

    ``source(run, pixel)`` returns the first element of a row of data: a run of blocks of input channels of a pixel,
    followed by that of the next pixel. ``weight`` is packed by :func:`schedules.loops.weight_packing.pack_tiles`.
    """
    shape = product.shape
    passes = TiledExtent(pixels, shape.all_rows, 1)
    with emit.loop(passes.per_task) as part:
        start = passes.start(0, part)
        product.zero()
        with emit.loop(int(weight.shape[1])) as run:
            product.add(
                lambda tile: source(run, start + tile * shape.rows),
                lambda out: weight[first_block + out, run, 0, 0, 0, 0],
                shape.depth_bytes,
            )

        def finished(tile: int, row: Expr, out: int, sums: Any) -> None:
            total = sums + initial_sums(conv, bias, first_block + out, TILE_OUTPUTS)
            sink(first_block + out, start + tile * shape.rows + row, total)

        product.finish(finished)
