"""What each of many tables costs a GPU that looks them all up in one table-batched kernel: the planner's fast path.

Such a kernel takes one table after the other, so that what each needs of the whole GPU adds up. Only chains of loads
that outlast everything else (a bag of many lookups in a small batch) do not: :meth:`TableSeconds.kernel` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from costmodel.embedding.tables import EmbeddingTable
from costmodel.gpu.embedding import Embedding, analysis
from costmodel.gpu.fitted import DIRECTORY, residuals_for, transfer
from costmodel.gpu.lookup_entries import Entries, entries_of_tables
from costmodel.gpu.lookup_passes import Stage, reuse_of, stages_of
from costmodel.gpu.model import KernelModel
from costmodel.machine_records import Machine


@dataclass(frozen=True)
class TableSeconds:
    """Seconds of every table, arrays of the shape (tables,).

    ``forward``, ``backward``: what the table adds to a table-batched kernel (backward: to all kernels of the pass, the
    optimizer included). ``forward_launch``, ``backward_launch``: what the kernels take besides, once per GPU and step,
    however many tables there are (at least one). ``forward_alone``, ``backward_alone``: of the table as the only one of
    its kernel, as ``gpu_cost_model(machine).estimate`` says.
    """

    forward: np.ndarray
    backward: np.ndarray
    forward_launch: float
    backward_launch: float
    forward_alone: np.ndarray
    backward_alone: np.ndarray

    def kernel(self, places: Sequence[int] | np.ndarray) -> tuple[float, float]:
        """Forward and backward seconds of the tables at ``places`` in one kernel; (0, 0) for none.

        Never less than the longest of them alone.
        """
        chosen = np.asarray(places, dtype=int)
        if not chosen.size:
            return 0.0, 0.0
        forward = self.forward_launch + float(self.forward[chosen].sum())
        backward = self.backward_launch + float(self.backward[chosen].sum())
        longest = float(self.forward_alone[chosen].max()), float(self.backward_alone[chosen].max())
        return max(forward, longest[0]), max(backward, longest[1])


def table_seconds(
    tables: Sequence[EmbeddingTable],
    batch_size: int | Sequence[int] | np.ndarray,
    machine: Machine,
    directory: Path = DIRECTORY,
) -> TableSeconds:
    """Of every table with ``batch_size`` samples each (one number, or one per table).

    ``batch_size`` is that of the samples whose lookups arrive at the table's GPU: the global batch for a table-wise
    placement. ``directory``: fitted models. ``MachineError`` if ``machine`` is no GPU.
    """
    if not tables:
        none = np.zeros(0)
        return TableSeconds(none, none, 0.0, 0.0, none, none)
    batches = np.broadcast_to(np.asarray(batch_size), (len(tables),))
    model = _model(machine, directory)
    forward, forward_launch, forward_alone = _pass(entries_of_tables(tables, batches, False), model)
    backward, backward_launch, backward_alone = _pass(entries_of_tables(tables, batches, True), model)
    return TableSeconds(forward, backward, forward_launch, backward_launch, forward_alone, backward_alone)


def _pass(entries: Entries, model: KernelModel) -> tuple[np.ndarray, float, np.ndarray]:
    """Added seconds, launch seconds and seconds alone; what the model has learned scales all of them."""
    found = reuse_of(entries, model.machine)
    stages = stages_of(entries, found, model.machine)
    analysed = analysis(entries, found, stages)
    learned = model.middles(_FAMILY, analysed)
    added = np.sum([stage.throughput for stage in stages], axis=0) * learned
    return added, float(np.max(_launches(stages) * learned)), analysed.seconds * learned


def _launches(stages: Sequence[Stage]) -> np.ndarray:
    return np.asarray(np.sum([stage.fixed for stage in stages], axis=0))


_FAMILY = Embedding()


def _model(machine: Machine, directory: Path) -> KernelModel:
    return KernelModel(machine, lambda operator: _FAMILY, residuals_for(machine, directory), transfer(directory))
