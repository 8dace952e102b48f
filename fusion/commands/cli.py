"""``python -m fusion analyze | tune | report | run | benchmark | compare | quantize | doctor``.

Exit status: 0 done, 1 ``doctor`` found a problem, 2 error in the user's input or output (one line on stderr), 130
stopped with Ctrl-C, 143 ended by SIGTERM. With ``--json`` standard output contains only JSON; progress and messages go
to standard error.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from costmodel.base.command_line import ProgramGroup, guarded, program_name, version_command
from costmodel.base.errors import InputError
from costmodel.base.units import whole_number
from fusion.comparing.engine import DEFAULT, ENGINES
from schedules.contract.tvm_import import import_tvm_alone

app = typer.Typer(
    name="fusion",
    cls=ProgramGroup,
    help="Make convolutional networks fast on CPUs: tune fused kernels for an ONNX model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.callback()(version_command)

ModelOption = Annotated[Path, typer.Argument(help="ONNX file.", metavar="MODEL.onnx", show_default=False)]
Build = Annotated[Path, typer.Argument(help="Folder that `tune` wrote.", metavar="BUILD", show_default=False)]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME=1,3,224,224",
        help="Shape of an open input; repeatable. `tune` takes several shapes of one input, a profile each.",
    ),
]
BatchOption = Annotated[
    int | None, typer.Option(min=1, help="Batch size: rewrites the leading dimension of a static model.")
]
BatchesOption = Annotated[
    list[int] | None,
    typer.Option("--batch", min=1, help="Batch size of a static model; repeatable: a profile each."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of threads; default: the cores of this process.")]
MachineName = Annotated[
    str | None, typer.Option("--machine", help="Machine file or name (`python -m costmodel machines`).")
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="float32|bfloat16|int8|auto",
        help="Number type of layers; auto: bfloat16 where worth its error; int8: quantised with --calibration.",
    ),
]
QuantizedFile = Annotated[
    Path | None,
    typer.Option(
        "--quantized",
        metavar="FILE.onnx",
        help="Quantised file that engines of INT8 run; default: what `quantize` wrote beside the model.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def main() -> None:
    """Entry point of ``python -m fusion``."""
    if not sys.warnoptions:  # overflows are reported by our messages, not by NumPy's
        warnings.simplefilter("ignore", RuntimeWarning)
    app(prog_name=program_name("fusion"))


@app.command()
@guarded("stopped")
def analyze(
    model: ModelOption,
    shape: Shapes = None,
    batch: BatchOption = None,
    machine: MachineName = None,
    threads: Threads = None,
    precision: Annotated[
        str, typer.Option(metavar="float32|bfloat16", help="Number type of the layers of the listed sites.")
    ] = "float32",
    all_: Annotated[bool, typer.Option("--all", help="List also sites that are never worth tuning.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw the roofline of every precision, and the sites before and after."),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Which sites are worth fusing, and why. Takes seconds and tunes nothing."""
    from fusion.commands import fusion_api
    from fusion.report.console_report import print_analysis

    profiles = parse_shapes(shape)
    if len(profiles) > 1:
        raise InputError(
            f"--shape {shape[-1] if shape else ''}: its input is given twice; analyze takes one shape; leave one out"
        )
    shapes = profiles[0]
    import_tvm_alone()
    analysis = fusion_api.analyze(
        model,
        shapes=shapes,
        batch=batch,
        machine=machine,
        threads=threads,
        precision=precision,
        picture=picture,
        progress=_say,
    )
    _emit(analysis.to_json()) if json_ else print_analysis(analysis, everything=all_)


