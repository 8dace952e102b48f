"""Choice of the layers stored in a shorter number type, within a time limit, by the errors and the time of the
network.

The time of a network with some layers in a shorter type is the sum of its kernels and of the type conversions. A
tensor that is written in one number type and read in another needs one more pass, whose time the roofline derives
from its bytes; so does a model input that the first layer reads in a shorter type. Kernels that convert a tensor to
or from the blocked layout also convert the number type.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import MachineError
from costmodel.cpu.roofline import RooflineModel
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import Conv2d, Dense, element_bytes
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
from fusion.analysis.analyzer import network_bytes
from fusion.comparing.output_errors import error_inputs, errors_json
from fusion.model.conv_graph import BFLOAT16, FLOAT32, Precision, in_dtype, layers_covered, layers_in, require_float
from fusion.model.named_arrays import ONE_SAMPLE, DeclaredInput, read_calibration
from fusion.tuning.network_check import expose

if TYPE_CHECKING:
    from costmodel.operators.layers import Operator
    from fusion.analysis.target_machine import Target
    from fusion.comparing.output_errors import OutputErrors
    from fusion.model.conv_graph import Graph, Node
    from fusion.model.named_arrays import Arrays
    from fusion.tuning.clock import TuningDisplay
    from fusion.tuning.network import Network
    from schedules.contract.cpu_target import CpuTarget


def predicted_in(graph: Graph, machine: Machine, threads: int, dtype: str) -> dict[Operator, float]:
    """Roofline seconds of every layer of ``graph`` in float32 and in ``dtype``."""
    roofline = RooflineModel(machine, threads, network_bytes(graph))
    operators = {in_dtype(node.operator, each): None for node in graph.nodes for each in (FLOAT32, dtype)}
    return {each: found.seconds for each, found in zip(operators, roofline.estimate(list(operators)), strict=True)}


def comparable(
    graph: Graph, predicted: Mapping[Operator, float], measured: Mapping[Operator, float], dtype: str
) -> dict[Operator, float]:
    """``measured`` times of layers measured in both number types, ``predicted`` ones for the others."""
    seconds = dict(predicted)
    for node in graph.nodes:
        both = [in_dtype(node.operator, each) for each in (FLOAT32, dtype)]
        if all(each in measured for each in both):
            seconds.update((each, measured[each]) for each in both)
    return seconds


def followers(graph: Graph) -> set[str]:
    """Names of pooling and normalisation nodes: the layers around them round their inputs and outputs anyway."""
    return {node.name for node in graph.nodes if not isinstance(node.operator, Conv2d | Dense)}


class MixedTimes:
    """Seconds of a float32 ``graph`` with some layers in ``dtype``.

    ``layers``: names of the layers with a form in ``dtype``; ``seconds``: of each layer in both number types.
    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        cpu: CpuTarget,
        dtype: str,
        layers: Collection[str],
        seconds: Mapping[Operator, float],
    ) -> None:
        self._graph, self._machine, self._cpu, self._dtype = graph, machine, cpu, dtype
        self._followers = followers(graph) & set(layers)
        self._seconds = seconds
        self._made = {node.output: node for node in graph.nodes}
        self._readers: dict[Any, list[Node]] = {}
        for node in graph.nodes:
            for tensor in (node.data, node.residual, node.gate):
                if tensor is not None:
                    self._readers.setdefault(tensor, []).append(node)
        others = {other.output for other in graph.others}
        self._inputs = [tensor for tensor in self._readers if tensor not in self._made and tensor not in others]

    def with_followers(self, rounded: Collection[str]) -> set[str]:
        """``rounded`` plus the nodes after these layers that are neither convolution nor dense layer."""
        found = set(rounded)
        for node in self._graph.nodes:
            before = self._made.get(node.data)
            if node.name in self._followers and before is not None and before.name in found:
                found.add(node.name)
        return found

    def __call__(self, rounded: Collection[str]) -> float:
        """Return the seconds with the layers ``rounded`` in the shorter type."""
        names = self.with_followers(rounded)
        own = sum(self._seconds[self._stored(node, names)] for node in self._graph.nodes)
        return own + sum(map(self._conversion_seconds, self.converted_values(rounded)))

    def known(self, rounded: Collection[str], measured: Mapping[Operator, float]) -> bool:
        """True if ``measured`` has every kernel of that network."""
        names = self.with_followers(rounded)
        return all(self._stored(node, names) in measured for node in self._graph.nodes)

    def converted_values(self, rounded: Collection[str]) -> list[int]:
        """Number of elements of each tensor needed in both number types: layer outputs and model inputs.

        Other operators convert while reading and writing.
        """
        names = self.with_followers(rounded)
        found = []
        for node in self._graph.nodes:
            readers = self._readers.get(node.output, ())
            if any((reader.name in names) != (node.name in names) for reader in readers):
                found.append(_elements(node.operator.output_bytes, node.operator.dtype))
        for tensor in self._inputs:
            rounding = [node for node in self._readers[tensor] if node.name in names and self._reads_plain(node)]
            found += [_elements(node.operator.input_bytes, node.operator.dtype) for node in rounding[:1]]
        return found

    def _reads_plain(self, node: Node) -> bool:
        from schedules.kernels.direct_conv2d import reads_plain_input

        return isinstance(node.operator, Conv2d) and reads_plain_input(node.operator, self._cpu.lanes)

    def _stored(self, node: Node, names: Collection[str]) -> Operator:
        return in_dtype(node.operator, self._dtype if node.name in names else FLOAT32)

    def _conversion_seconds(self, elements: int) -> float:
        """Seconds of one pass that reads all bytes in one type and writes all in the other."""
        sizes = [elements * element_bytes(dtype) for dtype in (FLOAT32, self._dtype)]
        machine, threads = self._machine, self._cpu.threads
        level = machine.level_holding(sum(sizes) / threads, threads)
        moved = level.seconds(sizes[0], threads) + level.seconds(sizes[1], threads, write=True)
        return moved + machine.region_seconds(threads)


def _elements(size: int, dtype: str) -> int:
    return size // element_bytes(dtype)


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
    from fusion.relax.onnx.model_file import load_model
    from fusion.relax.onnx.preparation import prepare

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
