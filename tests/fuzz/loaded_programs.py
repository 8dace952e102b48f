"""Command lines in forks of a process that has loaded their libraries once: what takes long of a short one is loading.

The process is started with this file and told what to do in lines of JSON (:func:`_serve`). A fork runs ``-m PROGRAM``
as Python itself does, in a session of its own, with the environment, folder, limits and user that it is given; it ends
as any interpreter does, threads and ``atexit`` included. What it does not try is the loading itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOOK_SECONDS = 0.05
_LONGEST_LOOK = 1.0
_FORKED = ("jemalloc_bg_thd",)  # Arrow's allocator, which knows forks
# Forks load these themselves: one starts a thread as it is loaded, which forks would lack, one counts in the end what
# it lacks.
_LEFT_OUT = ("onnxruntime", "triton")
_MAIN = ("__main__", "__mp_main__")


def look(seconds: float = LOOK_SECONDS) -> float:
    """Sleeps ``seconds``; so many have gone by, but never more than one: a process that was stopped for a while, with
    all that it watches, counts none of that.
    """
    began = time.monotonic()
    time.sleep(seconds)
    return min(time.monotonic() - began, _LONGEST_LOOK)


class LoadedPrograms:
    """The process that loads and forks; a context manager. ``load``: names of modules, or a command line whose modules
    are learnt from running it once.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {}), "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=self._environment,
        )  # fmt: skip

    def __enter__(self) -> LoadedPrograms:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process; forks that are still there go on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def learn(self, words: Sequence[object], folder: Path) -> ForkedCommand:
        """Runs a command line to its end in ``folder`` and loads all that it loaded; the command line as it ended."""
        with tempfile.TemporaryDirectory(prefix="learn-") as place:
            modules = Path(place) / "modules.json"
            command = self.start(words, folder, Path(place) / "messages.txt", modules=str(modules))
            command.wait()
            told = (Path(place) / "messages.txt").read_text(errors="replace")
            if not modules.is_file():
                raise RuntimeError(f"{words} ended with {command.returncode}: {told[-2000:]}")
            self._ask(load=json.loads(modules.read_text()))
        return command

    def start(
        self,
        words: Sequence[object],
        folder: Path,
        output: Path,
        environment: Mapping[str, str] | None = None,
        **limits: Any,
    ) -> ForkedCommand:
        """A fork that runs ``words`` (``-m PROGRAM ...``) in ``folder``; what it prints goes to ``output``.

        ``limits``: ``seconds`` of processor time, ``user``: the number of one whose rights it has, ``errors``: a file
        of its own for standard error.
        """
        given = {**self._environment, **(environment or {})}
        asked = {"words": [*map(str, words)], "folder": str(folder), "output": str(output), "environment": given}
        return ForkedCommand(self._ask(start={**asked, **limits})["pid"], self)

    def _ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that loads programs has ended")
        told: dict[str, Any] = json.loads(answer)
        if "error" in told:
            raise RuntimeError(told["error"])
        return told

    def asked_for(self, pid: int) -> dict[str, Any]:
        """What is known of the fork ``pid``: nothing, or how it ended."""
        return self._ask(ask=pid)


@dataclass
class ForkedCommand:
    """As far as it is needed what ``subprocess.Popen`` is. ``used``: seconds of a processor, ``peak_bytes``: memory of
    the fork, both known when it has ended.
    """

    pid: int
    programs: LoadedPrograms
    returncode: int | None = None
    used: float = 0.0
    peak_bytes: int = 0

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; ``None`` while it runs."""
        if self.returncode is None and (told := self.programs.asked_for(self.pid)):
            self.returncode, self.used, self.peak_bytes = told["status"], told["seconds"], told["peak_bytes"]
        return self.returncode

    def wait(self) -> int:
        """Its exit status, as soon as there is one."""
        while (status := self.poll()) is None:
            time.sleep(LOOK_SECONDS / 2)
        return status

    def send_signal(self, number: int) -> None:
        """As ``kill`` does; nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


# --- the process that loads and forks -------------------------------------------------------------


def _serve(orders: Any, answers: int) -> dict[str, Any]:
    """Does as it is told; returns in a fork alone, with what that shall run."""

    def tell(answer: dict[str, Any]) -> None:
        os.write(answers, json.dumps(answer).encode() + b"\n")

    for line in orders:
        order = json.loads(line)
        if "load" in order:
            _load(order["load"])
            others = _other_threads()
            tell({"error": f"a fork would lack the threads {', '.join(others)}"} if others else {})
        elif "ask" in order:
            pid, status, usage = os.wait4(order["ask"], os.WNOHANG)
            seconds, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10
            tell({"status": os.waitstatus_to_exitcode(status), "seconds": seconds, "peak_bytes": peak} if pid else {})
        else:
            ready, begins = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(answers)
                orders.close()
                os.close(ready)
                asked: dict[str, Any] = {**order["start"], "begins": begins}
                return asked
            os.close(begins)
            os.read(ready, 1)
            os.close(ready)
            tell({"pid": pid})
    os._exit(0)


def _load(names: Sequence[str]) -> None:
    import gc

    from tests.library_loading import load_modules

    if "tvm" in names:  # without PyTorch, as `fusion` does
        from schedules.contract.lean_import import import_tvm_alone

        import_tvm_alone()
    load_modules(name for name in names if name.partition(".")[0] not in _LEFT_OUT)
    gc.collect()
    gc.freeze()


def _other_threads() -> list[str]:
    tasks = Path("/proc/self/task")
    names = {
        each.name: (each / "comm").read_text().strip() for each in tasks.iterdir() if each.name != str(os.getpid())
    }
    return [name for name in names.values() if name not in _FORKED]


def _become(asked: dict[str, Any]) -> None:
    """Runs what a fork was asked for, and raises what that raises."""
    import atexit
    import gc
    import resource
    import runpy
    import signal

    # Triton tells in the end of all that is still held, as of a mistake; without it nobody pays for looking at that.
    atexit.register(lambda: gc.unfreeze() if "triton" in sys.modules else None)
    os.setsid()
    streams = [os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)]
    streams.append(
        os.open(asked["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND) if "errors" in asked else streams[0]
    )
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    for stream in set(streams):
        os.close(stream)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    if "seconds" in asked:
        resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"], asked["seconds"] + 2))
    if "user" in asked:
        os.setgroups([])
        os.setgid(asked["user"])
        os.setuid(asked["user"])
    if "modules" in asked:
        atexit.register(_note_modules, asked["modules"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    option, program, *rest = asked["words"]
    assert option == "-m"
    sys.argv, sys.path[0] = [program, *rest], asked["folder"]
    os.write(asked["begins"], b".")
    os.close(asked["begins"])
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def _note_modules(path: str) -> None:
    names = [name for name, module in sys.modules.items() if module is not None and name not in _MAIN]
    Path(path).write_text(json.dumps(names))


if __name__ == "__main__":
    _orders, _answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    for _stream in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), _stream)
    _become(_serve(_orders, _answers))
