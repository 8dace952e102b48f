"""Which layers of a network are stored in a shorter number type, in the time that there is to find that out."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import MachineError
from fusion.acceptance.error_budget import (
    DEFAULT_MAX_ERROR,
    FRONTIER_POINTS,
    GIVEN_OUT,
    BudgetInputs,
    FrontierPoint,
    PrecisionChoice,
    RoundedLimit,
    choose_layers,
)
from fusion.acceptance.rounded_layers import rounded_runs, switched_model
from fusion.analysis.mixed_times import MixedTimes, comparable, followers, predicted_in
from fusion.comparing.output_errors import errors_json
from fusion.comparing.probes import error_inputs
from fusion.model.calibration_data import ONE_SAMPLE, DeclaredInput, read_calibration
from fusion.model.precision import (
    BFLOAT16,
    FLOAT32,
    Precision,
    layers_covered,
    layers_in,
    require_float,
)
from fusion.tuning.network_check import expose

if TYPE_CHECKING:
    from costmodel.operators.layers import Operator
    from fusion.analysis.target_machine import Target
    from fusion.comparing.output_errors import OutputErrors
    from fusion.model.conv_graph import Graph
    from fusion.model.named_arrays import Arrays
    from fusion.search.progress import TuningDisplay
    from fusion.tuning.network import Network

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
    def settled_limit(self) -> RoundedLimit | None:
        """The limit of a network whose layers are settled before any kernel is measured; ``None`` where they are chosen
        by measured times.
        """
        return None if self.asked == "auto" else self.limit


class PrecisionChooser:
    """Chooses layers of one network by times and errors. ``seconds``: what measuring errors may take in each choice."""

    def __init__(self, graph: Graph, target: Target, plan: PrecisionPlan, seconds: float) -> None:
        """``graph``: with all its layers in float32."""
        self.plan = plan
        self._graph, self._target = graph, target
        self._predicted = predicted_in(graph, target.machine, target.cpu.threads, plan.dtype)
        self._seconds = seconds
        # Of few inputs where a run takes long: the whole is measured on all of them in the end.
        self._first = plan.limit.measured.fitting(seconds, USUAL_SETS)

    def within(self, plan: PrecisionPlan) -> PrecisionChooser:
        """The same for another budget."""
        return PrecisionChooser(self._graph, self._target, plan, self._seconds)

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
        dtype, target = self.plan.dtype, self._target
        seconds = comparable(self._graph, self._predicted, measured, dtype)
        return MixedTimes(self._graph, target.machine, target.cpu, dtype, self.plan.layers, seconds)

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


@contextmanager
def precision_plan(network: Network, scratch: Path, display: TuningDisplay) -> Iterator[PrecisionPlan | None]:
    """What ``network`` is asked for, with ONNX Runtime ready to tell errors; ``None`` for float32 alone."""
    request = network.request
    if request.precision == FLOAT32:
        yield None
        return
    require_float(network.graph, request.precision)
    if BFLOAT16 not in network.machine.compute:
        name = network.machine.source or network.machine.name
        raise MachineError(
            f"{name}: no compute rate for {BFLOAT16}; measure this CPU again with "
            "`python -m costmodel calibrate`, or choose --precision float32"
        )
    from fusion.relax.onnx.onnx_file import load_model
    from fusion.relax.onnx.onnx_prepare import prepare

    inputs = budget_inputs(network)
    display.stage("finding out what bfloat16 does to the outputs")
    file = request.model
    prepared = prepare(file, load_model(file), network.profile.shapes, network.profile.batch)
    exposed = expose(prepared)
    hidden = [] if exposed is None else [value.name for value in exposed.graph.output]
    switched = switched_model(prepared, network.graph, hidden)
    layers = layers_covered(network.graph, BFLOAT16, network.cpu) & (followers(network.graph) | set(switched.layers))
    folder = scratch / "rounded"
    folder.mkdir(exist_ok=True)
    names = {info.name for info in network.model.outputs}
    limit = request.max_error if request.max_error is not None or request.precision != "auto" else DEFAULT_MAX_ERROR
    with rounded_runs(
        switched, network.model.inputs, network.model.outputs, network.target.threads_here, folder
    ) as runs:
        measured = BudgetInputs(runs, inputs, names, error_seconds(request.minutes))
        yield PrecisionPlan(request.precision, layers, RoundedLimit(runs, measured, limit))


def budget_inputs(network: Network) -> dict[str, Arrays]:
    """What errors are measured on: the user's inputs, else random ones and pictures."""
    path = network.request.calibration
    if path is None:
        return error_inputs(network.model.inputs)
    declared = [DeclaredInput(info.name, info.shape, info.dtype) for info in network.model.inputs]
    samples = read_calibration(path, declared)
    return samples.named(range(samples.calls))


@dataclass(frozen=True, eq=False)
class PrecisionReport:
    """What became of a :class:`PrecisionPlan`: ``errors`` of the shipped network, on the inputs of the plan."""

    plan: PrecisionPlan
    errors: OutputErrors | None
    choice: PrecisionChoice | None = None
    float32_won: bool = False

    @property
    def notes(self) -> list[str]:
        """What the user should know of the errors that are told."""
        return [ONE_SAMPLE] if self.plan.told.get("held_out_samples") == 0 else []

    def to_json(self, network: Network) -> dict[str, Any]:
        """JSON-able, for ``summary.json``; ``network``: what was shipped."""
        rounded = layers_in(network.graph, self.plan.dtype)
        kept = [node.name for node in network.graph.nodes if node.name not in rounded]
        return {
            "asked": self.plan.asked,
            "max_error": self.plan.limit.max_error,
            "layers": len(network.graph.nodes),
            f"{self.plan.dtype}_layers": len(rounded),
            "float32_layers": kept,
            "inputs": list(self.plan.limit.measured.names),
            "errors": errors_json(self.errors),
            "choice": None if self.choice is None else self.choice.to_json(),
            "float32_was_faster": self.float32_won,
            **self.plan.told,
        }


def with_raced(choice: PrecisionChoice, chosen: float, float32: float | None = None) -> PrecisionChoice:
    """``choice`` with the seconds of whole networks timed in turns: the ``chosen`` one's, and that in ``float32``."""

    def of(point: FrontierPoint) -> FrontierPoint:
        if point.chosen:
            return replace(point, raced_seconds=chosen)
        return point if point.rounded else replace(point, raced_seconds=float32)

    return replace(choice, frontier=tuple(map(of, choice.frontier)))
