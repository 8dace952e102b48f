"""Driver of a sweep: reuses known results, computes the rest, ranks them.

Rows are ranked by samples per second, or with a :class:`RunPlan` by the training run's deadline, cost and duration.

:func:`ranking_key` defines the order; :mod:`e2e.sweeps.sweep_report` keeps it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.errors import InputError
from costmodel.base.output_files import lock_folder, remove_partials
from costmodel.machines.machine_file import user_directory
from e2e.parallelism.capture_cache import capture_key
from e2e.sweeps.first_look import Promising
from e2e.sweeps.sweep_results import ResultFile, SweepRow, SweepTask
from e2e.sweeps.sweep_space import SweepCell, SweepRequest, record_of
from e2e.sweeps.workers import Workers

if TYPE_CHECKING:
    from e2e.sources.gpu_prices import GpuPrices


DAY = 86_400.0
_LARGE = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_TIMES = {"h": 3600.0, "d": DAY, "w": 7 * DAY}


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run; ``None``: not requested."""

    # Tokens to train on.
    tokens: float | None = None
    # Limit of the duration, in seconds.
    deadline: float | None = None
    prices: GpuPrices | None = None

    def seconds(self, row: SweepRow) -> float | None:
        """Seconds of the whole run at the predicted rate, without stops, checkpoints and failures."""
        if self.tokens is None or not row.tokens_per_second_per_gpu:
            return None
        return self.tokens / (row.tokens_per_second_per_gpu * row.gpus)

    def cost(self, row: SweepRow) -> float | None:
        """Cost of the whole run, or of a million tokens without a number of tokens, in the currency of the prices."""
        if self.prices is None or not row.tokens_per_second_per_gpu:
            return None
        hours = (self.tokens or 1e6) / row.tokens_per_second_per_gpu / 3600.0
        return hours * self._price(row.gpu)

    def late(self, row: SweepRow) -> bool:
        """True if the run takes longer than the deadline."""
        seconds = self.seconds(row)
        return self.deadline is not None and (seconds is None or seconds > self.deadline)

    def amount(self, row: SweepRow) -> float:
        """Sort key of rows in time: cost, else GPU hours if there is a deadline, else 0."""
        cost = self.cost(row)
        if cost is not None:
            return cost
        return 0.0 if self.deadline is None else 1.0 / (row.tokens_per_second_per_gpu or 1e-9)

    def check(self, machines: Sequence[str]) -> None:
        """Raise ``InputError`` for a machine without a price."""
        for name in machines if self.prices is not None else ():
            self._price(name)

    def _price(self, gpu: str) -> float:
        from costmodel.machines.cluster import load_gpu

        assert self.prices is not None
        return self.prices.of(gpu, load_gpu(gpu).name).per_gpu_hour


def run_plan(
    tokens: str | float | None, deadline: str | float | None, price: str | float | os.PathLike[str] | None
) -> RunPlan:
    """Parse texts such as ``1T``, ``30d`` and ``2.5``; raises ``InputError`` naming an invalid one."""
    from e2e.sources.gpu_prices import read_prices

    if deadline is not None and tokens is None:
        raise InputError(f"--deadline {deadline}: of how many tokens? give --tokens, such as 1T")
    return RunPlan(
        None if tokens is None else _number("--tokens", tokens, _LARGE, "1T or 300e9"),
        None if deadline is None else _number("--deadline", deadline, _TIMES, "30d, 12h or 2w"),
        None if price is None else read_prices(os.fspath(price) if isinstance(price, os.PathLike) else str(price)),
    )


def _number(option: str, value: str | float, units: dict[str, float], such: str) -> float:
    text = str(value).strip()
    unit = units.get(text[-1:], 0.0)
    try:
        number = float(text[:-1]) * unit if unit else float(text) * (DAY if units is _TIMES else 1.0)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e30:
        raise InputError(f"{option} {value}: expected a number such as {such}")
    return number


