"""Processes in which the user's program runs, one for each rank that is captured (:mod:`e2e.capture.program`)."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import IO

from costmodel.base.errors import ModelError
from costmodel.base.process import available_memory_bytes, usable_cores
from e2e.capture.distributed.communication import PAUSE_SECONDS, Mailbox, Parcels
from e2e.capture.distributed.distributed_capture import CapturedRank, DistributedCapture, RankSignature
from e2e.capture.distributed.rank_work import RankWork, work_of
from e2e.capture.distributed.world import RankPlace
from e2e.capture.launcher import Launch
from e2e.capture.missing.loaders import Loading
from e2e.capture.program import Evaluation, FoundStep, ProgramJob, WaitingRank, end_started
from e2e.step.options import StepOptions

# Bytes of a program's output that are shown.
MOST_OUTPUT = 20_000
# Memory of the process of a rank, of a model with billions of parameters.
RANK_BYTES = 2 << 30


@dataclass
class ProgramRanks:
    """Ranks of a program; each is captured in a process of its own, at most once."""

    launch: Launch
    options: StepOptions
    # Folder in which the command is started.
    folder: Path
    # True if data that are not there are made up.
    made_up: bool = False
    found: dict[int, FoundStep] = field(default_factory=dict)
    # Work of the first rank of each kind.
    kinds: list[RankWork] = field(default_factory=list)
    # Processes of ranks that wait for an object.
    waiting: dict[int, RankProcess] = field(default_factory=dict)
    _running: list[RankProcess] = field(default_factory=list)
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def reference(self) -> str:
        """Name of the program for messages."""
        return self.launch.title

    @property
    def at_once(self) -> int:
        """Number of processes for which there are cores and memory."""
        return max(min(usable_cores(), (available_memory_bytes() or 0) // RANK_BYTES), 1)

    def capture(self, place: RankPlace, mailbox: Mailbox) -> CapturedRank:
        """Run the program on the rank ``place`` until it has made a steady step."""
        if place.rank not in self.found:
            with self._lock:
                if self._closed:
                    raise ModelError(f"{self.reference}: stopped")
                process = self.waiting.pop(place.rank, None)
                if process is None:
                    parcels = Parcels(dict(mailbox.sent), mailbox.shared)
                    job = ProgramJob(self.launch, self.options, place, parcels, self.made_up)
                    process = RankProcess(job, self.folder)
                else:
                    process.deliver(mailbox)
                self._running.append(process)
            try:
                found = process.result()
            finally:
                self._running.remove(process)
            mailbox.merge(place.rank, found.mailbox)
            if isinstance(found, WaitingRank):
                if (available_memory_bytes() or 0) > RANK_BYTES:
                    self.waiting[place.rank] = process
                else:
                    process.end()  # and to be started again
                raise found.wait
            self.found[place.rank] = replace(found, rank=replace(found.rank, signature=self._kind(found)))
        return self.found[place.rank].rank

    def close(self) -> None:
        """End all processes; threads in which ranks are captured then raise."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
        while self.waiting:
            self.waiting.popitem()[1].end()

    def _kind(self, found: FoundStep) -> RankSignature:
        work = replace(work_of(found.rank.trace.calls), drawn=found.drawn)
        with self._lock:
            number = next((number for number, kind in enumerate(self.kinds) if work.is_like(kind)), len(self.kinds))
            if number == len(self.kinds):
                self.kinds.append(work)
        return ((f"kind {number}", (), "", ""),)

    def told(self, capture: DistributedCapture) -> tuple[str, ...]:
        """Describe, for the report, the step that was taken and what the program did not really have."""
        first = self.found[capture.traces[0].rank]
        return f"{self.reference}: {first.told}", *first.notes

    def evaluations(self, capture: DistributedCapture) -> tuple[Evaluation, ...]:
        """Return the passes of the first captured rank that are no part of its step."""
        return self.found[capture.traces[0].rank].evaluations

    def loading(self, capture: DistributedCapture) -> tuple[Loading, ...]:
        """Return what data loaders do beside a step of the first captured rank."""
        return self.found[capture.traces[0].rank].loading

    def signature(self, place: RankPlace, mailbox: Mailbox) -> RankSignature | None:
        """Return None: the work of a rank is known when it has been done."""
        return None


class RankProcess:
    """Process that runs ``job``, started in ``folder``, whose output goes to standard error."""

    def __init__(self, job: ProgramJob, folder: Path) -> None:
        self._title = job.launch.title
        self._scratch = tempfile.TemporaryDirectory(prefix="e2e-program-")
        self._place = Path(self._scratch.name)
        request, self._answer = self._place / "job", self._place / "answer"
        request.write_bytes(pickle.dumps(job))
        # The project is importable in the program's folder too, from wherever it was imported here.
        roots = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
        command = [sys.executable, "-P", "-m", "e2e.capture", str(request), str(self._answer)]
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._shown = Thread(target=_show, args=(self._process.stdout,), daemon=True)
        self._shown.start()

    def result(self) -> FoundStep | WaitingRank:
        """Return the step, or what the rank waits for meanwhile.

        Raise the error that ended the program; ``ModelError`` if its process was ended from outside.
        """
        asked = self._place / "waiting"
        try:
            while not asked.exists():
                with suppress(subprocess.TimeoutExpired):
                    return self._ended(self._process.wait(PAUSE_SECONDS))
        except BaseException:
            self.end()
            raise
        found = pickle.loads(asked.read_bytes())
        asked.unlink()
        assert isinstance(found, WaitingRank)
        return found

    def _ended(self, status: int) -> FoundStep:
        if not self._answer.exists():
            how = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
            raise ModelError(f"{self._title}: its process ended without an answer, with {how}")
        found = pickle.loads(self._answer.read_bytes())
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, FoundStep)
        self.end()
        return found

    def deliver(self, mailbox: Mailbox) -> None:
        """Let the rank go on with the objects sent so far."""
        unfinished = self._place / "sent"
        unfinished.write_bytes(pickle.dumps(dict(mailbox.sent)))
        unfinished.replace(self._place / "parcels")

    def kill(self) -> None:
        """End the process and those that it has started."""
        end_started(self._process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """End the process and those that it has started, and remove its files."""
        self.kill()
        self._process.wait()
        self._shown.join(PAUSE_SECONDS)
        self._scratch.cleanup()


def _show(output: IO[bytes]) -> None:
    """Pass the beginning of what a program says on to standard error; read the rest, so that it can go on."""
    left, last = MOST_OUTPUT, b""
    while text := os.read(output.fileno(), 1 << 16):
        if left > 0:
            last = text[:left]
            print(last.decode(errors="replace"), end="", file=sys.stderr, flush=True)
            left -= len(text)
            if left <= 0:
                print("\n... (the program says more than is shown)", file=sys.stderr)
    if left > 0 and last and not last.endswith(b"\n"):  # a line of progress
        print(file=sys.stderr, flush=True)
