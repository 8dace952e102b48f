"""``tune --precision int8``: a float model quantised on the way, as many of its layers as an error budget lets.

ONNX Runtime's quantiser makes the file that is tuned, beside the build (:mod:`fusion.commands.quantize`). Where its
outputs err more than is allowed, every layer's share in that is measured, and those that cost most for the time they
save stay in float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.errors import InputError
from fusion.acceptance.error_budget import (
    GIVEN_OUT,
    BudgetInputs,
    PrecisionChoice,
    RoundedLimit,
    sensitivities,
)
from fusion.acceptance.network_check import reference_worker, threads_here
from fusion.acceptance.precision_choice import MOST_REBUILDS, PrecisionChooser, PrecisionPlan, error_seconds
from fusion.acceptance.quantised_layers import ByteRounding
from fusion.acceptance.rounded_layers import rounded_runs, switched_model
from fusion.acceptance.tune_job import Job, TuneRequest
from fusion.analysis.mixed_times import followers
from fusion.commands.quantize import QuantizeSummary, quantize_model
from fusion.model.calibration_data import DeclaredInput, read_calibration
from fusion.model.named_arrays import Arrays
from fusion.model.precision import FLOAT32, INT8
from fusion.model.tensor_info import TensorInfo
from fusion.relax.onnx.onnx_quantised import quantized_path
from fusion.search.progress import TuningDisplay

if TYPE_CHECKING:
    from costmodel.machines.machine_records import Machine
    from schedules.contract.cpu_target import CpuTarget

QUANTISING = ".quantising-"  # how the name of a temporary folder begins
_ADVICE = "allow more, or calibrate with more samples"


@dataclass(frozen=True)
class Quantised:
    """A float ``model`` and the quantised one that is tuned in its place. ``choice``: which layers of it were left in
    float32, if not all could be quantised.
    """

    model: Path
    summary: QuantizeSummary
    max_error: float | None
    choice: PrecisionChoice | None = None

    def to_json(self) -> dict[str, object]:
        """JSON-able, for ``summary.json``."""
        return {
            "float_model": str(self.model),
            "quantised_nodes": self.summary.quantised_layers,
            "calibration": self.summary.calibration,
            "calibrated_samples": self.summary.calibrated,
            "held_out_samples": self.summary.held_out,
            "quantised_errors": self.summary.errors.to_json(),
        }


Described = Callable[[], "tuple[CpuTarget, Machine]"]


@contextmanager
def quantised_request(
    request: TuneRequest, described: Described, display: TuningDisplay
) -> Iterator[tuple[TuneRequest, Quantised | None]]:
    """``request`` for the quantised file, where that is asked for: ``request.output`` holds it then. ``described()``:
    the CPU that it is tuned for, and its machine. ``InputError`` where the budget cannot be kept.
    """
    if request.precision != INT8:
        yield request, None
        return
    target = request.output / quantized_path(request.model).name
    before = target.exists()
    display.stage("quantising the model")
    try:
        found = _within_budget(request, target, described, display)
        yield replace(request, model=target, precision=FLOAT32, max_error=None, calibration=None), found
    except BaseException:
        if not before:
            target.unlink(missing_ok=True)
        raise


@contextmanager
def quantised_plan(job: Job, asked: TuneRequest, quantised: Quantised, scratch: Path) -> Iterator[PrecisionPlan]:
    """What a network of ``job``, whose model is quantised, may be off by from the float one. ``asked``: by the user."""
    from fusion.relax.onnx.onnx_prepare import static_model

    assert asked.calibration is not None, "who quantises has samples"
    file = scratch / "float.onnx"
    file.write_bytes(static_model(quantised.model, job.profile.shapes, job.profile.batch).SerializeToString())
    inputs = _told(asked.calibration, job.model.inputs)
    with reference_worker(quantised.model, job.model, job.cpu, scratch, file) as worker:

        class Float:
            def outputs(self, inputs: Arrays, rounded: Collection[str]) -> Arrays:
                return worker.run(inputs)

        names = {info.name for info in job.model.outputs}
        measured = BudgetInputs(Float(), inputs, names, error_seconds(asked.minutes))
        limit = RoundedLimit(None, measured, asked.max_error, _ADVICE)
        yield PrecisionPlan(INT8, frozenset(), limit, INT8, quantised.choice, quantised.to_json())


def _told(path: Path, tensors: Sequence[TensorInfo]) -> dict[str, Arrays]:
    """What errors are told on: calls that nothing was calibrated with, where there are such."""
    data = read_calibration(path, [DeclaredInput(info.name, info.shape, info.dtype) for info in tensors])
    calibrated, held_out = data.split()
    return data.named(held_out or calibrated)


def _within_budget(request: TuneRequest, target: Path, described: Described, display: TuningDisplay) -> Quantised:
    from fusion.relax.onnx.onnx_quantizer import QuantizationOptions

    def quantised(exclude: tuple[str, ...] = ()) -> QuantizeSummary:
        options = QuantizationOptions(per_channel=True, exclude=exclude)
        return quantize_model(request.model, target, request.calibration, options=options, say=display.say)

    summary = quantised()
    limit = request.max_error
    whole = summary.errors.max_relative_error
    if limit is None or whole <= GIVEN_OUT * limit:
        return Quantised(request.model, summary, limit)
    display.say(f"all layers quantised err by {whole:.2g}: finding out which of them stay in float32")
    with _choosing(request, target, described, limit) as (chooser, sensitivity, excluded):
        plan = chooser.plan
        for _ in range(MOST_REBUILDS + 1):
            choice = chooser.chosen(sensitivity, {})
            if not choice.rounded:
                break
            kept = tuple(name for name in sensitivity if name not in choice.rounded)
            summary = quantised(excluded(kept))
            found = summary.errors.max_relative_error
            display.say(f"{len(choice.rounded)} of {len(sensitivity)} layers quantised err by {found:.2g}")
            if found <= GIVEN_OUT * limit:
                choice = replace(choice, kept=kept, frontier=chooser.frontier(sensitivity, {}, choice))
                return Quantised(request.model, summary, limit, choice)
            assert plan.limit.max_error is not None
            smaller = 0.9 * plan.limit.max_error * choice.error / max(found, choice.error, 1e-30)
            plan = replace(plan, limit=replace(plan.limit, max_error=smaller))
            chooser = chooser.within(plan)
    least = min(sensitivity.values(), default=whole)
    raise InputError(
        f"--max-error {limit:g}: quantised to 8 bits, {request.model} errs by {whole:.2g}, by {least:.2g} with the "
        f"least delicate layer alone, and leaving layers in float32 does not keep the budget; {_ADVICE}, or choose "
        "--precision auto"
    )


@contextmanager
def _choosing(
    request: TuneRequest, target: Path, described: Described, limit: float
) -> Iterator[tuple[PrecisionChooser, dict[str, float], Callable[[Collection[str]], tuple[str, ...]]]]:
    """Who chooses among the layers, each one's own error, and which nodes to exclude for layers to stay in float32."""
    from fusion.relax.extract import extract_graph
    from fusion.relax.onnx.importer import import_onnx
    from fusion.relax.onnx.onnx_file import load_model
    from fusion.relax.onnx.onnx_prepare import prepare
    from fusion.relax.onnx.onnx_quantizer import float_form, load_float_model, with_what_follows

    cpu, machine = described()
    assert request.calibration is not None, "who quantises has samples"
    profile = request.profiles[0]
    with tempfile.TemporaryDirectory(prefix=QUANTISING, dir=request.output) as folder:
        file = Path(folder) / "float.onnx"
        form = float_form(request.model, load_float_model(request.model))
        file.write_bytes(form.SerializeToString())
        model = import_onnx(file, profile.shapes, profile.batch)
        graph = extract_graph(model.mod)
        prepared = prepare(file, load_model(file), profile.shapes, profile.batch)
        switched = switched_model(prepared, graph, rounding=ByteRounding(load_model(target)))
        inputs = _told(request.calibration, model.inputs)
        with rounded_runs(switched, model.inputs, model.outputs, threads_here(cpu), Path(folder)) as runs:
            seconds = error_seconds(request.minutes)
            names = {info.name for info in model.outputs}
            measured = BudgetInputs(runs, inputs, names, seconds)
            layers = frozenset({*switched.layers, *followers(graph)})
            plan = PrecisionPlan(INT8, layers, RoundedLimit(runs, measured, limit), INT8)
            chooser = PrecisionChooser(graph, machine, cpu, plan, seconds)
            sensitivity = sensitivities(measured, switched.layers, seconds)
            yield chooser, sensitivity, lambda kept: with_what_follows(form, [switched.nodes[name] for name in kept])
