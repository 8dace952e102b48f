"""``python -m e2e sweep``: predictions of many GPUs, counts and ways to spread a model, ranked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from costmodel.base.errors import InputError
from e2e.commands.options import JsonOption, NetworkOption, NumberTypeOption, SequenceLengthOption
from e2e.parallelism.spec import parse_parallel
from e2e.step.choices import AttentionForm

if TYPE_CHECKING:
    from e2e.sweeps.sweep_results import SweepRow
    from e2e.sweeps.workers import Workers


def sweep_command(
    model: Annotated[str, typer.Option(help="Built-in transformer, or a Hugging Face configuration file.")],
    gpu: Annotated[str, typer.Option(help="Machines or clusters, such as h100-sxm,h200-sxm.")],
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, such as 8,64,512.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for results and captures; a second run adds.")
    ] = Path("sweep"),
    parallel: Annotated[
        list[str] | None, typer.Option(help="`auto` (default), or a spec as of `predict`; repeatable.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of one micro-batch on one replica.")] = 1,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of all replicas in a step; with --parallel auto.")
    ] = None,
    sequence_length: SequenceLengthOption = None,
    dtype: NumberTypeOption = "bfloat16",
    attention: AttentionForm = "flash",
    network: NetworkOption = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: the cores of this process.")] = None,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster instead: auto, local or HOST:PORT.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table per GPU and number of GPUs.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Draw samples per second over GPUs (.svg, .png, .pdf).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predicts a model on many GPUs, numbers of GPUs and ways to spread it, and ranks them."""
    from e2e.sweeps.sweep_driver import sweep
    from e2e.sweeps.sweep_report import render_sweep, sweep_record, write_plot
    from e2e.sweeps.sweep_space import SweepRequest, cells_of, counts, names

    ways = parallel or ["auto"]
    _check(ways, global_batch, plot)
    request = SweepRequest(model, batch_size, global_batch, sequence_length, dtype, attention, network, _experts(model))
    cells = cells_of(request, names(gpu, "--gpu"), counts(gpus, "--gpus"), ways)
    if not cells:
        raise InputError(f"--global-batch {global_batch}: divides for no way to spread the model; try another")
    result = sweep(request, cells, output, _workers(workers, ray), _tell)
    if result.computed < len(cells):
        print(f"{len(cells) - result.computed} of {len(cells)} were in {output} already", file=sys.stderr)
    if plot is not None:
        write_plot(result, plot)
    if as_json:
        print(json.dumps(sweep_record(result), indent=2))
    else:
        render_sweep(result, top)


def _check(ways: Sequence[str], global_batch: int | None, plot: Path | None) -> None:
    """What no number of GPUs makes right is an error, not a row."""
    from e2e.sweeps.sweep_report import check_plot

    if plot is not None:
        check_plot(plot)
    if global_batch is not None and "auto" not in ways:
        raise InputError("--global-batch sets the micro-batches of --parallel auto; write them in --parallel instead")
    for text in ways:
        if text != "auto":
            parse_parallel(text)


def _experts(model: str) -> int:
    """Experts of a layer; one error for an unknown model, not one per row."""
    from e2e.parallelism.parallel_graph import configuration
    from e2e.sweeps.sweep_space import experts_of

    return experts_of(configuration(model)[0])


def _workers(count: int | None, ray: str | None) -> Workers:
    from e2e.sweeps.workers import LocalWorkers, RayWorkers

    if ray is None:
        return LocalWorkers(count or len(os.sched_getaffinity(0)))
    if count is not None:
        raise InputError("--workers counts processes of this machine; with --ray leave it out")
    return RayWorkers(ray)


def _tell(done: int, total: int, seconds: float, row: SweepRow) -> None:
    left = f"{seconds / done * (total - done):.0f} s"
    found = row.status if row.iteration_seconds is None else f"{row.iteration_seconds * 1e3:.4g} ms"
    print(
        f"{done} of {total}: {row.gpus} x {row.gpu}, {row.parallel}: {found}; {left} left", file=sys.stderr, flush=True
    )
