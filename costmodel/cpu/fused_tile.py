"""Row tiles of fused convolutions: recomputation per tile, and bytes it keeps in the caches.

A fused kernel computes the last convolution in tiles of rows; for each tile it first computes the rows of every
intermediate that the tile reads. Neighbouring tiles need overlapping rows (the halo of a window), which are computed
twice: the recomputation factor rho is rows computed over rows that exist. Chains of three and pairs with a dense window
keep the rows shared by neighbouring tiles (``schedules/kernels/sliding_window.py``, ``conv_pair.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.operators.layers import Conv2d, FusedConvs, conv_kind, element_bytes


@dataclass(frozen=True)
class FusedTile:
    """A tile of ``rows`` rows of the last convolution.

    count: row tiles of one image. recomputation: rho of each convolution, 1 for the last.
    input_factor: rows of the input read by all tiles over rows that exist.
    resident_bytes: the intermediates' tile and the weights that it needs, which must stay in the caches.
    """

    rows: int
    count: int
    recomputation: tuple[float, ...]
    input_factor: float
    resident_bytes: int


def fused_tiles(operator: FusedConvs, lanes: int, threads: int = 1) -> list[FusedTile]:
    """Tiles of every height that gives a different number of tiles; ``lanes``: channels of one block."""
    height = operator.convs[-1].out_height
    heights = sorted({-(-height // count) for count in range(1, height + 1)})
    return [fused_tile(operator, rows, lanes, threads) for rows in heights]


def has_dense_window(operator: FusedConvs) -> bool:
    """True for a pair in which one convolution is a dense k x k convolution."""
    return len(operator.convs) == 2 and any(conv_kind(conv) == "conv" for conv in operator.convs)


def slides_a_window(operator: FusedConvs) -> bool:
    """True if the kernel slides down the rows and keeps the rows needed by the next step."""
    return len(operator.convs) > 2 or has_dense_window(operator)


def fused_tile(operator: FusedConvs, rows: int, lanes: int, threads: int = 1) -> FusedTile:
    """Tile of ``rows`` output rows (the last tile may be shorter).

    If the kernel slides a window (:func:`slides_a_window`), each of ``threads`` threads does so over its own rows: only
    the halo between two threads is computed twice, but all channels of the window stay resident.
    """
    height = operator.convs[-1].out_height
    slides = slides_a_window(operator)
    tiles = _bands(height, rows)
    computed = _bands(height, -(-height // threads)) if slides else tiles
    factors: list[float] = []
    resident = 0
    for index in range(len(operator.convs) - 1, -1, -1):
        conv = operator.convs[index]
        factors.append(sum(stop - start for start, stop in computed) / conv.out_height)
        if index < len(operator.convs) - 1:
            tallest = max(stop - start for start, stop in tiles)
            resident += _intermediate_bytes(conv, tallest, operator.convs[index + 1], lanes, slides)
        resident += _weight_bytes(operator, index, lanes, slides)
        tiles = [input_rows(conv, start, stop) for start, stop in tiles]
        computed = [input_rows(conv, start, stop) for start, stop in computed]
    rows_read = sum(stop - start for start, stop in computed)
    return FusedTile(
        rows=rows,
        count=-(-height // rows),
        recomputation=tuple(reversed(factors)),
        input_factor=rows_read / operator.convs[0].height,
        resident_bytes=resident,
    )


def _bands(height: int, rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + rows, height)) for start in range(0, height, rows)]


def input_rows(conv: Conv2d, start: int, stop: int) -> tuple[int, int]:
    """Range of input rows read by output rows ``start`` to ``stop`` (exclusive), padding excluded."""
    extent = conv.dilation[0] * (conv.kernel[0] - 1) + 1
    first = start * conv.stride[0] - conv.padding[0]
    last = (stop - 1) * conv.stride[0] - conv.padding[0] + extent
    return max(first, 0), max(min(last, conv.height), max(first, 0))


def _intermediate_bytes(conv: Conv2d, rows: int, consumer: Conv2d, lanes: int, slides: bool) -> int:
    """Bytes of an intermediate's tile. A depthwise consumer of a pair takes one block of channels at a time; any other
    needs all channels.
    """
    channels = min(lanes, conv.out_channels) if consumer.is_depthwise and not slides else conv.out_channels
    return rows * conv.out_width * channels * element_bytes(middle_dtype(consumer))


def middle_dtype(consumer: Conv2d) -> str:
    """Data type of the intermediate read by ``consumer``: a depthwise convolution of a narrow dtype computes in FP32
    and reads unrounded values, a dense one takes operands of its own dtype. Quantised layers (``int8``) round as they
    would alone, so the intermediate is ``int8``.
    """
    narrow = element_bytes(consumer.dtype) < 4 and consumer.dtype != "int8"
    return "float32" if consumer.is_depthwise and narrow else consumer.dtype


def _weight_bytes(operator: FusedConvs, index: int, lanes: int, slides: bool) -> int:
    """Bytes of the weights that a tile needs: one channel block's if a pair ends in a depthwise convolution,
    else all.
    """
    conv = operator.convs[index]
    if slides or not operator.convs[-1].is_depthwise:
        return conv.weight_bytes
    share = min(lanes, conv.out_channels) / conv.out_channels
    return round(conv.weight_bytes * share)
