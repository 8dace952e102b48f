"""One engine in its own process.

Engines keep thread pools that spin after each call, pin themselves to cores, or bring their own copy of OpenMP. In one
process they would compete for cores, so each engine has a process, and a block of calls returns only when the engine's
threads are asleep.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, cast

import numpy as np

from costmodel.base.errors import Say
from costmodel.base.process import end_with_parent
from fusion.comparing.engine import (
    Arrays,
    EngineCall,
    EngineSpec,
    EngineWorkload,
    LayerTime,
    ProfiledSession,
    Session,
    Unavailable,
)
from fusion.model.library_messages import sentence

PREPARE_TIMEOUT_SECONDS, CALL_TIMEOUT_SECONDS = 1200.0, 120.0
SETTLE_INTERVAL_SECONDS = 0.01
SETTLE_LIMIT_SECONDS = 1.0
BUSY_FRACTION = 0.1
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): resets VmHWM to the current resident size


class EngineFailed(Exception):
    """Raised if the engine raised, crashed or hung; the message is one line."""


class Worker:
    """Parent side. A failed request ends the process and raises :class:`EngineFailed`."""

    def __init__(self, spec: EngineSpec, threads: int) -> None:
        self.spec = spec
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        self._connection, child = Pipe()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(threads),
            "TVM_NUM_THREADS": str(threads),
            "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",  # keep FP32 engines from using BF16 because of a user's environment
        }
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fusion.comparing.engine_worker", str(child.fileno()), str(os.getpid())],
                pass_fds=[child.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is sent to the parent only, which then ends the whole group
            )

    def prepare(self, workload: EngineWorkload, timeout: float | None, progress: Say = lambda _: None) -> None:
        """Load, compile, tune; ``timeout`` is the limit in seconds between messages. Raises ``Unavailable``,
        ``EngineFailed``.
        """
        self._ask("prepare", self.spec, workload, timeout=timeout, progress=progress)

    def bind(self, inputs: Arrays) -> tuple[str, Arrays]:
        """Fix the inputs and select the fastest mode; return its name and the outputs."""
        return self._ask("bind", inputs, timeout=CALL_TIMEOUT_SECONDS)

    def run(self, inputs: Arrays) -> Arrays:
        """Return the outputs on other inputs than the bound ones."""
        return self._ask("run", inputs, timeout=CALL_TIMEOUT_SECONDS)

    def block(self, warmup: int, calls: int, seconds: float) -> np.ndarray:
        """Durations in seconds of back-to-back calls: at least ``calls``, for at least ``seconds``."""
        return self._ask("block", warmup, calls, seconds, timeout=CALL_TIMEOUT_SECONDS)

    def layers(self, inputs: Arrays, seconds: float) -> list[LayerTime]:
        """Times of every kernel, from runs for ``seconds``; raises ``Unavailable`` if the engine has none."""
        return self._ask("layers", inputs, seconds, timeout=PREPARE_TIMEOUT_SECONDS)

    def growth(self) -> int | None:
        """Peak resident memory of the process minus its memory after loading the model, in bytes, or None if unknown.

        It covers arenas, scratch memory and outputs of the calls since then.
        """
        return self._ask("growth", timeout=CALL_TIMEOUT_SECONDS)

    def close(self) -> None:
        """End the engine's process and its children. Can be called repeatedly."""
        if self._connection.closed:
            return
        self._connection.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: str, *arguments: Any, timeout: float | None, progress: Say = lambda _: None) -> Any:
        try:
            self._connection.send((request, arguments))
            kind, reply = self._receive(timeout)
            while kind == "progress":
                progress(reply)
                kind, reply = self._receive(timeout)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            reason = self._post_mortem()
            self.close()
            raise EngineFailed(reason) from None
        if kind != "ok":
            self.close()
            raise Unavailable(reply) if kind == "unavailable" else EngineFailed(reply)
        return reply

    def _receive(self, timeout: float | None) -> tuple[str, Any]:
        if not self._connection.poll(timeout):
            self.close()  # it may be spinning and would take cores from other engines
            raise EngineFailed(f"no answer within {timeout:.0f} s")
        return self._connection.recv()

    def _post_mortem(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.poll()
        ended = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2000))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"its process died ({ended})" + (f": {lines[-1].strip()}" if lines else "")


class _Host:
    """Child side: holds the session and answers requests."""

    def __init__(self, progress: Say) -> None:
        self._progress = progress
        self._session: Session | None = None
        self._call: EngineCall | None = None
        self._loaded_bytes: int | None = None

    def prepare(self, spec: EngineSpec, workload: EngineWorkload) -> None:
        self._session = spec.load().prepare(workload, self._progress)
        self._loaded_bytes = start_of_growth()

    def growth(self) -> int | None:
        return None if self._loaded_bytes is None else peak_growth(self._loaded_bytes)

    def bind(self, inputs: Mapping[str, np.ndarray]) -> tuple[str, Arrays]:
        assert self._session is not None  # the parent prepares first
        self._call = self._session.bind(inputs)
        return self._session.mode, self.run(inputs)

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        assert self._session is not None  # the parent prepares first
        return {name: np.array(array) for name, array in self._session.run(inputs).items()}

    def layers(self, inputs: Mapping[str, np.ndarray], seconds: float) -> list[LayerTime]:
        if not hasattr(self._session, "layers"):
            raise Unavailable("it tells no times of layers")
        found = cast(ProfiledSession, self._session).layers(inputs, seconds)
        _settle()
        return found

    def block(self, warmup: int, calls: int, seconds: float) -> np.ndarray:
        call, clock = self._call, time.perf_counter
        assert call is not None  # the parent binds first
        for _ in range(warmup):
            call()
        durations: list[float] = []
        gc.disable()
        end = clock() + seconds
        while len(durations) < calls or clock() < end:
            start = clock()
            call()
            durations.append(clock() - start)
        gc.enable()
        _settle()
        return np.array(durations)


def _settle() -> None:
    """Wait until the threads of this process sleep, so that the next engine has all cores."""
    end = time.perf_counter() + SETTLE_LIMIT_SECONDS
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(SETTLE_INTERVAL_SECONDS)
        if time.process_time() - before < BUSY_FRACTION * SETTLE_INTERVAL_SECONDS:
            return


def _serve(connection: Connection) -> None:
    host = _Host(lambda message: connection.send(("progress", message)))
    while True:
        try:
            request, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply = ("ok", getattr(host, request)(*arguments))
        except Unavailable as error:
            reply = ("unavailable", str(error))
        except Exception as error:  # process boundary: any exception of an engine becomes the reason in its row
            text = sentence(error)
            name = type(error).__name__
            reply = ("error", text if text == name else f"{name}: {text}")
        connection.send(reply)


def start_of_growth() -> int | None:
    """Reset the memory peak and return the resident bytes, or None if the system does not support it.

    Engines report arenas differently (ONNX Runtime and OpenVINO not at all from Python), so one measure is used for
    all: peak resident memory minus resident memory after loading the model. Freed memory is returned to the system
    first: an arena taken from it would not be counted.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _RESET.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return None
    return _bytes("VmRSS")


def peak_growth(start: int) -> int | None:
    """Largest increase of the resident memory over ``start`` in bytes."""
    peak = _bytes("VmHWM")
    return None if peak is None else max(0, peak - start)


def _bytes(field: str) -> int | None:
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found.group(1))


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    _serve(Connection(int(sys.argv[1])))
