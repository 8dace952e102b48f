"""Cost of each of many tables in one table-batched kernel: the planner's fast path.

Such a kernel processes the tables in order, so that the needs of each table add up. Only chains of loads that outlast
everything else (a bag of many lookups in a small batch) do not: :meth:`TableSeconds.kernel` includes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from costmodel.gpu.embedding_tables import EmbeddingTable
from costmodel.gpu.families.lookups import (
    Entries,
    LookupKernels,
    Reuse,
    analysis,
    entries_of_tables,
    reuse_of,
    stages_of,
)
from costmodel.gpu.fitted import DIRECTORY, adaptations_for, level_transfer, residuals_for
from costmodel.gpu.kernel_model import KernelModel
from costmodel.machines.machine_records import Machine


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one pass, by stage."""

    # Seconds of the whole GPU that a table needs, (stages, tables).
    added: np.ndarray
    # Chain of loads that is a lower bound of the stage, (stages, tables).
    longest: np.ndarray
    # Fixed seconds of the stages.
    launch: float
    # Seconds of each table in a kernel of its own, (tables,).
    alone: np.ndarray
    # Half of the model's 80 % interval, in log units, (tables,).
    half_width: np.ndarray

    def at(self, places: np.ndarray) -> PassSeconds:
        """The tables at ``places``, in that order; a table may occur several times."""
        added, longest = self.added[:, places], self.longest[:, places]
        return PassSeconds(added, longest, self.launch, self.alone[places], self.half_width[places])

    def kernel(self, places: np.ndarray) -> float:
        """Seconds of the tables at ``places`` together."""
        if not places.size:
            return 0.0
        added, longest = self.added[:, places].sum(axis=1), self.longest[:, places].max(axis=1)
        return self.launch + float(np.maximum(added, longest).sum())


@dataclass(frozen=True)
class TableSeconds:
    """Seconds of every table, as arrays of shape (tables,), and of any set of them in one kernel."""

    forward_pass: PassSeconds
    backward_pass: PassSeconds

    @property
    def forward(self) -> np.ndarray:
        """Seconds that each table adds to the forward kernel."""
        return np.asarray(self.forward_pass.added.sum(axis=0))

    @property
    def backward(self) -> np.ndarray:
        """Seconds that each table adds to the kernels of the backward pass, optimizer included."""
        return np.asarray(self.backward_pass.added.sum(axis=0))

    @property
    def forward_launch(self) -> float:
        """Fixed seconds of the forward kernel, once per GPU and step, for any number of tables."""
        return self.forward_pass.launch

    @property
    def backward_launch(self) -> float:
        """Fixed seconds of the kernels of the backward pass, once per GPU and step."""
        return self.backward_pass.launch

    @property
    def forward_alone(self) -> np.ndarray:
        """Forward seconds of each table in a kernel of its own, equal to ``gpu_cost_model(machine).estimate``."""
        return self.forward_pass.alone

    @property
    def backward_alone(self) -> np.ndarray:
        """Backward seconds of each table in kernels of its own."""
        return self.backward_pass.alone

    @property
    def forward_stages(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds that each table adds to each stage of the forward kernel, and lower bounds of the stage by each
        table, (stages, tables); :meth:`kernel` is the sum over stages of the larger of the sum and the maximum over
        tables.
        """
        return self.forward_pass.added, self.forward_pass.longest

    @property
    def backward_stages(self) -> tuple[np.ndarray, np.ndarray]:
        """The same as :attr:`forward_stages` for the kernels of the backward pass."""
        return self.backward_pass.added, self.backward_pass.longest

    @property
    def forward_half_width(self) -> np.ndarray:
        """Half of the 80 % interval of each table's forward time, in log units."""
        return self.forward_pass.half_width

    @property
    def backward_half_width(self) -> np.ndarray:
        """Half of the 80 % interval of each table's backward time, in log units."""
        return self.backward_pass.half_width

    def at(self, places: Sequence[int] | np.ndarray) -> TableSeconds:
        """The tables at ``places``, in that order; a table may occur several times."""
        chosen = np.asarray(places, dtype=int)
        return TableSeconds(self.forward_pass.at(chosen), self.backward_pass.at(chosen))

    def kernel(self, places: Sequence[int] | np.ndarray) -> tuple[float, float]:
        """Forward and backward seconds of the tables at ``places`` in one kernel; (0, 0) for an empty set."""
        chosen = np.asarray(places, dtype=int)
        return self.forward_pass.kernel(chosen), self.backward_pass.kernel(chosen)


def table_seconds(
    tables: Sequence[EmbeddingTable],
    batch_size: int | Sequence[int] | np.ndarray,
    machine: Machine,
    directory: Path = DIRECTORY,
) -> TableSeconds:
    """Seconds of every table with ``batch_size`` samples each (one number, or one per table).

    ``batch_size``: samples whose lookups arrive at the table's GPU, the global batch for a table-wise placement.
    ``directory``: fitted models. ``MachineError`` if ``machine`` is no GPU.
    """
    batches = np.broadcast_to(np.asarray(batch_size), (len(tables),))
    machine.chip()
    learned = (residuals_for(machine, directory), level_transfer(directory), adaptations_for(machine, directory))
    model = KernelModel(machine, lambda operator: _FAMILY, *learned)
    dtypes = [each.dtype for each in tables]
    forward, backward = (entries_of_tables(tables, batches, way) for way in (False, True))
    found = reuse_of(forward, machine)  # the lookups are the same in both
    return TableSeconds(_pass(forward, found, model, dtypes), _pass(backward, found, model, dtypes))


_FAMILY = LookupKernels()


def _pass(entries: Entries, found: Reuse, model: KernelModel, dtypes: Sequence[str]) -> PassSeconds:
    """Seconds of one pass; the model's factor for each table alone scales all of its stages.

    Row numbers of tables that share a kernel are sorted as those of all tables together: by more bits than their own.
    """
    if not entries.operators:
        return PassSeconds(np.zeros((1, 0)), np.zeros((1, 0)), 0.0, np.zeros(0), np.zeros(0))
    analysed = analysis(entries, found, stages_of(entries, found, model.machine))
    learned = model.middles(_FAMILY, analysed, dtypes)
    together = stages_of(replace(entries, operator=np.zeros_like(entries.operator)), found, model.machine)
    added, longest = (np.array([getattr(each, name) for each in together]) for name in ("throughput", "longest"))
    launch = sum(float(each.fixed[0]) for each in together) * float(np.median(learned))
    widths = model.half_widths(_FAMILY, analysed, dtypes)
    return PassSeconds(added * learned, longest * learned, launch, analysed.seconds * learned, widths)