CAPTURES = "captures"  # cache folder of captured models within the sweep's folder
# Progress callback: number of cells done, number of all, seconds since the start, newest row.
SweepProgress = Callable[[int, int, float, SweepRow], None]


@dataclass(frozen=True)
class SweepResult:
    """Ranked result of a sweep."""

    request: SweepRequest
    # One per cell, by `ranking_key`: rows that run first, by samples per second of the whole job (not per GPU).
    rows: tuple[SweepRow, ...]
    # Number of rows computed in this run, not before.
    computed: int
    # Plan of the training run.
    plan: RunPlan = field(default_factory=RunPlan)
    # Number of further ways of `auto` that cannot fit.
    too_large: int = 0
    # Number of further ways of `auto` that look slower and were not predicted.
    left: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[SweepRow]:
        return iter(self.rows)

    def __getitem__(self, place: int) -> SweepRow:
        return self.rows[place]


def run_sweep(
    request: SweepRequest,
    cells: Sequence[SweepCell] | Promising,
    directory: Path,
    workers: Workers,
    progress: SweepProgress,
    plan: RunPlan | None = None,
) -> SweepResult:
    """Compute the cells that ``directory`` does not contain yet. Ctrl-C keeps all finished results.

    Raises ``OutputError`` if another sweep is writing there.
    """
    with lock_folder(directory, "results of a sweep"):
        try:
            remove_partials(directory, directory / CAPTURES)
            looked = cells if isinstance(cells, Promising) else Promising(tuple(cells), 0, 0)
            found = _sweep(request, looked.cells, directory, workers, progress)
            plan = plan or RunPlan()
            rows = tuple(sorted(found.rows, key=lambda row: ranking_key(row, plan)))
            return replace(found, rows=rows, plan=plan, too_large=looked.too_large, left=looked.left)
        except BaseException:
            remove_partials(directory / CAPTURES)
            raise


def _sweep(
    request: SweepRequest, cells: Sequence[SweepCell], directory: Path, workers: Workers, progress: SweepProgress
) -> SweepResult:
    results = ResultFile(directory)
    own = _own_machines()
    keys = [capture_key({**record_of(request, cell), "files": [_files(request, cell), own]}) for cell in cells]
    missing = [place for place, key in enumerate(keys) if results.get(key) is None]
    tasks = [SweepTask(request, cells[place], directory / CAPTURES) for place in missing]
    began = time.monotonic()
    failed: list[SweepRow] = []
    for done, (place, row) in enumerate(workers.run(tasks) if tasks else (), 1):
        if row.status == "failed":
            failed.append(row)
        else:
            results.add(keys[missing[place]], row)
        progress(done, len(missing), time.monotonic() - began, row)
    rows = [*(found for key in keys if (found := results.get(key)) is not None), *failed]
    return SweepResult(request, tuple(rows), len(missing))


def _files(request: SweepRequest, cell: SweepCell) -> list[str]:
    """Return the contents of files that the request names, so that a changed file changes the key."""
    named = (request.model, cell.gpu, (request.network or "").rpartition(":")[0] or request.network or "")
    return [_content(Path(name)) for name in named]


def _own_machines() -> list[str]:
    """Return the contents of the user's own machines and of what was fitted to them."""
    return [f"{path}: {_content(path)}" for path in sorted(user_directory().rglob("*"))]


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def ranking_key(row: SweepRow, plan: RunPlan | None = None) -> tuple[int, bool, float, float, int, str]:
    """Sort key of rows.

    Steps that run first, then those in time for ``plan``, by cost, samples per second (descending), fewest GPUs.
    """
    order = ("ok", "may not fit", "does not fit", "not possible", "failed")
    runs = plan is not None and row.tokens_per_second_per_gpu is not None
    late, amount = (plan.late(row), plan.amount(row)) if plan is not None and runs else (False, 0.0)
    return order.index(row.status), late, amount, -(row.samples_per_second or 0.0), row.gpus, row.way
