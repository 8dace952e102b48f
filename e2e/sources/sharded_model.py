"""``--model dlrm --config tables.yaml --sharding plan.json``: DLRM whose tables are spread as a plan says."""

from __future__ import annotations

from e2e.sharding.sharded_step import sharded_dlrm
from e2e.sources.asked.request import PredictRequest
from e2e.sources.prepared_step import Batch, PreparedStep
from e2e.sources.request_parts import capture_options, cluster_of, placed_values, setting_of


def prepare(request: PredictRequest) -> PreparedStep:
    """Captures the dense part; the tables are kernels of every rank."""
    workload, plan, gpus = request.workload, request.configuration.sharding, request.machine.gpus
    assert plan is not None and workload.tables is not None and gpus is not None
    cluster = cluster_of(request.machine, gpus)
    built = sharded_dlrm(plan, workload.tables, cluster, workload.batch_size, capture_options(request))
    setting = setting_of(request.configuration, cluster.machine)
    skew = request.machine.skew
    return PreparedStep(
        built.graph,
        setting,
        cluster,
        built.memory,
        built.warnings,
        skew=skew,
        batch=Batch(built.samples, made_of=f"{built.samples // gpus} on each of {gpus} GPUs"),
        taken={"--batch-size": f"{built.samples // gpus} (the plan's)"} | placed_values(cluster),
    )
