"""``tune`` in another precision than float32: layers stored in bfloat16, all or as many as an error budget lets.

``auto`` measures what every layer costs in exactness, tunes kernels of both number types, chooses by measured times
under the budget, and races what comes out against the network in float32: it is never slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import InputError, MachineError
from costmodel.base.foreign_files import find_refusal
from fusion.acceptance.error_budget import (
    DEFAULT_MAX_ERROR,
    BudgetInputs,
    FrontierPoint,
    PrecisionChoice,
    RoundedLimit,
    sensitivities,
)
from fusion.acceptance.final_networks import FinalNetwork
from fusion.acceptance.network_check import NetworkCheck, expose, threads_here
from fusion.acceptance.precision_choice import (
    LEAST_ERROR_SECONDS,
    PrecisionChooser,
    PrecisionPlan,
    error_seconds,
    ordered,
)
from fusion.acceptance.rounded_layers import rounded_runs, switched_model
from fusion.acceptance.time_limit import StageClock
from fusion.acceptance.tune_job import Job, TuneRequest
from fusion.analysis.mixed_times import followers
from fusion.commands.quantize import ONE_SAMPLE
from fusion.comparing.output_errors import errors_json
from fusion.comparing.probes import error_inputs
from fusion.model.calibration_data import DeclaredInput, read_calibration
from fusion.model.named_arrays import Arrays
from fusion.model.precision import (
    BFLOAT16,
    FLOAT32,
    INT8,
    PRECISIONS,
    layers_covered,
    layers_in,
    require_float,
)
from fusion.search.progress import TuningDisplay

if TYPE_CHECKING:
    from fusion.comparing.output_errors import OutputErrors
    from fusion.search.network_tuning import TunedKernels
    from schedules.contract.cpu_target import CpuTarget

# The network that everything is stored in float32 in, among the finals.
FLOAT32_NETWORK = "float32"
# Of the time for kernels those of bfloat16.
ROUNDED_SHARE = 0.6


def checked_precision(request: TuneRequest, display: TuningDisplay) -> TuneRequest:
    """``request`` with a precision that this CPU has; ``InputError`` for one that it lacks, or options that do not fit.

    ``auto`` goes on in float32 where the CPU has nothing else.
    """
    if request.precision not in PRECISIONS:
        raise InputError(f"--precision {request.precision}: choose one of {', '.join(PRECISIONS)}")
    if request.max_error is not None and not 0 < request.max_error <= 1:
        raise InputError(
            f"--max-error {request.max_error:g}: must be above 0 and at most 1; 0.01: a hundredth of the largest output"
        )
    if request.precision == FLOAT32:
        for option, value in (("--max-error", request.max_error), ("--calibration", request.calibration)):
            if value is not None:
                raise InputError(
                    f"{option} {value}: says how far a shorter type may err; choose --precision bfloat16, int8 or auto"
                )
        return request
    if request.calibration is not None:
        refusal = find_refusal(request.calibration, "arrays")
        if refusal is not None:
            raise InputError(f"--calibration {request.calibration}: {refusal}; check the path")
    if request.precision == INT8 and request.calibration is None:
        raise InputError("--precision int8: quantising needs samples, some hundred of them: --calibration DATA.npz")
    if request.target is not None or request.tracker is not None:
        return request  # what that CPU has is known later
    from schedules.contract.cpu_target import host_target

    return on_cpu(request, host_target(request.threads), display)


def on_cpu(request: TuneRequest, cpu: CpuTarget, display: TuningDisplay) -> TuneRequest:
    """``request`` with a precision that ``cpu`` has kernels for; otherwise as of :func:`checked_precision`."""
    reason = cpu.lacks(INT8 if request.precision == INT8 else BFLOAT16)
    if reason is None or request.precision == FLOAT32:
        return request
    if request.precision != "auto":
        raise InputError(f"--precision {request.precision}: {reason}; choose --precision float32")
    display.say(f"all layers stay in float32: {reason}")
    return replace(request, precision="float32", max_error=None, calibration=None)


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
    layers = layers_covered(job.graph, BFLOAT16, job.cpu) & (followers(job.graph) | set(switched.layers))
    folder = scratch / "rounded"
    folder.mkdir(exist_ok=True)
    names = {info.name for info in job.model.outputs}
    limit = request.max_error if request.max_error is not None or request.precision != "auto" else DEFAULT_MAX_ERROR
    with rounded_runs(switched, job.model.inputs, job.model.outputs, threads_here(job.cpu), folder) as runs:
        measured = BudgetInputs(runs, inputs, names, error_seconds(request.minutes))
        yield PrecisionPlan(request.precision, layers, RoundedLimit(runs, measured, limit))


def budget_inputs(job: Job) -> dict[str, Arrays]:
    """What errors are measured on: the user's inputs, else random ones and pictures."""
    path = job.request.calibration
    if path is None:
        return error_inputs(job.model.inputs)
    declared = [DeclaredInput(info.name, info.shape, info.dtype) for info in job.model.inputs]
    samples = read_calibration(path, declared)
    return samples.named(range(samples.calls))


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

    @property
    def notes(self) -> list[str]:
        """What the user should know of the errors that are told."""
        return [ONE_SAMPLE] if self.plan.told.get("held_out_samples") == 0 else []

    def to_json(self, job: Job) -> dict[str, Any]:
        """JSON-able, for ``summary.json``; ``job``: what was shipped."""
        rounded = layers_in(job.graph, self.plan.dtype)
        kept = [node.name for node in job.graph.nodes if node.name not in rounded]
        return {
            "asked": self.plan.asked,
            "max_error": self.plan.limit.max_error,
            "layers": len(job.graph.nodes),
            f"{self.plan.dtype}_layers": len(rounded),
            "float32_layers": kept,
            "inputs": list(self.plan.limit.measured.names),
            "errors": errors_json(self.errors),
            "choice": None if self.choice is None else self.choice.to_json(),
            "float32_was_faster": self.float32_won,
            **self.plan.told,
        }


