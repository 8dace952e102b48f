"""Sharding task, and what its parts cost: the dense part of the model, the exchanges, every option of every table.

Kernel seconds of the dense part of a DLRM follow from the widths of its MLPs; host time is excluded. ``predict``
captures the model itself (:mod:`e2e.sharding.sharded_step`); a plan only needs the time that its exchanges can overlap
with. Exchanges are functions of bytes, tabulated once for many look-ups.

An option costs lookup seconds, exchanged bytes and bytes of memory on the ranks that it uses. Bytes of a step (N
samples of all ranks, B of one; L lookups per sample; D columns of a shard):

  indices   N L x 8 to the rank of a shard, N L / ranks of a block of rows; int64 as TorchRec sends them
  lengths   N x 8 per shard: number of indices of each sample
  output    N D x 4 of a shard (pooled sums, FP32), and as many of gradients back

Memory: weights, optimizer state, one batch of indices, lengths, output and its gradient where the shard is; the
exchanged output and its gradient, B D x 4 each, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from costmodel.base.errors import InputError
from costmodel.cost_model import CostModel
from costmodel.gpu.embedding_tables import OPTIMIZER_STATE, EmbeddingTable
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.table_costs import table_seconds
from costmodel.machines.cluster import Cluster
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.collective_transfer import CollectiveKind, CollectiveTransfer
from costmodel.operators.device_work import Elementwise, Gemm, Loss, MemoryCopy, OptimizerStep, Rearrangement, Reduction
from e2e.sharding.placement import Option, Rules
from e2e.step.arrays import Floats, Integers

# Share of a GPU's memory reserved for uncounted items: CUDA context, allocator, NCCL buffers (the default of TorchRec's
# `HeuristicalStorageReservation(percentage=0.15)`).
RESERVE = 0.15


@dataclass(frozen=True)
class DensePart:
    """Seconds on every rank of the work outside embeddings, in the order of a DLRM step; zero by default."""

    # MLP of the dense features.
    bottom_forward: float = 0.0
    # Interaction, top MLP, loss.
    top_forward: float = 0.0
    # Ends before the backward pass of the interaction.
    top_backward: float = 0.0
    interaction_backward: float = 0.0
    bottom_backward: float = 0.0
    optimizer: float = 0.0
    # All-reduces of the gradients of the top and the bottom MLP.
    top_all_reduce: float = 0.0
    bottom_all_reduce: float = 0.0
    # Memory of the dense part on a rank.
    memory_bytes: int = 0
    details: Mapping[str, object] = field(default_factory=dict, compare=False)

    @property
    def seconds(self) -> float:
        """Sum of the kernels, without all-reduces."""
        forward = self.bottom_forward + self.top_forward
        return forward + self.top_backward + self.interaction_backward + self.bottom_backward + self.optimizer


@dataclass(frozen=True)
class ShardingTask:
    """Tables to be sharded over a cluster."""

    tables: tuple[EmbeddingTable, ...]
    cluster: Cluster
    # Samples per GPU, as in TorchRec's `Topology`; a step trains `gpus` times as many.
    batch_size: int
    dense: DensePart = field(default_factory=DensePart)
    # Share of the memory that is kept free.
    reserve: float = RESERVE
    rules: Rules = field(default_factory=Rules)

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.cluster.gpus

    @property
    def samples(self) -> int:
        """Samples of all ranks together."""
        return self.batch_size * self.ranks

    @property
    def memory_bytes(self) -> int:
        """Memory available for tables and their buffers on a rank."""
        capacity = self.cluster.machine.memory[-1].usable
        return max(int(capacity * (1 - self.reserve)) - self.dense.memory_bytes, 0)


KINDS: tuple[CollectiveKind, ...] = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
# Range and density of the tabulated sizes, with linear interpolation between them.
SMALLEST, LARGEST, PER_OCTAVE = 2**8, 2**38, 8


class TransferTimes:
    """Tabulated collectives among all ``ranks`` on ``nodes``; zero for one rank.

    Sizes as in :class:`CollectiveTransfer`; for an all_to_all: bytes that the busiest rank receives (or sends), its own
    part included.

    ``factors``: kind -> multiplier of its times (for experiments with wrong models). ``half_width``: kind -> half-width
    of the model's 80 % interval in log units, the median over the sizes.
    """

    def __init__(self, model: CostModel, ranks: int, nodes: int, factors: Mapping[str, float] | None = None) -> None:
        octaves = (LARGEST // SMALLEST).bit_length() - 1
        self.sizes: Floats = np.concatenate(
            [[0.0], SMALLEST * 2.0 ** (np.arange(octaves * PER_OCTAVE + 1) / PER_OCTAVE)]
        )
        self.seconds: dict[str, Floats] = {}
        self.half_width: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        for kind in KINDS:
            if ranks == 1:
                self.seconds[kind] = np.zeros_like(self.sizes)
                continue
            transfers = [_transfer(kind, float(size), ranks, nodes) for size in self.sizes]
            estimates = model.estimate(transfers)
            times = np.array([estimate.seconds for estimate in estimates])
            self.seconds[kind] = times * (factors or {}).get(kind, 1.0)
            widths = [math.log(each.upper / each.lower) / 2 for each in estimates if each.lower > 0]
            self.half_width[kind] = float(np.median(widths)) if widths else 0.0

    def of(self, kind: CollectiveKind, size_bytes: ArrayLike) -> Floats:
        """Seconds, in the shape of ``size_bytes``; proportional to the size beyond the largest one."""
        size = np.asarray(size_bytes, dtype=float)
        table = self.seconds[kind]
        beyond = np.maximum(size / LARGEST, 1.0)
        return np.asarray(np.interp(size, self.sizes, table) * beyond)

    def line(self, kind: CollectiveKind, low: float, high: float) -> tuple[float, float]:
        """Return intercept and slope of the straight line through two sizes."""
        high = max(high, low + 1.0)
        first, last = (float(self.of(kind, size)) for size in (low, high))
        slope = max((last - first) / (high - low), 0.0)
        return max(first - slope * low, 0.0), slope

    def floor_lines(self, kind: CollectiveKind, seconds: float) -> tuple[tuple[float, float], ...]:
        """Return (intercept, slope) of a few lines that bound the times up to ``seconds`` from below.

        They are edges of the lower convex hull, near the largest such size and fractions of it.
        """
        table = self.seconds[kind]
        last = max(int((table <= seconds).sum()), 2)
        sizes, times = self.sizes[:last], np.minimum.accumulate(table[:last][::-1])[::-1]
        corners = _lower_hull(sizes, times)
        wanted = {
            int(np.searchsorted(sizes[corners], sizes[-1] * share))
            for share in (0.0, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0)
        }
        edges = sorted({min(max(at, 1), len(corners) - 1) for at in wanted})
        found = []
        for at in edges:
            low, high = corners[at - 1], corners[at]
            slope = float((times[high] - times[low]) / (sizes[high] - sizes[low]))
            found.append((float(times[low] - slope * sizes[low]), slope))
        return tuple(found)


def _lower_hull(sizes: Floats, times: Floats) -> list[int]:
    """Indices of the corners of the lower convex hull (Andrew's monotone chain)."""
    hull: list[int] = []
    for at in range(len(sizes)):
        while len(hull) > 1 and _above(sizes, times, hull[-2], hull[-1], at):
            hull.pop()
        hull.append(at)
    return hull


def _above(sizes: Floats, times: Floats, first: int, middle: int, last: int) -> bool:
    """True if the middle point is on or above the line between the others."""
    rise = (times[middle] - times[first]) * (sizes[last] - sizes[first])
    return bool(rise >= (times[last] - times[first]) * (sizes[middle] - sizes[first]))


def _transfer(kind: CollectiveKind, size: float, ranks: int, nodes: int) -> CollectiveTransfer:
    busiest = size * (ranks - 1) / ranks if kind == "all_to_all" else None
    return CollectiveTransfer(kind, size, ranks, nodes, busiest)


@dataclass(frozen=True)
class DenseModel:
    """Widths of the MLPs, as in ``DlrmConfig``.

    Vectors are multiplied pairwise if all have the same width, otherwise concatenated.
    """

    # Widths from the dense features to the embedding width.
    bottom: tuple[int, ...]
    # Hidden widths and the output width.
    top: tuple[int, ...]

    def interacts(self, tables: Sequence[EmbeddingTable]) -> bool:
        """True if the model has a dot interaction."""
        return all(table.dim == self.bottom[-1] for table in tables)

    def top_widths(self, tables: Sequence[EmbeddingTable]) -> tuple[int, ...]:
        """Return the widths of the top MLP, input width included."""
        vectors = len(tables) + 1
        if self.interacts(tables):
            return (self.bottom[-1] + vectors * (vectors - 1) // 2, *self.top)
        return (self.bottom[-1] + sum(table.dim for table in tables), *self.top)


def read_dense_model(model: Mapping[str, Any]) -> DenseModel | None:
    """Parse the ``model`` part of ``tables.yaml``; ``None`` if it is absent, raises ``InputError`` if it is invalid."""
    if not model:
        return None
    if set(model) != {"bottom", "top"}:
        raise InputError(f"model: needs bottom and top, widths of the MLPs; has {', '.join(map(str, model))}")
    for name, least in (("bottom", 2), ("top", 1)):
        widths = model[name]
        if not isinstance(widths, list) or len(widths) < least or not all(_is_width(width) for width in widths):
            raise InputError(f"model.{name}: needs a list of at least {least} widths above zero, such as [512, 64]")
    return DenseModel(tuple(model["bottom"]), tuple(model["top"]))


def _is_width(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def dense_part(
    model: DenseModel, tables: Sequence[EmbeddingTable], batch: int, gpu: CostModel, times: TransferTimes
) -> DensePart:
    """Return the dense part in FP32 with SGD; gradients are all-reduced by DDP once per MLP."""
    top = model.top_widths(tables)
    elements, top_elements = _parameters(model.bottom), _parameters(top)
    forward, backward = _interaction(model, tables, batch)

    def seconds(records: Sequence[AnyOperator]) -> float:
        return sum(estimate.seconds for estimate in gpu.estimate(records)) if records else 0.0

    activations = batch * (sum(model.bottom) + sum(top)) * 2
    return DensePart(
        bottom_forward=seconds(_mlp_forward(model.bottom, batch)),
        top_forward=seconds([*forward, *_mlp_forward(top, batch), Loss("bce", batch, 1)]),
        top_backward=seconds([Loss("bce", batch, 1, direction="backward"), *_mlp_backward(top, batch, True)]),
        interaction_backward=seconds(backward),
        bottom_backward=seconds(_mlp_backward(model.bottom, batch, False)),
        optimizer=seconds([OptimizerStep("sgd", elements + top_elements, 2, 2, 1)]),
        top_all_reduce=float(times.of("all_reduce", top_elements * 4)),
        bottom_all_reduce=float(times.of("all_reduce", elements * 4)),
        memory_bytes=(2 * (elements + top_elements) + activations) * 4,
    )


def _parameters(widths: Sequence[int]) -> int:
    return sum((before + 1) * after for before, after in zip(widths, widths[1:], strict=False))


def _mlp_forward(widths: Sequence[int], batch: int) -> list[AnyOperator]:
    records: list[AnyOperator] = []
    for before, after in zip(widths, widths[1:], strict=False):
        records += [Gemm(1, batch, after, before, transpose_b=True, bias=True), Elementwise("relu", batch * after)]
    return records


def _mlp_backward(widths: Sequence[int], batch: int, to_input: bool) -> list[AnyOperator]:
    """Operators of the gradients of weights, biases and inputs; those of the first layer's input only if needed."""
    records: list[AnyOperator] = []
    layers = list(zip(widths, widths[1:], strict=False))
    for place, (before, after) in reversed(list(enumerate(layers))):
        records += [
            Elementwise("threshold_backward", batch * after, 2),
            Gemm(1, after, before, batch, transpose_a=True),
            Reduction("sum", batch * after, after, contiguous=False),
        ]
        if place > 0 or to_input:
            records.append(Gemm(1, batch, before, after))
    return records


def _interaction(
    model: DenseModel, tables: Sequence[EmbeddingTable], batch: int
) -> tuple[list[AnyOperator], list[AnyOperator]]:
    """Operators of the interaction, forward and backward."""
    vectors, width = len(tables) + 1, model.bottom[-1]
    together = batch * model.top_widths(tables)[0]
    if not model.interacts(tables):
        joined = Rearrangement("concat", together, width, inputs=vectors)
        return [joined], [Rearrangement("split", together, width)]
    stacked, pairs = batch * vectors * width, batch * vectors * (vectors - 1) // 2
    product = Gemm(batch, vectors, vectors, width, transpose_b=True)
    gradient = Gemm(batch, vectors, width, vectors)
    forward: list[AnyOperator] = [
        Rearrangement("concat", stacked, width, inputs=2),
        product,
        Rearrangement("index", pairs),
        Rearrangement("concat", together, width, inputs=2),
    ]
    backward: list[AnyOperator] = [
        Rearrangement("scatter", batch * vectors * vectors),
        gradient,
        gradient,
        Elementwise("add", stacked, 2),
    ]
    return forward, backward


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
