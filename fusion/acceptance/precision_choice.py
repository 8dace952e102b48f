"""Which layers of one network are stored in a shorter number type, in the time that there is to find that out."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from costmodel.machines.machine_records import Machine
from fusion.acceptance.error_budget import (
    FRONTIER_POINTS,
    GIVEN_OUT,
    FrontierPoint,
    PrecisionChoice,
    RoundedLimit,
    choose_layers,
)
from fusion.analysis.mixed_times import MixedTimes, comparable, predicted_in
from fusion.model.precision import BFLOAT16, Precision

if TYPE_CHECKING:
    from costmodel.operators.layers import Operator
    from fusion.model.conv_graph import Graph
    from schedules.contract.cpu_target import CpuTarget

# What errors of single layers may take of a limited job, and so those of networks in each choice among them; never less
# than it takes to be of use. Of so many networks errors are asked in a choice.
ERROR_SHARE = 0.05
LEAST_ERROR_SECONDS, MOST_ERROR_SECONDS = 3.0, 60.0
USUAL_SETS = 12
# But no more of what is left for that and for kernels: errors are measured in three turns.
MOST_SHARE_LEFT = 0.1
# A choice that turns out to err more than it is allowed to is made again for a smaller budget, so often at most.
MOST_REBUILDS = 2


@dataclass(frozen=True, eq=False)
class PrecisionPlan:
    """What is asked of one job: ``layers`` could be stored in ``dtype``, within ``limit``. ``choice``: among them,
    where it is made already; ``told``: what ``summary.json`` says besides.
    """

    asked: Precision
    layers: frozenset[str]
    limit: RoundedLimit
    dtype: str = BFLOAT16
    choice: PrecisionChoice | None = None
    told: Mapping[str, Any] = field(default_factory=dict)

    @property
    def of_all_layers(self) -> RoundedLimit | None:
        """The limit of a network whose layers are settled before any kernel is measured; ``None`` where they are chosen
        by measured times.
        """
        return None if self.asked == "auto" else self.limit


class PrecisionChooser:
    """Chooses layers of one network by times and errors. ``seconds``: what measuring errors may take in each choice."""

    def __init__(self, graph: Graph, machine: Machine, cpu: CpuTarget, plan: PrecisionPlan, seconds: float) -> None:
        """``graph``: with all its layers in float32."""
        self.plan = plan
        self._graph, self._machine, self._cpu = graph, machine, cpu
        self._predicted = predicted_in(graph, machine, cpu.threads, plan.dtype)
        self._seconds = seconds
        # Of few inputs where a run takes long: the whole is measured on all of them in the end.
        self._first = plan.limit.measured.fitting(seconds, USUAL_SETS)

    def within(self, plan: PrecisionPlan) -> PrecisionChooser:
        """The same for another budget."""
        return PrecisionChooser(self._graph, self._machine, self._cpu, plan, self._seconds)

    def with_followers(self, rounded: Collection[str]) -> set[str]:
        """As of :class:`fusion.analysis.mixed_times.MixedTimes`."""
        return self._times({}).with_followers(rounded)

    def chosen(self, sensitivity: Mapping[str, float], measured: Mapping[Operator, float]) -> PrecisionChoice:
        """The fastest network within the budget, by times ``measured`` where there are such in both number types."""
        errors, limit = self.plan.limit.measured, self.plan.limit.max_error
        allowed = float("inf") if limit is None else limit
        for _ in range(MOST_REBUILDS + 1):
            choice = self._choice(sensitivity, measured, allowed, FRONTIER_POINTS)
            found = errors.error_of(choice.rounded) if choice.rounded else 0.0
            if limit is None or found <= GIVEN_OUT * limit or not choice.rounded:
                break
            allowed *= 0.9 * choice.error / max(found, choice.error, 1e-30)
        if limit is not None and not found <= limit:
            return PrecisionChoice(frozenset(), tuple(sensitivity), 0.0, dict(sensitivity), ())
        return replace(choice, error=found)

    def frontier(
        self, sensitivity: Mapping[str, float], measured: Mapping[Operator, float], chosen: PrecisionChoice
    ) -> tuple[FrontierPoint, ...]:
        """From no layer to all of them, whatever the budget is, with what was ``chosen``: by how much a layer gains for
        its error, and at last those that gain nothing.
        """
        whole = self._choice(sensitivity, measured, float("inf"), FRONTIER_POINTS)
        wanted = dict.fromkeys(point.rounded for point in whole.frontier)
        wanted |= dict.fromkeys((frozenset(sensitivity), chosen.rounded))
        return ordered(self.point(each, each == chosen.rounded, measured) for each in wanted)

    def _choice(
        self, sensitivity: Mapping[str, float], measured: Mapping[Operator, float], limit: float, points: int
    ) -> PrecisionChoice:
        end = time.monotonic() + self._seconds
        errors = self.plan.limit.measured
        return choose_layers(
            sensitivity,
            self._times(measured),
            lambda layers: errors.error_of(layers, self._first),
            limit,
            points,
            lambda: time.monotonic() < end,
        )

    def _times(self, measured: Mapping[Operator, float]) -> MixedTimes:
        dtype = self.plan.dtype
        seconds = comparable(self._graph, self._predicted, measured, dtype)
        return MixedTimes(self._graph, self._machine, self._cpu, dtype, self.plan.layers, seconds)

    def point(self, rounded: frozenset[str], chosen: bool, measured: Mapping[Operator, float]) -> FrontierPoint:
        """The network with these layers in the shorter type; errors of what is ``chosen`` are those on all inputs."""
        times = self._times(measured)
        errors = self.plan.limit.measured.errors_of(rounded, None if chosen else self._first)
        return FrontierPoint(
            layers=len(rounded),
            seconds=times(rounded),
            error=errors.max_relative_error,
            chosen=chosen,
            rounded=rounded,
            predicted_seconds=self._times({})(rounded),
            measured_seconds=times(rounded) if times.known(rounded, measured) else None,
            errors=errors,
        )


def ordered(points: Iterable[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Fewest layers first."""
    return tuple(sorted(points, key=lambda each: (each.layers, each.error)))


def error_seconds(minutes: float | None, left: float | None = None) -> float:
    """What errors of layers, and what errors of networks in each choice, may take in a job of ``minutes`` that has so
    many seconds ``left`` for that and for kernels.
    """
    wanted = MOST_ERROR_SECONDS if minutes is None else ERROR_SHARE * 60.0 * minutes
    if left is not None:
        wanted = min(wanted, MOST_SHARE_LEFT * left)
    return min(max(wanted, LEAST_ERROR_SECONDS), MOST_ERROR_SECONDS)
