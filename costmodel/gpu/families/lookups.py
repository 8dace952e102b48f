"""Embedding lookups, forward and backward, of one table or many: operators as arrays, stages of a pass, the family.

Operators become arrays with an entry per operator and distinct table, so that thousands are priced at once. A pass
has stages, each one launch or several consecutive ones. The tables of a stage are processed in order (thread blocks
are ordered by table in FBGEMM's kernels), so that times that need the whole GPU add up, while a bag or a row
processed by one group of threads may outlast all of them:

    seconds = fixed + max(sum over tables of max(DRAM, L2, waiting), longest chain of loads)

Rows. A batch's lookups miss L1 caches and an L2 that start empty as LRU caches do (:mod:`costmodel.operators.lookups`);
misses move sectors from DRAM, and a sector more each: rows of 256 B are gathered at 82 % of the H100's datasheet
bandwidth where streams reach 91 % (meta-pytorch/torchrec, pull request 4688). Gradients of bags are read once per
lookup.

Waiting. A group of threads fetches the rows of its bag one by one (table-batched; 0.6 us per row in the trace
`dlrm_8xV100`) or four at a time (PyTorch's bags: the compiler unrolls the loop by four, an estimate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from costmodel.gpu.embedding_tables import OPTIMIZER_STATE, EmbeddingTable, row_bytes
from costmodel.gpu.families import memory_bound
from costmodel.gpu.families.family import Family, KernelAnalysis, safe_log2
from costmodel.gpu.families.rates import dram_bandwidth, kernel_floor, l2_bandwidth, l2_bytes, latency
from costmodel.machines.machine_records import USABLE_SHARE, Machine
from costmodel.operators import lookups as reuse
from costmodel.operators.layers import element_bytes
from costmodel.operators.lookups import EmbeddingLookup, IndexStatistics, TableLookup

KERNELS = ("embedding", "embedding_bag", "table_batched")
# Pooled values and their gradients: FP32 in table-batched kernels, whatever the dtype of the rows (output_dtype of
# FBGEMM and TorchRec); of the rows' dtype in PyTorch's own kernels.
_BATCHED_VALUE = 4.0


@dataclass(frozen=True)
class Entries:
    """Arrays over entries."""

    # Index of the entry's operator.
    operator: np.ndarray
    # Number of identical tables in it.
    copies: np.ndarray
    rows: np.ndarray
    dim: np.ndarray
    indices: np.ndarray
    bags: np.ndarray
    # Bytes of a row with its scale and bias, of one of its values, and of a pooled value.
    row: np.ndarray
    element: np.ndarray
    value: np.ndarray
    index_bytes: np.ndarray
    # Distinct rows if known, else NaN.
    known_unique: np.ndarray
    # Popularity (entries, groups), padded with groups of no rows.
    group_rows: np.ndarray
    group_chance: np.ndarray
    # Index into :data:`KERNELS`.
    kernel: np.ndarray
    backward: np.ndarray
    whole: np.ndarray
    sparse: np.ndarray
    maximum: np.ndarray
    # True if there is a fused optimizer, and its FP32 values of state per row and per element.
    fused: np.ndarray
    state_row: np.ndarray
    state_element: np.ndarray

    @property
    def operators(self) -> int:
        """Number of operators."""
        return int(self.operator[-1]) + 1 if len(self.operator) else 0

    @property
    def pooling(self) -> np.ndarray:
        """Mean number of lookups per bag."""
        return np.asarray(self.indices / np.maximum(self.bags, 1))

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sum over the tables of each operator, identical ones counted."""
        return np.bincount(self.operator, values * self.copies, self.operators)

    def most(self, values: np.ndarray) -> np.ndarray:
        """Largest value of each operator."""
        result = np.zeros(self.operators)
        np.maximum.at(result, self.operator, values)
        return result

    def first(self, values: np.ndarray) -> np.ndarray:
        """Value of the first entry of each operator, for values that all its entries share."""
        return values[np.searchsorted(self.operator, np.arange(self.operators))]


class _Row(NamedTuple):
    """One entry: scalars for the arrays of the same names in :class:`Entries`."""

    operator: int
    copies: int
    rows: int
    dim: int
    indices: int
    bags: float
    row: float
    element: int
    index_bytes: int
    known_unique: float
    kernel: int
    backward: bool
    whole: bool
    sparse: bool
    maximum: bool
    fused: bool
    state_row: int
    state_element: int


