"""Workers of data loaders, which are not started: the batches of a few steps are made in the program's own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

_loading = import_module("torch.utils.data.dataloader")
_worker = import_module("torch.utils.data._utils.worker")


class _InProcess(_loading._SingleProcessDataLoaderIter):  # type: ignore[misc,name-defined]
    """Iterator of a loader with workers, which does the work of the first of them itself."""

    def __init__(self, loader: Any) -> None:
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
        with self._as_worker():
            return super()._next_data()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._dataset_fetcher = _loading._DatasetKind.create_fetcher(
            self._dataset_kind, self._dataset, self._auto_collation, self._collate_fn, self._drop_last
        )


@contextmanager
def loaders_without_workers() -> Iterator[None]:
    """Context in which data loaders start no processes."""
    get = torch.utils.data.DataLoader._get_iterator

    def get_iterator(self: Any) -> Any:
        return _InProcess(self) if self.num_workers else get(self)

    loader = torch.utils.data.DataLoader
    with (
        patch.object(loader, "_get_iterator", get_iterator),
        patch.object(loader, "check_worker_number_rationality", lambda self: None),
    ):
        yield
