"""Worker processes: their start, and tasks computed in several of them.

Nothing slow is imported at module level: until the worker is tied to the process that started it, it would outlive that
one, and loading PyTorch takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import TypeVar

from costmodel.base.process import end_with_parent, interrupts_held

Task = TypeVar("Task")
Answer = TypeVar("Answer")


def tie_worker(parent: int) -> None:
    """Limit the worker to one thread and tie it to ``parent``.

    Several processes with as many threads as cores each would compete for them. Ctrl-C is handled by ``parent``, which
    ends this process; without ``parent`` this process would wait forever.
    """
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"


def prepare_worker(parent: int) -> None:
    """Tie the worker to ``parent`` as :func:`tie_worker`, and limit PyTorch to one thread."""
    tie_worker(parent)
    import torch

    torch.set_num_threads(1)


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