def entries_of(operators: Sequence[EmbeddingLookup]) -> Entries:
    """Entries of ``operators``, in order."""
    parts = [(place, each, table, count) for place, each in enumerate(operators) for table, count in each.parts]
    popularity = [(table.statistics, table.rows) for _, _, table, _ in parts]
    return _entries([_row(*part) for part in parts], popularity)


def _row(place: int, operator: EmbeddingLookup, table: TableLookup, copies: int) -> _Row:
    state_row, state_element = OPTIMIZER_STATE.get(operator.fused_optimizer, (0, 0))
    return _Row(
        operator=place,
        copies=copies,
        rows=table.rows,
        dim=table.dim,
        indices=table.indices,
        bags=table.bags,
        row=row_bytes(table.dim, table.dtype),
        element=element_bytes(table.dtype),
        index_bytes=element_bytes(operator.index_dtype),
        known_unique=float("nan") if operator.unique_rows is None else float(operator.unique_rows),
        kernel=KERNELS.index(operator.implementation),
        backward=operator.direction == "backward",
        whole=operator.whole_pass,
        sparse=operator.gradient == "sparse",
        maximum=operator.mode == "max",
        fused=bool(operator.fused_optimizer),
        state_row=state_row,
        state_element=state_element,
    )


def entries_of_tables(tables: Sequence[EmbeddingTable], batches: np.ndarray, backward: bool) -> Entries:
    """Entries of table-batched kernels of one table each: the forward pass, or the whole backward pass."""
    rows = [
        _table_row(place, each, float(batch), backward)
        for place, (each, batch) in enumerate(zip(tables, batches, strict=True))
    ]
    return _entries(rows, [(each.statistics, each.rows) for each in tables])


def _table_row(place: int, table: EmbeddingTable, batch: float, backward: bool) -> _Row:
    state_row, state_element = OPTIMIZER_STATE[table.optimizer]
    return _Row(
        operator=place,
        copies=1,
        rows=table.rows,
        dim=table.dim,
        indices=table.indices(int(batch)),
        bags=batch,
        row=row_bytes(table.dim, table.dtype),
        element=element_bytes(table.dtype),
        index_bytes=8,
        known_unique=float("nan"),
        kernel=KERNELS.index("table_batched"),
        backward=backward,
        whole=backward,
        sparse=False,
        maximum=False,
        fused=backward,
        state_row=state_row,
        state_element=state_element,
    )


def _entries(rows: Sequence[_Row], popularity: Sequence[tuple[IndexStatistics | None, int]]) -> Entries:
    group_rows, group_chance = _groups(popularity)
    matrix = np.array(rows, dtype=float).reshape(len(rows), len(_Row._fields))
    columns: dict[str, np.ndarray] = dict(zip(_Row._fields, matrix.T, strict=True))
    columns |= {name: columns[name].astype(int) for name in ("operator", "kernel")}
    columns |= {name: columns[name].astype(bool) for name in ("backward", "whole", "sparse", "maximum", "fused")}
    batched = columns["kernel"] == KERNELS.index("table_batched")
    value = np.where(batched, _BATCHED_VALUE, columns["element"])
    return Entries(**columns, value=value, group_rows=group_rows, group_chance=group_chance)


