"""Input of a convolution as read by its kernel: after gate, scale and shift, and activation."""

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
    """Blocked ``data`` and the operands that prepare it for a kernel of ``conv``."""

    conv: Conv2d
    data: Any
    # Blocked, one pixel per image; None without a gate.
    gate: Any | None
    # Scales, then shifts of a prologue (:func:`schedules.loops.weight_packing.pack_prologue`), or None.
    constants: Any | None
    lanes: int

    def block(self, image: Expr, block: Expr) -> Callable[[Expr, Expr], Any]:
        """Return ``pixel(row, column)`` for one block of channels; operands shared by all pixels are loaded here,
        once.
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
    """Vector operations per input vector without its load, for analytic costs."""
    prologue = conv.prologue
    return int(conv.gated) + (0 if prologue is None else int(prologue.affine) + (prologue.activation is not None))
