"""Quantisation of a float ONNX file, as a command or as part of ``tune --precision int8``.

ONNX Runtime's quantiser makes the file. If ``tune`` has an error budget that the outputs exceed, every layer's error is
measured, and the layers with the largest error per time saved stay in float32.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import InputError, ModelError, OutputError, Say
from costmodel.base.output_files import check_writable, write_whole
from fusion.acceptance.error_budget import GIVEN_OUT, BudgetInputs, PrecisionChoice, RoundedLimit, sensitivities
from fusion.acceptance.rounded_layers import ByteRounding, rounded_runs, switched_model
from fusion.comparing.output_errors import ErrorTally, OutputErrors
from fusion.model.build_folder import file_digest
from fusion.model.conv_graph import FLOAT32, INT8
from fusion.model.library_messages import sentence
from fusion.model.named_arrays import (
    ONE_SAMPLE,
    Arrays,
    CalibrationData,
    DeclaredInput,
    TensorInfo,
    random_calibration,
    read_calibration,
)
from fusion.relax.onnx.quantised_model import (
    QuantizationOptions,
    declared_inputs,
    load_float_model,
    quantised_share,
    quantized,
    quantized_path,
    set_origin,
)
from fusion.relax.onnx.refusals import MOST_ELEMENTS
from fusion.tuning.clock import TuningDisplay
from fusion.tuning.network import Network, TuneRequest
from fusion.tuning.network_check import reference_worker
from fusion.tuning.precision import MOST_REBUILDS, PrecisionChooser, PrecisionPlan, error_seconds, followers

if TYPE_CHECKING:
    from fusion.analysis.target_machine import Target

RANDOM_CALLS = 10
QUANTISING = ".quantising-"  # name prefix of a temporary folder
_ADVICE = "allow more, or calibrate with more samples"


@dataclass(frozen=True)
class QuantizeSummary:
    """Result of a quantisation."""

    model: str
    output: str
    # Origin of the samples.
    calibration: str
    # Number of calls used for calibration.
    calibrated: int
    # Number of calls not used for calibration; ``errors`` are measured on them, or on the calibration calls if 0.
    held_out: int
    # Number of quantised convolutions and products among ``layers``.
    quantised_layers: int
    layers: int
    size_bytes: int
    # Errors of the quantised file against the float one, both run by ONNX Runtime.
    errors: OutputErrors
    wall_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary, as documented for ``--json``."""
        document = asdict(self)
        return {**{name: value for name, value in document.items() if name != "errors"}, **self.errors.to_json()}


def quantize_model(
    model: Path,
    output: Path | None = None,
    calibration: Path | None = None,
    random: bool = False,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    options: QuantizationOptions | None = None,
    say: Say = lambda _: None,
) -> QuantizeSummary:
    """Quantise the float file ``model`` into ``output`` (default: beside it), atomically.

    ``calibration``: ``.npz`` with one array per input, first axis samples; ``random``: random inputs instead, with
    ``shapes`` for open dimensions. Raises ``ModelError``, ``InputError``, ``OutputError``.
    """
    started = time.monotonic()
    target = output or quantized_path(model)
    _check_target(model, target)
    loaded = load_float_model(model)
    inputs = declared_inputs(model, loaded)
    data = _calibration(model, inputs, calibration, random, shapes or {})
    calibrated, held_out = data.split()
    data.require_spread()
    if not held_out:
        say(ONE_SAMPLE)
    result = quantized(model, loaded, data, calibrated, options or QuantizationOptions(), say)
    set_origin(result, file_digest(model))
    content = result.SerializeToString()
    say("comparing the outputs of both")
    errors = compare_outputs(model, content, data, held_out or calibrated)
    try:
        write_whole(target, content)
    except OSError as error:
        raise OutputError(
            f"{target}: cannot be written: {error.strerror or error}; choose another place, or free some"
        ) from error
    return QuantizeSummary(
        str(model),
        str(target),
        data.source,
        len(calibrated),
        len(held_out),
        *quantised_share(result.graph),
        len(content),
        errors,
        time.monotonic() - started,
    )


