"""Measurement in a worker process, which may crash, hang or compute wrong values without affecting the tuner."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from costmodel.base.errors import TuningError
from costmodel.cost_model import ConfigKey, config_key
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.measuring.timing_protocol import (
    Answer,
    CompileRequest,
    FailureKind,
    KernelCandidate,
    KernelProgram,
    MeasureOutcome,
    MeasureRequest,
    ProgramRequest,
    Setup,
    TimingProtocol,
    WorkerPhase,
)

_ROOT = Path(__file__).resolve().parents[2]
# Number of candidates compiled before the first of them is timed; if a search ends in between, the compilation of the
# rest was wasted.
COMPILED_TOGETHER = 4
# Estimated seconds per candidate before any has been compiled here.
COMPILE_SECONDS = 0.2


class Runner:
    """Context manager with one long-lived worker process, started on first use.

    ``timeout_seconds``: limit of each phase (building, running, timing) of a candidate; a worker that exceeds it is
    killed and replaced. ``templates``: ``module:function`` that returns the template of (operator, cpu). Raises
    ``TuningError`` if no worker can be started.
    """

    def __init__(
        self,
        cpu: CpuTarget,
        timeout_seconds: float = 10.0,
        *,
        protocol: TimingProtocol | None = None,
        templates: str = "schedules.kernels.template_table:template_for",
        startup_seconds: float = 120.0,
    ) -> None:
        self._cpu = cpu
        self._timeout_seconds = timeout_seconds
        self._protocol = protocol or TimingProtocol()
        self._templates = templates
        self._startup_seconds = startup_seconds
        self._worker: _WorkerProcess | None = None
        self._compiled: set[tuple[Operator, ConfigKey]] = set()  # by the current worker
        self._compilations, self._compiling_seconds = 0, 0.0

    def measure(
        self, operator: Operator, config: Mapping[str, int], best_seconds: float | None = None
    ) -> MeasureOutcome:
        """Build, verify and time one candidate; stop timing early if it is clearly slower than ``best_seconds``."""
        return self._answer(MeasureRequest((((operator, dict(config)),),), best_seconds))[0]

    def measure_batch(
        self, operator: Operator, configs: Sequence[Mapping[str, int]], best_seconds: float | None = None
    ) -> Iterator[tuple[Mapping[str, int], MeasureOutcome]]:
        """Measure several candidates of one operator; yield each result when it is done, in any order.

        A few at a time are compiled on all cores, then each is timed alone.
        """
        for index, config in enumerate(configs):
            if index % COMPILED_TOGETHER == 0 and len(configs) > 1:
                self.compile_together([(operator, each) for each in configs[index : index + COMPILED_TOGETHER]])
            outcome = self.measure(operator, config, best_seconds)
            if outcome.seconds is not None:
                best_seconds = min(outcome.seconds, best_seconds or outcome.seconds)
            yield config, outcome

    def compile_together(self, candidates: Sequence[KernelCandidate]) -> None:
        """Compile candidates on all cores for later measurements.

        A candidate that fails to compile, or crashes the worker, is reported when it is measured.
        """
        fresh = [candidate for candidate in candidates if _key(candidate) not in self._compiled]
        if not fresh:
            return
        self._started()
        started = time.monotonic()
        self._try(CompileRequest(tuple((operator, dict(config)) for operator, config in fresh)))
        self._compilations += len(fresh)
        self._compiling_seconds += time.monotonic() - started

    def compilation_seconds(self, candidates: Collection[KernelCandidate]) -> float:
        """Estimated seconds to compile those of ``candidates`` that the worker has not compiled yet."""
        pace = COMPILE_SECONDS
        if self._compilations:
            pace = self._compiling_seconds / self._compilations
        return pace * len({_key(candidate) for candidate in candidates} - self._compiled)

    def compare(self, arms: Sequence[Sequence[KernelCandidate]]) -> list[MeasureOutcome]:
        """Time the arms alternately, A B C A B C; an arm is a sequence of candidates run consecutively.

        An arm of two layers against an arm of their fusion compares the alternatives of a network. An arm that fails
        does not affect the others.
        """
        return self._survivors(
            len(arms),
            lambda left: MeasureRequest(
                tuple(tuple((op, dict(config)) for op, config in arms[index]) for index in left)
            ),
        )

    def rehearse(self, programs: Sequence[KernelProgram], rounds: int = 5, runs: int = 12) -> list[MeasureOutcome]:
        """Time whole networks alternately, kernel by kernel, on buffers that are reused as in a network.

        A kernel finds its input where the previous one left it, and its weights where the previous run left them, so
        its time differs from that alone. Kernels are not verified again. A program that fails does not affect the
        others.
        """
        return self._survivors(
            len(programs),
            lambda left: ProgramRequest(tuple(programs[index] for index in left), rounds, runs),
        )

    def _survivors(
        self, count: int, request: Callable[[Sequence[int]], MeasureRequest | ProgramRequest]
    ) -> list[MeasureOutcome]:
        """Outcomes of all arms or programs; the request is repeated without those that crashed or hung the worker."""
        outcomes: dict[int, MeasureOutcome] = {}
        while len(outcomes) < count:
            left = [index for index in range(count) if index not in outcomes]
            answers, culprit = self._try(request(left))
            if culprit is None:
                outcomes.update(zip(left, answers, strict=True))
            else:
                outcomes[left[culprit]] = answers[0]
        return [outcomes[index] for index in range(count)]

    def close(self) -> None:
        """End the worker; a later call starts a new one."""
        self._compiled.clear()
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _answer(self, request: MeasureRequest) -> Sequence[MeasureOutcome]:
        return self._try(request)[0]

    def _try(
        self, request: MeasureRequest | ProgramRequest | CompileRequest
    ) -> tuple[Sequence[MeasureOutcome], int | None]:
        """Outcomes of all arms; or only the failure, and the arm that crashed or hung the worker."""
        worker = self._started()  # start-up failures are not the candidate's
        phase = WorkerPhase("preparing")
        try:
            worker.connection.send(request)
            while worker.connection.poll(self._timeout_seconds):
                message = worker.connection.recv()
                if isinstance(message, Answer):
                    self._compiled.update(map(_key, _candidates(request)))
                    if message.tainted:
                        self.close()
                    return message.outcomes, None
                phase = message
            return self._failed("hang", f"no answer within {self._timeout_seconds:g} s while {phase.name}", phase)
        except (EOFError, OSError):
            return self._failed("crash", f"while {phase.name}: {worker.post_mortem()}", phase)
        except BaseException:  # Ctrl-C included: the worker is in an undefined state and cannot be kept
            self.close()
            raise

    def _failed(self, kind: FailureKind, message: str, phase: WorkerPhase) -> tuple[Sequence[MeasureOutcome], int]:
        self.close()
        return [MeasureOutcome(None, kind, message)], phase.arm

    def _started(self) -> _WorkerProcess:
        if self._worker is not None and not self._worker.alive:
            self.close()
        if self._worker is None:
            path = tuple(sys.path)
            setup = Setup(self._cpu, self._protocol, self._templates, path, self._timeout_seconds)
            try:
                self._worker = _WorkerProcess(setup)
                self._worker.wait_until_ready(self._startup_seconds)
            except OSError as error:  # no process, pipe or temporary file available
                raise TuningError(
                    f"the measuring process cannot start: {error}; `python -m fusion doctor` looks for what is missing"
                ) from error
            except BaseException:
                self.close()
                raise
        return self._worker


def _candidates(request: MeasureRequest | ProgramRequest | CompileRequest) -> Iterator[KernelCandidate]:
    """Candidates that the worker compiles for ``request``."""
    if isinstance(request, CompileRequest):
        yield from request.candidates
    elif isinstance(request, MeasureRequest):
        yield from (candidate for arm in request.arms for candidate in arm)
    else:
        yield from (step.candidate for program in request.programs for step in program)


def _key(candidate: KernelCandidate) -> tuple[Operator, ConfigKey]:
    return candidate[0], config_key(candidate[1])


class _WorkerProcess:
    """A running ``python -m schedules.measuring.measure_worker``, its pipe and its stderr.

    A new interpreter, not a fork (TVM's threads do not survive one) nor ``multiprocessing``'s spawn (which runs the
    caller's main module again). It has its own process group, so that Ctrl-C is sent only to the tuner.
    """

    def __init__(self, setup: Setup) -> None:
        self.connection, theirs = Pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
        self._process = _spawn(theirs, self._stderr, setup.cpu.threads)
        theirs.close()
        self._finalizer = weakref.finalize(self, _kill, self._process)
        with contextlib.suppress(OSError):  # died immediately: wait_until_ready reports why
            self.connection.send(setup)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, seconds: float) -> None:
        try:
            if self.connection.poll(seconds):
                self.connection.recv()
                return
            reason = f"not ready within {seconds:g} s"
        except (EOFError, OSError):
            reason = self.post_mortem()
        self.kill()
        raise TuningError(
            f"the measuring process cannot start: {reason}; `python -m fusion doctor` looks for what is missing"
        )

    def post_mortem(self) -> str:
        """How the process ended, with the last line of its stderr."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        cause = f"exit status {code}"
        if code < 0:
            cause = signal.Signals(-code).name
            if -code == signal.SIGKILL:
                cause += ", probably out of memory"
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 4096))
        lines = [line.strip() for line in self._stderr.read().decode(errors="replace").splitlines()]
        lines = [line for line in lines if line and not line.startswith('File "')]
        return f"{cause} ({lines[-1][:300]})" if lines else cause

    def kill_process(self) -> None:
        """Kill and reap the process; readers of its pipe get an EOF."""
        self._finalizer()

    def kill(self) -> None:
        """Kill and reap the process, and close the pipe."""
        self.kill_process()
        self.connection.close()
        self._stderr.close()


def _spawn(connection: Connection, stderr: IO[bytes], threads: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "TVM_NUM_THREADS": str(threads),
        # Kernels are verified with NumPy. Threads of its BLAS spin for some 30 ms after a product, on the cores where a
        # kernel is timed next: every parallel region then takes a time slice of the scheduler.
        **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "schedules.measuring.measure_worker", str(connection.fileno()), str(os.getpid())],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(connection.fileno(),),
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
