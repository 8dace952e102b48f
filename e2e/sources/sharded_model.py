"""Steps from ``--model dlrm --config tables.yaml --sharding plan.json``: DLRM with sharded embedding tables."""

from __future__ import annotations

from e2e.sources.known_requests import ShardedTables
from e2e.sources.prepared_step import Batch, PreparedStep
from e2e.sources.request_parts import cluster_of, placed_values, setting_of, step_options


def prepare_sharded(request: ShardedTables) -> PreparedStep:
    """Capture the dense part and add the table kernels of every rank."""
    from e2e.sharding.sharded_step import sharded_dlrm  # loads the planner, which other models do not need

    gpus, options = request.gpus, step_options(request)
    cluster = cluster_of(request, gpus)
    built = sharded_dlrm(request.sharding, request.tables, cluster, request.batch_size, options)
    return PreparedStep(
        built.graph,
        setting_of(request, cluster.machine, options),
        cluster,
        built.memory,
        built.warnings,
        skew=request.skew,
        batch=Batch(built.samples, made_of=f"{built.samples // gpus} on each of {gpus} GPUs"),
        taken={"--batch-size": f"{built.samples // gpus} (the plan's)"} | placed_values(cluster),
    )
