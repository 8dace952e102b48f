"""Python API of ``fusion``: :func:`analyze`, :func:`tune`, :func:`quantize`; :func:`fusion.load` runs builds.

The command line calls these functions. Errors caused by the user are :class:`costmodel.ProjectError` with a one-line
message that names options as on the command line (``--batch`` is ``batch`` here).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from costmodel.base.errors import InputError, Say
from costmodel.base.output_files import check_writable
from costmodel.base.units import MOST_COUNT, check_count
from costmodel.pages.charts import check_picture
from fusion.model.conv_graph import Precision

if TYPE_CHECKING:
    from fusion.analysis.analyzer import NetworkAnalysis
    from fusion.tuning.clock import TuningDisplay
    from fusion.tuning.network import InputProfile
    from fusion.tuning.quantization import QuantizeSummary

PathLike = str | os.PathLike[str]
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class TuneSummary:
    """Result of :func:`tune`.

    For a build for another CPU, times and errors are NaN: nothing was run. With several profiles, times, sites, errors
    and notes are those of the first profile; trials, failures and wall time are totals.
    """

    output: Path
    # Seconds per run of the written network. It, the network without fusion and ONNX Runtime were timed in alternation.
    tuned_seconds: float
    # The same with fusion off; NaN if there was no time to build that.
    unfused_seconds: float
    onnxruntime_seconds: float
    # Number of fusable sites.
    sites: int
    sites_fused: int
    # Errors against ONNX Runtime on random inputs; the relative one refers to the largest output value.
    max_abs_error: float
    max_relative_error: float
    # Kernels measured in this run.
    trials: int
    # Failed measurements among them.
    failures: int
    # Duration of the whole call.
    wall_seconds: float
    # True if Ctrl-C ended the tuning early.
    interrupted: bool
    # Messages about this result.
    notes: tuple[str, ...]
    # Content of ``summary.json`` in ``output``, as printed by ``--json``.
    record: Mapping[str, Any]
    # One summary per input shape if there are several, otherwise empty.
    profiles: tuple[TuneSummary, ...] = ()

    @property
    def speedup_over_onnxruntime(self) -> float:
        """Speedup over ONNX Runtime."""
        return self.onnxruntime_seconds / self.tuned_seconds

    @property
    def speedup_over_unfused(self) -> float:
        """Speedup by fusion."""
        return self.unfused_seconds / self.tuned_seconds


def analyze(
    model: PathLike,
    *,
    shapes: Shapes | None = None,
    batch: int | None = None,
    machine: PathLike | None = None,
    threads: int | None = None,
    precision: str = "float32",
    picture: PathLike | None = None,
    progress: Say | None = None,
) -> NetworkAnalysis:
    """Find the convolutions of the ONNX file ``model`` that are worth fusing, and explain why; nothing is tuned.

    - ``shapes``: shapes of open inputs by name, e.g. ``{"x": (1, 3, 224, 224)}``; ``batch``: new leading dimension
    - ``machine``: name or file of a CPU (default: this one, measured quickly on first use)
    - ``threads``: of the kernels (default: the cores of this process)
    - ``precision``: number type of layers, ``"float32"`` or ``"bfloat16"``
    - ``picture``: ``.svg``, ``.png`` or ``.pdf`` file for a drawing of the rooflines of every precision, with the sites
      before and after fusion
    - ``progress``: callback for progress messages of one line

    Seconds are predicted. Raises ``ModelError`` for a file that cannot be read or imported, ``InputError`` for wrong
    shapes, ``MachineError`` for an unknown machine.

    >>> analysis = analyze("model.onnx", batch=1)                       # doctest: +SKIP
    >>> [site.name for site in analysis.sites if site.fuse]             # doctest: +SKIP
    ['/features/features.1/conv/...']
    """
    from fusion.model.tuned_model import require_compiler

    require_compiler()
    from fusion.analysis.analyzer import analyze_in, by_precision, read_graph

    _check_counts(batch=batch, threads=threads)
    if precision not in ("float32", "bfloat16"):
        raise InputError(f"--precision {precision}: choose float32 or bfloat16")
    if picture is not None:
        check_picture(Path(picture), "--picture")
        check_writable(Path(picture), "--picture")
    read = read_graph(
        Path(model), _shapes(shapes), _text(machine), threads, progress or _unheard, batch, precision=precision
    )
    found = analyze_in(precision, *read)
    if picture is not None:
        from fusion.report.pictures import write_roofline

        write_roofline(read.machine, read.cpu.threads, by_precision(*read), Path(picture))
    return found


def tune(
    model: PathLike,
    output: PathLike,
    *,
    trials: int = 64,
    minutes: float | None = None,
    shapes: Shapes | Sequence[Shapes] | None = None,
    batch: int | Sequence[int] | None = None,
    threads: int | None = None,
    machine: PathLike | None = None,
    target: PathLike | None = None,
    tracker: str | None = None,
    key: str | None = None,
    against: Sequence[str] = (),
    quantized: PathLike | None = None,
    precision: str = "float32",
    max_error: float | None = None,
    calibration: PathLike | None = None,
    report: bool = True,
    progress: Say | TuningDisplay | None = None,
) -> TuneSummary:
    """Tune fused and separate kernels of the ONNX file ``model``, and write the fastest network into ``output``.

    Outputs are checked against the model in FP64 (ONNX Runtime where that is impossible); :func:`fusion.load` opens the
    build. A second call continues from the records. Options not listed are those of :func:`analyze`.

    - ``trials``: candidates per kernel, those of earlier runs included
    - ``minutes``: limit of the whole job (``None``: until the trials are done)
    - ``shapes``, ``batch``: with several shapes (a list of mappings) or batches, every combination is a profile with
      its own network in ``output``; ``minutes`` are shared among them, and :func:`fusion.load` selects by input shape
    - ``target``: another CPU to build for from its records, without measuring: ``"llvm -mcpu=znver4 -num-cores 8"`` or
      the name of a machine file
    - ``tracker`` (``HOST:PORT``) and ``key``: servers of TVM's RPC; kernels are built for their CPU and measured there,
      and ``machine`` predicts for that CPU
    - ``against``: engines to time at the end in addition to ONNX Runtime, e.g. ``"openvino-bf16"``; loading them is not
      part of ``minutes``
    - ``quantized``: file run by INT8 engines
    - ``precision``: ``"float32"``; ``"bfloat16"``: where kernels exist, inputs and outputs keep their types;
      ``"auto"``: bfloat16 where it saves time within ``max_error``, and float32 if that is not slower; ``"int8"``: the
      model is quantised as by :func:`quantize`, and layers with too large errors stay in float32
    - ``max_error``: relative to the largest value of each output (default for ``"auto"``: 0.01); with ``"bfloat16"``
      and ``"int8"`` larger errors are refused (default: limit by rounding)
    - ``calibration``: ``.npz`` file of inputs for measuring errors, samples along the first dimension; required by
      ``"int8"``
    - ``report``: write ``report.html`` into ``output``
    - ``progress``: callback as in :func:`analyze`, or the progress bar of the command line,
      :class:`fusion.tuning.clock.TuningDisplay`

    Ctrl-C while kernels are tuned builds the best network found so far. Raises ``ModelError`` and ``InputError`` as
    :func:`analyze`, ``OutputError`` for a folder that is not writable, ``TuningError`` if nothing could be built, run
    and verified: only the tuning records are kept then.

    >>> summary = tune("model.onnx", "build/", minutes=5, progress=print)    # doctest: +SKIP
    >>> summary.speedup_over_onnxruntime, summary.sites_fused                # doctest: +SKIP
    (1.44, 13)
    """
    from fusion.commands.doctor import require_tools
    from fusion.model.tuned_model import require_compiler

    require_tools(Path(model), Path(output))
    require_compiler()  # before imports that need it
    from fusion.report.tune_page import remove_reports, write_reports
    from fusion.tuning.clock import TuningDisplay
    from fusion.tuning.network import TuneRequest
    from fusion.tuning.tuning_run import tune_model

    _check_counts(trials=trials, threads=threads)
    request = TuneRequest(
        Path(model), Path(output), _profiles(shapes, batch), trials, minutes, threads, _text(machine), _text(target),
        tracker, key, against=tuple(against), quantized=None if quantized is None else Path(quantized),
        precision=cast(Precision, precision), max_error=max_error,
        calibration=None if calibration is None else Path(calibration),
    )  # fmt: skip
    display = progress if isinstance(progress, TuningDisplay) else TuningDisplay(told=progress or _unheard)
    with display:
        record = tune_model(request, display)
    write_reports(request.output) if report else remove_reports(request.output)
    return _summary(request.output, record)


def quantize(
    model: PathLike,
    calibration: PathLike | None = None,
    output: PathLike | None = None,
    *,
    random: bool = False,
    shapes: Shapes | None = None,
    format: str = "qdq",
    per_channel: bool = False,
    symmetric: bool = False,
    exclude: Sequence[str] = (),
    method: str = "minmax",
    progress: Say | None = None,
) -> QuantizeSummary:
    """Quantise the float ONNX file ``model`` to INT8 with ONNX Runtime's quantiser, and compare the outputs of both.

    - ``output``: default ``MODEL-int8.onnx`` beside the model
    - ``calibration``: ``.npz`` file with one array per input, first axis samples, some hundred of them; every fifth
      sample is held out for measuring errors
    - ``random``: random inputs instead, with ``shapes`` for open inputs; the result is only useful for timing
    - ``format``: ``qdq`` or ``qoperator``; ``per_channel``: one weight scale per output channel; ``symmetric``:
      activation ranges symmetric around zero; ``exclude``: names of nodes that stay in floating point
    - ``method``: derivation of ranges from samples, ``minmax``, ``entropy`` or ``percentile``

    Raises ``ModelError`` for a file that cannot be read or is quantised already, ``InputError`` for wrong samples,
    ``OutputError`` if the file cannot be written.

    >>> quantize("model.onnx", "images.npz", per_channel=True).errors.top1_agreement    # doctest: +SKIP
    0.98
    """
    from fusion.relax.onnx.quantised_model import QuantizationOptions
    from fusion.tuning.quantization import quantize_model

    options = QuantizationOptions(format, per_channel, symmetric, tuple(exclude), method)
    samples, target = (None if each is None else Path(each) for each in (calibration, output))
    return quantize_model(Path(model), target, samples, random, _shapes(shapes), options, progress or _unheard)


def _profiles(shapes: Shapes | Sequence[Shapes] | None, batch: int | Sequence[int] | None) -> tuple[InputProfile, ...]:
    """Profiles of all combinations of shapes and batches."""
    from fusion.tuning.network import InputProfile

    all_shapes = [shapes] if shapes is None or isinstance(shapes, Mapping) else list(shapes)
    batches = list(batch) if isinstance(batch, Sequence) else [batch]
    for each in batches:
        _check_counts(batch=each)
    return tuple(InputProfile(_shapes(each), size) for each in all_shapes or [None] for size in batches or [None])


def _summary(output: Path, record: Mapping[str, Any]) -> TuneSummary:
    if "profiles" in record:
        return _of_profiles(output, record)
    latency = record["latency_seconds"]
    return TuneSummary(
        output=output,
        tuned_seconds=_number(latency["tuned"]),
        unfused_seconds=_number(latency.get("tuned_without_fusion")),
        onnxruntime_seconds=_number(latency["onnxruntime"]),
        sites=len(record["sites"]),
        sites_fused=sum(site["fused_in_model"] for site in record["sites"]),
        max_abs_error=_number(record["max_abs_error"]),
        max_relative_error=_number(record["max_relative_error"]),
        trials=record["trials"],
        failures=record["failures"],
        wall_seconds=record["wall_seconds"],
        interrupted=record["interrupted"],
        notes=tuple(record["notes"]),
        record=record,
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _of_profiles(output: Path, record: Mapping[str, Any]) -> TuneSummary:
    profiles = tuple(_summary(output / each["folder"], each) for each in record["profiles"])
    return replace(
        profiles[0],
        output=output,
        trials=record["trials"],
        failures=record["failures"],
        wall_seconds=record["wall_seconds"],
        interrupted=record["interrupted"],
        record=record,
        profiles=profiles,
    )


def _shapes(shapes: Shapes | None) -> dict[str, tuple[int, ...]]:
    for name, shape in (shapes or {}).items():
        if not all(isinstance(extent, int) and 0 < extent <= MOST_COUNT for extent in shape):
            given = ",".join(map(str, shape))
            raise InputError(f"--shape {name}={given}: expected positive sizes, of at most {MOST_COUNT:,}")
    return {name: tuple(shape) for name, shape in (shapes or {}).items()}


def _check_counts(**counts: int | None) -> None:
    for option, count in counts.items():
        check_count(option, count)


def _text(machine: PathLike | None) -> str | None:
    return None if machine is None else os.fspath(machine)


def _unheard(line: str) -> None:
    """Ignore a progress message."""
