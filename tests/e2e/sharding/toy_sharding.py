"""A toy cluster for tests of sharding: round costs that can be added up by hand.

A lookup costs 1 us per 1,000 values that its samples read (samples x pooling x dim), twice that backward; a kernel
costs 10 us (20 us backward) besides. A collective takes 5 us and 1 us per 1,000,000 bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from costmodel.cost_model import CostModel, Estimate
from costmodel.gpu.embedding_tables import EmbeddingTable
from costmodel.machines.cluster import Cluster
from costmodel.machines.machine_file import load_machine
from costmodel.machines.machine_records import Machine
from costmodel.operators.collective_transfer import CollectiveTransfer
from e2e.sharding.placement import Rules, enumerate_options
from e2e.sharding.step_model import Problem
from e2e.sharding.task import DensePart, ShardingTask, TransferTimes, option_costs

US = 1e-6


class ToyCollectives(CostModel):
    """5 us and 1 us per megabyte on the wire."""

    def estimate(self, operators: Sequence[CollectiveTransfer]) -> list[Estimate]:
        return [_exact(5 * US + each.wire_bytes * 1e-12) for each in operators]


class ToyKernels(CostModel):
    """1 us per megabyte, whatever it is."""

    def estimate(self, operators: Sequence) -> list[Estimate]:
        return [_exact((each.read_bytes + each.write_bytes) * 1e-12) for each in operators]


def _exact(seconds: float) -> Estimate:
    return Estimate(seconds, seconds, seconds, "toy")


class ToyLookups:
    """Tables of a kernel add up."""

    forward_launch, backward_launch = 10 * US, 20 * US

    def __init__(self, pieces: Sequence[EmbeddingTable], batches: Sequence[int], half_width: float = 0.0) -> None:
        values = [batch * piece.pooling * piece.dim for piece, batch in zip(pieces, batches, strict=True)]
        self.forward = np.array(values) * 1e-9
        self.backward = 2 * self.forward
        self.forward_alone = self.forward + self.forward_launch
        self.backward_alone = self.backward + self.backward_launch
        self.forward_stages = (self.forward[None], np.zeros((1, len(pieces))))
        self.backward_stages = (self.backward[None], np.zeros((1, len(pieces))))
        self.forward_half_width = self.backward_half_width = np.full(len(pieces), half_width)

    def kernel(self, places: Sequence[int]) -> tuple[float, float]:
        chosen = np.asarray(places, dtype=int)
        return (
            self.forward_launch + float(self.forward[chosen].sum()),
            self.backward_launch + float(self.backward[chosen].sum()),
        )


def toy_cluster(gpus: int, memory_bytes: float = 1e9) -> Cluster:
    """All in one node; of the machine only its memory matters, all of which a process sees."""
    machine = load_machine("a100-sxm-40gb")
    memory = (replace(machine.memory[-1], capacity_bytes=memory_bytes, usable_bytes=memory_bytes),)
    return Cluster("toy", replace(machine, name="toy", memory=memory), gpus, 1, machine.links[-1], None)


def toy_problem(
    tables: Sequence[EmbeddingTable],
    gpus: int,
    batch_size: int = 100,
    memory_bytes: float = 1e9,
    dense: DensePart | None = None,
    rules: Rules | None = None,
    half_width: float = 0.0,
) -> Problem:
    """Priced by the toy models; no memory is reserved. ``half_width``: of the interval of lookups, in log units."""
    cluster = toy_cluster(gpus, memory_bytes)
    task = ShardingTask(tuple(tables), cluster, batch_size, dense or DensePart(), 0.0, rules or Rules())
    times = TransferTimes(ToyCollectives(), gpus, 1)
    options = enumerate_options(task.tables, gpus, task.rules)

    def lookups(pieces: Sequence[EmbeddingTable], batches: Sequence[int], machine: Machine) -> tuple:
        return ToyLookups(pieces, batches, half_width), np.arange(len(pieces))

    return Problem(task, option_costs(task, options, times, ToyKernels(), lookups), times)


def table(name: str, rows: int = 1000, dim: int = 64, pooling: float = 10.0, **others: Any) -> EmbeddingTable:
    """A small table."""
    return EmbeddingTable(name, rows, dim, pooling, **others)


def some_tables(seed: int, count: int) -> list:
    """Drawn tables of 10 to 20,000 rows."""
    generator = np.random.default_rng(seed)
    return [
        table(
            f"t{place}",
            int(generator.integers(10, 20_000)),
            int(generator.choice([32, 64, 128])),
            float(generator.uniform(1, 60)),
        )
        for place in range(count)
    ]