@app.command()
@guarded("stopped; what was measured so far is kept")
def tune(
    model: ModelOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the build into.")],
    trials: Annotated[int, typer.Option(min=1, help="Configurations to measure per kernel.")] = 64,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Time limit in minutes, everything included.")] = None,
    threads: Threads = None,
    shape: Shapes = None,
    batch: BatchesOption = None,
    machine: MachineName = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="CPU",
            help='Another CPU to build for from its records: "llvm -mcpu=znver4 -num-cores 8", or a machine file.',
        ),
    ] = None,
    tracker: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Measure kernels on servers of this TVM RPC tracker.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Key of the tracker's servers, all with the same CPU.")] = None,
    precision: PrecisionOption = "float32",
    max_error: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Largest error that shorter types may cause, over an output's largest value; default: 0.01 for auto.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA.npz", help="Inputs on which errors are measured (default: synthetic) and int8 is calibrated."
        ),
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="ENGINES", help="Engines of `compare` to time at the end, separated by commas.")
    ] = "",
    quantized: QuantizedFile = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write report.html into the build, for a browser.")
    ] = True,
    json_: JsonOption = False,
) -> None:
    """Tune fused and separate kernels, keep what measures faster, check the outputs, write the build."""
    from fusion.commands import fusion_api
    from fusion.report.console_report import print_summary
    from fusion.tuning.clock import TuningDisplay

    shapes = parse_shapes(shape)
    import_tvm_alone()
    summary = fusion_api.tune(
        model,
        output,
        trials=trials,
        minutes=minutes,
        shapes=shapes,
        batch=batch,
        threads=threads,
        machine=machine,
        target=target,
        tracker=tracker,
        key=key,
        precision=precision,
        max_error=max_error,
        calibration=calibration,
        against=_names(against),
        quantized=quantized,
        report=report,
        progress=TuningDisplay(),
    )
    _emit(summary.record) if json_ else print_summary(summary.record, output)
    if summary.interrupted:
        raise typer.Exit(130)


@app.command()
@guarded("stopped; nothing is written")
def report(build: Build) -> None:
    """Make report.html of a build again, from its summary.json."""
    from fusion.report.tune_page import write_reports

    for path in write_reports(build):
        typer.echo(str(path))


@app.command()
@guarded("stopped")
def run(
    build: Build,
    input_: Annotated[Path, typer.Option("--input", help="NPZ file with one array per input of the model.")],
    output: Annotated[Path, typer.Option("--output", help="NPZ file to write, one array per output.")],
    threads: Threads = None,
    json_: JsonOption = False,
) -> None:
    """Run a tuned model on named arrays."""
    from fusion.model.tuned_model import render_run, run_command

    result = run_command(build, input_, output, threads)
    _emit(asdict(result)) if json_ else typer.echo(render_run(result))


@app.command()
@guarded("stopped")
def benchmark(
    build: Build,
    threads: Threads = None,
    seconds: Annotated[float, typer.Option(help="Seconds of measuring.")] = 5.0,
    json_: JsonOption = False,
) -> None:
    """Latency percentiles and throughput of a tuned model by itself."""
    from fusion.comparing.compare import benchmark_build, render_times
    from fusion.model.build_folder import read_profiles

    folders = [artifact.directory for artifact in read_profiles(build)]
    times = [benchmark_build(folder, threads, seconds, _say) for folder in folders]
    _emit_all([asdict(each) for each in times]) if json_ else typer.echo("\n".join(map(render_times, times)))


@app.command()
@guarded("stopped; records measured so far are kept")
def compare(
    build: Build,
    against: Annotated[
        str, typer.Option(help=f"Engines, separated by commas, of: {', '.join(ENGINES)}.", metavar="ENGINES")
    ] = ",".join(DEFAULT),
    model: Annotated[Path | None, typer.Option(help="ONNX file, if it was moved since `tune`.")] = None,
    quantized: QuantizedFile = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA.npz", help="Samples on which errors are measured, as for `quantize`; default: synthetic."
        ),
    ] = None,
    threads: Threads = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials per task of tvm-metaschedule.")] = 64,
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Print times by layer, ours and the fastest peer's."),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Time a tuned model beside other engines, in turns, outputs compared too."""
    from fusion.comparing.compare import compare_command
    from fusion.model.build_folder import read_profiles
    from fusion.report.console_report import print_comparison

    comparisons = [
        compare_command(
            artifact.directory,
            _names(against),
            model=model,
            quantized=quantized,
            data=data,
            threads=threads,
            trials_per_task=trials,
            layers=layers,
            progress=_say,
            each_round=_say if sys.stderr.isatty() else _say_nothing,
        )
        for artifact in read_profiles(build)
    ]
    if json_:
        _emit_all([comparison.to_json() for comparison in comparisons])
    else:
        for comparison in comparisons:
            print_comparison(comparison)


