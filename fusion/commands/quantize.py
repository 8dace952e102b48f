"""``python -m fusion quantize``: a float ONNX file to a quantised one beside it, and what that costs in exactness."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, ModelError, OutputError
from costmodel.base.say import Say
from costmodel.base.whole_file import check_writable, write_whole
from fusion.artifact.build_folder import digest
from fusion.comparing.output_errors import ErrorTally, OutputErrors
from fusion.model.calibration_data import CalibrationData, DeclaredInput, random_calibration, read_calibration
from fusion.model.library_messages import sentence
from fusion.model.tensor_info import TensorInfo
from fusion.relax.onnx.model_size_limits import MOST_ELEMENTS
from fusion.relax.onnx.onnx_quantised import quantised_share, quantized_path, set_origin
from fusion.relax.onnx.onnx_quantizer import QuantizationOptions, declared_inputs, load_float_model, quantized

RANDOM_CALLS = 10
ONE_SAMPLE = "one sample alone: errors are told on what it was calibrated with, on other inputs they are larger"


@dataclass(frozen=True)
class QuantizeSummary:
    """What was written. ``quantised_layers`` of ``layers`` convolutions and products; ``errors``: of the quantised file
    against the float one, both by ONNX Runtime, on ``held_out`` calls that were not calibrated with (on the calibrated
    ones where there are none); ``calibration``: where the samples are from.
    """

    model: str
    output: str
    calibration: str
    calibrated: int
    held_out: int
    quantised_layers: int
    layers: int
    size_bytes: int
    errors: OutputErrors
    wall_seconds: float

    def to_json(self) -> dict[str, Any]:
        """JSON-able, as documented for ``--json``."""
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
    """Quantises the float file ``model`` into ``output`` (default: beside it), whole or not at all.

    ``calibration``: ``.npz`` with an array per input, first axis samples; ``random``: random numbers instead, of inputs
    whose open dimensions ``shapes`` gives. Raises ``ModelError``, ``InputError``, ``OutputError``.
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
    set_origin(result, digest(model))
    content = result.SerializeToString()
    say("comparing the outputs of both")
    errors = compared(model, content, data, held_out or calibrated)
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


def compared(model: Path, quantised: bytes, data: CalibrationData, calls: Sequence[int]) -> OutputErrors:
    """Errors of the ``quantised`` model against the float one in ``model`` on ``calls`` of ``data``, by ONNX Runtime.

    ``ModelError`` where it runs one of the two not at all.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
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
    """A few lines for people."""
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
    """Before anything is computed."""
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
    """Of the shape asked for; one sample where that is open."""
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
