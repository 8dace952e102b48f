"""``python -m e2e predict | validate | measure``.

Exit status: 0 done, 2 the user's input is at fault (one line on standard error), 130 stopped with Ctrl-C. With
``--json`` standard output holds JSON alone.
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from costmodel.command_line import guarded, repeated
from e2e.choices import AttentionForm, Dtype, Mode
from e2e.sharding.command import shard_command
from e2e.sweep.command import sweep_command

app = typer.Typer(
    name="e2e",
    help="Step time of training and inference on GPUs, without the GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def main() -> None:
    """Entry point of ``python -m e2e``."""
    # Nearly all that a prediction makes lives to its end: looking for garbage as often as usual takes a fifth of it.
    gc.set_threshold(100_000, 20, 20)
    app(repeated(sys.argv[1:], ("--trace", "--kineto")), prog_name="python -m e2e")


@app.command("predict")
@guarded()
def predict_command(
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Machine or cluster: a name (`python -m costmodel machines`) or a YAML file. Of a recorded "
            "run: the GPU it ran on, if its profile does not tell."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Built-in model, such as gpt2-large or resnet-50.")] = None,
    model_config: Annotated[Path | None, typer.Option(help="Hugging Face configuration file.")] = None,
    script: Annotated[str | None, typer.Option(help="FILE.py:FUNCTION that returns (module, step).")] = None,
    trace: Annotated[
        list[str] | None,
        typer.Option(help="PyTorch execution traces (.json, .gz, .tar.gz), one per rank: several files or patterns."),
    ] = None,
    kineto: Annotated[
        list[str] | None,
        typer.Option(
            help="Profiles of the same run as --trace, one per rank: several files or patterns. Their host times and "
            "kernels are used."
        ),
    ] = None,
    retarget: Annotated[str | None, typer.Option(help="GPU (or cluster) to move a recorded run to.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of the whole job.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes over which they are spread.")] = None,
    network: Annotated[str | None, typer.Option(help="Network between nodes, NAME:N for N cards per node.")] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="How a built-in model is spread: dp=8, fsdp=8, tp=4,pp=2,micro-batches=8, cp=4,zero=3, dp=8,ep=8 ..."
        ),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Ranks of --script to capture, such as 0,7, where they differ unseen.")
    ] = None,
    skew: Annotated[
        str | None, typer.Option(help="How ranks vary: spread=0.02,jitter=0.05,seed=1,start=RANK:MS.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="tables.yaml of --model dlrm.")] = None,
    sharding: Annotated[Path | None, typer.Option(help="plan.json that places the tables of --config.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Samples per GPU and micro-batch; default: 1, of --script and --sharding their own."),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens; default: the model's maximum, 1024 at most; of --script its own.")
    ] = None,
    mode: Mode = Mode.train,
    dtype: Dtype = Dtype.float32,
    attention: Annotated[
        AttentionForm | None,
        typer.Option(help="Default: eager; of --script flash, the fused kernels that PyTorch itself would choose."),
    ] = None,
    cuda_graph: Annotated[bool, typer.Option(help="The step is replayed as one CUDA graph.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Forward and backward by torch.compile.")] = False,
    overheads: Annotated[Path | None, typer.Option(help="Table of host overheads; default: the shared one.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace (.json or .json.gz).")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML report.")] = None,
    as_json: Json = False,
) -> None:
    """Predicts one steady step of a model on one GPU or many, or replays a recorded run."""
    from e2e.jobs import Job, StepOptions, Where, Workload, parse_ranks, predict_job
    from e2e.outputs import Outputs, write_outputs
    from e2e.skew import parse_skew

    workload = Workload(model, model_config, script, tuple(trace or ()), tuple(kineto or ()), config)
    form = attention or (AttentionForm.eager if script is None else AttentionForm.flash)
    step = StepOptions(
        batch_size, sequence_length, mode.value, dtype.value, form.value, cuda_graph, overheads, compiled
    )
    variation = None if skew is None else parse_skew(skew)
    where = Where(gpu, gpus, nodes, network, parallel, sharding, retarget, parse_ranks(ranks), variation)
    # What a script prints is not the answer.
    with redirect_stdout(sys.stderr):
        predicted = predict_job(Job(workload, step, where))
    write_outputs(predicted, Outputs(timeline, report, as_json))


@app.command("validate")
@guarded()
def validate_command(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the measurements; default: $COSTMODEL_DATA, else those of `data fetch`."),
    ] = None,
    only: Annotated[str, typer.Option(help="Cases whose GPU/case contains this.")] = "",
    section: Annotated[list[str] | None, typer.Option(help="One of models, replay, vtrain; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Predicts what was measured in the data folder and reports the errors: whole models, recorded ranks replayed."""
    from costmodel.datasets.folder import data_folder
    from e2e.validation_sections import run_sections

    sections = run_sections(data_folder(data), only, section or ())
    if as_json:
        print(json.dumps({name: ran.record() for name, ran in sections.items()}, indent=2))
    else:
        for ran in sections.values():
            ran.render()


app.command("sweep")(guarded()(sweep_command))
app.command("shard")(guarded()(shard_command))


@app.command("measure")
@guarded()
def measure_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the table and the traces.")],
    device: Annotated[str, typer.Option(help="cuda, cuda:N, or cpu to try the code.")] = "cuda",
    minutes: Annotated[float, typer.Option(help="Time budget; what is measured by then is kept.")] = 8.0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the table that -o holds.")] = False,
) -> None:
    """Measures real steps of the built-in models on the GPU at hand."""
    from e2e.measure_models import measure_models

    measure_models(device, output, minutes, resume, lambda line: print(line, file=sys.stderr, flush=True))
