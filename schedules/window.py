"""The rows that a fused kernel keeps while it walks down an image."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from costmodel.operators import Conv2d
from schedules import emit
from schedules.emit import Expr
from schedules.ordering import ring_rows, window_steps


@dataclass(frozen=True)
class Window:
    """``tasks`` tasks each walk down their rows of the output of ``conv``, ``rows`` at a step.

    Source rows lie in a ring of :attr:`ring` rows. Tasks may overlap at the end of the image: what two of them share
    is computed twice, alike.
    """

    conv: Conv2d
    rows: int
    tasks: int

    @property
    def steps(self) -> int:
        """Steps of one task."""
        return window_steps(self.conv, self.rows, self.tasks)

    @property
    def ring(self) -> int:
        """Rows of the ring."""
        return ring_rows(self.conv, self.rows)

    def first_row(self, task: Expr, step: Expr) -> Expr:
        """First output row of a step."""
        count = self.steps * self.rows
        return emit.bind(emit.clamp_start(task * count, count, self.conv.out_height) + step * self.rows)

    def new_sources(self, first_row: Expr, step: Expr) -> tuple[Expr, Expr]:
        """Source rows [begin, end) that no step of this task had before."""
        stride, extent = self.conv.stride[0], (self.conv.kernel[0] - 1) * self.conv.dilation[0] + 1
        top = first_row * stride - self.conv.padding[0]
        end = emit.smaller(self.conv.height, top + (self.rows - 1) * stride + extent)
        begin = emit.larger(0, top)
        if not isinstance(step, int):
            # The step before ended where its last row's filter did.
            begin = tirx.Select(step == 0, begin, emit.smaller(self.conv.height, top - stride + extent))
        return emit.bind(begin), emit.bind(emit.larger(begin, end))

    def slot(self, row: Expr) -> Expr:
        """Where source ``row`` lies in the ring."""
        return emit.remainder(row, self.ring)
