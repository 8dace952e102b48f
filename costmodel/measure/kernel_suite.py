"""The suites of kernels and of embedding lookups: a row per operator until the time budget is used up.

Cases are operators of every family, sizes log-uniform, in a random but fixed order. Every family has its own random
generator and the families are interleaved by weight, so that any prefix of the list is a fair sample of all of them:
a run cut short by its time budget is smaller, not biased.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from costmodel.base.errors import Say
from costmodel.base.process import pass_ending
from costmodel.measure.device import (
    TimingEffort,
    failure_line,
    largest_tensor_bytes,
    provenance,
    time_call,
)
from costmodel.measure.runs import SuiteProgress, Table, TimeBudget
from costmodel.operators.any_operator import AnyOperator, dtype_of, to_record
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import (
    ConvolutionBackward,
    Elementwise,
    Gemm,
    Loss,
    MemoryCopy,
    Normalization,
    OptimizerStep,
    Pooling,
    Rearrangement,
    Reduction,
    Softmax,
)
from costmodel.operators.layers import Conv2d, element_bytes
from costmodel.operators.lookups import EmbeddingLookup, IndexStatistics, TableLookup, zipf

SEED = 20240917
FLOATS = ("float32", "bfloat16", "float16")
PRODUCTS = ("float32", "tf32", "bfloat16", "float16")
# Full-size tensors read and written by each piece of the foreach form and by whole fused updates.
FOREACH = {"foreach_add": (2, 1), "foreach_mul": (1, 1), "foreach_addcmul": (3, 1), "foreach_sqrt": (1, 1)}
FUSED = {"sgd": (3, 2), "adam": (4, 3), "adamw": (4, 3)}
BINARY = ("add", "mul", "div")
UNARY = ("relu", "gelu", "tanh", "sigmoid", "silu", "exp", "dropout")

Draw = Callable[[random.Random, int], AnyOperator]


@dataclass(frozen=True)
class MeasuredCase:
    """One operator to measure. ``family``: the group it was drawn from, for progress and selection."""

    family: str
    operator: AnyOperator


def _size(rng: random.Random, low: int, high: int, multiple: int = 1) -> int:
    """Log-uniform size between ``low`` and ``high``, rounded to ``multiple`` three times out of four (as widths usually
    are).
    """
    value = round(low * (high / low) ** rng.random())
    if multiple > 1 and rng.random() < 0.75:
        value = round(value / multiple) * multiple
    return int(min(max(value, low), high))


def _gemm(rng: random.Random, largest: int) -> Gemm:
    top = max(int((largest / 4) ** 0.5), 16)
    m, n, k = (_size(rng, 8, min(top, 16384), 64) for _ in range(3))
    transposed = rng.random() < 0.6
    return Gemm(1, m, n, k, rng.choice(PRODUCTS), False, transposed, transposed and rng.random() < 0.7)


def _batched_gemm(rng: random.Random, largest: int) -> Gemm:
    batch = _size(rng, 2, 512)
    top = max(int((largest / 4 / batch) ** 0.5), 8)
    m, n = (_size(rng, 8, min(top, 4096), 32) for _ in range(2))
    k = rng.choice((32, 64, 80, 128, min(top, 1024)))
    return Gemm(batch, m, n, min(k, max(top, 8)), rng.choice(PRODUCTS), False, rng.random() < 0.5)


def _convolution(rng: random.Random, largest: int) -> Conv2d:
    size, kernel = rng.choice((7, 8, 14, 17, 28, 35, 56, 112, 224)), rng.choice((1, 1, 3, 3, 5, 7))
    top = min(max(largest // (8 * size * size), 16), 1024)
    channels, outputs = _size(rng, 3, top, 32), _size(rng, 16, max(top, 17), 32)
    groups = 1
    if rng.random() < 0.1:
        groups = outputs = channels
    room = max(int(largest / (size * size * max(channels, outputs) * 4)), 1)
    batch = _size(rng, 1, min(room, 256), 8)
    stride, pad = rng.choice((1, 1, 2)), kernel // 2
    return Conv2d(
        batch, channels, size, size, outputs, (kernel, kernel), (stride, stride), (pad,) * 4, (1, 1), groups,
        dtype=rng.choice(PRODUCTS), channels_last=rng.random() < 0.5,
    )  # fmt: skip


def _convolution_backward(rng: random.Random, largest: int) -> ConvolutionBackward:
    return ConvolutionBackward(_convolution(rng, largest), rng.choice(("data", "weight")))


def _attention(rng: random.Random, largest: int) -> Attention:
    head_dim, heads = rng.choice((64, 64, 80, 128)), rng.choice((8, 12, 16, 20, 32))
    length = _size(rng, 64, min(max(largest // (heads * head_dim * 16), 65), 8192), 64)
    room = max(int(largest / (heads * length * head_dim * 16)), 1)
    batch = _size(rng, 1, min(room, 64))
    kv_heads = heads // 4 if heads % 4 == 0 and rng.random() < 0.2 else heads
    dtype = rng.choice(("bfloat16", "bfloat16", "float16", "float32"))
    return Attention(
        batch, heads, length, length, head_dim, kv_heads, rng.random() < 0.5, dtype, _direction(rng)
    )  # fmt: skip


def _direction(rng: random.Random) -> Any:
    return rng.choice(("forward", "backward"))


def _matrix(rng: random.Random, largest: int) -> tuple[int, int]:
    columns = _size(rng, 32, 65536, 64)
    return _size(rng, 1, max(largest // (16 * columns), 1)), columns


def _softmax(rng: random.Random, largest: int) -> Softmax:
    rows, columns = _matrix(rng, largest)
    return Softmax(rows, columns, rng.choice(FLOATS), _direction(rng), rng.choice(("softmax", "log_softmax")))


def _normalization(rng: random.Random, largest: int) -> Normalization:
    if rng.random() < 0.6:
        rows, columns = _matrix(rng, largest)
        return Normalization("layer_norm", rows, min(columns, 16384), rng.choice(FLOATS), _direction(rng))
    channels = _size(rng, 16, 2048, 32)
    rows = _size(rng, 64, max(largest // (16 * channels), 65))
    dtype, direction, last = rng.choice(FLOATS), _direction(rng), rng.random() < 0.5
    return Normalization("batch_norm", rows, channels, dtype, direction, channels_last=last)


def _elementwise(rng: random.Random, largest: int) -> Elementwise:
    elements, dtype, place = _size(rng, 1024, max(largest // 16, 2048)), rng.choice(FLOATS), rng.random()
    if place < 0.2:
        columns = min(_size(rng, 16, 16384, 64), elements)
        rows = elements // columns
        return Elementwise(rng.choice(BINARY), rows * columns, 1, 1, columns, dtype, one_by_one=True)
    if place < 0.4:
        return Elementwise(rng.choice(BINARY), elements, inputs=2, dtype=dtype)
    if place < 0.9:
        kind = rng.choice(UNARY)
        return Elementwise(kind, elements, outputs=1, dtype=dtype)
    return Elementwise("cast", elements, dtype="float32", output_dtype=rng.choice(("bfloat16", "float16")))


def _reduction(rng: random.Random, largest: int) -> Reduction:
    rows, columns = _matrix(rng, largest)
    kind, contiguous = rng.choice(("sum", "mean", "max", "norm")), rng.random() < 0.6
    return Reduction(kind, rows * columns, rows if contiguous else columns, rng.choice(FLOATS), contiguous)


def _embedding(rng: random.Random, largest: int) -> EmbeddingLookup:
    dim = rng.choice((16, 32, 64, 128, 256, 768, 1024))
    rows = _size(rng, 100, max(min(largest // (8 * dim), 20_000_000), 101))
    bags = _size(rng, 64, max(min(largest // (8 * dim), 65536), 65))
    pooling = rng.choice((1, 1, 10, 50, 100))
    direction = _direction(rng)
    return EmbeddingLookup(rows, dim, bags * pooling, bags, direction=direction, whole_pass=direction == "backward")


def _copy(rng: random.Random, largest: int) -> MemoryCopy:
    kind: Any = rng.choice(("host_to_device", "host_to_device", "device_to_host", "device_to_device", "memset"))
    pinned = kind in ("host_to_device", "device_to_host") and rng.random() < 0.6
    return MemoryCopy(_size(rng, 4096, max(min(largest // 2, 1 << 28), 8192)), kind, pinned)


def _rearrangement(rng: random.Random, largest: int) -> Rearrangement:
    kind, dtype = rng.choice(("transpose", "concat", "tril", "gather", "index")), rng.choice(FLOATS)
    inner, elements = _size(rng, 16, 2048, 16), _size(rng, 4096, max(largest // 16, 8192))
    if kind == "tril":
        inner = max(int(min(elements, 1 << 26) ** 0.5), 2)
        return Rearrangement(kind, inner * inner, inner, dtype)
    outer = max(elements // inner, 2)
    if kind == "transpose":
        return Rearrangement(kind, outer * inner, 1, dtype)
    inputs = rng.choice((2, 3, 8)) if kind == "concat" else 1
    return Rearrangement(kind, outer * inner * inputs, inner, dtype, inputs)


def _pooling(rng: random.Random, largest: int) -> Pooling:
    size, kernel = rng.choice((14, 28, 56, 112)), rng.choice((2, 3))
    channels = _size(rng, 16, 512, 16)
    batch = _size(rng, 1, max(min(largest // (16 * channels * size * size), 128), 1))
    out = (size - kernel) // 2 + 1
    kind: Any = rng.choice(("max", "average"))
    return Pooling(
        kind, batch, channels, size, size, out, out, (kernel, kernel), rng.choice(FLOATS), _direction(rng),
        rng.random() < 0.5,
    )  # fmt: skip


def _optimizer(rng: random.Random, largest: int) -> OptimizerStep:
    kinds = FUSED if rng.random() < 0.5 else FOREACH
    kind = rng.choice(tuple(kinds))
    tensors, reads_writes = _size(rng, 1, 200), kinds[kind]
    each = _size(rng, 256, max(min(largest // (16 * tensors), 1 << 26), 512))
    return OptimizerStep(kind, each * tensors, tensors, *reads_writes)


def _loss(rng: random.Random, largest: int) -> Loss:
    kind, columns = rng.choice(("nll", "cross_entropy", "bce", "mse")), _size(rng, 2, 65536)
    if kind in ("bce", "mse"):
        columns = 1
    rows = _size(rng, 32, max(min(largest // (16 * columns), 1 << 22), 33))
    return Loss(kind, rows, columns, direction=_direction(rng))


EXPONENTS = (None, None, 0.6, 0.9, 1.05, 1.2)  # None: uniform lookups
DIMS = (8, 16, 32, 64, 64, 128, 128, 256)
POOLINGS = (1, 1, 2, 5, 10, 20, 50, 100)
LOOKUP_DTYPES = ("float32", "float32", "float16", "bfloat16")
_TABLE_TENSORS = 4  # largest table, in units of the largest tensor
_LARGEST_INDICES = 1 << 23
_LONGEST = 120  # characters of an operator in a line of progress
_DIGITS = 6  # digits of statistics in rows of the table


def _table(rng: random.Random, largest: int, bags: int, dtype: str) -> TableLookup:
    """A table and a batch whose output and indices fit ``largest`` bytes; the table may be a few times that."""
    dim, pooling = rng.choice(DIMS), rng.choice(POOLINGS)
    size = element_bytes(dtype)
    bags = max(min(bags, largest // (2 * dim * size)), 1)
    pooling = max(min(pooling, largest // (32 * bags), _LARGEST_INDICES // bags), 1)
    most = max(_TABLE_TENSORS * largest // (4 * dim * size), 64)
    rows = _size(rng, 32, most)
    return TableLookup(rows, dim, bags * pooling, bags, dtype, _popularity(rows, rng.choice(EXPONENTS)))


def _popularity(rows: int, exponent: float | None) -> IndexStatistics | None:
    """Zipf statistics with few digits, so that a row of the table is short; ``None`` for uniform lookups."""
    if exponent is None:
        return None
    exact = zipf(rows, exponent)
    shares = [round(each, _DIGITS) for each in exact.group_shares[1:]]
    return replace(exact, group_shares=(1.0 - sum(shares), *shares))


def _lookup(kernel: Any, rng: random.Random, largest: int) -> EmbeddingLookup:
    table = _table(rng, largest, _size(rng, 16, 65536), rng.choice(LOOKUP_DTYPES))
    if kernel == "embedding":
        table = replace(table, bags=table.indices)
        if table.indices * table.dim * element_bytes(table.dtype) > largest:
            table = replace(table, indices=table.bags // 100 + 1, bags=table.bags // 100 + 1)
    backward = rng.random() < 0.6
    mode: Any = rng.choice(("sum", "sum", "mean", "max")) if kernel == "embedding_bag" else "sum"
    sparse = backward and mode != "max" and rng.random() < 0.35
    return EmbeddingLookup(
        table.rows,
        table.dim,
        table.indices,
        table.bags,
        dtype=table.dtype,
        direction="backward" if backward else "forward",
        statistics=table.statistics,
        kernel=kernel,
        gradient="sparse" if sparse else "dense",
        whole_pass=backward,
        mode=mode,
    )


# Weight: roughly the number of cases per hundred; large for kernels whose time is hard to predict.
DRAWS: dict[str, tuple[Draw, int]] = {
    "gemm": (_gemm, 24),
    "batched_gemm": (_batched_gemm, 12),
    "convolution": (_convolution, 12),
    "convolution_backward": (_convolution_backward, 12),
    "attention": (_attention, 10),
    "softmax": (_softmax, 6),
    "normalization": (_normalization, 8),
    "elementwise": (_elementwise, 8),
    "reduction": (_reduction, 4),
    "embedding": (_embedding, 6),
    "copy": (_copy, 4),
    "rearrangement": (_rearrangement, 5),
    "pooling": (_pooling, 3),
    "optimizer": (_optimizer, 4),
    "loss": (_loss, 3),
}


# Of the embedding suite: lookups of one table over sizes, reuse and kinds of gradients.
LOOKUPS: dict[str, tuple[Draw, int]] = {
    "embedding": (partial(_lookup, "embedding"), 3),
    "embedding_bag": (partial(_lookup, "embedding_bag"), 4),
}


def kernel_cases(
    largest_bytes: int, draws: Mapping[str, tuple[Draw, int]] = DRAWS, seed: int = SEED
) -> Iterator[MeasuredCase]:
    """Endless sequence of distinct cases whose largest tensor has about ``largest_bytes``; deterministic for a seed."""
    generators = {name: random.Random(f"{seed}-{name}") for name in draws}
    order, names = random.Random(seed), [name for name, (_, weight) in draws.items() for _ in range(weight)]
    seen = set()
    while True:
        order.shuffle(names)
        for name in names:
            operator = draws[name][0](generators[name], largest_bytes)
            if operator not in seen:
                seen.add(operator)
                yield MeasuredCase(name, operator)


TORCH = True
COLUMNS = ("family", "operator", "median_s", "minimum_s", "repeats", "calls", "error")


def measure_kernels(
    device: Any,
    output: Path,
    budget: TimeBudget,
    resume: bool,
    report: Say,
    name: Literal["kernels", "embedding"] = "kernels",
    most: int | None = None,
) -> Path:
    """Write ``output/<name>.csv`` and ``.json``; returns the former. ``most``: limit on the cases, for tests.

    An operator that torch cannot run on ``device`` gives a row with an ``error`` and no time.
    """
    largest, draws = largest_tensor_bytes(device), LOOKUPS if name == "embedding" else DRAWS
    with Table(output, name, COLUMNS, provenance(device) | {"largest_tensor_bytes": largest}, resume) as table:
        done = {row["operator"] for row in table.rows}
        measured = measure_cases(islice(kernel_cases(largest, draws), most), done, device, budget, table, report)
        report(f"{measured} operators measured in {budget.elapsed:.0f} s, {len(done)} known before; {table.path}")
    return table.path


def measure_cases(
    cases: Iterable[MeasuredCase], done: Collection[str], device: Any, budget: TimeBudget, table: Table, report: Say
) -> int:
    """Measure each case that is not in ``done`` while there is time; returns their number."""
    progress = SuiteProgress(budget, report)
    for case in cases:
        if not budget.left():
            break
        text = json.dumps(to_record(case.operator), separators=(",", ":"))
        if text not in done:
            table.add(family=case.family, operator=text, **_row(case, device))
            progress.step(text[:_LONGEST])
    return progress.done


def _row(case: MeasuredCase, device: Any) -> dict[str, Any]:
    """Row of one case; an error of torch becomes the row's error, and the suite continues."""
    try:
        return _measure(case.operator, device)
    except Exception as error:
        pass_ending(error)
        return {"error": failure_line(case.operator, error, device)}


def _measure(operator: Any, device: Any) -> dict[str, Any]:
    import torch

    from costmodel.measure.operator_calls import allow_tf32, make_call

    allow_tf32(dtype_of(operator) == "tf32")
    torch.manual_seed(0)
    call = make_call(operator, device)
    if call is None:
        return {"error": "no call for this operator"}
    timing = time_call(call, device, TimingEffort())
    times = {"median_s": f"{timing.median:.4e}", "minimum_s": f"{timing.minimum:.4e}"}
    return {**times, "repeats": timing.repeats, "calls": timing.calls}
