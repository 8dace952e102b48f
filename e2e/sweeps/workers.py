"""Workers that compute the cells of a sweep: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from costmodel.base.errors import InputError
from e2e.sweeps.sweep_results import SweepRow, SweepTask, evaluate, failed_row
from e2e.sweeps.worker_process import each_in_processes

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
