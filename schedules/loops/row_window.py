"""Window of rows that a fused kernel keeps while it computes an image from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from costmodel.operators.layers import Conv2d
from schedules.loops import emit
from schedules.loops.emit import Expr


@dataclass(frozen=True)
class RowWindow:
    """Window of ``tasks`` tasks, each of which computes its rows of the output of ``conv`` in order, ``rows`` per step.

    Source rows are stored in a ring of :attr:`ring` rows. Tasks may overlap at the end of the image: the overlap is
    computed twice, with equal results.
    """

    conv: Conv2d
    rows: int
    tasks: int

    @property
    def steps(self) -> int:
        """Steps of one task."""
        return -(-(-(-self.conv.out_height // self.rows)) // self.tasks)

    @property
    def ring(self) -> int:
        """Rows of the ring: the rows that a step reads, rounded up to a power of two, so that the remainder
        is a mask.
        """
        return 1 << (_extent(self.conv, self.rows) - 1).bit_length()

    def first_row(self, task: Expr, step: Expr) -> Expr:
        """Return the first output row of a step."""
        count = self.steps * self.rows
        return emit.bind(emit.clamp_start(task * count, count, self.conv.out_height) + step * self.rows)

    def new_sources(self, first_row: Expr, step: Expr) -> tuple[Expr, Expr]:
        """Return the source rows [begin, end) that no earlier step of this task has computed."""
        stride, extent = self.conv.stride[0], _extent(self.conv, 1)
        top = first_row * stride - self.conv.padding[0]
        end = emit.smaller(self.conv.height, top + (self.rows - 1) * stride + extent)
        begin = emit.larger(0, top)
        if not isinstance(step, int):
            # The previous step ended with the filter of its last row; with a stride beyond the filter, before this step
            # begins.
            following = top if stride > extent else top - stride + extent
            if self.rows * stride - self.conv.padding[0] - stride + extent < 0:  # whole rows of padding
                following = emit.larger(0, following)
            begin = tirx.Select(step == 0, begin, emit.smaller(self.conv.height, following))
        return emit.bind(begin), emit.bind(emit.larger(begin, end))

    def slot(self, row: Expr) -> Expr:
        """Return the position of source ``row`` in the ring."""
        return emit.remainder(row, self.ring)


def source_rows(conv: Conv2d, rows: int) -> int:
    """Return the number of input rows that ``rows`` output rows read, at most the image."""
    return min(conv.height, _extent(conv, rows))


def _extent(conv: Conv2d, rows: int) -> int:
    """Return the number of rows from the first to the last that ``rows`` output rows read, including the padding."""
    return (rows - 1) * conv.stride[0] + (conv.kernel[0] - 1) * conv.dilation[0] + 1
