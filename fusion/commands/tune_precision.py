"""``tune`` in another precision than float32: layers stored in bfloat16, all or as many as an error budget lets.

``auto`` measures what every layer costs in exactness, tunes kernels of both number types, chooses by measured times
under the budget, and races what comes out against the network in float32: it is never slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import InputError, MachineError
from costmodel.operators.layers import Conv2d, Dense
from fusion.acceptance.error_budget import (
    DEFAULT_MAX_ERROR,
    FRONTIER_POINTS,
    BudgetInputs,
    FrontierPoint,
    PrecisionChoice,
    RoundedLimit,
    choose_layers,
    sensitivities,
)
from fusion.acceptance.final_networks import FinalNetwork
from fusion.acceptance.network_check import NetworkCheck, expose, threads_here
from fusion.acceptance.rounded_layers import rounded_runs, switched_model
from fusion.acceptance.tune_job import Job, TuneRequest
from fusion.comparing.output_errors import errors_json
from fusion.comparing.probes import error_inputs
from fusion.model.calibration_data import DeclaredInput, read_calibration
from fusion.model.named_arrays import Arrays
from fusion.model.precision import (
    BFLOAT16,
    FLOAT32,
    PRECISIONS,
    Precision,
    in_dtype,
    layers_covered,
    layers_in,
    require_float,
)
from fusion.search.progress import TuningDisplay

if TYPE_CHECKING:
    from costmodel.operators.layers import Operator
    from fusion.comparing.output_errors import OutputErrors
    from fusion.model.conv_graph import Node
    from fusion.search.network_tuning import TunedKernels

# The network that everything is stored in float32 in, among the finals.
FLOAT32_NETWORK = "float32"
# What sensitivities may take of a limited job, and without a limit; of the time for kernels those of bfloat16.
SENSITIVITY_SHARE, SENSITIVITY_SECONDS = 0.1, 60.0
ROUNDED_SHARE = 0.6
# Of a calibration file so many samples at most, evenly spread: all networks in question are run on each.
MOST_SAMPLES = 48
# Networks that are built because the one before exceeded the budget.
MOST_REBUILDS = 2


def checked_precision(request: TuneRequest, display: TuningDisplay) -> TuneRequest:
    """``request`` with a precision that this CPU has; ``InputError`` for one that it lacks, or options that do not fit.

    ``auto`` goes on in float32 where the CPU has nothing else.
    """
    if request.precision not in PRECISIONS:
        raise InputError(f"--precision {request.precision}: choose one of {', '.join(PRECISIONS)}")
    if request.max_error is not None and not 0 < request.max_error < float("inf"):
        raise InputError(
            f"--max-error {request.max_error:g}: must be above 0; 0.01 is a hundredth of the largest output"
        )
    if request.precision == FLOAT32:
        for option, value in (("--max-error", request.max_error), ("--calibration", request.calibration)):
            if value is not None:
                raise InputError(
                    f"{option} {value}: says how far bfloat16 may err; choose --precision bfloat16 or auto"
                )
        return request
    if request.target is not None or request.tracker is not None:
        option = "--target" if request.target is not None else "--tracker"
        raise InputError(f"--precision {request.precision}: errors are measured on this CPU; leave out {option}")
    if request.calibration is not None and not request.calibration.is_file():
        raise InputError(f"--calibration {request.calibration}: no such file")
    return _or_float32(request, _lacking(request.threads), display)


def _or_float32(request: TuneRequest, reason: str | None, display: TuningDisplay) -> TuneRequest:
    if reason is None:
        return request
    if request.precision != "auto":
        raise InputError(f"--precision {request.precision}: {reason}; choose --precision float32")
    display.say(f"all layers stay in float32: {reason}")
    return replace(request, precision="float32", max_error=None, calibration=None)


def _lacking(threads: int | None) -> str | None:
    """Why this CPU has no kernels for bfloat16."""
    from schedules.contract.cpu_target import host_target

    return host_target(threads).lacks(BFLOAT16)


@dataclass(frozen=True, eq=False)
class PrecisionPlan:
    """What is asked of one job: ``layers`` could be in bfloat16, within ``limit``."""

    asked: Precision
    layers: frozenset[str]
    limit: RoundedLimit

    @property
    def of_all_layers(self) -> RoundedLimit | None:
        """The limit of a network with all ``layers`` in bfloat16; ``None`` where layers are chosen."""
        return None if self.asked == "auto" else self.limit


@contextmanager
def precision_plan(job: Job, scratch: Path, display: TuningDisplay) -> Iterator[PrecisionPlan | None]:
    """What ``job`` is asked for, with ONNX Runtime ready to tell errors; ``None`` for float32 alone."""
    request = job.request
    if request.precision == FLOAT32:
        yield None
        return
    require_float(job.graph, request.precision)
    if BFLOAT16 not in job.machine.compute:
        raise MachineError(
            f"{job.machine.source or job.machine.name}: no compute rate for {BFLOAT16}; measure this CPU again with "
            "`python -m costmodel calibrate`, or choose --precision float32"
        )
    from fusion.relax.onnx.onnx_file import load_model
    from fusion.relax.onnx.onnx_prepare import prepare

    inputs = budget_inputs(job)
    display.stage("finding out what bfloat16 does to the outputs")
    file = request.model
    prepared = prepare(file, load_model(file), job.profile.shapes, job.profile.batch)
    exposed = expose(prepared)
    hidden = [] if exposed is None else [value.name for value in exposed.graph.output]
    switched = switched_model(prepared, job.graph, hidden)
    layers = layers_covered(job.graph, BFLOAT16, job.cpu) & (_followers(job) | set(switched.layers))
    folder = scratch / "rounded"
    folder.mkdir(exist_ok=True)
    names = {info.name for info in job.model.outputs}
    limit = request.max_error if request.max_error is not None or request.precision != "auto" else DEFAULT_MAX_ERROR
    with rounded_runs(switched, job.model.inputs, job.model.outputs, threads_here(job.cpu), folder) as runs:
        yield PrecisionPlan(request.precision, layers, RoundedLimit(runs, BudgetInputs(runs, inputs, names), limit))


def budget_inputs(job: Job) -> dict[str, Arrays]:
    """What errors are measured on: the user's inputs, else random ones and pictures."""
    path = job.request.calibration
    if path is None:
        return error_inputs(job.model.inputs)
    declared = [DeclaredInput(info.name, info.shape, info.dtype) for info in job.model.inputs]
    samples = read_calibration(path, declared)
    step = -(-samples.calls // MOST_SAMPLES)
    return {f"{path.name} {index + 1}": samples.call(index) for index in range(0, samples.calls, step)}


@dataclass(frozen=True, eq=False)
class MixedTuning:
    """Tuned kernels of a job and of the same in float32, and what was chosen of them."""

    job: Job
    tuned: TunedKernels
    choice: PrecisionChoice


@dataclass(frozen=True, eq=False)
class PrecisionReport:
    """What became of a :class:`PrecisionPlan`: ``errors`` of the shipped network, on the inputs of the plan."""

    plan: PrecisionPlan
    errors: OutputErrors | None
    choice: PrecisionChoice | None = None
    float32_won: bool = False

    def to_json(self, job: Job) -> dict[str, Any]:
        """JSON-able, for ``summary.json``; ``job``: what was shipped."""
        rounded = layers_in(job.graph, BFLOAT16)
        kept = [node.name for node in job.graph.nodes if node.name not in rounded]
        return {
            "asked": self.plan.asked,
            "max_error": self.plan.limit.max_error,
            "layers": len(job.graph.nodes),
            "bfloat16_layers": len(rounded),
            "float32_layers": kept,
            "inputs": list(self.plan.limit.measured.names),
            "errors": errors_json(self.errors),
            "choice": None if self.choice is None else self.choice.to_json(),
            "float32_was_faster": self.float32_won,
        }


Tune = Callable[[Job, float | None], "TunedKernels"]


def tune_mixed(
    job: Job, plan: PrecisionPlan, left: Callable[[], float | None], tune: Tune, display: TuningDisplay
) -> tuple[MixedTuning | None, TunedKernels]:
    """Kernels of the layers that the budget lets into bfloat16, those of float32, and the best of both by their times.

    ``tune(job, seconds)`` measures kernels; ``left()``: seconds that there are for that from now on.
    The first of the two results is ``None`` where no layer gains.
    """
    layers = sorted(plan.layers & set(plan.limit.runs.layers))
    sensitivity = sensitivities(plan.limit.measured, layers, _sensitivity_seconds(job))
    choice = _chosen(job, plan, sensitivity, _predicted(job), points=0)
    if not choice.rounded:
        display.say("no layer is worth its error in bfloat16, or none is predicted to gain: all stay in float32")
        return None, tune(job, left())
    display.say(_announced(choice, len(job.graph.nodes)))
    mixed = job.stored(_with_followers(job, plan, choice.rounded), BFLOAT16)
    seconds = left()
    tuned = first = tune(mixed, None if seconds is None else ROUNDED_SHARE * seconds)
    plain = tune(job, 0.0 if first.interrupted else left())
    measured = _comparable(job, {**tuned.seconds, **plain.seconds})
    allowed = {name: error for name, error in sensitivity.items() if name in choice.rounded}
    better = _chosen(job, plan, allowed, measured, points=0)
    better = replace(
        better,
        sensitivity=sensitivity,
        kept=tuple(name for name in sensitivity if name not in better.rounded),
        frontier=_whole_frontier(job, plan, sensitivity, measured, better),
    )
    if not better.rounded:
        display.say("no layer measured faster in bfloat16: all stay in float32")
        return None, plain
    if better.rounded != choice.rounded:
        display.say(_announced(better, len(job.graph.nodes)))
        mixed = job.stored(_with_followers(job, plan, better.rounded), BFLOAT16)
        tuned = tune(mixed, _no_more(seconds))
    trials, failures = first.trials + plain.trials, first.failures + plain.failures
    interrupted = first.interrupted or plain.interrupted
    tuned, plain = (replace(each, trials=trials, failures=failures, interrupted=interrupted) for each in (tuned, plain))
    return MixedTuning(mixed, tuned, better), plain


def _whole_frontier(
    job: Job,
    plan: PrecisionPlan,
    sensitivity: Mapping[str, float],
    seconds: Mapping[Operator, float],
    chosen: PrecisionChoice,
) -> tuple[FrontierPoint, ...]:
    """From no layer to all that gain, whatever the budget is, with the point that was ``chosen``."""
    unlimited = replace(plan, limit=replace(plan.limit, max_error=None))
    points = [replace(each, chosen=False) for each in _chosen(job, unlimited, sensitivity, seconds).frontier]
    points += [each for each in chosen.frontier if each.chosen]
    return tuple(sorted(points, key=lambda each: (each.layers, each.error)))


def tightened(
    job: Job, plan: PrecisionPlan, mixing: MixedTuning, error: float, plain: TunedKernels, tune: Tune
) -> MixedTuning | None:
    """The choice once more, for a budget as much smaller as the network built erred more than was expected.

    ``None`` where no layer is left.
    """
    limit = plan.limit.max_error
    assert limit is not None, "nobody exceeds what nobody limits"
    measured = _comparable(job, {**mixing.tuned.seconds, **plain.seconds})
    allowed = {name: each for name, each in mixing.choice.sensitivity.items() if name in mixing.choice.rounded}
    smaller = 0.9 * limit * mixing.choice.error / max(error, mixing.choice.error, 1e-30)
    choice = _chosen(job, replace(plan, limit=replace(plan.limit, max_error=smaller)), allowed, measured)
    if not choice.rounded or choice.rounded == mixing.choice.rounded:
        return None
    choice = replace(
        choice,
        sensitivity=mixing.choice.sensitivity,
        kept=tuple(name for name in mixing.choice.sensitivity if name not in choice.rounded),
    )
    mixed = job.stored(_with_followers(job, plan, choice.rounded), BFLOAT16)
    return MixedTuning(mixed, tune(mixed, _no_more(job.request.minutes)), choice)


def with_float32(
    check: NetworkCheck,
    plan: PrecisionPlan,
    mixing: MixedTuning,
    networks: Collection[FinalNetwork],
    plain: FinalNetwork,
) -> tuple[NetworkCheck, list[FinalNetwork]]:
    """The finals of ``networks``, which are mixed, and of the one in float32; and what checks them. ``check``: that of
    float32.
    """
    names = layers_in(mixing.job.graph, BFLOAT16)
    rounded = check.with_rounded(names, plan.limit)
    alone = replace(check, rounded=replace(plan.limit, max_error=None))
    return replace(rounded, apart={FLOAT32_NETWORK: alone}), [*networks, replace(plain, name=FLOAT32_NETWORK)]


def _sensitivity_seconds(job: Job) -> float:
    minutes = job.request.minutes
    return SENSITIVITY_SECONDS if minutes is None else min(SENSITIVITY_SECONDS, SENSITIVITY_SHARE * 60.0 * minutes)


def _announced(choice: PrecisionChoice, layers: int) -> str:
    return (
        f"{len(choice.rounded)} of {layers} layers in bfloat16: an error of {choice.error:.2g} of the largest value is "
        "expected"
    )


def _chosen(
    job: Job,
    plan: PrecisionPlan,
    sensitivity: Mapping[str, float],
    seconds: Mapping[Operator, float],
    points: int = FRONTIER_POINTS,
) -> PrecisionChoice:
    timed = _NetworkTimes(job, plan, seconds)
    limit = plan.limit.max_error
    error_of = plan.limit.measured.error_of
    return choose_layers(sensitivity, timed, error_of, float("inf") if limit is None else limit, points)


def _predicted(job: Job) -> dict[Operator, float]:
    """The roofline's seconds of every layer in both number types."""
    from costmodel.cpu.roofline import RooflineModel
    from fusion.analysis.analyzer import network_bytes

    roofline = RooflineModel(job.machine, job.cpu.threads, network_bytes(job.graph))
    operators = {in_dtype(node.operator, dtype): None for node in job.graph.nodes for dtype in (FLOAT32, BFLOAT16)}
    return {each: found.seconds for each, found in zip(operators, roofline.estimate(list(operators)), strict=True)}


def _followers(job: Job) -> set[str]:
    """Names of pooling and normalisation: what they read and write is rounded by the layers around them anyway."""
    return {node.name for node in job.graph.nodes if not isinstance(node.operator, Conv2d | Dense)}


def _with_followers(job: Job, plan: PrecisionPlan, rounded: Collection[str]) -> set[str]:
    """``rounded``, and what follows such layers without being a convolution or a dense layer."""
    followers = _followers(job) & plan.layers
    produced = {node.output: node.name for node in job.graph.nodes}
    found = set(rounded)
    for node in job.graph.nodes:
        if node.name in followers and produced.get(node.data) in found:
            found.add(node.name)
    return found


def _comparable(job: Job, measured: Mapping[Operator, float]) -> dict[Operator, float]:
    """``measured`` where a layer has been measured in both number types; predicted for both where not."""
    seconds = _predicted(job)
    for node in job.graph.nodes:
        both = [in_dtype(node.operator, dtype) for dtype in (FLOAT32, BFLOAT16)]
        if all(each in measured for each in both):
            seconds.update((each, measured[each]) for each in both)
    return seconds


def _no_more(limit: float | None) -> float | None:
    """Seconds for a network all of whose kernels are measured: without a limit as long as the comparisons take."""
    return None if limit is None else 0.0


class _NetworkTimes:
    """Seconds of the network with some layers in bfloat16: of its kernels one by one, and of conversions between."""

    def __init__(self, job: Job, plan: PrecisionPlan, seconds: Mapping[Operator, float]) -> None:
        self._job, self._plan, self._seconds = job, plan, seconds
        self._readers: dict[Any, list[Node]] = {}
        for node in job.graph.nodes:
            for tensor in (node.data, node.residual, node.gate):
                if tensor is not None:
                    self._readers.setdefault(tensor, []).append(node)

    def __call__(self, rounded: Collection[str]) -> float:
        names = _with_followers(self._job, self._plan, rounded)
        total = 0.0
        for node in self._job.graph.nodes:
            own = node.name in names
            total += self._seconds[in_dtype(node.operator, BFLOAT16 if own else FLOAT32)]
            if any((reader.name in names) != own for reader in self._readers.get(node.output, ())):
                total += self._conversion(node)
        return total

    def _conversion(self, node: Node) -> float:
        """One pass over the output of ``node``: 4 bytes of every value on one side, 2 on the other."""
        size = 1.5 * in_dtype(node.operator, FLOAT32).output_bytes
        machine, threads = self._job.machine, self._job.cpu.threads
        level = machine.level_holding(size / threads, threads)
        return level.seconds(size, threads) + machine.region_seconds(threads)
