"""The overheads suite: costs of launching and waiting, and steps of small models with and without the profiler.

Traces contain the overheads T1 to T5; the same step without the profiler shows the profiler's share of them. The
models are small: their kernels are short, so that host overheads dominate.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from costmodel.base.errors import OutputError, Say
from costmodel.base.output_files import whole_file
from costmodel.measure.device import TimingEffort, provenance, synchronize, time_call
from costmodel.measure.runs import SuiteProgress, Table, TimeBudget

TORCH = True
COLUMNS = ("quantity", "median_s", "minimum_s", "samples", "trace")
STEPS, SAMPLES, TRACED_STEPS, WARM_UP_STEPS = 20, 11, 10, 5
_LAUNCHES = 200  # well below the length of the launch queue, on which the host would wait
_SECONDS_OF_A_MODEL = 15.0

Seconds = list[float]
BATCH = 8


def measure_overheads(device: Any, output: Path, budget: TimeBudget, resume: bool, report: Say) -> Path:
    """Write ``output/overheads.csv`` and ``.json``, and a Kineto trace per model (``overheads-<model>.json.gz``).

    ``step <model>`` is the mean time of a step without the profiler, ``profiled step <model>`` with it, both with one
    wait at the end of every ``STEPS`` and ``TRACED_STEPS`` of them.
    """
    with Table(output, "overheads", COLUMNS, provenance(device), resume) as table:
        done = {row["quantity"] for row in table.rows}
        progress = SuiteProgress(budget, report, 4 + len(MODELS))
        for quantity, samples in _primitives(device, done):
            _add(table, quantity, samples)
            progress.step(quantity)
        for name in MODELS:
            if f"profiled step {name}" not in done and budget.left(_SECONDS_OF_A_MODEL):
                _measure_model(name, device, output, table, f"step {name}" in done)
            progress.step(name)
        report(f"overheads measured in {budget.elapsed:.0f} s; {table.path}")
    return table.path


def _add(table: Table, quantity: str, samples: Seconds, trace: str = "") -> None:
    middle, least = f"{statistics.median(samples):.4e}", f"{min(samples):.4e}"
    table.add(quantity=quantity, median_s=middle, minimum_s=least, samples=len(samples), trace=trace)


def _primitives(device: Any, done: set[str]) -> Iterator[tuple[str, Seconds]]:
    """Seconds of primitives: ``host launch`` is the host time of an in-place operator of one element, ``kernel floor``
    its device time, ``synchronize`` a wait for an idle device, ``item`` a launch, a copy and a wait.
    """
    one = torch.ones(1, device=device)
    yield from _unless("host launch", done, lambda: _host_launch(lambda: one.add_(1), device))
    yield from _unless("kernel floor", done, lambda: [time_call(lambda: one.add_(1), device, TimingEffort()).median])
    yield from _unless("synchronize", done, lambda: _walls(lambda: synchronize(device)))
    yield from _unless("item", done, lambda: _walls(one.item))


def _unless(quantity: str, done: set[str], measure: Callable[[], Seconds]) -> Iterator[tuple[str, Seconds]]:
    if quantity not in done:
        yield quantity, measure()


def _host_launch(call: Callable[[], Any], device: Any) -> Seconds:
    samples = []
    for _ in range(SAMPLES):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            call()
        samples.append((time.perf_counter() - start) / _LAUNCHES)
    synchronize(device)
    return samples


def _walls(call: Callable[[], Any], count: int = 100) -> Seconds:
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return samples


def _measure_model(name: str, device: Any, output: Path, table: Table, timed: bool) -> None:
    step = make_step(name, device)
    step_seconds(step, device, WARM_UP_STEPS)
    if not timed:
        _add(table, f"step {name}", [step_seconds(step, device, STEPS) for _ in range(SAMPLES)])
    trace = f"overheads-{name}.json.gz"
    _add(table, f"profiled step {name}", [traced_seconds(step, device, TRACED_STEPS, output / trace)], trace)


def step_seconds(step: Callable[[], Any], device: Any, steps: int) -> float:
    """Mean seconds of ``steps`` steps, including the wait for the device at the end."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / steps


