"""Calls of embedding lookups on a device, torch's or table-batched, with random lookups that follow statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from costmodel.measure.operator_calls import DTYPES, DeviceCall, random
from costmodel.operators.lookups import EmbeddingLookup, TableLookup, uniform

TORCH = True


def draw_indices(table: TableLookup, device: Any) -> torch.Tensor:
    """Draw ``table.indices`` independent row numbers, int64, with the probabilities of ``table.statistics``.

    Popular rows are spread over the table: neighbours in popularity are not neighbours in memory.
    """
    statistics = table.statistics or uniform(table.rows)
    sizes = torch.tensor(statistics.group_rows, dtype=torch.float64, device=device)
    shares = torch.tensor(statistics.group_shares, dtype=torch.float64, device=device)
    ends = shares.cumsum(0)
    group = torch.searchsorted(ends, torch.rand(table.indices, dtype=torch.float64, device=device) * ends[-1])
    group = group.clamp(max=len(sizes) - 1)
    within = torch.rand(table.indices, dtype=torch.float64, device=device) * sizes[group]
    rank = ((sizes.cumsum(0) - sizes)[group] + within).long().clamp(max=table.rows - 1)
    return (rank * _stride(table.rows)) % table.rows


def _stride(rows: int) -> int:
    """Step near the golden section of ``rows`` that visits every row once."""
    step = max(int(rows * 0.6180339887), 1)
    while math.gcd(step, rows) != 1:
        step += 1
    return step


RATE, EPSILON = 0.01, 1e-8


def triton_runs_on(device: Any) -> bool:
    """True if the Triton kernels can be measured on ``device``."""
    return device.type == "cuda" and find_spec("triton") is not None


class TableBatch:
    """Weights of ``tables`` in one flat buffer, the lookups of a batch, and scratch memory of the backward pass.

    All tables have the same number of bags and the same dtype. ``indices``: table by table, by default drawn from their
    statistics.
    """

    def __init__(self, tables: Sequence[TableLookup], device: Any, indices: torch.Tensor | None = None) -> None:
        self.batch, self.width = tables[0].bags, sum(each.dim for each in tables)
        self.block = max(1 << (max(each.dim for each in tables) - 1).bit_length(), 16)
        self.dims = self._numbers([each.dim for each in tables], device)
        self.columns = self._starts([each.dim for each in tables], device)
        self.row_starts = self._starts([each.rows for each in tables], device)
        self.weight_starts = self._starts([each.rows * each.dim for each in tables], device)
        size = sum(each.rows * each.dim for each in tables)
        self.weights = torch.randn(size, dtype=DTYPES[tables[0].dtype], device=device)
        self.state = torch.zeros(sum(each.rows for each in tables), device=device)
        self.indices = torch.cat([draw_indices(each, device) for each in tables]) if indices is None else indices
        self.lengths = torch.cat([_lengths(each, device) for each in tables])
        self.offsets = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])
        self.gradient = torch.randn((self.batch, self.width), device=device)  # FP32, as FBGEMM's output

    def forward(self) -> torch.Tensor:
        """Sums of rows, shape (batch, width)."""
        from costmodel.measure import triton_tables

        output = torch.empty_like(self.gradient)
        grid = (len(self.lengths),)
        triton_tables.forward_kernel[grid](
            self.weights, self.indices, self.offsets, self.weight_starts, self.dims, self.columns, output,
            self.batch, self.width, BLOCK=self.block, num_warps=self._warps(),
        )  # fmt: skip
        return output

    def backward(self, optimizer: str) -> None:
        """Update the rows in the batch by ``sgd`` or ``rowwise_adagrad``, without waiting for the device."""
        from costmodel.measure import triton_tables

        bags, rows, lookups, run_starts = self._sorted()
        count, longest = len(rows), triton_tables.SPLIT
        slots = -(-count // longest)
        partial = torch.zeros((slots, self.block), device=rows.device)
        partial_starts = torch.full((slots,), -1, device=rows.device)
        adagrad = optimizer == "rowwise_adagrad"
        where = (self.row_starts, self.weight_starts, self.dims)
        triton_tables.backward_kernel[(count,)](
            self.gradient, self.weights, self.state, rows, lookups, run_starts, bags, partial, partial_starts,
            *where, self.columns, count, self.batch, self.width, RATE, EPSILON, BLOCK=self.block,
            TILE=min(max(1024 // self.block, 1), 8), LONGEST=longest, ADAGRAD=adagrad, num_warps=self._warps(),
        )  # fmt: skip
        triton_tables.backward_long_kernel[(slots,)](
            self.weights, self.state, rows, lookups, bags, partial, partial_starts, *where, self.batch, RATE, EPSILON,
            BLOCK=self.block, ADAGRAD=adagrad, num_warps=self._warps(),
        )  # fmt: skip

    def _sorted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Bag of each lookup; rows of all tables sorted, the lookup of each, and the start of its row's run."""
        count = len(self.indices)
        every = torch.arange(len(self.lengths), device=self.indices.device)
        bags = torch.repeat_interleave(every, self.lengths, output_size=count)
        linear = self.indices + self.row_starts[bags // self.batch]
        rows, lookups = torch.sort(linear)
        places = torch.arange(count, device=rows.device)
        first = torch.ones_like(rows, dtype=torch.bool)
        torch.ne(rows[1:], rows[:-1], out=first[1:])
        run_starts = torch.cummax(torch.where(first, places, 0), 0).values
        return bags, rows, lookups, run_starts

    def _warps(self) -> int:
        return min(max(self.block // 256, 1), 8)

    @staticmethod
    def _numbers(values: Sequence[int], device: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    @classmethod
    def _starts(cls, sizes: Sequence[int], device: Any) -> torch.Tensor:
        return cls._numbers([sum(sizes[:place]) for place in range(len(sizes))], device)


def _lengths(table: TableLookup, device: Any) -> torch.Tensor:
    """Number of lookups of every bag, as even as possible."""
    each, rest = divmod(table.indices, table.bags)
    lengths = torch.full((table.bags,), each, dtype=torch.int64, device=device)
    lengths[:rest] += 1
    return lengths


def make_embedding_call(operator: EmbeddingLookup, device: Any) -> tuple[DeviceCall, list[torch.Tensor]]:
    """The call, and its lookups for every table (for the statistics of the row).

    A backward call runs only the backward pass. Errors of torch and Triton propagate.
    """
    if operator.implementation == "table_batched":
        tables = [table for table, count in operator.parts for _ in range(count)]
        batch = TableBatch(tables, device)
        lookups = list(torch.split(batch.indices, [each.indices for each in tables]))
        return (
            partial(batch.backward, operator.fused_optimizer) if operator.fused_optimizer else batch.forward
        ), lookups
    return _torch_call(operator, device)


def _torch_call(operator: EmbeddingLookup, device: Any) -> tuple[DeviceCall, list[torch.Tensor]]:
    (table, _), learned = operator.parts[0], operator.direction == "backward"
    weight = random((table.rows, table.dim), table.dtype, device).requires_grad_(learned)
    rows, sparse = draw_indices(table, device), operator.gradient == "sparse"
    if operator.implementation == "embedding":
        forward: DeviceCall = partial(F.embedding, rows, weight, sparse=sparse)
    else:
        offsets = (torch.arange(table.bags, device=device) * table.indices) // table.bags
        forward = partial(F.embedding_bag, rows, weight, offsets, mode=operator.mode, sparse=sparse)
    if not learned:
        return forward, [rows]
    output = forward()
    gradient = torch.randn_like(output)
    return (lambda: torch.autograd.grad(output, weight, gradient, retain_graph=True)), [rows]
