"""``--model-config``: the model of a Hugging Face configuration file on one GPU."""

from __future__ import annotations

from e2e.capture.models.catalog import build_from_file
from e2e.capture.session import capture
from e2e.sources.asked_machine import one_gpu
from e2e.sources.prepared_step import PreparedStep
from e2e.sources.request import PredictRequest
from e2e.sources.single_gpu import capture_options, single_step


def prepare(request: PredictRequest) -> PreparedStep:
    """Captures the model's step without a GPU."""
    workload, options = request.workload, capture_options(request)
    assert workload.model_config is not None
    cluster = one_gpu(request)
    model = build_from_file(workload.model_config, workload.samples, workload.sequence_length, options)
    return single_step(capture(model, options), request, cluster)
