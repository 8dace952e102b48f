"""``python -m e2e sweep``: ranked predictions for many GPU types, GPU counts and ways to spread a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from costmodel.base.output_files import check_outputs
from costmodel.pages.document import check_page
from e2e.commands import predict_command
from e2e.step.options import AttentionForm, Dtype

if TYPE_CHECKING:
    from e2e.step.options import Precision
    from e2e.sweeps.sweep_results import SweepRow


def sweep_command(
    model: Annotated[
        str,
        typer.Option("--model", "--model-config", help="Built-in transformer, or a Hugging Face configuration file."),
    ],
    gpu: Annotated[str, typer.Option(help="Machines or clusters, such as h100-sxm,h200-sxm.")],
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, such as 8,64,512.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder of results and captures; a second run adds to it.")
    ] = Path("sweep"),
    parallel: Annotated[
        list[str] | None,
        typer.Option(help="Ways to spread the model: auto (default), or as for `predict`; repeatable."),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences of one micro-batch on one replica; default: 1, with --global-batch 1, 2 and 4."
        ),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a step over all replicas: sets the number of micro-batches.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; default: the model's maximum, 4096 at most.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Recipes of `predict`, such as megatron,torchtitan; default: plain."),
    ] = None,
    dtype: Annotated[Dtype | None, predict_command.shared("dtype")] = None,
    attention: Annotated[AttentionForm | None, predict_command.shared("attention")] = None,
    stack: Annotated[str | None, predict_command.shared("stack")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Recipes for linear layers in 8 bits, separated by commas.")
    ] = None,
    compiled: Annotated[bool, predict_command.shared("compile")] = False,
    network: Annotated[str | None, predict_command.shared("network")] = None,
    tries: Annotated[
        int,
        typer.Option(min=1, help="Ways of `auto` to predict for each number of GPUs: those that look fastest."),
    ] = 12,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of the whole training run, such as 1T: adds its days (and cost).")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="Time that the run may take, such as 30d; later rows come last.")
    ] = None,
    price: predict_command.PriceOption = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: the cores of this process.")] = None,
    ray: Annotated[str | None, typer.Option(help="Run on this Ray cluster: auto, local or HOST:PORT.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table per GPU and number of GPUs.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Draw samples per second over GPUs (.svg, .png, .pdf).")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML report.")] = None,
    as_json: predict_command.JsonOption = False,
) -> None:
    """Predict a model on several GPUs, numbers of GPUs and ways to spread it, and rank them."""
    from costmodel.pages.charts import check_picture
    from e2e.commands.e2e_api import sweep
    from e2e.sweeps.sweep_report import render_sweep, sweep_record, write_plot
    from e2e.sweeps.sweep_space import parse_counts, parse_names

    if plot is not None:
        check_picture(plot, "--plot")
    check_outputs({"--plot": plot, "--report": report}, {"--model": model})
    check_page(report)
    result = sweep(
        model,
        gpu=parse_names(gpu, "--gpu"),
        gpus=parse_counts(gpus, "--gpus"),
        parallel=parallel or "auto",
        batch_size=batch_size,
        global_batch=global_batch,
        sequence_length=sequence_length,
        recipe=None if recipe is None else parse_names(recipe, "--recipe"),
        tries=tries,
        tokens=tokens,
        deadline=deadline,
        price=price,
        dtype=dtype,
        attention=attention,
        stack=stack,
        precision=None if precision is None else cast("list[Precision]", parse_names(precision, "--precision")),
        compile=compiled,
        network=network,
        output=output,
        workers=workers,
        ray=ray,
        progress=_tell,
    )
    if result.computed < len(result):
        print(f"{len(result) - result.computed} of {len(result)} were in {output} already", file=sys.stderr)
    if plot is not None:
        write_plot(result, plot)
    if report is not None:
        from e2e.sweeps.sweep_report import write_sweep_page

        write_sweep_page(result, report)
    if as_json:
        print(json.dumps(sweep_record(result), indent=2))
    else:
        render_sweep(result, top)


def _tell(done: int, total: int, seconds: float, row: SweepRow) -> None:
    from e2e.report.tables import number_text

    left = f"{seconds / done * (total - done):.0f} s"
    found = row.status if row.iteration_seconds is None else f"{number_text(row.iteration_seconds * 1e3)} ms"
    print(
        f"{done} of {total}: {row.gpus} x {row.gpu}, {row.parallel}: {found}; {left} left", file=sys.stderr, flush=True
    )
