"""Input of a convolution with the operators that its kernel applies as it reads it: a gate, a scale and a shift, an
activation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d
from schedules.contract.blocked_layout import blocks
from schedules.loops import emit
from schedules.loops.emit import Expr


@dataclass(frozen=True)
class PreparedInput:
    """Blocked input ``data`` of ``conv`` and the parameters of its gate and prologue."""

    conv: Conv2d
    data: Any
    # Blocked, of one pixel; None if there is no gate.
    gate: Any | None
    # Scales, then shifts, of a prologue (:func:`schedules.loops.weight_packing.pack_prologue`); None if there are none.
    constants: Any | None
    lanes: int

    def block(self, image: Expr, block: Expr) -> Callable[[Expr, Expr], Any]:
        """Return ``pixel(row, column)``, the vectors of one block of channels; parameters common to all pixels are read
        here, once.
        """
        lanes, prologue = self.lanes, self.conv.prologue
        factor = scale = shift = None
        if self.gate is not None:
            factor = T.bind(emit.load(self.gate, image, block, 0, 0, lanes=lanes))
        if self.constants is not None:
            scale = T.bind(emit.load(self.constants, block, lanes=lanes))
            shift = T.bind(emit.load(self.constants, block + blocks(self.conv.in_channels, lanes), lanes=lanes))

        def pixel(row: Expr, column: Expr) -> Any:
            value = emit.load(self.data, image, block, row, column, lanes=lanes)
            value = value if factor is None else value * factor
            value = value if scale is None or shift is None else value * scale + shift
            if prologue is None:
                return value
            coarse = self.conv.dtype == "bfloat16"
            return emit.activate(value, prologue.activation, lanes, prologue.slope, coarse)

        return pixel


def preparing_operations(conv: Conv2d) -> int:
    """Return the vector operations per vector of the input, without its load, for analytic costs."""
    prologue = conv.prologue
    return int(conv.gated) + (0 if prologue is None else int(prologue.affine) + (prologue.activation is not None))
