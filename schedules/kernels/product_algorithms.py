"""Products in vector registers or, on CPUs with AMX, in tile registers, as the configuration selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx

from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, SummedBuild, Template, WorkSplit

# Knobs of kernels in tile registers only: rows of a tile; blocks of input channels per row of data.
TILE_ROWS, DEPTH_BLOCKS = "tile_rows", "depth_blocks"


class ProductAlgorithms(Template):
    """Template for all operators that ``vectors`` covers, with its kernels and those of ``tiles`` that also cover the
    operator: one template per depth of a tile (0 if depth is no knob). On a CPU without AMX it is equivalent to
    ``vectors``.
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
        """Signature of kernels in vector registers; kernels in tiles have other weight layouts (:meth:`for_config`)."""
        return self._vectors.signature(operator, cpu)

    def pack(self, operator: Operator, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        """Pack weights for kernels in vector registers; for tiles use :meth:`for_config`."""
        return self._vectors.pack(operator, parameters, cpu)

    def space(self, operator: Operator, cpu: CpuTarget) -> Sequence[Config]:
        """Return the configurations of all templates, each pruned separately: the speed of tiles is uncertain before
        they are measured.
        """
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