@app.command()
@guarded("stopped; nothing is written")
def quantize(
    model: ModelOption,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="DATA.npz", help="Samples: an array for every input, first axis samples."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default: MODEL-int8.onnx beside it.")
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="Steps around float layers (qdq), or integer layers (qoperator).")
    ] = "qdq",
    per_channel: Annotated[bool, typer.Option("--per-channel", help="A scale for each output channel.")] = False,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Symmetric signed activations.")] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Node that stays in floating point; repeatable.")
    ] = None,
    method: Annotated[str, typer.Option(help="Ranges of activations: minmax, entropy or percentile.")] = "minmax",
    random: Annotated[
        bool, typer.Option("--random", help="Calibrate with random numbers: good for timing alone.")
    ] = False,
    shape: Shapes = None,
    json_: JsonOption = False,
) -> None:
    """Quantise a float model to INT8 by ONNX Runtime's quantiser, and say how far its outputs are off."""
    from fusion.relax.onnx.quantised_model import QuantizationOptions
    from fusion.tuning.quantization import quantize_model, render_quantized

    shapes = parse_shapes(shape)
    if len(shapes) > 1:
        raise InputError(
            f"--shape {shape[-1] if shape else ''}: its input is given twice; quantize takes one shape; leave one out"
        )
    options = QuantizationOptions(format_, per_channel, symmetric, tuple(exclude or ()), method)
    summary = quantize_model(model, output, calibration, random, shapes[0], options, _say)
    _emit(summary.to_json()) if json_ else typer.echo(render_quantized(summary))


@app.command()
@guarded()
def doctor(json_: JsonOption = False) -> None:
    """Check the installation; status 1, and what to do, if something is broken."""
    from fusion.commands.doctor import doctor_command

    doctor_command(json_)


def parse_shapes(options: Sequence[str] | None) -> list[dict[str, tuple[int, ...]]]:
    """Parse ``name=1,3,224,224`` options into one mapping per profile; raise :class:`InputError` if malformed.

    The first occurrence of every input belongs to the first profile, the second to the second, and so on; an input
    given once is the same in all profiles.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for option in options or ():
        name, _, text = option.rpartition("=")
        extents = [whole_number(field) for field in text.replace("x", ",").split(",")]
        found = tuple(extent for extent in extents if extent)
        if not name or len(found) < len(extents):
            raise InputError(f"--shape {option}: expected NAME=1,3,224,224 with positive sizes")
        shapes.setdefault(name, []).append(found)
    count = max(map(len, shapes.values()), default=1)
    for name, given in shapes.items():
        if len(given) not in (1, count):
            raise InputError(
                f"--shape {name}=...: given {len(given)} times, another input {count} times; "
                "give every input once, or once for each profile"
            )
    return [{name: given[min(index, len(given) - 1)] for name, given in shapes.items()} for index in range(count)]


def _names(text: str) -> list[str]:
    """Split a comma-separated list of names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _emit_all(documents: Sequence[Mapping[str, Any]]) -> None:
    """Print the only document, or those of all profiles."""
    _emit(documents[0] if len(documents) == 1 else {"profiles": list(documents)})


def _emit(document: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2))


def _say(message: str) -> None:
    typer.echo(message, err=True)


def _say_nothing(message: str) -> None:
    """Discard a message: progress of measurement rounds is shown on terminals only."""
