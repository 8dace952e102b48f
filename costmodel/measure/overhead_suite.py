"""The overheads suite: costs of launching and waiting, and steps of small models with and without the profiler.

Traces contain the overheads T1 to T5; the same step without the profiler shows the profiler's share of them.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def measure_overheads(device: Any, output: Path, budget: TimeBudget, resume: bool, report: Say) -> Path:
    """Write ``output/overheads.csv`` and ``.json``, and a Kineto trace per model (``overheads-<model>.json.gz``).

    ``step <model>`` is the mean time of a step without the profiler, ``profiled step <model>`` with it, both with one
    wait at the end of every ``STEPS`` and ``TRACED_STEPS`` of them.
    """
    from costmodel.measure.small_models import MODELS

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
    import torch

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
    from costmodel.measure.small_models import make_step

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
    import torch

    count = iter(range(1_000_000))

    def marked() -> None:
        with torch.profiler.record_function(f"ProfilerStep#{next(count)}"):
            step()

    return marked