def _groups(popularity: Sequence[tuple[IndexStatistics | None, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows and probabilities by group, (entries, groups); uniform popularity is one group."""
    width = max((1 if each is None else len(each.group_rows) for each, _ in popularity), default=1)
    rows, chances = np.zeros((len(popularity), width)), np.zeros((len(popularity), width))
    for place, (each, count) in enumerate(popularity):
        if each is None:
            rows[place, 0], chances[place, 0] = count, 1 / count
        else:
            size, chance = each.arrays
            rows[place, : size.shape[1]], chances[place, : size.shape[1]] = size[0], chance[0]
    return rows, chances


_SECTOR, _FETCH = 32, 64  # bytes that L2 moves, and that it requests from DRAM (CUDA's cudaLimitMaxL2FetchGranularity)
_ROW_OVERHEAD = 32  # bytes; see above
_OCCUPANCY = 0.75  # share of the resident threads: 33 registers each in blocks of 512 (dlrm_8xV100)
_BAG_ROWS_IN_FLIGHT = 4.0
# PyTorch's ``vectorized_gather_kernel``: a block for each row, or 4 KiB of it (256 threads, 16 bytes each). Cycles from
# the start of one block to that of the next on a multiprocessor: H200, 61,136 rows of 512 bytes in 39 us.
_GATHERED, _START_CYCLES = 4096, 160
# Sequential loads besides those of the rows: table, offsets, indices, output. For the update of rows accessed up to 32
# times 11, for the search for other rows 2, for their update 18: kernels of `dlrm_8xV100` with 32 lookups (12 to 14 us,
# 3 to 4 us) and with rows accessed more than 32 times (15 us and more), over the latency of a load.
_FORWARD_LOADS, _UPDATE_LOADS, _SEARCH_LOADS, _LONG_ROW_LOADS = 4, 11, 2, 18
# Most lookups of a row added by one group; more are shared by the 32 groups of a block, and by several blocks beyond
# 1,024 (FBGEMM: max_segment_length_per_warp, max_segment_length_per_cta; `dlrm_8xV100`: a block per 1,024 lookups).
_WARP_SEGMENT, _BLOCK_SEGMENT, _BLOCK_GROUPS = 32, 1024, 32
# aten/src/ATen/native/cuda/Embedding.cu: most lookups without a sort, from compute capability 9 on and before.
_UNSORTED_INDICES, _UNSORTED_BEFORE = 4096, 3072
# EmbeddingBackwardKernel.cu: NROWS_PER_THREAD; kernels after the sort (profile of PyTorch 2.11).
_PARTIAL_ROWS, _PARTIAL_LAUNCHES = 10, 9
_MOST_THREADS, _MOST_BLOCKS = 1024, 32  # of a block; on a multiprocessor
_FIND_LOADS = 2  # sequential loads in which a block finds its part of the lookups
_EMBEDDING, _BAG, _BATCHED = range(len(KERNELS))


@dataclass(frozen=True)
class LookupStage:
    """Times of one stage in seconds: ``dram``, ``l2``, ``waiting``, ``longest`` per entry, ``fixed`` per operator."""

    dram: np.ndarray
    l2: np.ndarray
    waiting: np.ndarray
    longest: np.ndarray
    fixed: np.ndarray

    @property
    def throughput(self) -> np.ndarray:
        """Seconds of the whole GPU that each table needs, (entries,)."""
        return np.asarray(np.maximum(np.maximum(self.dram, self.l2), self.waiting))

    def seconds(self, entries: Entries) -> np.ndarray:
        """Seconds of the stage, (operators,)."""
        return np.asarray(self.fixed + np.maximum(entries.total(self.throughput), entries.most(self.longest)))


@dataclass(frozen=True)
class Reuse:
    """Reuse in caches, per entry: distinct rows, misses of the rows in L2 and in the L1 caches, of the gradients of the
    bags in L2, and lookups of the most popular row.
    """

    unique: np.ndarray
    misses: np.ndarray
    l1_misses: np.ndarray
    gradient_misses: np.ndarray
    most_popular: np.ndarray

    def waits(self, misses: np.ndarray, entries: Entries, machine: Machine) -> np.ndarray:
        """Mean seconds of a load of a row, L2 hits and misses together."""
        share = misses / np.maximum(entries.indices, 1)
        return np.asarray((1 - share) * latency(machine, 0) + share * latency(machine, 1))


def reuse_of(entries: Entries, machine: Machine) -> Reuse:
    """Cache reuse of the rows and gradients of ``entries``."""
    lookups, capacity = entries.indices, USABLE_SHARE * l2_bytes(machine)
    cache = capacity / _whole(entries.row, _SECTOR)
    model = reuse.expected_unique(entries.group_rows, entries.group_chance, lookups)
    known = np.where(np.isnan(entries.known_unique), model, entries.known_unique)
    misses = reuse.lru_misses(entries.group_rows, entries.group_chance, cache, lookups) + known - model
    first = np.minimum(
        np.maximum(entries.bags, 1), lookups
    )  # each bag's gradient is read once per lookup, in any order
    held = capacity / _whole(_pooled(entries), _SECTOR)
    gradients = first + (lookups - first) * np.maximum(1 - held / np.maximum(entries.bags, 1), 0)
    popular = np.maximum(entries.group_chance.max(axis=1) * lookups, 1)
    misses = np.clip(misses, 0, np.maximum(lookups, known))
    return Reuse(known, misses, _l1_misses(entries, machine, misses), gradients, np.minimum(popular, lookups))


def _l1_misses(entries: Entries, machine: Machine, l2_misses: np.ndarray) -> np.ndarray:
    """Lookups that miss L1 and reach L2: each multiprocessor has a random part of them, and its own cache."""
    chip = machine.chip()
    parts = np.minimum(float(chip.sm_count), np.maximum(entries.indices, 1))
    cache = USABLE_SHARE * chip.shared_memory_bytes / _whole(entries.row, _SECTOR)
    each = reuse.lru_misses(entries.group_rows, entries.group_chance, cache, entries.indices / parts)
    return np.asarray(np.clip(parts * each, l2_misses, np.maximum(entries.indices, l2_misses)))


def stages_of(entries: Entries, found: Reuse, machine: Machine) -> list[LookupStage]:
    """Stages of every operator; stages that an operator lacks take no time."""
    forward, batched = ~entries.backward, entries.kernel == _BATCHED
    plain = entries.backward & ~batched
    most = _UNSORTED_INDICES if machine.chip().architecture in ("hopper", "blackwell") else _UNSORTED_BEFORE
    unsorted = (entries.kernel == _EMBEDDING) & (entries.indices <= most)
    summed = plain & ~entries.sparse & ~unsorted & ~entries.maximum
    sorts = entries.whole & ((entries.backward & batched) | summed)
    return [
        _masked(_forward(entries, found, machine), forward, entries),
        _masked(_clear(entries, machine), entries.whole & entries.backward & ~entries.fused & ~entries.sparse, entries),
        _masked(_linearize(entries, machine), sorts & batched, entries),
        _masked(_sort(entries, found, machine), sorts, entries),
        _masked(_update(entries, found, machine), entries.backward & batched, entries),
        _masked(_partial_sums(entries, found, machine), summed, entries),
        _masked(_unsorted(entries, found, machine), plain & ~entries.sparse & unsorted, entries),
        _masked(_scatter(entries, machine), plain & ~entries.sparse & ~unsorted & entries.maximum, entries),
        _masked(_expand(entries, found, machine), plain & entries.sparse, entries),
    ]


def _masked(stage: LookupStage, mask: np.ndarray, entries: Entries) -> LookupStage:
    whole = entries.first(mask).astype(float)
    keep = mask.astype(float)
    return LookupStage(
        stage.dram * keep, stage.l2 * keep, stage.waiting * keep, stage.longest * keep, stage.fixed * whole
    )


def _whole(size: np.ndarray, unit: int) -> np.ndarray:
    """Bytes moved for ``size`` bytes at a random address, in whole units."""
    return np.asarray(size + unit - np.gcd(size.astype(int), unit))


def _scattered(size: np.ndarray) -> np.ndarray:
    """Bytes of DRAM traffic equivalent to ``size`` bytes at a random address."""
    return _whole(size, _FETCH) + _ROW_OVERHEAD


def _pooled(entries: Entries) -> np.ndarray:
    """Bytes of a bag's output, or of its gradient."""
    return np.asarray(entries.dim * entries.value)


def _threads(entries: Entries) -> np.ndarray:
    """Threads that work on one bag: four values each (table-batched: 8, 16 or 32 threads), one each in bags."""
    group = np.select([entries.dim <= 32, entries.dim <= 64], [8.0, 16.0], 32.0)
    return np.where(entries.kernel == _BAG, 32 * np.ceil(entries.dim / 32), group)


def _slots(machine: Machine) -> float:
    chip = machine.chip()
    return chip.sm_count * chip.max_threads * _OCCUPANCY


def _stage(
    dram_bytes: np.ndarray,
    l2_bytes_: np.ndarray,
    chains: np.ndarray,
    longest: np.ndarray,
    fixed: np.ndarray,
    on: Machine,
) -> LookupStage:
    """Stage from bytes and chains. ``chains``: thread-seconds of waiting, spread over the threads that the GPU
    holds.
    """
    return LookupStage(
        dram_bytes / dram_bandwidth(on), l2_bytes_ / l2_bandwidth(on), chains / _slots(on), longest, fixed
    )


def _fixed(entries: Entries, launches: float, loads: float, machine: Machine) -> np.ndarray:
    seconds = launches * kernel_floor(machine) + loads * latency(machine, 1)
    return np.full(entries.operators, seconds)


def _forward(entries: Entries, found: Reuse, machine: Machine) -> LookupStage:
    lookups, values = entries.indices, entries.bags * entries.dim
    bag = entries.kernel == _BAG
    outputs = values * (entries.value + 8.0 * (bag & entries.maximum))
    lists = lookups * (entries.index_bytes * (1.0 + bag)) + 8 * entries.bags * (entries.kernel != _EMBEDDING)
    # A bag's loop loads the number of a row, then the row.
    wait = found.waits(found.misses, entries, machine) + bag * latency(machine, 0)
    flight = np.where(bag, _BAG_ROWS_IN_FLIGHT, 1.0)
    stage = _stage(
        found.misses * _scattered(entries.row) + outputs + lists,
        found.l1_misses * _whole(entries.row, _SECTOR) + outputs + lists,
        lookups / flight * wait * _threads(entries),
        entries.pooling / flight * wait,
        _fixed(entries, 1, _FORWARD_LOADS, machine),
        machine,
    )
    blocks = lookups * np.ceil(entries.row / _GATHERED) * (entries.kernel == _EMBEDDING)
    chip = machine.chip()
    return replace(stage, waiting=np.maximum(stage.waiting, blocks * _START_CYCLES / (chip.sm_count * chip.clock_hz)))


def _clear(entries: Entries, machine: Machine) -> LookupStage:
    size, zero = entries.rows * entries.dim * entries.element, np.zeros(len(entries.rows))
    return _stage(size, size, zero, zero, _fixed(entries, 1, 0, machine), machine)


def _linearize(entries: Entries, machine: Machine) -> LookupStage:
    """Stage that maps the row numbers of all tables to one range: a warp takes 32 bags in turn, 32 lookups at a time.

    Half of a load's latency is visible per step (`dlrm_8xV100`: 13 to 48 us for 1 to 100 lookups per bag).
    """
    size = entries.indices * (entries.index_bytes + 12)
    steps = np.ceil(entries.pooling / 32) * latency(machine, 1) / 2
    threads = np.ceil(entries.bags / 32) * 32 * steps * 32
    return _stage(size, size, threads, 32 * steps, _fixed(entries, 1, _FORWARD_LOADS, machine), machine)


def _sort(entries: Entries, found: Reuse, machine: Machine) -> LookupStage:
    """Stage that sorts pairs of (row, lookup) and finds runs of equal rows (run lengths and their sums: four
    launches).
    """
    batched = entries.kernel == _BATCHED
    pair = np.where(batched, 12.0, 16.0)
    # PyTorch sorts by all bits of its indices ("/*, 0, nbits*/" in Embedding.cu and EmbeddingBag.cu).
    needed = memory_bound.sort_bits(entries.total(entries.rows))[entries.operator]
    bits = np.where(batched, needed, 8 * entries.index_bytes)
    zero = np.zeros(len(entries.rows))
    dram = memory_bound.sort_traffic_seconds(entries.indices, bits, pair, machine)
    runs = (entries.indices * 12 + found.unique * 16) * batched / dram_bandwidth(machine)
    pairs = entries.total(entries.indices)
    fixed = memory_bound.sort_fixed_seconds(pairs, entries.first(bits), machine)
    fixed = fixed + entries.first(batched.astype(float)) * _fixed(entries, 4, 9, machine)
    return LookupStage(dram + runs, zero, zero, zero, fixed)


def _update(entries: Entries, found: Reuse, machine: Machine) -> LookupStage:
    """Stage that adds up the gradients of a row's lookups and updates the row and its optimizer state, or writes its
    gradient.

    One kernel for rows of many lookups, preceded by one that finds them, and one for the others.
    """
    scattered, sectors = _scattered(entries.row), _whole(entries.row, _SECTOR)
    state = 2.0 * (_FETCH + _ROW_OVERHEAD) * (entries.state_row > 0) + 8.0 * entries.state_element * entries.dim
    row = np.where(entries.fused, 2.0, 1.0)
    lists = 8 * entries.indices + 12 * found.unique
    wait = found.waits(found.gradient_misses, entries, machine)
    threads = (entries.indices * wait + 3 * found.unique * latency(machine, 1)) * _threads(entries)
    shared = np.minimum(found.most_popular, _BLOCK_SEGMENT) / _BLOCK_GROUPS
    alone = np.minimum(found.most_popular, _WARP_SEGMENT) + np.maximum(shared - 1, 0)
    long_row = (found.most_popular > _WARP_SEGMENT) * (_LONG_ROW_LOADS - _SEARCH_LOADS) * latency(machine, 1)
    loads = _UPDATE_LOADS + 2 * _SEARCH_LOADS
    return _stage(
        found.gradient_misses * _scattered(_pooled(entries)) + found.unique * (row * scattered + state) + lists,
        entries.indices * _whole(_pooled(entries), _SECTOR) + found.unique * (row * sectors + state) + lists,
        threads,
        alone * wait + long_row,
        _fixed(entries, 3, loads, machine),
        machine,
    )


def _partial_sums(entries: Entries, found: Reuse, machine: Machine) -> LookupStage:
    """Stage that sums up to ten sorted lookups of a row in FP32, then these sums, and writes a dense gradient.

    A thread block has the values of one sum. It loads place, bag and gradient of one lookup after the other (its loop
    has conditions and is not unrolled); the second kernel has four sums on the way.
    """
    bag = entries.kernel == _BAG
    gradients = np.where(bag, found.gradient_misses, entries.indices)
    # Lookups of a row that are no multiple of ten leave half a sum on average.
    sums = np.maximum(found.unique, entries.indices / _PARTIAL_ROWS + found.unique / 2)
    near, find = latency(machine, 0), _FIND_LOADS * latency(machine, 1)
    summing = find + entries.indices / sums * (found.waits(gradients, entries, machine) + (1 + bag) * near)
    adding = find + sums / found.unique / _BAG_ROWS_IN_FLIGHT * near
    partial = 2 * sums * entries.dim * 4
    lists = 32 * entries.indices
    stage = _stage(
        (gradients + found.unique) * _scattered(entries.row) + partial + lists,
        (entries.indices + found.unique) * _whole(entries.row, _SECTOR) + partial + lists,
        np.zeros(len(entries.rows)),
        summing + find + found.most_popular / _PARTIAL_ROWS / _BAG_ROWS_IN_FLIGHT * near,
        _fixed(entries, _PARTIAL_LAUNCHES, 0, machine),
        machine,
    )
    return replace(stage, waiting=(sums * summing + found.unique * adding) / _blocks(entries, machine))


def _blocks(entries: Entries, machine: Machine) -> np.ndarray:
    """Rows whose values have threads of their own, a block for up to 1,024, that the GPU holds at once."""
    chip = machine.chip()
    threads = 32 * np.ceil(entries.dim / 32)
    block = np.minimum(threads, _MOST_THREADS)
    resident = np.minimum(chip.max_threads // block, _MOST_BLOCKS)
    return np.asarray(chip.sm_count * resident * block / threads)


def _unsorted(entries: Entries, found: Reuse, machine: Machine) -> LookupStage:
    """Stage for few lookups: each thread block takes 32 values of all rows and iterates over the lookups, 32 at a time.

    Two sequential loads per step: 50 ns per lookup on A100 (pytorch/pytorch, pull request 49913: 64 values, 1,024 to
    3,072 lookups).
    """
    size = (entries.indices + 2 * found.unique) * _scattered(entries.row)
    steps = np.ceil(entries.indices / 32) * 2 * latency(machine, 1)
    zero = np.zeros(len(entries.rows))
    return _stage(size, size, zero, steps, _fixed(entries, 1, _FORWARD_LOADS, machine), machine)


def _scatter(entries: Entries, machine: Machine) -> LookupStage:
    """Backward stage of max pooling: every value of a bag is added, atomically, to the row that it came from."""
    size = entries.bags * entries.dim * (entries.element + 8.0 + 2 * _SECTOR)
    zero = np.zeros(len(entries.rows))
    return _stage(size, size, zero, zero, _fixed(entries, 1, _FORWARD_LOADS, machine), machine)


def _expand(entries: Entries, found: Reuse, machine: Machine) -> LookupStage:
    """Stage of a sparse gradient: the bag's gradient is copied for each lookup; without pooling it is a view."""
    written = entries.indices * (entries.dim * entries.element + 8.0)
    bag = (entries.kernel == _BAG).astype(float)
    zero = np.zeros(len(entries.rows))
    return _stage(
        (found.gradient_misses * _scattered(entries.row) + written) * bag,
        (entries.indices * _whole(entries.row, _SECTOR) + written) * bag,
        zero,
        zero,
        _fixed(entries, 1, _FORWARD_LOADS, machine) * entries.first(bag),
        machine,
    )


_MEASURED = ("float32", "float16", "bfloat16")


class LookupKernels(Family[EmbeddingLookup]):
    """Table lookups, pooled or not, forward and backward, one table or many."""

    name = "embedding"

    def analyse(self, operators: Sequence[EmbeddingLookup], machine: Machine) -> KernelAnalysis:
        entries = entries_of(operators)
        found = reuse_of(entries, machine)
        return analysis(entries, found, stages_of(entries, found, machine))

    def least(self, operators: Sequence[EmbeddingLookup], machine: Machine) -> np.ndarray:
        return np.zeros(len(operators))  # repeatedly accessed rows come from caches

    def covers(self, operator: EmbeddingLookup) -> bool:
        """True for operators that `costmodel measure --suite embedding` times: forward calls, and whole backward
        passes.
        """
        whole = operator.direction == "forward" or operator.whole_pass
        return whole and all(table.dtype in _MEASURED for table, _ in operator.parts)


def analysis(entries: Entries, found: Reuse, stages: Sequence[LookupStage]) -> KernelAnalysis:
    """Seconds, terms and features of the operators of ``entries``."""
    seconds = sum((stage.seconds(entries) for stage in stages), np.zeros(entries.operators))
    terms = {
        "memory:DRAM": _summed(entries, [stage.dram for stage in stages]),
        "memory:L2": _summed(entries, [stage.l2 for stage in stages]),
        "waiting": _summed(entries, [stage.waiting for stage in stages]),
        "longest": np.sum([entries.most(stage.longest) for stage in stages], axis=0),
        "launch": np.sum([stage.fixed for stage in stages], axis=0),
    }
    return KernelAnalysis(seconds, terms, {**_features(entries, found), **_shares(seconds, terms)})


def _summed(entries: Entries, values: Sequence[np.ndarray]) -> np.ndarray:
    return entries.total(np.sum(values, axis=0))


def _features(entries: Entries, found: Reuse) -> dict[str, np.ndarray]:
    lookups = entries.total(entries.indices)
    values = entries.total(entries.indices * entries.dim)
    flags = {name: entries.first(getattr(entries, name)).astype(float) for name in ("kernel", "backward", "sparse")}
    return {
        "indices": safe_log2(lookups),
        "dim": safe_log2(values / np.maximum(lookups, 1)),
        "pooling": safe_log2(lookups / np.maximum(entries.total(entries.bags), 1)),
        "tables": safe_log2(entries.total(np.ones(len(entries.rows)))),
        "unique": safe_log2(entries.total(found.unique) / np.maximum(lookups, 1)),
        "misses": safe_log2(entries.total(found.misses) / np.maximum(lookups, 1)),
        "most_popular": safe_log2(entries.most(found.most_popular)),
        "element": safe_log2(entries.first(entries.element)),
        "state": entries.first(entries.state_row + entries.state_element + entries.fused),
        **flags,
    }


def _shares(seconds: np.ndarray, terms: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Seconds, and the share of each term in them."""
    shares = {f"{name}_share": safe_log2(values / np.maximum(seconds, 1e-12) + 1e-6) for name, values in terms.items()}
    return {"seconds": safe_log2(seconds), **shares}
