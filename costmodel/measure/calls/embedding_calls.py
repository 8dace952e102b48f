"""Calls of embedding lookups on a device, on random rows with lookups that follow their statistics."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from costmodel.measure.calls.draws import draw_indices
from costmodel.measure.calls.sample_tensors import DeviceCall, random
from costmodel.measure.calls.table_batch import TableBatch
from costmodel.operators.lookups import EmbeddingLookup

TORCH = True


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