def traced_seconds(step: Callable[[], Any], device: Any, steps: int, path: Path, shapes: bool = False) -> float:
    """Mean seconds as in :func:`step_seconds`, under the profiler, whose Kineto trace is written to ``path``, gzipped.

    A discarded session before it absorbs the profiler's start-up cost. ``shapes`` are recorded at a cost per operator.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities):
        step()
        synchronize(device)
    with profile(activities=activities, record_shapes=shapes) as profiler:
        seconds = step_seconds(_as_steps(step), device, steps)
    try:
        # The profiler's writer ignores a full disk and leaves a partial file when interrupted.
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / path.name
            profiler.export_chrome_trace(str(written))
            with written.open("rb") as source, whole_file(path) as stream:
                shutil.copyfileobj(source, stream)
    except (OSError, RuntimeError) as error:
        raise OutputError(f"{path}: cannot be written ({error}); give another folder") from None
    return seconds


def _as_steps(step: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap ``step`` to mark every call as ``ProfilerStep#n``, the name that trace readers look for."""
    count = iter(range(1_000_000))

    def marked() -> None:
        with torch.profiler.record_function(f"ProfilerStep#{next(count)}"):
            step()

    return marked


class _Convolutions(nn.Module):
    """Residual blocks of convolution, batch norm and ReLU, as in image networks."""

    def __init__(self, blocks: int = 6, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.stem(pictures)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class _Transformer(nn.Module):
    """Transformer layers with separate operations: products, softmax, layer norm, dropout, GELU."""

    def __init__(self, layers: int = 4, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(1000, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.mixing = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for place, (mixing, wide, narrow) in enumerate(zip(self.mixing, self.wide, self.narrow, strict=True)):
            x = x + self._attend(mixing(self.norms[2 * place](x)))
            hidden = nn.functional.gelu(wide(self.norms[2 * place + 1](x)))
            x = x + nn.functional.dropout(narrow(hidden), 0.1, self.training)
        return self.head(x.mean(1))

    def _attend(self, mixed: torch.Tensor) -> torch.Tensor:
        batch, length, width = mixed.shape
        q, k, v = mixed.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5), -1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, width // 3)


class _Recommender(nn.Module):
    """Embedding bags, pairwise interaction and an MLP, as in DLRM."""

    def __init__(self, tables: int = 8, dim: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, dim, mode="sum") for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * tables, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        looked_up = torch.stack([table(rows[:, place]) for place, table in enumerate(self.tables)], dim=1)
        return self.top((looked_up @ looked_up.transpose(1, 2)).flatten(1))


def _layers(depth: int = 8, width: int = 64) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)), nn.Linear(width, 10)
    )


Make = Callable[[Any], tuple[nn.Module, torch.Tensor]]
MODELS: dict[str, Make] = {
    "mlp": lambda device: (_layers(), torch.randn(BATCH, 64, device=device)),
    "convolutions": lambda device: (_Convolutions(), torch.randn(BATCH, 3, 16, 16, device=device)),
    "transformer": lambda device: (_Transformer(), torch.randint(1000, (BATCH, 16), device=device)),
    "recommender": lambda device: (_Recommender(), torch.randint(1000, (BATCH, 8, 4), device=device)),
}
OPTIMIZERS = {"mlp": torch.optim.SGD, "recommender": torch.optim.Adagrad}


def make_step(name: str, device: Any) -> Callable[[], None]:
    """One training step of the model ``name``: forward, loss, backward, foreach optimizer (default: AdamW)."""
    torch.manual_seed(0)
    model, data = MODELS[name](device)
    model.to(device).train()
    labels = torch.randint(10, (BATCH,), device=device)
    optimizer = OPTIMIZERS.get(name, torch.optim.AdamW)(model.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(data), labels).backward()
        optimizer.step()

    return step