Tune = Callable[[Job, float | None], "TunedKernels"]


@dataclass(frozen=True)
class Tuned:
    """Kernels in float32 (``plain``), the mixed network (``None`` where no layer gains), and the choice behind it."""

    mixing: MixedTuning | None
    plain: TunedKernels
    choice: PrecisionChoice


def tune_mixed(
    job: Job,
    plan: PrecisionPlan,
    left: Callable[[], float | None],
    tune: Tune,
    display: TuningDisplay,
    clock: StageClock,
) -> Tuned:
    """Kernels of the layers that the budget lets into bfloat16, those of float32, and the best of both by their times.

    ``tune(job, seconds)`` measures kernels; ``left()``: seconds that there are for that from now on.
    """
    seconds = error_seconds(job.request.minutes, left())
    assert plan.limit.runs is not None, "errors of single layers are measured"
    layers = [name for name in plan.limit.runs.layers if name in plan.layers]
    sensitivity = sensitivities(plan.limit.measured, layers, seconds)
    chooser = _chooser(job, plan, seconds)
    choice = chooser.chosen(sensitivity, {})
    clock.ended("errors")
    if not choice.rounded:
        display.say("no layer is worth its error in bfloat16, or none is predicted to gain: all stay in float32")
        choice = replace(choice, frontier=chooser.frontier(sensitivity, {}, choice))
        return Tuned(None, tune(job, left()), choice)
    display.say(_announced(choice, len(job.graph.nodes)))
    mixed = _stored(job, chooser, choice.rounded)
    tuned = first = tune(mixed, _share(left(), seconds, ROUNDED_SHARE))
    plain = tune(job, 0.0 if first.interrupted else _share(left(), seconds))
    measured = {**tuned.seconds, **plain.seconds}
    clock.ended("tuning")
    allowed = {name: error for name, error in sensitivity.items() if name in choice.rounded}
    better = chooser.chosen(allowed, measured)
    better = replace(
        better,
        sensitivity=sensitivity,
        kept=tuple(name for name in sensitivity if name not in better.rounded),
        frontier=chooser.frontier(sensitivity, measured, better),
    )
    clock.ended("errors")
    if not better.rounded:
        display.say("no layer measured faster in bfloat16: all stay in float32")
        return Tuned(None, plain, better)
    if better.rounded != choice.rounded:
        display.say(_announced(better, len(job.graph.nodes)))
        mixed = _stored(job, chooser, better.rounded)
        tuned = tune(mixed, _no_more(left()))
    trials, failures = first.trials + plain.trials, first.failures + plain.failures
    interrupted = first.interrupted or plain.interrupted
    tuned, plain = (replace(each, trials=trials, failures=failures, interrupted=interrupted) for each in (tuned, plain))
    return Tuned(MixedTuning(mixed, tuned, better), plain, better)


