"""Choice of the layers stored in a shorter number type, within a time limit."""

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
    from fusion.tuning.network import Network
    from fusion.tuning.progress import TuningDisplay

# Share of a limited job for errors of single layers, and the same for errors of networks in each choice, with lower and
# upper limits in seconds; and the usual number of networks evaluated in a choice.
ERROR_SHARE = 0.05
LEAST_ERROR_SECONDS, MOST_ERROR_SECONDS = 3.0, 60.0
USUAL_SETS = 12
# Maximum share of the time left for errors and kernels: errors are measured three times.
MOST_SHARE_LEFT = 0.1
# Maximum number of times that a choice with a too large measured error is repeated with a smaller budget.
MOST_REBUILDS = 2


@dataclass(frozen=True, eq=False)
class PrecisionPlan:
    """Precision request of one job."""

    asked: Precision
    # Layers that can be stored in ``dtype``.
    layers: frozenset[str]
    limit: RoundedLimit
    dtype: str = BFLOAT16
    # Choice among them, if already made.
    choice: PrecisionChoice | None = None
    # Further entries of ``summary.json``.
    told: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settled_limit(self) -> RoundedLimit | None:
        """Limit of a network whose layers are settled before measurements; None if they are chosen by measured
        times.
        """
        return None if self.asked == "auto" else self.limit


class PrecisionChooser:
    """Chooses layers of one network by times and errors. ``seconds``: time for measuring errors in each choice."""

    def __init__(self, graph: Graph, target: Target, plan: PrecisionPlan, seconds: float) -> None:
        """``graph``: with all its layers in float32."""
        self.plan = plan
        self._graph, self._target = graph, target
        self._predicted = predicted_in(graph, target.machine, target.cpu.threads, plan.dtype)
        self._seconds = seconds
        # On few inputs if a run is slow: the final choice is measured on all of them.
        self._first = plan.limit.measured.fitting(seconds, USUAL_SETS)

    def within(self, plan: PrecisionPlan) -> PrecisionChooser:
        """A chooser with another budget."""
        return PrecisionChooser(self._graph, self._target, plan, self._seconds)

    def with_followers(self, rounded: Collection[str]) -> set[str]:
        """See :class:`MixedTimes`."""
        return self._times({}).with_followers(rounded)

    def chosen(self, sensitivity: Mapping[str, float], measured: Mapping[Operator, float]) -> PrecisionChoice:
        """Fastest network within the budget, by ``measured`` times of layers measured in both number types."""
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
        """Frontier from no layer to all layers regardless of the budget, including the choice ``chosen``.

        Layers are ordered by time saved per error; layers without a gain come last.
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
        """Frontier point of these layers in the shorter type; the errors of a ``chosen`` point are on all inputs."""
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
    """Points with fewest layers first."""
    return tuple(sorted(points, key=lambda each: (each.layers, each.error)))


def error_seconds(minutes: float | None, left: float | None = None) -> float:
    """Seconds for errors of layers, and for errors of networks in each choice, in a job of ``minutes``.

    ``left``: seconds available for errors and kernels.
    """
    wanted = MOST_ERROR_SECONDS if minutes is None else ERROR_SHARE * 60.0 * minutes
    if left is not None:
        wanted = min(wanted, MOST_SHARE_LEFT * left)
    return min(max(wanted, LEAST_ERROR_SECONDS), MOST_ERROR_SECONDS)


@contextmanager
def precision_plan(network: Network, scratch: Path, display: TuningDisplay) -> Iterator[PrecisionPlan | None]:
    """Precision plan of ``network``, with ONNX Runtime ready to measure errors; None for float32."""
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
    """Inputs for measuring errors: the user's, or random ones and pictures."""
    path = network.request.calibration
    if path is None:
        return error_inputs(network.model.inputs)
    declared = [DeclaredInput(info.name, info.shape, info.dtype) for info in network.model.inputs]
    samples = read_calibration(path, declared)
    return samples.named(range(samples.calls))


@dataclass(frozen=True, eq=False)
class PrecisionReport:
    """Result of a :class:`PrecisionPlan`; ``errors`` of the shipped network, on the inputs of the plan."""

    plan: PrecisionPlan
    errors: OutputErrors | None
    choice: PrecisionChoice | None = None
    float32_won: bool = False

    @property
    def notes(self) -> list[str]:
        """Messages about the reported errors."""
        return [ONE_SAMPLE] if self.plan.told.get("held_out_samples") == 0 else []

    def to_json(self, network: Network) -> dict[str, Any]:
        """Return a JSON-able dictionary for ``summary.json``; ``network``: the shipped one."""
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
    """``choice`` with the seconds of whole networks: of the ``chosen`` one, and of the ``float32`` one."""

    def of(point: FrontierPoint) -> FrontierPoint:
        if point.chosen:
            return replace(point, raced_seconds=chosen)
        return point if point.rounded else replace(point, raced_seconds=float32)

    return replace(choice, frontier=tuple(map(of, choice.frontier)))
