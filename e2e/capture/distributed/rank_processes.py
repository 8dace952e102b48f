"""Processes that a program starts for its ranks itself: none is started, this process goes on as the captured rank."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager
from importlib import import_module
from multiprocessing.process import BaseProcess
from threading import Lock
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist

from costmodel.base.errors import InputError, ModelError
from e2e.capture.distributed.world import RankPlace
from e2e.capture.launcher import Launch, parse_command
from e2e.capture.script_errors import OtherGpusError


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
            process._popen = SimpleNamespace(pid=_NO_PROCESS + number, poll=lambda: 0)
            started.append(process)
            if number == local:
                process.run()

        def unless_rank(name: str, answer: Any) -> None:
            asked = getattr(BaseProcess, name)

            def ask(process: Any, *given: Any) -> Any:
                return answer if process in started else asked(process, *given)

            stack.enter_context(patch.object(BaseProcess, name, ask))

        stack.enter_context(patch.object(BaseProcess, "start", start))
        stack.enter_context(patch.object(os, "kill", _kill_of(os.kill)))
        unless_rank("join", None)
        unless_rank("is_alive", False)
        unless_rank("terminate", None)
        yield


@contextmanager
def started_programs(place: RankPlace, run: Callable[[Launch, int], None]) -> Iterator[None]:
    """Context in which a Python program that the program starts, itself or by a launcher such as torchrun, or that it
    becomes (``os.exec``), runs here by ``run``, as the rank ``place``; one whose output is read runs by itself.

    ``run`` is told how many processes of it the program starts.
    """
    begin, launch_here = subprocess.Popen.__init__, import_module("torch.distributed.run")

    def start(process: Any, args: Any, *more: Any, **options: Any) -> None:
        launch = None if {subprocess.PIPE} & {options.get("stdout"), options.get("stderr")} else _program_of(args)
        if launch is None:
            begin(process, args, *more, **options)
            return
        vars(process).update(args=args, pid=0, returncode=0, stdin=None, stdout=None, stderr=None, **_ENDED)
        given, own = dict(options.get("env") or os.environ), place.environment()
        if not launch.launcher and given.get("LOCAL_RANK", own["LOCAL_RANK"]) != own["LOCAL_RANK"]:
            return  # another rank
        count = launch.gpus or int(given.get("WORLD_SIZE", place.world_size))
        go_on(launch, count, {**given, **launch.environment, **(own if "RANK" in given else {})}, options.get("cwd"))

    def execute(path: Any, args: Any, environment: Mapping[str, str] | None = None) -> NoReturn:
        launch, given = _program_of(args), dict(environment or os.environ)
        if launch is None:
            raise ModelError(f"the program becomes {shlex.join(args)}, which is no program of Python; predict that one")
        go_on(launch, launch.gpus or int(given.get("WORLD_SIZE", place.world_size)), given)
        raise SystemExit(0)

    def go_on(launch: Launch, count: int, environment: Mapping[str, str], folder: Any = None) -> None:
        with patch.dict(os.environ, environment), patch.object(sys, "argv", list(sys.argv)), chdir(folder or "."):
            run(launch, count)

    def run_by_torchrun(options: Any) -> None:
        count = int(options.nproc_per_node) * int(str(options.nnodes).rpartition(":")[2])
        go_on(Launch(options.training_script, tuple(options.training_script_args), options.module), count, {})

    with ExitStack() as stack:
        stack.enter_context(patch.object(subprocess.Popen, "__init__", start))
        stack.enter_context(patch.object(launch_here, "run", run_by_torchrun))
        for name in ("execv", "execve", "execvp", "execvpe"):
            stack.enter_context(patch.object(os, name, execute))
        yield


# What a process that has ended has besides.
_ENDED = {"_child_created": False, "_communication_started": False, "_waitpid_lock": Lock(), "universal_newlines": None}
# The first number of a rank's process: beyond those of Linux.
_NO_PROCESS = 1 << 22
# Programs that train nothing.
_TOOLS = ("pip", "torch", "ensurepip", "ray", "venv")


def _program_of(command: Any) -> Launch | None:
    """Return the Python program that a command starts, or None if it starts something else."""
    try:
        words = shlex.split(command) if isinstance(command, str) else [os.fsdecode(word) for word in command]
        launch = parse_command(words)
    except (InputError, ValueError, TypeError):
        return None
    python = launch.launcher or re.match(r"python[\d.]*$", os.path.basename(words[0])) or words[0].endswith(".py")
    return launch if python and launch.program.partition(".")[0] not in _TOOLS else None


def _spawn(place: RankPlace) -> Any:
    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *others: Any, **more: Any) -> None:
        if nprocs != min(place.gpus_per_node, place.world_size):
            raise OtherGpusError(f"the program starts {nprocs} processes", nprocs)
        fn(place.rank % nprocs, *args)

    return spawn


def _kill_of(kill: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Return a replacement of ``os.kill``, by which a program ends its ranks where one of them failed."""

    def ignoring_ranks(number: int, signal: int) -> None:
        if number < _NO_PROCESS:
            kill(number, signal)

    return ignoring_ranks


def _is_rank(process: Any, number: int) -> bool:
    """True if a process is that of rank ``number``, by the first number among the arguments of its function: those
    that load data or watch have none, or another, or are daemons, which may have no workers of their own.
    """
    if process.daemon or str(getattr(process._target, "__module__", "")).startswith("torch.utils.data"):
        return False
    numbers = [each for each in (*process._args, *process._kwargs.values()) if type(each) is int]
    return bool(numbers) and numbers[0] == number
