"""A priced graph after its simulation: the one step of it that is explained."""

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
    """``iteration`` of ``timeline`` is looked at. ``seconds``: of a step. ``starts``: rank -> seconds by which it began
    late. ``host_factor``: by how much the host's times may be shorter or longer. ``errors``: what measured steps of its
    kind tell of its interval.
    """

    graph: ExecutionGraph
    timeline: Timeline
    iteration: int
    seconds: float
    starts: Mapping[int, float] = field(default_factory=dict)
    host_factor: float = 1.0
    errors: StepErrors | None = None

    @property
    def window(self) -> TimeWindow:
        """From the end of the iteration before to the end of this one."""
        return self.timeline.window(self.iteration)

    @cached_property
    def path(self) -> CriticalPath:
        """The critical path of the explained iteration through all ranks."""
        return critical_path(self.graph, self.timeline, iteration=self.iteration)

    @cached_property
    def paths(self) -> Mapping[int, CriticalPath]:
        """Rank -> the critical path of the explained iteration through that rank alone."""
        return {
            rank.rank: critical_path(self.graph, self.timeline, iteration=self.iteration, rank=rank.rank)
            for rank in self.graph.ranks
        }
