"""What each of many tables costs a GPU that looks them all up in one table-batched kernel: the planner's fast path.

Such a kernel takes one table after the other, so that times add up:

    seconds of a kernel of some tables = sum of what each adds + what the kernel costs at all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.device_operators import EmbeddingLookup
from costmodel.embedding.tables import EmbeddingTable
from costmodel.gpu import gpu_cost_model
from costmodel.machine_records import Machine


@dataclass(frozen=True)
class TableSeconds:
    """``forward``, ``backward`` (tables,): what each table adds to a table-batched kernel, seconds.

    ``forward_launch``, ``backward_launch``: what the kernels of each pass cost besides, once per GPU and step.
    """

    forward: np.ndarray
    backward: np.ndarray
    forward_launch: float
    backward_launch: float


def table_seconds(
    tables: Sequence[EmbeddingTable], batch_size: int | np.ndarray | Sequence[int], machine: Machine
) -> TableSeconds:
    """Of every table, ``batch_size`` samples each (one number, or one per table).

    ``batch_size`` is that of the samples whose lookups arrive at the table's GPU: the global batch for a table-wise
    placement. ``MachineError`` if ``machine`` is no GPU.
    """
    batches = np.broadcast_to(np.asarray(batch_size), (len(tables),))
    passes = []
    for direction in ("forward", "backward"):
        records = [_record(each, int(batch), direction) for each, batch in zip(tables, batches, strict=True)]
        estimates = gpu_cost_model(machine).estimate(records)
        launch = float(estimates[0].breakdown["launch_seconds"]) if estimates else 0.0
        passes.append((np.array([each.seconds for each in estimates]) - launch, launch))
    (forward, forward_launch), (backward, backward_launch) = passes
    return TableSeconds(forward, backward, forward_launch, backward_launch)


def _record(table: EmbeddingTable, batch: int, direction: str) -> EmbeddingLookup:
    return EmbeddingLookup(
        rows=table.rows,
        dim=table.dim,
        indices=table.indices(batch),
        bags=batch,
        dtype=table.dtype,
        direction="forward" if direction == "forward" else "backward",
        unique_rows=round(table.popularity().unique_rows(table.indices(batch))),
        fused_optimizer=table.optimizer if direction == "backward" else "",
    )
