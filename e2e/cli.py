"""``python -m e2e predict | validate | measure``.

Exit status: 0 done, 2 the user's input is at fault (one line on standard error), 130 stopped with Ctrl-C. With
``--json`` standard output holds JSON alone.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from costmodel.errors import InputError, MachineError, ProjectError
from costmodel.machine_catalog import load_machine
from costmodel.machine_records import Machine
from e2e.prediction import prediction_record

app = typer.Typer(
    name="e2e",
    help="Step time of training and inference on GPUs, without the GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
P = ParamSpec("P")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


class Mode(StrEnum):
    """What one step does."""

    train = "train"
    forward_backward = "forward-backward"
    inference = "inference"


class Dtype(StrEnum):
    """Number type of the model."""

    float32 = "float32"
    tf32 = "tf32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class AttentionForm(StrEnum):
    """How attention is computed."""

    eager = "eager"
    flash = "flash"


def main() -> None:
    """Entry point of ``python -m e2e``."""
    # Nearly all that a prediction makes lives to its end: looking for garbage as often as usual takes a fifth of it.
    gc.set_threshold(100_000, 20, 20)
    app(prog_name="python -m e2e")


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turns errors of the user into one line and exit status 2, and Ctrl-C into 130."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except ProjectError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            raise typer.Exit(130) from None

    return run


@app.command("predict")
@guarded
def predict_command(
    gpu: Annotated[str, typer.Option(help="Machine: a name (`python -m costmodel machines`) or a YAML file.")],
    model: Annotated[str | None, typer.Option(help="Built-in model, such as gpt2-large or resnet-50.")] = None,
    model_config: Annotated[Path | None, typer.Option(help="Hugging Face configuration file.")] = None,
    script: Annotated[str | None, typer.Option(help="FILE.py:FUNCTION that returns (module, step).")] = None,
    trace: Annotated[Path | None, typer.Option(help="PyTorch execution trace (.json, .gz, .tar.gz).")] = None,
    kineto: Annotated[
        Path | None, typer.Option(help="Profile of the same run as --trace: its host overheads are used.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    sequence_length: Annotated[int | None, typer.Option(min=1, help="Tokens; default: the model's maximum.")] = None,
    mode: Mode = Mode.train,
    dtype: Dtype = Dtype.float32,
    attention: AttentionForm = AttentionForm.eager,
    cuda_graph: Annotated[bool, typer.Option(help="The step is replayed as one CUDA graph.")] = False,
    overheads: Annotated[Path | None, typer.Option(help="Table of host overheads; default: the shared one.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace (.json or .json.gz).")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML report.")] = None,
    as_json: Json = False,
) -> None:
    """Predicts one steady step of a model on a GPU."""
    from e2e.predictor import Setting, predict
    from e2e.shared_overheads import load_overheads, overheads_of_profile
    from e2e.sources import Source, read_source
    from e2e.text_report import render

    if kineto is not None and (trace is None or overheads is not None):
        raise InputError("--kineto goes with --trace, and not with --overheads")
    machine = _gpu(gpu)
    step = (batch_size, sequence_length, mode.value, dtype.value, attention.value)
    operators = read_source(Source(model, model_config, script, trace, *step))
    table = load_overheads(overheads) if kineto is None else overheads_of_profile(operators, kineto)
    setting = Setting(machine, table, tf32=dtype is Dtype.tf32, cuda_graph=cuda_graph)
    result = predict(operators, setting)
    if timeline is not None:
        from e2e.timeline_export import write_trace

        write_trace(result.graph, result.steady.timeline, timeline)
    if report is not None:
        from e2e.html_report import write_report

        write_report(result.prediction, report)
    if as_json:
        print(json.dumps(prediction_record(result.prediction), indent=2))
    else:
        render(result.prediction)


@app.command("validate")
@guarded
def validate_command(
    data: Annotated[Path, typer.Option(help="Folder of measured data (see its README).")] = Path("../shared/data"),
    only: Annotated[str, typer.Option(help="Cases whose GPU/case contains this.")] = "",
    as_json: Json = False,
) -> None:
    """Predicts the measured whole-model cases of the data folder and reports the errors."""
    from e2e.validation import render_validation, validate

    results = validate(data, only)
    if as_json:
        print(json.dumps(results.record(), indent=2))
    else:
        render_validation(results)


@app.command("measure")
@guarded
def measure_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the table and the traces.")],
    device: Annotated[str, typer.Option(help="cuda, cuda:N, or cpu to try the code.")] = "cuda",
    minutes: Annotated[float, typer.Option(help="Time budget; what is measured by then is kept.")] = 8.0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the table that -o holds.")] = False,
) -> None:
    """Measures real steps of the built-in models on the GPU at hand."""
    from e2e.measure_models import measure_models

    measure_models(device, output, minutes, resume, lambda line: print(line, file=sys.stderr, flush=True))


def _gpu(name: str) -> Machine:
    machine = load_machine(name)
    if machine.kind != "gpu":
        raise MachineError(f"{name}: is a {machine.kind} machine; `python -m costmodel machines` lists the GPUs")
    return machine