def tightened(
    job: Job, plan: PrecisionPlan, mixing: MixedTuning, error: float, plain: TunedKernels, tune: Tune
) -> MixedTuning | None:
    """The choice once more, for a budget as much smaller as the network built erred more than was expected.

    ``None`` where no layer is left.
    """
    limit = plan.limit.max_error
    assert limit is not None, "nobody exceeds what nobody limits"
    before = mixing.choice
    allowed = {name: each for name, each in before.sensitivity.items() if name in before.rounded}
    smaller = 0.9 * limit * before.error / max(error, before.error, 1e-30)
    plan = replace(plan, limit=replace(plan.limit, max_error=smaller))
    chooser = _chooser(job, plan, LEAST_ERROR_SECONDS)
    measured = {**mixing.tuned.seconds, **plain.seconds}
    choice = chooser.chosen(allowed, measured)
    if not choice.rounded or choice.rounded == before.rounded:
        return None
    others = [replace(each, chosen=False) for each in before.frontier]
    choice = replace(
        choice,
        sensitivity=before.sensitivity,
        kept=tuple(name for name in before.sensitivity if name not in choice.rounded),
        frontier=ordered([*others, chooser.point(choice.rounded, True, measured)]),
    )
    mixed = _stored(job, chooser, choice.rounded)
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


def with_raced(choice: PrecisionChoice, chosen: float, float32: float | None = None) -> PrecisionChoice:
    """``choice`` with the seconds of whole networks timed in turns: the ``chosen`` one's, and that in ``float32``."""

    def of(point: FrontierPoint) -> FrontierPoint:
        if point.chosen:
            return replace(point, raced_seconds=chosen)
        return point if point.rounded else replace(point, raced_seconds=float32)

    return replace(choice, frontier=tuple(map(of, choice.frontier)))


def _announced(choice: PrecisionChoice, layers: int) -> str:
    return (
        f"{len(choice.rounded)} of {layers} layers in bfloat16: an error of {choice.error:.2g} of the largest value is "
        "expected"
    )


def _chooser(job: Job, plan: PrecisionPlan, seconds: float) -> PrecisionChooser:
    return PrecisionChooser(job.graph, job.machine, job.cpu, plan, seconds)


def _stored(job: Job, chooser: PrecisionChooser, rounded: Collection[str]) -> Job:
    """``job`` with the layers ``rounded``, and what follows them, in the shorter type."""
    return job.stored(chooser.with_followers(rounded), chooser.plan.dtype)


def _share(left: float | None, kept: float, share: float = 1.0) -> float | None:
    """``share`` of the seconds that are ``left`` for kernels, but those ``kept`` for the choice behind them."""
    return None if left is None else share * max(0.0, left - kept)


def _no_more(limit: float | None) -> float | None:
    """Seconds for a network all of whose kernels are measured: without a limit as long as the comparisons take."""
    return None if limit is None else 0.0
