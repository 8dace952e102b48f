"""Where the cells of a sweep are computed: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Protocol

from costmodel.errors import InputError, ProjectError, SimulationError
from e2e.sweep.evaluate import Job, evaluate
from e2e.sweep.results import Row


class Workers(Protocol):
    """Computes jobs in any order: (place of the job, its row). A job's :class:`ProjectError` is raised."""

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Row]]: ...


class LocalWorkers:
    """``count`` processes of this machine, one thread each; with one, this process itself."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise InputError(f"--workers {count}: must be at least 1")
        self.count = count

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Row]]:
        if self.count == 1 or len(jobs) == 1:
            for place, job in enumerate(jobs):
                yield place, evaluate(job)
            return
        # Forked processes would inherit PyTorch's locks and threads.
        pool = ProcessPoolExecutor(min(self.count, len(jobs)), get_context("spawn"), initializer=_one_thread)
        try:
            places = {pool.submit(evaluate, job): place for place, job in enumerate(jobs)}
            for future in as_completed(places):
                yield places[future], future.result()
        except BrokenProcessPool as error:
            raise SimulationError(
                "a worker died, most likely for lack of memory; the results so far are kept: run the same command "
                "again with fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class RayWorkers:
    """A Ray cluster at ``address`` (``auto``, ``local`` or ``HOST:PORT``); each job takes one of its CPUs."""

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise InputError("--ray needs the package ray: pip install '.[cluster]'") from error
        self._ray: Any = ray
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            summary = " ".join(str(error).split())[:200]
            raise InputError(f"--ray {address}: no Ray cluster answers there: {summary}") from error

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Row]]:
        remote = self._ray.remote(num_cpus=1)(evaluate)
        # Captures are kept on the machine that makes them: a path of this one may not exist there.
        places = {remote.remote(job): place for place, job in enumerate(jobs)}
        waiting = list(places)
        try:
            while waiting:
                done, waiting = self._ray.wait(waiting)
                for reference in done:
                    yield places[reference], self._result(reference)
        finally:
            for reference in waiting:
                self._ray.cancel(reference)

    def _result(self, reference: Any) -> Row:
        try:
            row: Row = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ProjectError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayError as error:
            raise SimulationError(f"a Ray worker was lost; the results so far are kept: {error}") from error
        return row


def _one_thread() -> None:
    """Two processes with as many threads as cores each would fight for them."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
