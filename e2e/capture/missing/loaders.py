"""Workers of data loaders, which are not started: the batches of a few steps are made in the program's own process,
which notes how long a core takes for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from statistics import median
from time import thread_time
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

from e2e.capture.python_calls import Uncounted

_loading = import_module("torch.utils.data.dataloader")
_worker = import_module("torch.utils.data._utils.worker")


@dataclass(frozen=True)
class Loading:
    """Work of the workers of one loader for a step."""

    workers: int
    # On one core of this machine.
    core_seconds: float

    @property
    def seconds(self) -> float:
        """Time in which the workers, each with a core, load the data of a step."""
        return self.core_seconds / self.workers


@dataclass
class LoadedBatches:
    """Batches that workers would have made: number of workers and seconds of a core for each, by loader."""

    _seconds: dict[int, tuple[int, list[float]]] = field(default_factory=dict)
    _begun: dict[int, int] = field(default_factory=dict)

    def add(self, loader: int, workers: int, seconds: float) -> None:
        """Note a batch."""
        self._seconds.setdefault(loader, (workers, []))[1].append(seconds)

    def end_step(self) -> tuple[Loading, ...]:
        """Return what was loaded since the last call, each batch as long as the median of its loader's."""
        found = []
        for loader, (workers, seconds) in self._seconds.items():
            batches = len(seconds) - self._begun.get(loader, 0)
            self._begun[loader] = len(seconds)
            if batches:
                found.append(Loading(workers, batches * median(seconds)))
        return tuple(found)


class _InProcess(_loading._SingleProcessDataLoaderIter):  # type: ignore[misc,name-defined]
    """Iterator of a loader with workers, which does the work of the first of them itself."""

    def __init__(self, loader: Any, batches: LoadedBatches) -> None:
        self._batches, self._loader, self._asked_workers = batches, id(loader), loader.num_workers
        asked = loader.num_workers, loader.timeout
        loader.num_workers, loader.timeout = 0, 0
        try:
            super().__init__(loader)
        finally:
            loader.num_workers, loader.timeout = asked
        self._told = _worker.WorkerInfo(id=0, num_workers=1, seed=self._base_seed, dataset=loader.dataset)
        if loader.worker_init_fn is not None:
            with self._as_worker():
                loader.worker_init_fn(0)

    @contextmanager
    def _as_worker(self) -> Iterator[None]:
        with patch.object(_worker, "_worker_info", self._told):
            yield

    def _next_data(self) -> Any:
        # As in a process of its own: nothing is recorded or counted there.
        with self._as_worker(), Uncounted(), _disable_current_modes():
            begin = thread_time()
            data = super()._next_data()
            self._batches.add(self._loader, self._asked_workers, thread_time() - begin)
            return data

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._dataset_fetcher = _loading._DatasetKind.create_fetcher(
            self._dataset_kind, self._dataset, self._auto_collation, self._collate_fn, self._drop_last
        )


@contextmanager
def loaders_without_workers(batches: LoadedBatches) -> Iterator[None]:
    """Context in which data loaders start no processes; what their workers would have made is noted in ``batches``."""
    get = torch.utils.data.DataLoader._get_iterator

    def get_iterator(self: Any) -> Any:
        return _InProcess(self, batches) if self.num_workers else get(self)

    loader = torch.utils.data.DataLoader
    with (
        patch.object(loader, "_get_iterator", get_iterator),
        patch.object(loader, "check_worker_number_rationality", lambda self: None),
    ):
        yield
