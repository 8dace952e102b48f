"""``--gpus`` without ``--parallel``: the fastest predicted one of the promising ways to spread a model."""

from __future__ import annotations

from dataclasses import replace

from costmodel.base.errors import InputError
from e2e.parallelism.spec import text_of
from e2e.sources.known_requests import SpreadModel
from e2e.sources.predict_request import predict_request
from e2e.sources.recipes import has_sequences
from e2e.sweeps.first_look import promising
from e2e.sweeps.sweep_space import SweepRequest, cells_of, experts_of

# Number of predicted ways: each takes seconds.
TRIES = 4


def with_best_way(request: SpreadModel) -> tuple[SpreadModel, str]:
    """Return ``request`` with the way that was found, and a note on it.

    Raises ``InputError`` if none fits, and for models other than transformers and for inference, which are not
    searched.
    """
    from e2e.parallelism.parallel_graph import configuration, layer_count

    gpus = request.gpus or 1
    if gpus == 1 or request.mode != "train" or not has_sequences(request):
        several = f"{gpus} GPUs" if gpus > 1 else f"{request.nodes} nodes"
        raise InputError(
            f"{several}: say how the work is spread, such as --parallel dp=8 or --parallel fsdp=8 (a --script says it "
            "itself, with --gpus)"
        )
    config, name = configuration(request.named)
    question = SweepRequest(
        str(request.named), request.samples, None, request.sequence_length, request.dtype, request.attention,
        request.network, experts_of(config), request.recipe, request.stack, layers=layer_count(config, name),
    )  # fmt: skip
    looked = promising(question, cells_of(question, [request.gpu], [gpus], ["auto"]), TRIES)
    found: list[tuple[bool, float, SpreadModel, str]] = []  # (may not fit, rate, request, way)
    reason = f"all {looked.too_large} ways take more memory than there is"
    for cell in looked.cells:
        for spec in cell.specs():
            other = replace(request, parallel=spec, what_if=())
            try:
                step = predict_request(other).prediction
            except InputError as error:
                reason = str(error)
                break
            if step.fits is not False and step.throughput is not None:
                rate = step.throughput.tokens_per_second_per_gpu or 0.0
                found.append((step.fits is None, rate, replace(other, what_if=request.what_if), text_of(spec)))
            if step.fits:
                break
            reason = step.memory_shortage or reason
    if not found:
        raise InputError(f"--gpus {gpus}: no way to spread {name} was found ({reason}); give --parallel")
    (_, rate, best, way), *rest = sorted(found, key=lambda each: (each[0], -each[1]))
    total = len(looked.cells) + looked.left + looked.too_large
    line = f"--parallel {way}: the fastest of {len(found)} predicted of {total} ways, {rate:,.0f} tokens/s/GPU"
    if rest:
        line += f"; next: {rest[0][3]}, {rest[0][1]:,.0f}" + (" (may not fit)" if rest[0][0] else "")
    return best, f"{line} (`sweep --parallel auto` tries more)"
