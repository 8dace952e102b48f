"""A network prepared for timing: kernels, their configurations and their data dependencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from costmodel.operators.layers import Operator
from fusion.model.selection import FusionPlan, Group
from schedules.contract.template import Config
from schedules.measuring.measure_messages import KernelProgram, KernelStep


@dataclass(frozen=True, eq=False)
class Variant:
    """A network: its kernels and their configurations. Kernels without a configuration are omitted when it runs."""

    plan: FusionPlan
    configs: Mapping[Operator, Config]

    @property
    def groups(self) -> list[Group]:
        """Groups of the plan that have a configuration, in its order."""
        return [group for group in self.plan.groups if group.operator in self.configs]

    def program(self) -> KernelProgram:
        """Kernels in order, each with the indices of the kernels whose outputs it reads."""
        producer: dict[Any, int] = {}
        steps = []
        for index, group in enumerate(self.groups):
            first, last = group.nodes[0], group.nodes[-1]
            residual = None if last.residual is None else producer.get(last.residual)
            gate = None if first.gate is None else producer.get(first.gate)
            candidate = (group.operator, dict(self.configs[group.operator]))
            steps.append(KernelStep(candidate, producer.get(first.data), residual, gate))
            producer[last.output] = index
        return tuple(steps)
