"""The Python API of ``fusion``: :func:`analyze`, :func:`tune`, :func:`quantize`; :func:`fusion.load` runs builds.

The command line calls these functions. Errors that a user can cause are :class:`costmodel.ProjectError`, one line each,
which names options as the command line does (``--batch`` is ``batch`` here).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from costmodel.base.counts import MOST_COUNT, check_count
from costmodel.base.errors import InputError
from costmodel.base.pictures import check_picture
from costmodel.base.say import Say
from costmodel.base.whole_file import check_writable
from fusion.model.precision import Precision

if TYPE_CHECKING:
    from fusion.analysis.analyzer import NetworkAnalysis
    from fusion.search.progress import TuningDisplay
    from fusion.tuning.network import InputProfile
    from fusion.tuning.quantization import QuantizeSummary

PathLike = str | os.PathLike[str]
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class TuneSummary:
    """What :func:`tune` found; ``record`` is the content of ``summary.json`` in ``output``, as ``--json`` prints it.

    ``tuned_seconds``: of one run of the network as it was written; ``unfused_seconds``: with fusion off (NaN if there
    was no time to build that);
    ``onnxruntime_seconds``: of ONNX Runtime; all three timed in turns. ``sites_fused`` of ``sites`` fusable ones.
    ``max_abs_error`` and ``max_relative_error`` (of the largest output): against ONNX Runtime on random inputs.
    ``trials``: kernels measured in this run, ``failures`` of them in vain; ``wall_seconds``: of the whole call;
    ``interrupted``: Ctrl-C ended the tuning early. ``notes``: what to know about this result.

    Of a build for another CPU the times and errors are NaN: nothing was run.

    ``profiles``: one for each of several input shapes, empty for one. The whole then has the times, sites, errors and
    notes of the first, and the trials, failures and wall time of all together.
    """

    output: Path
    tuned_seconds: float
    unfused_seconds: float
    onnxruntime_seconds: float
    sites: int
    sites_fused: int
    max_abs_error: float
    max_relative_error: float
    trials: int
    failures: int
    wall_seconds: float
    interrupted: bool
    notes: tuple[str, ...]
    record: Mapping[str, Any]
    profiles: tuple[TuneSummary, ...] = ()

    @property
    def speedup_over_onnxruntime(self) -> float:
        """How many times as fast as ONNX Runtime."""
        return self.onnxruntime_seconds / self.tuned_seconds

    @property
    def speedup_over_unfused(self) -> float:
        """How many times as fast as with fusion off."""
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
    """Which convolutions of the ONNX file ``model`` are worth computing in one kernel, and why; tunes nothing.

    ``shapes``: of open inputs by name, such as ``{"x": (1, 3, 224, 224)}``; ``batch`` rewrites the leading dimension.
    ``machine``: a CPU's name or file (default: this one, measured quickly on first use); ``threads`` of the kernels
    (default: the cores of this process); ``precision``: ``"float32"`` or ``"bfloat16"``, what layers are stored in.
    ``picture``: an ``.svg``, ``.png`` or ``.pdf`` to draw the roofline of every precision into, with the sites before
    and after fusion. ``progress`` is told what happens, a line each. Seconds are predicted.

    Raises ``ModelError`` for a file that cannot be read or imported, ``InputError`` for shapes that do not fit,
    ``MachineError`` for an unknown machine.

    >>> analysis = analyze("model.onnx", batch=1)                       # doctest: +SKIP
    >>> [site.name for site in analysis.sites if site.fuse]             # doctest: +SKIP
    ['/features/features.1/conv/...']
    """
    from fusion.artifact.executable import require_compiler

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
        from fusion.report.result_pictures import draw_roofline

        draw_roofline(read.machine, read.cpu.threads, by_precision(*read), Path(picture))
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
    """Tunes fused and separate kernels of the ONNX file ``model``, keeps what measures faster, checks it against ONNX
    Runtime and writes it into the folder ``output``, for :func:`fusion.load`. A second call goes on from the records.

    ``trials``: candidates per kernel; ``minutes``: of the whole job (``None``: until the trials are done). The others
    are those of :func:`analyze`; ``progress`` may be the bar of the command line,
    :class:`fusion.search.progress.TuningDisplay`. Several ``shapes`` (a list of such mappings) or batches are profiles:
    each, or each shape with each batch, gets a network of its own in ``output``, ``minutes`` are shared among them, and
    :func:`fusion.load` picks by the shape of what it is given. Ctrl-C while kernels are tuned builds the best found so
    far.

    ``target``: another CPU, ``"llvm -mcpu=znver4 -num-cores 8"`` or the name of a machine file, to build for from its
    records, without measuring. ``tracker`` (``HOST:PORT``) and ``key``: servers of TVM's RPC; kernels are built for
    their CPU and measured there. ``machine`` predicts for that CPU then. ``against``: engines to time at the end
    beside ONNX Runtime, ``"openvino-bf16"`` for one; ``quantized``: the file that those of INT8 run. Loading them is
    not part of ``minutes``.

    ``precision``: ``"float32"``, ``"bfloat16"`` (layers are stored in it where there are kernels; inputs and outputs
    stay as they are), ``"auto"``: bfloat16 where it saves time and the outputs stay within ``max_error``, relative
    to the largest value of each (default: 0.01), and float32 where that is no slower; or ``"int8"``: the model is
    quantised as by :func:`quantize`, and layers that cost too much exactness stay in float32. ``max_error`` with
    ``"bfloat16"`` and ``"int8"`` refuses what errs more (default: what rounding explains). ``calibration``: an ``.npz``
    file of inputs on which errors are measured, several along the first dimension; ``"int8"`` needs it. ``report``:
    write ``report.html`` into ``output``.

    Raises ``ModelError`` and ``InputError`` as :func:`analyze`, ``OutputError`` for a folder that cannot be written,
    ``TuningError`` if nothing could be built, run and verified: nothing but the tuning records is left then.

    >>> summary = tune("model.onnx", "build/", minutes=5, progress=print)    # doctest: +SKIP
    >>> summary.speedup_over_onnxruntime, summary.sites_fused                # doctest: +SKIP
    (1.44, 13)
    """
    from fusion.artifact.executable import require_compiler
    from fusion.commands.doctor import require_tools

    require_tools(Path(model), Path(output))
    require_compiler()  # before anything is imported that needs it
    from fusion.report.tune_page import remove_reports, write_reports
    from fusion.search.progress import TuningDisplay
    from fusion.tuning.network import TuneRequest
    from fusion.tuning.road import tune_model

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
    """Quantises the float ONNX file ``model`` to INT8 by ONNX Runtime's quantiser, into ``output`` (default:
    ``MODEL-int8.onnx`` beside it), and compares the outputs of both.

    ``calibration``: an ``.npz`` file with an array per input, first axis samples, some hundred of them; every fifth is
    held out for the errors. ``random``: random numbers instead, of ``shapes`` where inputs are open; such a file is
    good for timing alone. ``format``: ``qdq`` or ``qoperator``; ``per_channel``: a scale for each output channel of
    weights; ``symmetric``: activations around zero; ``exclude``: names of nodes that stay in floating point;
    ``method``: how ranges follow from the samples, ``minmax``, ``entropy`` or ``percentile``.

    Raises ``ModelError`` for a file that cannot be read or is quantised already, ``InputError`` for samples that do not
    fit, ``OutputError`` where nothing can be written.

    >>> quantize("model.onnx", "images.npz", per_channel=True).errors.top1_agreement    # doctest: +SKIP
    0.98
    """
    from fusion.relax.onnx.onnx_quantizer import QuantizationOptions
    from fusion.tuning.quantization import quantize_model

    options = QuantizationOptions(format, per_channel, symmetric, tuple(exclude), method)
    samples, target = (None if each is None else Path(each) for each in (calibration, output))
    return quantize_model(Path(model), target, samples, random, _shapes(shapes), options, progress or _unheard)


def _profiles(shapes: Shapes | Sequence[Shapes] | None, batch: int | Sequence[int] | None) -> tuple[InputProfile, ...]:
    """Every shape with every batch."""
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
    """Nobody asked for progress."""
