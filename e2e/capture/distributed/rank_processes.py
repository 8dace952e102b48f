"""Processes that a program starts for its ranks itself: none is started, this process goes on as the captured rank."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from costmodel.base.errors import InputError, ModelError
from e2e.capture.distributed.world import RankPlace
from e2e.capture.launcher import Launch, parse_command


@contextmanager
def spawned_ranks(place: RankPlace) -> Iterator[None]:
    """Context in which ``torch.multiprocessing.spawn``, and processes started one for each rank, run the function of
    the rank ``place`` here.
    """
    spawning = import_module("torch.multiprocessing.spawn")
    with ExitStack() as stack:
        for module in (torch.multiprocessing, spawning):
            stack.enter_context(patch.object(module, "spawn", _spawn(place)))
        stack.enter_context(patch.object(spawning, "start_processes", _spawn(place)))
        started: list[BaseProcess] = []
        local = int(place.environment()["LOCAL_RANK"])
        begin = BaseProcess.start

        def start(process: Any) -> None:
            number = len(started)
            if dist.is_initialized() or not _is_rank(process, number):
                begin(process)
                return
            started.append(process)
            if number == local:
                process.run()

        def unless_rank(name: str, answer: Any) -> None:
            asked = getattr(BaseProcess, name)

            def ask(process: Any, *given: Any) -> Any:
                return answer if process in started else asked(process, *given)

            stack.enter_context(patch.object(BaseProcess, name, ask))

        stack.enter_context(patch.object(BaseProcess, "start", start))
        unless_rank("join", None)
        unless_rank("is_alive", False)
        unless_rank("terminate", None)
        yield


@contextmanager
def launched_commands(place: RankPlace, run: Callable[[Launch], None]) -> Iterator[None]:
    """Context in which a program that starts itself, or another, by a launcher such as torchrun goes on here as the
    rank ``place``: ``run`` is called with what would be started.
    """
    begin = subprocess.Popen.__init__

    def start(process: Any, args: Any, *others: Any, **options: Any) -> None:
        launch = _launch_of(args)
        if launch is None:
            begin(process, args, *others, **options)
            return
        if launch.gpus not in (None, place.world_size):
            raise ModelError(
                f"the program starts {launch.gpus} processes by {launch.launcher}: give --gpus {launch.gpus}"
            )
        own = place.environment()
        os.environ.update({name: value for name, value in (options.get("env") or {}).items() if name not in own})
        os.environ.update(launch.environment)
        run(launch)

    with patch.object(subprocess.Popen, "__init__", start):
        yield


def _launch_of(command: Any) -> Launch | None:
    """Return what a launcher of ranks is told to start, or None if the command is something else."""
    try:
        launch = parse_command(shlex.split(command) if isinstance(command, str) else [str(word) for word in command])
    except (InputError, ValueError, TypeError):
        return None
    return launch if launch.launcher else None


def _spawn(place: RankPlace) -> Any:
    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *others: Any, **more: Any) -> None:
        fn(place.rank % nprocs, *args)

    return spawn


def _is_rank(process: Any, number: int) -> bool:
    """True if a process is that of rank ``number``, by the first number among the arguments of its function: those
    that load data or watch have none, or another.
    """
    if str(getattr(process._target, "__module__", "")).startswith("torch.utils.data"):
        return False
    numbers = [each for each in (*process._args, *process._kwargs.values()) if type(each) is int]
    return bool(numbers) and numbers[0] == number
