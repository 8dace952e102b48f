"""Simulated step of a priced graph, to be explained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from e2e.explain.critical_path import CriticalPath, critical_path
from e2e.price.speed_band import StepErrors
from e2e.simulate.timeline import Timeline, TimeWindow
from e2e.step.execution_graph import ExecutionGraph


@dataclass(frozen=True)
class SimulatedStep:
    """Iteration ``iteration`` of ``timeline``."""

    graph: ExecutionGraph
    timeline: Timeline
    iteration: int
    # Time of a step.
    seconds: float
    # Rank -> seconds by which it began late.
    starts: Mapping[int, float] = field(default_factory=dict)
    # Factor by which the host's times may be shorter or longer.
    host_factor: float = 1.0
    # Error figures learned from measured steps of its kind.
    errors: StepErrors | None = None

    @property
    def window(self) -> TimeWindow:
        """Window from the end of the previous iteration to the end of this one."""
        return self.timeline.window(self.iteration)

    @cached_property
    def path(self) -> CriticalPath:
        """Critical path of the explained iteration through all ranks."""
        return critical_path(self.graph, self.timeline, iteration=self.iteration)

    @cached_property
    def paths(self) -> Mapping[int, CriticalPath]:
        """Critical path of the explained iteration through each rank alone, by rank."""
        return {
            rank.rank: critical_path(self.graph, self.timeline, iteration=self.iteration, rank=rank.rank)
            for rank in self.graph.ranks
        }
