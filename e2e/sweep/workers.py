"""Where the cells of a sweep are computed: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Protocol

from costmodel.errors import InputError
from e2e.sweep.evaluate import Job, evaluate, failure
from e2e.sweep.results import Row

WORKER_DIED = "its worker process died, most likely for lack of memory"


class Workers(Protocol):
    """Computes jobs in any order: (place of the job, its row)."""

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
        left = dict(enumerate(jobs))
        for place, row in _in_processes(left, self.count):
            del left[place]
            yield place, row
        # A worker died and took the others with it. What is left is tried one by one, to tell whose fault it is.
        for place, job in left.items():
            rows = [row for _, row in _in_processes({place: job}, 1)]
            yield place, rows[0] if rows else failure(job, WORKER_DIED)


def _in_processes(jobs: Mapping[int, Job], count: int) -> Iterator[tuple[int, Row]]:
    """Rows as they come; none of those jobs that a process which died took with it."""
    # Forked processes would inherit PyTorch's locks and threads.
    pool = ProcessPoolExecutor(min(count, len(jobs)), get_context("spawn"), initializer=_prepare)
    try:
        places = {pool.submit(evaluate, job): place for place, job in jobs.items()}
        for future in as_completed(places):
            try:
                row = future.result()
            except BrokenProcessPool:
                continue
            yield places[future], row
    except BaseException:  # Ctrl-C: nobody waits for what the workers are doing
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
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
                    yield places[reference], self._result(reference, jobs[places[reference]])
        finally:
            for reference in waiting:
                self._ray.cancel(reference)

    def _result(self, reference: Any, job: Job) -> Row:
        try:
            row: Row = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return failure(job, f"a Ray worker was lost: {error}")
        return row


def _prepare() -> None:
    """One thread: two processes with as many threads as cores each would fight for them. Ctrl-C is for the process that
    asked, which ends this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
