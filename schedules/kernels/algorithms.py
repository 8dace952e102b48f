"""Templates that are a choice of algorithms: a configuration names the one that it is for.

``ConvAlgorithms``: direct sums, or if applicable Winograd's algorithm, and those for groups of few channels and for few
output channels. ``ProductAlgorithms``: products in vector registers or, on CPUs with AMX, in tile registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx

from costmodel.cpu.core_work import OUTPUTS, PIECES
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, SummedBuild, Template, WorkSplit
from schedules.kernels.direct_conv2d import DirectConv2d
from schedules.kernels.few_channels import COLUMNS_OF_A_VECTOR, GROUP_CHANNELS, LANE_COLUMNS, ColumnLanes, GroupedConv2d
from schedules.kernels.winograd_conv2d import LINE_AXIS, PIECE_TAPS, WINOGRAD_OUTPUTS, LineWinograd, WinogradConv2d


class ConvAlgorithms(Template):
    """Union of the algorithms' spaces; each is pruned separately, so that none is left out.

    ``direct`` covers every operator; ``winograd``: templates by the number of outputs along each side of their tiles.
    Defaults: the templates of a single k x k convolution.
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
        """Raise ``TypeError``: the layout of weights depends on the configuration's algorithm."""
        raise TypeError("each algorithm has constants of its own: ask for_config(config)")

    def pack(self, operator: Operator, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        """Raise ``TypeError``, as :meth:`signature`."""
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


# Knobs of tile kernels only: rows of a tile; blocks of input channels in a row of data.
TILE_ROWS, DEPTH_BLOCKS = "tile_rows", "depth_blocks"


class ProductAlgorithms(Template):
    """Union of the kernels of ``vectors`` and of those of ``tiles`` that cover the operator.

    ``tiles`` has one template per depth of a tile (0 without such a knob). Without AMX only ``vectors`` is used.
    """

    def __init__(self, vectors: Template, tiles: Mapping[int, Template]) -> None:
        self.family = vectors.family
        self._vectors, self._tiles = vectors, tiles

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return self._vectors.covers(operator, cpu)

    def for_config(self, config: Config) -> Template:
        if TILE_ROWS in config:
            return self._tiles[config.get(DEPTH_BLOCKS, 0)]
        return self._vectors.for_config(config)

    def signature(self, operator: Operator, cpu: CpuTarget) -> Signature:
        """Signature of kernels in vector registers; tile kernels have other weight layouts (:meth:`for_config`)."""
        return self._vectors.signature(operator, cpu)

    def pack(self, operator: Operator, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        """Constants of kernels in vector registers, as :meth:`signature`."""
        return self._vectors.pack(operator, parameters, cpu)

    def space(self, operator: Operator, cpu: CpuTarget) -> Sequence[Config]:
        """Union of the spaces, each pruned separately: the speed of tiles is uncertain before measurements."""
        configs = list(self._vectors.space(operator, cpu))
        for template in self._tiles.values():
            if template.covers(operator, cpu):
                configs += template.space(operator, cpu)
        return tuple(sorted(configs, key=lambda config: self.cost(operator, config, cpu)))

    def cost(self, operator: Operator, config: Config, cpu: CpuTarget) -> float:
        return self.for_config(config).cost(operator, config, cpu)

    def build(self, operator: Operator, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        return self.for_config(config).build(operator, config, cpu)

    def build_summed(self, operator: Operator, config: Config, cpu: CpuTarget) -> SummedBuild | None:
        return self.for_config(config).build_summed(operator, config, cpu)

    def relative_rounding(self, config: Config) -> float:
        return self.for_config(config).relative_rounding(config)

    def work_split(self, config: Config, cpu: CpuTarget) -> WorkSplit:
        return self.for_config(config).work_split(config, cpu)
