"""Convolutions by the algorithm that a configuration selects: direct sums, or where they apply Winograd's algorithm,
the one for groups of few channels or the one for few output channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx

from costmodel.cpu.line_work import PIECES
from costmodel.cpu.winograd_work import OUTPUTS
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template
from schedules.kernels.column_lanes import COLUMNS_OF_A_VECTOR, LANE_COLUMNS, ColumnLanes
from schedules.kernels.direct_conv2d import DirectConv2d
from schedules.kernels.grouped_conv2d import GROUP_CHANNELS, GroupedConv2d
from schedules.kernels.line_winograd import LINE_AXIS, PIECE_TAPS, LineWinograd
from schedules.kernels.winograd_conv2d import WINOGRAD_OUTPUTS, WinogradConv2d


class ConvAlgorithms(Template):
    """Template whose space is that of all algorithms; each was pruned separately, so that none lacks a configuration.

    ``direct`` covers all operators of the template; ``winograd``: templates by the outputs along each side of their
    tiles. The defaults are those of a single k x k convolution.
    """

    def __init__(
        self, family: str = "conv2d", direct: Template | None = None, winograd: Mapping[int, Template] | None = None
    ) -> None:
        self.family = family
        self._direct = direct or DirectConv2d()
        self._grouped = GroupedConv2d()
        self._lines = {(taps, axis): LineWinograd(taps, axis) for taps in PIECES for axis in (0, 1)}
        self._column_lanes = {columns: ColumnLanes(columns) for columns in COLUMNS_OF_A_VECTOR}
        self._winograd = winograd or {outputs: WinogradConv2d(outputs) for outputs in OUTPUTS}

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return self._direct.covers(operator, cpu)

    def for_config(self, config: Config) -> Template:
        outputs = config.get(WINOGRAD_OUTPUTS)
        if GROUP_CHANNELS in config:
            return self._grouped
        if PIECE_TAPS in config:
            return self._lines[config[PIECE_TAPS], config[LINE_AXIS]]
        if LANE_COLUMNS in config:
            return self._column_lanes[config[LANE_COLUMNS]]
        return self._direct if outputs is None else self._winograd[outputs]

    def signature(self, operator: Operator, cpu: CpuTarget) -> Signature:
        """Raise ``TypeError``: the layout of weights depends on the algorithm of a configuration."""
        raise TypeError("each algorithm has constants of its own: ask for_config(config)")

    def pack(self, operator: Operator, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        """Raise ``TypeError``, as :meth:`signature` does."""
        raise TypeError("each algorithm has constants of its own: ask for_config(config)")

    def space(self, operator: Operator, cpu: CpuTarget) -> Sequence[Config]:
        known = (
            self._direct,
            self._grouped,
            *self._column_lanes.values(),
            *self._winograd.values(),
            *self._lines.values(),
        )
        algorithms = [each for each in known if each.covers(operator, cpu)]
        configs = [config for algorithm in algorithms for config in algorithm.space(operator, cpu)]
        return tuple(sorted(configs, key=lambda config: self.cost(operator, config, cpu)))

    def cost(self, operator: Operator, config: Config, cpu: CpuTarget) -> float:
        return self.for_config(config).cost(operator, config, cpu)

    def build(self, operator: Operator, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        return self.for_config(config).build(operator, config, cpu)

    def relative_rounding(self, config: Config) -> float:
        return self.for_config(config).relative_rounding(config)