def compare_outputs(model: Path, quantised: bytes, data: CalibrationData, calls: Sequence[int]) -> OutputErrors:
    """Errors of the ``quantised`` model against the float one in ``model`` on ``calls`` of ``data``, by ONNX Runtime.

    Raises ``ModelError`` if it cannot run one of them.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    # Errors of the model, not of sums that saturate on CPUs without VNNI (kOrtSessionOptionsAvx2PrecisionMode).
    settings.add_session_config_entry("session.x64quantprecision", "1")
    tally = ErrorTally()
    try:
        sessions = [
            onnxruntime.InferenceSession(each, settings, providers=["CPUExecutionProvider"])
            for each in (quantised, str(model))
        ]
        names = [output.name for output in sessions[1].get_outputs()]
        for call in calls:
            feeds = data.call(call)
            ours, theirs = (dict(zip(names, session.run(names, feeds), strict=True)) for session in sessions)
            tally.add(ours, theirs)
    except Exception as error:  # the library raises anything on models that it does not expect
        raise ModelError(
            f"{model}: ONNX Runtime does not run it, or its quantised form: {sentence(error)}; "
            "leave layers out with --exclude"
        ) from error
    return tally.errors()


def render_quantized(summary: QuantizeSummary) -> str:
    """Format the summary as a few lines of text."""
    errors = summary.errors
    where = f"{summary.held_out} held-out" if summary.held_out else f"the {summary.calibrated} calibration"
    figures = [
        f"largest {errors.max_relative_error:.2g}",
        f"mean {errors.mean_relative_error:.2g} of the largest value of an output",
    ]
    figures += [] if errors.cosine is None else [f"cosine {errors.cosine:.6f}"]
    figures += [] if errors.top1_agreement is None else [f"top-1 agreement {errors.top1_agreement:.1%}"]
    note = "" if summary.held_out else f"note: {ONE_SAMPLE}\n"
    return (
        f"{summary.quantised_layers} of {summary.layers} layers quantised with {summary.calibrated} samples of "
        f"{summary.calibration}, {summary.size_bytes / 1e6:.1f} MB, {summary.wall_seconds:.0f} s\n"
        f"errors against the float model on {where} samples: {', '.join(figures)}\n"
        f"{note}written to {summary.output}"
    )


def _check_target(model: Path, target: Path) -> None:
    """Check the output file before any computation."""
    check_writable(target, "--output")
    if target.exists() and model.exists() and target.samefile(model):
        raise OutputError(f"--output {target}: is the model itself; name another file")


def _calibration(
    model: Path,
    inputs: Sequence[DeclaredInput],
    calibration: Path | None,
    random: bool,
    shapes: Mapping[str, tuple[int, ...]],
) -> CalibrationData:
    if calibration is not None and random:
        raise InputError("--calibration and --random: give one of the two")
    if calibration is not None:
        if shapes:
            raise InputError(
                "--shape is for --random: samples of --calibration have their own shapes; leave one of them out"
            )
        return read_calibration(calibration, inputs)
    if not random:
        wanted = ", ".join(f"'{each.name}' {each.dtype} ({_told(each.shape)})" for each in inputs)
        raise InputError(
            f"{model}: quantising needs samples: --calibration DATA.npz with {wanted}, some hundred of them; "
            "or --random, whose file is good for timing alone"
        )
    for name in shapes:
        if name not in {each.name for each in inputs}:
            raise InputError(f"{model}: no input {name!r}; the inputs are {', '.join(each.name for each in inputs)}")
    return random_calibration([_random_input(model, each, shapes) for each in inputs], RANDOM_CALLS)


def _told(shape: Sequence[int | None]) -> str:
    return ", ".join(["samples", *("?" if size is None else str(size) for size in shape[1:])])


def _random_input(model: Path, declared: DeclaredInput, shapes: Mapping[str, tuple[int, ...]]) -> TensorInfo:
    """Random input of the requested shape; one sample if the dimension is open."""
    shape: tuple[int | None, ...] = declared.shape and (declared.shape[0] or 1, *declared.shape[1:])
    shape = shapes.get(declared.name, shape)
    fits = len(shape) == len(declared.shape) and all(
        size is None or size == extent for size, extent in zip(declared.shape, shape, strict=True)
    )
    if not fits:
        raise InputError(f"--shape {declared.name}={','.join(map(str, shape))}: the model takes {declared.shape}")
    if None in shape:
        example = f"{declared.name}={','.join(str(size or 224) for size in shape)}"
        raise InputError(f"{model}: dynamic shape of input '{declared.name}'; pass for example --shape {example}")
    sizes = tuple(size or 1 for size in shape)
    if math.prod(sizes) > MOST_ELEMENTS:
        raise InputError(
            f"{model}: input '{declared.name}' of {','.join(map(str, sizes))} has {math.prod(sizes):,} elements; "
            f"at most {MOST_ELEMENTS:,} random ones are made; give smaller sizes with --shape"
        )
    return TensorInfo(declared.name, sizes, declared.dtype)


@dataclass(frozen=True)
class Quantised:
    """A float ``model`` and the quantised one that is tuned instead.

    ``choice``: layers left in float32, if not all could be quantised.
    """

    model: Path
    summary: QuantizeSummary
    max_error: float | None
    choice: PrecisionChoice | None = None

    def to_json(self) -> dict[str, object]:
        """Return a JSON-able dictionary for ``summary.json``."""
        return {
            "float_model": str(self.model),
            "quantised_nodes": self.summary.quantised_layers,
            "calibration": self.summary.calibration,
            "calibrated_samples": self.summary.calibrated,
            "held_out_samples": self.summary.held_out,
            "quantised_errors": self.summary.errors.to_json(),
        }


@contextmanager
def quantised_request(
    request: TuneRequest, target: Target, display: TuningDisplay
) -> Iterator[tuple[TuneRequest, Quantised | None]]:
    """``request`` for the quantised file, written into ``request.output``, if quantisation is requested.

    Raises ``InputError`` if the budget cannot be kept.
    """
    if request.precision != INT8:
        yield request, None
        return
    file = request.output / quantized_path(request.model).name
    before = file.exists()
    display.stage("quantising the model")
    try:
        found = _within_budget(request, file, target, display)
        yield replace(request, model=file, precision=FLOAT32, max_error=None, calibration=None), found
    except BaseException:
        if not before:
            file.unlink(missing_ok=True)
        raise


@contextmanager
def quantised_plan(
    network: Network, asked: TuneRequest, quantised: Quantised, scratch: Path
) -> Iterator[PrecisionPlan]:
    """Error limit of ``network``, whose model is quantised, against the float model. ``asked``: the user's request."""
    from fusion.relax.onnx.preparation import static_model

    assert asked.calibration is not None, "who quantises has samples"
    file = scratch / "float.onnx"
    file.write_bytes(static_model(quantised.model, network.profile.shapes, network.profile.batch).SerializeToString())
    inputs = _samples(asked.calibration, network.model.inputs)
    with reference_worker(quantised.model, network.model, network.target, scratch, file) as worker:

        class Float:
            def outputs(self, inputs: Arrays, rounded: Collection[str]) -> Arrays:
                return worker.run(inputs)

        names = {info.name for info in network.model.outputs}
        measured = BudgetInputs(Float(), inputs, names, error_seconds(asked.minutes))
        limit = RoundedLimit(None, measured, asked.max_error, _ADVICE)
        yield PrecisionPlan(INT8, frozenset(), limit, INT8, quantised.choice, quantised.to_json())


