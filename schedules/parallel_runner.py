"""Several workers for one tuner: compiling takes far longer than timing, and every core can compile."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from costmodel.operators import Operator
from schedules.messages import Candidate, Outcome
from schedules.runner import Runner
from schedules.target import CpuTarget

MAX_WORKERS = 8

_Result = tuple[Mapping[str, int], Outcome] | BaseException


class ParallelRunner:
    """Like :class:`Runner`, with ``workers`` processes (default: one per usable core, at most 8).

    They build, run and verify candidates side by side; each times alone, while the others wait
    (:class:`schedules.turns.Turns`). ``options`` are those of :class:`Runner`. A context manager.
    """

    def __init__(self, cpu: CpuTarget, workers: int | None = None, **options: Any) -> None:
        count = workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self._turn_file = tempfile.NamedTemporaryFile(prefix="turns-")  # noqa: SIM115 (closed with the runner)
        self._runners = [Runner(cpu, turn_file=self._turn_file.name, **options) for _ in range(count)]

    def measure(self, operator: Operator, config: Mapping[str, int], best_seconds: float | None = None) -> Outcome:
        """As :meth:`Runner.measure`."""
        return self._runners[0].measure(operator, config, best_seconds)

    def compare(self, arms: Sequence[Sequence[Candidate]]) -> list[Outcome]:
        """As :meth:`Runner.compare`: arms that take turns are timed by one process."""
        return self._runners[0].compare(arms)

    def measure_batch(
        self, operator: Operator, configs: Sequence[Mapping[str, int]], best_seconds: float | None = None
    ) -> Iterator[tuple[Mapping[str, int], Outcome]]:
        """Measures candidates on all workers; yields each as it is done, in any order.

        Leaving the iteration early waits for those that are being measured; Ctrl-C kills their workers.
        """
        waiting = deque(configs)
        results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=_work, args=(runner, operator, waiting, best_seconds, results), daemon=True)
            for runner in self._runners[: len(configs)]
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in range(len(configs)):
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        except GeneratorExit:
            raise
        except BaseException:
            waiting.clear()
            for runner in self._runners:
                runner.kill()
            raise
        finally:
            waiting.clear()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        """Ends the workers."""
        for runner in self._runners:
            runner.close()
        self._turn_file.close()

    def __enter__(self) -> ParallelRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _work(
    runner: Runner,
    operator: Operator,
    waiting: deque[Mapping[str, int]],
    best_seconds: float | None,
    results: queue.SimpleQueue[_Result],
) -> None:
    """Takes candidates until none is left; an error of the runner itself is handed to the main thread."""
    while True:
        try:
            config = waiting.popleft()
        except IndexError:
            return
        try:
            results.put((config, runner.measure(operator, config, best_seconds)))
        except BaseException as error:
            results.put(error)
            return
