"""Workers that compute the cells of a sweep: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Protocol, TypeVar

from costmodel.base.errors import InputError
from costmodel.base.process import interrupts_held
from e2e.sweeps.sweep_results import SweepRow, SweepTask, evaluate, failed_row
from e2e.sweeps.worker_process import prepare_worker

Task = TypeVar("Task")
Answer = TypeVar("Answer")
WORKER_DIED = "its worker process died, most likely for lack of memory"


class Workers(Protocol):
    """Interface of workers: computes tasks in any order and yields (place of the task, its row)."""

    def run(self, tasks: Sequence[SweepTask]) -> Iterator[tuple[int, SweepRow]]: ...


MOST_WORKERS = 1024  # limit for one machine


class LocalWorkers:
    """Workers in ``count`` processes of this machine, one thread each; with one, in this process."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise InputError(f"--workers {count}: must be at least 1")
        if count > MOST_WORKERS:
            raise InputError(
                f"--workers {count}: more than {MOST_WORKERS} processes; leave it out for one on each core"
            )
        self.count = count

    def run(self, tasks: Sequence[SweepTask]) -> Iterator[tuple[int, SweepRow]]:
        if self.count == 1 or len(tasks) == 1:
            for place, task in enumerate(tasks):
                yield place, evaluate(task)
            return
        left = dict(enumerate(tasks))
        for place, row in each_in_processes(evaluate, left, self.count):
            del left[place]
            yield place, row
        for place, task in left.items():
            yield place, failed_row(task, WORKER_DIED)


def each_in_processes(
    function: Callable[[Task], Answer],
    tasks: Mapping[int, Task],
    count: int,
    prepare: Callable[[int], None] = prepare_worker,
) -> Iterator[tuple[int, Answer]]:
    """Compute ``function`` of every task in ``count`` processes; yield (place of the task, result) as they finish.

    A task whose process dies has no result. ``prepare``: what each process does first.
    """
    left = dict(tasks)
    if not left:
        return
    for place, answer in _in_processes(function, dict(left), count, prepare):
        del left[place]
        yield place, answer
    # A worker died and took the others with it. The remaining tasks run one by one, to find the faulty one.
    for place, task in left.items():
        yield from _in_processes(function, {place: task}, 1, prepare)


def _in_processes(
    function: Callable[[Task], Answer], tasks: Mapping[int, Task], count: int, prepare: Callable[[int], None]
) -> Iterator[tuple[int, Answer]]:
    """Yield results as they finish; tasks lost with a dead process have none."""
    # Forked processes would inherit PyTorch's locks and threads.
    context, processes = get_context("spawn"), min(count, len(tasks))
    pool = ProcessPoolExecutor(processes, context, initializer=prepare, initargs=(os.getpid(),))
    try:
        with _without_main(), interrupts_held():  # all processes start with the first tasks
            places = {pool.submit(function, task): place for place, task in tasks.items()}
        for future in as_completed(places):
            try:
                row = future.result()
            except BrokenProcessPool:
                continue
            yield places[future], row
    except BaseException:  # Ctrl-C: the workers' results are not needed
        _kill(list((pool._processes or {}).values()))
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _kill(processes: Sequence[BaseProcess]) -> None:
    """Kill the processes and wait for their end, so that their partial files can be removed."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


@contextmanager
def _without_main() -> Iterator[None]:
    """Prevent processes started in this context from running the user's main program again.

    New processes do so to know its classes: a program that calls a sweep without ``if __name__ == "__main__":`` would
    start another one in each.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class RayWorkers:
    """Workers on a Ray cluster at ``address`` (``auto``, ``local`` or ``HOST:PORT``).

    Each task takes one of its CPUs.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise InputError("--ray needs the package ray: pip install '.[cluster]'") from error
        self._ray: Any = ray
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # raised by Ray also for a node that is slow to start
            summary = " ".join(str(error).split())[:200]
            raise InputError(
                f"--ray {address}: no Ray cluster answers there: {summary}; start it with `ray start`"
            ) from error

    def run(self, tasks: Sequence[SweepTask]) -> Iterator[tuple[int, SweepRow]]:
        remote = self._ray.remote(num_cpus=1)(evaluate)
        # Captures are kept on the machine that makes them: a path of this machine may not exist there.
        places = {remote.remote(task): place for place, task in enumerate(tasks)}
        waiting = list(places)
        try:
            while waiting:
                done, waiting = self._ray.wait(waiting)
                for reference in done:
                    yield places[reference], self._result(reference, tasks[places[reference]])
        finally:
            for reference in waiting:
                self._ray.cancel(reference)

    def _result(self, reference: Any, task: SweepTask) -> SweepRow:
        try:
            row: SweepRow = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return failed_row(task, f"a Ray worker was lost: {error}")
        return row