def _samples(path: Path, tensors: Sequence[TensorInfo]) -> dict[str, Arrays]:
    """Inputs for measuring errors: calls not used for calibration if there are any."""
    data = read_calibration(path, [DeclaredInput(info.name, info.shape, info.dtype) for info in tensors])
    calibrated, held_out = data.split()
    return data.named(held_out or calibrated)


def _within_budget(request: TuneRequest, file: Path, target: Target, display: TuningDisplay) -> Quantised:
    """Quantise as many layers as the budget allows into ``file``."""

    def quantised(exclude: tuple[str, ...] = ()) -> QuantizeSummary:
        options = QuantizationOptions(per_channel=True, exclude=exclude)
        return quantize_model(request.model, file, request.calibration, options=options, say=display.say)

    summary = quantised()
    limit = request.max_error
    whole = summary.errors.max_relative_error
    if limit is None or whole <= GIVEN_OUT * limit:
        return Quantised(request.model, summary, limit)
    display.say(f"all layers quantised err by {whole:.2g}: finding out which of them stay in float32")
    with _choosing(request, file, target, limit) as (chooser, sensitivity, excluded):
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
    request: TuneRequest, quantised: Path, target: Target, limit: float
) -> Iterator[tuple[PrecisionChooser, dict[str, float], Callable[[Collection[str]], tuple[str, ...]]]]:
    """Precision chooser, error of each layer, and a function from layers kept in float32 to the nodes to exclude."""
    from fusion.relax.extract import extract_graph
    from fusion.relax.onnx.importer import import_onnx
    from fusion.relax.onnx.model_file import load_model
    from fusion.relax.onnx.preparation import prepare
    from fusion.relax.onnx.quantised_model import float_form, with_followers

    assert request.calibration is not None, "who quantises has samples"
    profile = request.profiles[0]
    with tempfile.TemporaryDirectory(prefix=QUANTISING, dir=request.output) as folder:
        file = Path(folder) / "float.onnx"
        form = float_form(request.model, load_float_model(request.model))
        file.write_bytes(form.SerializeToString())
        model = import_onnx(file, profile.shapes, profile.batch)
        graph = extract_graph(model.mod)
        prepared = prepare(file, load_model(file), profile.shapes, profile.batch)
        switched = switched_model(prepared, graph, rounding=ByteRounding(load_model(quantised)))
        inputs = _samples(request.calibration, model.inputs)
        with rounded_runs(switched, model.inputs, model.outputs, target.threads_here, Path(folder)) as runs:
            seconds = error_seconds(request.minutes)
            names = {info.name for info in model.outputs}
            measured = BudgetInputs(runs, inputs, names, seconds)
            layers = frozenset({*switched.layers, *followers(graph)})
            plan = PrecisionPlan(INT8, layers, RoundedLimit(runs, measured, limit), INT8)
            chooser = PrecisionChooser(graph, target, plan, seconds)
            sensitivity = sensitivities(measured, switched.layers, seconds)
            yield chooser, sensitivity, lambda kept: with_followers(form, [switched.nodes[name] for name in kept])
