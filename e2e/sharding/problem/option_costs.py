"""Costs of every option on the ranks that it uses: lookup seconds, exchanged bytes, bytes of memory.

Bytes of a step (N samples of all ranks, B of one; L lookups per sample; D columns of a shard):

  indices   N L x 8 to the rank of a shard, N L / ranks of a block of rows; int64 as TorchRec sends them
  lengths   N x 8 per shard: number of indices of each sample
  output    N D x 4 of a shard (pooled sums, FP32), and as many of gradients back

Memory: weights, optimizer state, one batch of indices, lengths, output and its gradient where the shard is; the
exchanged output and its gradient, B D x 4 each, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from costmodel.embedding.embedding_tables import OPTIMIZER_STATE, EmbeddingTable
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.table_costs import table_seconds
from costmodel.machines.machine_records import Machine
from costmodel.model.cost_model import CostModel
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import MemoryCopy, OptimizerStep
from e2e.sharding.problem.placement import Option
from e2e.sharding.problem.task import ShardingTask
from e2e.sharding.problem.transfers import TransferTimes
from e2e.step.arrays import Floats, Integers

INDEX_BYTES = LENGTH_BYTES = 8
OUTPUT_BYTES = 4
# DDP all-reduces gradients in buckets of this size (`bucket_cap_mb=25`).
BUCKET_BYTES = 25 * 2**20
# Columns of :attr:`OptionCosts.shard`.
FORWARD, BACKWARD, INDICES, LENGTHS, OUTPUT, MEMORY = range(6)
LOADS = 6


class TableLookups(Protocol):
    """Interface of :class:`costmodel.gpu.table_costs.TableSeconds` as used here."""

    @property
    def forward(self) -> Floats: ...
    @property
    def backward(self) -> Floats: ...
    @property
    def forward_launch(self) -> float: ...
    @property
    def backward_launch(self) -> float: ...
    @property
    def forward_alone(self) -> Floats: ...
    @property
    def backward_alone(self) -> Floats: ...
    @property
    def forward_stages(self) -> tuple[Floats, Floats]: ...
    @property
    def backward_stages(self) -> tuple[Floats, Floats]: ...
    @property
    def forward_half_width(self) -> Floats: ...
    @property
    def backward_half_width(self) -> Floats: ...
    def kernel(self, places: Sequence[int] | Integers) -> tuple[float, float]: ...


@dataclass(frozen=True, eq=False)
class OptionCosts:
    """Arrays over options."""

    options: tuple[Option, ...]
    # Load that one shard adds to its rank (FORWARD ... MEMORY), or to each rank for kinds on all ranks, shape (options,
    # 6).
    shard: Floats
    # Further bytes of memory on every rank, shape (options,).
    everywhere: Floats
    # Seconds for the gradients of a data-parallel table, shape (options,).
    all_reduce: Floats
    # Fixed cost of the kernels of a group of tables, forward and backward, shape (2,).
    launch: Floats
    # Seconds of a shard alone, a lower bound of its group's, shape (options, 2).
    alone: Floats
    # Exact times of groups, by the numbers in `pieces`, shape (options,).
    lookups: TableLookups
    pieces: Integers
    # Seconds of dense updates in the backward pass, shape (options,).
    update: Floats
    # Half-width of the 80 % interval of a shard's forward and backward lookup, in log units, shape (options, 2).
    half_width: Floats

    def kernel(self, options: Sequence[int]) -> tuple[float, float]:
        """Forward and backward seconds of one kernel over a shard of each of ``options``; (0, 0) if there are none."""
        forward, backward = self.lookups.kernel(self.pieces[list(options)])
        extra = float(self.update[list(options)].sum())
        return forward, backward + extra


# Function: (pieces, samples of each, machine) -> (times of the distinct pieces, index of each piece among them).
LookupPrices = Callable[[Sequence[EmbeddingTable], Sequence[int], Machine], tuple[TableLookups, Integers]]


def option_costs(
    task: ShardingTask,
    options: Sequence[Option],
    times: TransferTimes,
    gpu: CostModel | None = None,
    price: LookupPrices | None = None,
) -> OptionCosts:
    """Return the costs of ``options`` of ``task``.

    ``gpu`` prices the other work of data-parallel tables, ``price`` the lookups (defaults: the fitted models of the
    task's machine).
    """
    pieces = [piece_of(task.tables[option.table], option) for option in options]
    batches = [task.batch_size if option.kind == "data-parallel" else task.samples for option in options]
    lookups, at = (price or _lookup_seconds)(pieces, batches, task.cluster.machine)
    shard = np.zeros((len(options), LOADS))
    shard[:, FORWARD], shard[:, BACKWARD] = lookups.forward[at], lookups.backward[at]
    everywhere, all_reduce = np.zeros(len(options)), np.zeros(len(options))
    for place, (option, piece) in enumerate(zip(options, pieces, strict=True)):
        table = task.tables[option.table]
        if option.kind != "data-parallel":
            indices, output = task.samples * piece.pooling * INDEX_BYTES, task.samples * piece.dim * OUTPUT_BYTES
            shard[place, INDICES], shard[place, LENGTHS] = indices, task.samples * LENGTH_BYTES
            shard[place, OUTPUT] = output
            shard[place, MEMORY] = shard_bytes(piece) + indices + task.samples * LENGTH_BYTES + 2 * output
        else:
            shard[place, MEMORY] = shard_bytes(table) + table.rows * table.dim * 4
            all_reduce[place] = _all_reduce_seconds(table, times)
        everywhere[place] = 2 * task.batch_size * table.dim * OUTPUT_BYTES
    update = _dense_updates(task, options, gpu)
    shard[:, BACKWARD] += update
    launch = np.array([lookups.forward_launch, lookups.backward_launch])
    alone = np.stack([lookups.forward_alone[at], lookups.backward_alone[at] + update], axis=1)
    half_width = np.stack([lookups.forward_half_width[at], lookups.backward_half_width[at]], axis=1)
    return OptionCosts(tuple(options), shard, everywhere, all_reduce, launch, alone, lookups, at, update, half_width)


def piece_of(table: EmbeddingTable, option: Option) -> EmbeddingTable:
    """Return one shard as a table of its own.

    Rows of a block are assumed to be a random part of all: hot ones spread evenly.
    """
    if option.kind == "column-wise":
        return replace(table, dim=table.dim // option.shards)
    if option.kind == "row-wise":
        rows = -(-table.rows // option.shards)
        statistics = None if table.statistics is None else table.statistics.of_row_shard(1 / option.shards)
        if statistics is not None:
            rows = statistics.rows
        return replace(table, rows=rows, pooling=table.pooling / option.shards, statistics=statistics)
    if option.kind == "data-parallel":
        # The backward kernel adds into a dense gradient; the optimizer is a separate kernel.
        return replace(table, optimizer="sgd")
    return table


def shard_bytes(piece: EmbeddingTable) -> int:
    """Bytes of weights and optimizer state."""
    return piece.weight_bytes + piece.optimizer_bytes


def _lookup_seconds(
    pieces: Sequence[EmbeddingTable], batches: Sequence[int], machine: Machine
) -> tuple[TableLookups, Integers]:
    """Return the times of the distinct pieces, and the index of each piece among them."""
    keys = [(replace(piece, name=""), batch) for piece, batch in zip(pieces, batches, strict=True)]
    distinct = list(dict.fromkeys(keys))
    place = {key: at for at, key in enumerate(distinct)}
    found = table_seconds([piece for piece, _ in distinct], [batch for _, batch in distinct], machine)
    return found, np.array([place[key] for key in keys], dtype=np.int64)


def _all_reduce_seconds(table: EmbeddingTable, times: TransferTimes) -> float:
    """Seconds of the all-reduce of FP32 gradients; small tables share a bucket."""
    size = table.rows * table.dim * 4
    if size >= BUCKET_BYTES:
        return float(times.of("all_reduce", size))
    return float(times.of("all_reduce", BUCKET_BYTES)) * size / BUCKET_BYTES


def _dense_updates(task: ShardingTask, options: Sequence[Option], gpu: CostModel | None) -> Floats:
    """Seconds to clear a data-parallel table's gradient and to update all its rows, shape (options,)."""
    update = np.zeros(len(options))
    places = [place for place, option in enumerate(options) if option.kind == "data-parallel"]
    if not places:
        return update
    records: list[AnyOperator] = []
    for place in places:
        table = task.tables[options[place].table]
        elements = table.rows * table.dim
        _, states = OPTIMIZER_STATE[table.optimizer]
        records.append(MemoryCopy(elements * 4, "memset"))
        records.append(OptimizerStep("sgd", elements, 1, 2 + states, 1 + states, table.dtype))
    estimates = (gpu or gpu_cost_model(task.cluster.machine)).estimate(records)
    update[places] = np.array([estimate.seconds for estimate in estimates]).reshape(len(places), 2).sum(axis=1)
    return update
