"""Triton kernels of table-batched embeddings for measurements: forward, and backward fused with the optimizer.

Tables of any sizes are stored in one flat buffer of weights. Bags are ordered by table: bag t * batch + s is that of
sample s in table t, ``offsets`` (bags + 1,) give the start of its lookups. A program processes one bag, as the thread
groups of FBGEMM's kernels do. Backward, lookups are sorted by row: a program processes up to ``SPLIT`` lookups of a
row, and rows with more of them accumulate their sums in ``partial`` for a second kernel. Importing this module requires
Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

TORCH = True
SPLIT = 1024  # a row's lookups per program, as in FBGEMM (max_segment_length_per_cta)


@triton.jit(do_not_specialize=["batch", "width"])
def forward_kernel(
    weights, indices, offsets, weight_starts, dims, columns, output, batch, width, BLOCK: tl.constexpr
):  # fmt: skip
    """Sums of rows: bag t * batch + s is written to ``output`` (batch, width) from column ``columns[t]`` on."""
    bag = tl.program_id(0).to(tl.int64)
    table = bag // batch
    dim = tl.load(dims + table)
    start = tl.load(weight_starts + table)
    first = tl.load(offsets + bag)
    last = tl.load(offsets + bag + 1)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(first, last):
        row = tl.load(indices + place)
        total += tl.load(weights + start + row * dim + column, mask=inside, other=0.0).to(tl.float32)
    target = output + (bag % batch) * width + tl.load(columns + table) + column
    tl.store(target, total.to(output.dtype.element_ty), mask=inside)


@triton.jit
def update_row(
    weights, state, linear, row, start, dim, gradient, inside, rate, epsilon,
    BLOCK: tl.constexpr, ADAGRAD: tl.constexpr,
):  # fmt: skip
    """SGD, or row-wise Adagrad: state += mean(g^2); w -= rate * g / (sqrt(state) + epsilon)."""
    column = tl.arange(0, BLOCK)
    step = gradient * rate
    if ADAGRAD:
        known = tl.load(state + linear) + tl.sum(gradient * gradient, axis=0) / dim
        tl.store(state + linear, known)
        step = step / (tl.sqrt(known) + epsilon)
    place = weights + start + row * dim + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) - step
    tl.store(place, value.to(weights.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "batch", "width"])
def backward_kernel(
    gradient, weights, state, rows, lookups, run_starts, bags, partial, partial_starts,
    row_starts, weight_starts, dims, columns, count, batch, width, rate, epsilon,
    BLOCK: tl.constexpr, TILE: tl.constexpr, LONGEST: tl.constexpr, ADAGRAD: tl.constexpr,
):  # fmt: skip
    """Program p processes the lookups of one row from sorted position p on, if its share begins there.

    ``rows``: sorted rows of all tables; ``lookups``: lookup of each; ``run_starts``: start of its row's run; ``bags``:
    bag of each lookup; ``partial`` (programs / LONGEST, BLOCK), ``partial_starts``: for rows of more than LONGEST
    lookups.
    """
    place = tl.program_id(0).to(tl.int64)
    begin = tl.load(run_starts + place)
    if (place - begin) % LONGEST == 0:
        column = tl.arange(0, BLOCK)
        linear = tl.load(rows + place)
        table = tl.load(bags + tl.load(lookups + place)) // batch
        dim = tl.load(dims + table)
        inside = column < dim
        source = tl.load(columns + table) + column
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        tile = tl.arange(0, TILE)
        at = place
        more = at < count
        while more:
            each = at + tile
            ours = (each < count) & (each < place + LONGEST)
            ours = ours & (tl.load(run_starts + each, mask=ours, other=-1) == begin)
            bag = tl.load(bags + tl.load(lookups + each, mask=ours, other=0), mask=ours, other=0)
            pointer = gradient + (bag % batch)[:, None] * width + source[None, :]
            total += tl.sum(tl.load(pointer, mask=ours[:, None] & inside[None, :], other=0.0).to(tl.float32), axis=0)
            at += TILE
            more = tl.sum(ours.to(tl.int32), axis=0) == TILE
        beyond = begin + LONGEST
        long = tl.load(run_starts + beyond, mask=beyond < count, other=-1) == begin
        if long:
            slot = begin // LONGEST
            tl.atomic_add(partial + slot * BLOCK + column, total, mask=inside)
            tl.store(partial_starts + slot, begin)
        else:
            row = linear - tl.load(row_starts + table)
            start = tl.load(weight_starts + table)
            update_row(weights, state, linear, row, start, dim, total, inside, rate, epsilon, BLOCK, ADAGRAD)


@triton.jit(do_not_specialize=["batch"])
def backward_long_kernel(
    weights, state, rows, lookups, bags, partial, partial_starts, row_starts, weight_starts, dims, batch, rate, epsilon,
    BLOCK: tl.constexpr, ADAGRAD: tl.constexpr,
):  # fmt: skip
    """Update the rows whose sums several programs have accumulated in ``partial``; no two such rows share a slot."""
    slot = tl.program_id(0).to(tl.int64)
    begin = tl.load(partial_starts + slot)
    if begin >= 0:
        column = tl.arange(0, BLOCK)
        linear = tl.load(rows + begin)
        table = tl.load(bags + tl.load(lookups + begin)) // batch
        dim = tl.load(dims + table)
        inside = column < dim
        total = tl.load(partial + slot * BLOCK + column, mask=inside, other=0.0)
        row = linear - tl.load(row_starts + table)
        start = tl.load(weight_starts + table)
        update_row(weights, state, linear, row, start, dim, total, inside, rate, epsilon, BLOCK, ADAGRAD)
