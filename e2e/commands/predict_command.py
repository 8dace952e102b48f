"""``python -m e2e predict``: from the command line to the answer."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

import typer

from costmodel.base.errors import InputError
from costmodel.base.units import whole_number
from e2e.commands import options
from e2e.sources.options_page import with_notes


@with_notes
def predict_command(
    gpu: options.GpuOption = None,
    model: options.ModelOption = None,
    model_config: options.ModelConfigOption = None,
    script: options.ScriptOption = None,
    trace: options.TracesOption = None,
    kineto: options.KinetoOption = None,
    retarget: options.RetargetOption = None,
    gpus: options.GpusOption = None,
    nodes: options.NodesOption = None,
    network: options.NetworkOption = None,
    parallel: options.ParallelOption = None,
    ranks: options.RanksOption = None,
    skew: options.VariationOption = None,
    config: options.TablesOption = None,
    sharding: options.ShardingOption = None,
    batch_size: options.BatchSizeOption = None,
    sequence_length: options.SequenceLengthOption = None,
    document_length: options.DocumentLengthOption = None,
    cache_length: options.CacheLengthOption = None,
    mode: options.StepModeOption = "train",
    recipe: options.RecipeOption = None,
    dtype: options.NumberTypeOption = None,
    attention: options.AttentionOption = None,
    stack: options.StackOption = None,
    lora: options.AdaptersOption = None,
    layout: options.LayoutOption = "contiguous",
    moe: options.MixtureOption = "grouped",
    routing: options.RoutingOption = "balanced",
    precision: options.PrecisionOption = None,
    linear_attention: options.LinearAttentionOption = None,
    optimizer: options.OptimizerOption = None,
    cuda_graph: options.CudaGraphOption = False,
    compiled: options.CompiledOption = False,
    overheads: options.OverheadsOption = None,
    price: options.PriceOption = None,
    advice: options.AdviceOption = False,
    what_if: options.WhatIfOption = None,
    timeline: options.TimelineOption = None,
    report: options.ReportOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Predicts one steady step of a model on one GPU or many, or replays a recorded run."""
    from e2e.commands.e2e_api import predict
    from e2e.report.outputs import show

    # What a script prints is not the answer.
    with redirect_stdout(sys.stderr):
        prediction = predict(
            model,
            model_config=model_config,
            script=script,
            traces=trace or (),
            kineto=kineto or (),
            gpu=gpu,
            gpus=gpus,
            nodes=nodes,
            network=network,
            batch_size=batch_size,
            sequence_length=sequence_length,
            document_length=document_length,
            cache_length=cache_length,
            mode=mode,
            recipe=recipe,
            dtype=dtype,
            attention=attention,
            stack=stack,
            lora=lora,
            layout=layout,
            moe=moe,
            routing=routing,
            precision=precision,
            linear_attention=linear_attention,
            compile=compiled,
            optimizer=optimizer,
            cuda_graph=cuda_graph,
            parallel=parallel,
            sharding=sharding,
            tables=config,
            ranks=parse_ranks(ranks),
            skew=skew,
            overheads=overheads,
            retarget=retarget,
            price=price,
            advice=tell if advice else False,
            what_if=what_if or (),
            timeline=timeline,
            report=report,
        )
    show(prediction, as_json)
    if prediction.memory_verdict == "may not fit":
        raise typer.Exit(MAY_NOT_FIT)


# Exit status where a step may not fit; of one that does not, ShortageError's.
MAY_NOT_FIT = 3


def tell(line: str) -> None:
    """Progress, beside the answer."""
    print(line, file=sys.stderr, flush=True)


def parse_ranks(text: str | None) -> tuple[int, ...]:
    """``"0,7"`` -> (0, 7); ``InputError`` for anything else."""
    if text is None:
        return ()
    ranks = [whole_number(field) for field in text.split(",")]
    found = tuple(rank for rank in ranks if rank is not None)
    if len(found) < len(ranks):
        raise InputError(f"--ranks {text}: expected numbers such as 0,7")
    return found
