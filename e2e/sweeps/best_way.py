"""``--gpus`` without ``--parallel``: the way to spread a model that is predicted to be the fastest of the promising."""

from __future__ import annotations

from dataclasses import replace

from costmodel.base.errors import InputError
from e2e.sources.asked.request import PredictRequest
from e2e.sources.predict_request import predict_request
from e2e.sources.recipes import has_sequences
from e2e.sweeps.first_look import promising
from e2e.sweeps.sweep_space import SweepRequest, cells_of, experts_of

# Ways that are predicted: each takes seconds.
TRIES = 4


def is_open(request: PredictRequest) -> bool:
    """Whether the request leaves open how a transformer is spread over its GPUs."""
    asked, workload = request.configuration, request.workload
    others = workload.script, workload.traces, workload.kineto, workload.tables, asked.parallel, asked.sharding
    several = (request.machine.gpus or 1) > 1 and workload.mode == "train" and request.machine.gpu is not None
    return several and not any(others) and has_sequences(request)


def with_best_way(request: PredictRequest) -> tuple[PredictRequest, str]:
    """``request`` with the way that was found, and what to say of it; ``InputError`` where none fits."""
    from e2e.parallelism.parallel_graph import configuration, layer_count

    workload, asked, machine = request.workload, request.configuration, request.machine
    assert machine.gpu is not None and machine.gpus is not None
    config, name = configuration(workload.model or workload.model_config or "")
    question = SweepRequest(
        str(workload.model or workload.model_config), workload.samples, None, workload.sequence_length, asked.dtype,
        asked.attention, machine.network, experts_of(config), asked.recipe, asked.stack,
        layers=layer_count(config, name),
    )  # fmt: skip
    looked = promising(question, cells_of(question, [machine.gpu], [machine.gpus], ["auto"]), TRIES)
    found: list[tuple[bool, float, PredictRequest, str]] = []  # whether it may not fit first, then its rate
    reason = f"all {looked.too_large} ways take more memory than there is"
    for cell in looked.cells:
        for spec in cell.specs():
            other = replace(request, configuration=replace(asked, parallel=spec), what_if=())
            try:
                step = predict_request(other).prediction
            except InputError as error:
                reason = str(error)
                break
            if step.fits is not False and step.throughput is not None:
                rate = step.throughput.tokens_per_second_per_gpu or 0.0
                found.append((step.fits is None, rate, replace(other, what_if=request.what_if), _text(other)))
            if step.fits:
                break
            reason = step.memory_shortage or reason
    if not found:
        raise InputError(f"--gpus {machine.gpus}: no way to spread {name} was found ({reason}); give --parallel")
    (_, rate, best, way), *rest = sorted(found, key=lambda each: (each[0], -each[1]))
    total = len(looked.cells) + looked.left + looked.too_large
    line = f"--parallel {way}: the fastest of {len(found)} predicted of {total} ways, {rate:,.0f} tokens/s/GPU"
    if rest:
        line += f"; next: {rest[0][3]}, {rest[0][1]:,.0f}" + (" (may not fit)" if rest[0][0] else "")
    return best, f"{line} (`sweep --parallel auto` tries more)"


def _text(request: PredictRequest) -> str:
    from e2e.parallelism.spec import text_of

    assert request.configuration.parallel is not None
    return text_of(request.configuration.parallel)
