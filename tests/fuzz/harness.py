"""Runs damaged inputs through a reader in a process of its own, a fork of one that has the libraries, and tells what
must never happen.

A reader may give a result or refuse: raise the project's own error (a line, exit status 2) or an ``OSError``, which
command lines put into one line too. Anything else is a finding: another exception (a traceback for the user), 20
seconds of processor time, 2 GiB of memory, the death of the process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.fuzz.readers import ALL_READERS, MOST_SECONDS, Reader, Seed

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MOST_BYTES = 2 << 30  # beyond what the process has when it begins
# Without a word, on a machine that is shared: stuck where no clock of Python's runs. Counted in looks of a second each,
# so that a machine that stands still for a while finds nothing.
_DEAF_LOOKS, _LOOK_SECONDS = 150, 1.0
_LONGEST_LINE, _LONGEST_ERRORS = 2_000, 1_500


@dataclass(frozen=True)
class Finding:
    """Case number ``case`` of ``reader`` (negative: a seed as it is) and what it did."""

    reader: str
    case: int
    what: str
    detail: str = ""


@dataclass
class FuzzReport:
    """What became of ``cases`` inputs: ``outcomes`` counts results and refusals; ``slowest`` in seconds, with its case;
    ``peak_bytes``: memory at the end beyond that of the beginning; ``whole_bytes``: of the process, libraries and all.
    """

    reader: str
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, 0)
    peak_bytes: int = 0
    whole_bytes: int = 0
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        """How many inputs were read."""
        return self.outcomes.total()


class Bench:
    """A process that loads once what the readers of these ``names`` need, and in forks of which they run; a context
    manager.
    """

    def __init__(self, names: Iterable[str]) -> None:
        command = [sys.executable, str(HERE), "--worker", *(word for name in names for word in ("--reader", name))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))}
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment
        )
        assert self._server.stdin is not None and self._server.stdout is not None
        self._asked, self._messages = self._server.stdin, _Messages(self._server.stdout)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.communicate()

    def fuzz(self, reader: str, cases: int, seconds: float, first: int = 0) -> FuzzReport:
        """Reads the seeds of ``reader``, then cases ``first`` and on, ``cases`` of them, or fewer where they have taken
        ``seconds`` of a processor before, in which libraries' start does not count; a reader that dies is followed by
        another.
        """
        report = FuzzReport(reader)
        began = time.monotonic()
        place, last, left = -1 if first == 0 else first, first + cases, seconds
        while place < last and left > 0:
            place, spent = self._run(report, place, last, left)
            left -= spent
        report.seconds = time.monotonic() - began
        return report

    def _run(self, report: FuzzReport, place: int, last: int, seconds: float) -> tuple[int, float]:
        """Cases from ``place`` on in one fork for ``seconds`` at most; where the next one goes on, and the seconds from
        the first input on.
        """
        asked = json.dumps({"reader": report.reader, "first": place, "last": last, "seconds": seconds})
        self._asked.write(asked.encode() + b"\n")
        self._asked.flush()
        pid: int = self._messages.next()["pid"]
        current: int | None = None
        used, began = 0.0, time.monotonic()
        while True:
            try:
                message = self._messages.next()
            except TimeoutError:
                stuck = place if current is None else current
                report.findings.append(Finding(report.reader, stuck, "hangs"))
                report.outcomes["hangs"] += 1
                self._end(pid)
                return stuck + 1, used + time.monotonic() - began
            if "ended" in message:
                break
            if "begin" in message:
                current, began = message["begin"], time.monotonic()
                continue
            _note(report, message)
            current, place, used = None, message["case"] + 1, message["used"]
        if message["ended"] == 0:
            return last, used
        died = place if current is None else current
        report.findings.append(
            Finding(report.reader, died, f"ends the process ({message['ended']})", message["errors"])
        )
        report.outcomes["dies"] += 1
        return (died + 1 if current is not None else last), used + time.monotonic() - began

    def _end(self, pid: int) -> None:
        """Ends the reader, whatever it is doing, and reads what it still said."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        while "ended" not in self._messages.next():
            pass


class _Messages:
    """What a bench and its readers say, a record in each line."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._rest = stream, b""
        self._whole: deque[bytes] = deque()

    def next(self) -> dict[str, Any]:
        """The next one; ``TimeoutError`` where none comes."""
        while True:
            while not self._whole:
                self._read()
            line = self._whole.popleft()
            with contextlib.suppress(ValueError):  # of a reader that was killed while it wrote
                return dict(json.loads(line))

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stream, selectors.EVENT_READ)
            if not any(selector.select(_LOOK_SECONDS) for _ in range(_DEAF_LOOKS)):
                raise TimeoutError
        piece = os.read(self._stream.fileno(), 1 << 16)
        if not piece:
            raise RuntimeError("the bench of the readers has ended")
        *whole, self._rest = (self._rest + piece).split(b"\n")
        self._whole.extend(whole)


def _note(report: FuzzReport, message: dict[str, Any]) -> None:
    case, seconds = message["case"], message["seconds"]
    report.slowest = max(report.slowest, (seconds, case))
    report.peak_bytes = max(report.peak_bytes, message["grown"])
    report.whole_bytes = max(report.whole_bytes, message["whole"])
    what = message["outcome"]
    report.outcomes[what] += 1
    if case < 0 and what != "result":
        report.findings.append(Finding(report.reader, case, f"a valid seed is {what}", message["detail"]))
    elif what not in ("result", "refused"):
        report.findings.append(Finding(report.reader, case, what, message["detail"]))
    if seconds > MOST_SECONDS:
        report.findings.append(Finding(report.reader, case, f"takes {seconds:.0f} s"))


# --- the process that reads -----------------------------------------------------------------------


def serve(names: Sequence[str]) -> None:
    """Loads what the readers of these names need, then reads cases in a fork for every line of the input, one after the
    other.
    """
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print
    for module in dict.fromkeys(module for name in names for module in ALL_READERS[name].needs):
        with contextlib.suppress(ImportError):  # told by those who use it
            importlib.import_module(module)
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile() as errors:
            pid = os.fork()
            if pid == 0:
                os.dup2(errors.fileno(), 2)
                status = 1
                try:
                    _tell(answers, {"pid": os.getpid()})  # not by the server, whose turn may come later
                    _read_cases(asked["reader"], asked["first"], asked["last"], asked["seconds"], answers)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _LONGEST_ERRORS))
            _tell(answers, {"ended": status, "errors": errors.read().decode(errors="replace")})


def _tell(answers: IO[bytes], message: dict[str, Any]) -> None:
    # On a line of its own, whatever a reader that was killed has written before.
    answers.write(b"\n" + json.dumps(message).encode() + b"\n")


def _read_cases(name: str, first: int, last: int, seconds: float, answers: IO[bytes]) -> None:
    """Reads cases ``first`` to ``last`` (excluded) of the reader ``name``, or fewer where they have taken ``seconds``
    of a processor; a message before and after each.
    """
    reader = ALL_READERS[name]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.chdir(folder)
        seeds = reader.seeds(Path(folder))
        numbers = [*range(-len(seeds), 0), *range(last)] if first < 0 else range(first, last)
        _warm(reader, seeds, Path(folder))
        _limit_memory()
        resident, started = _peak(), time.process_time()
        for number in numbers:
            _tell(answers, {"begin": number})
            try:
                path = reader.case(Path(folder), seeds, number, random.Random(f"{name} {number}"))
            except Exception:
                failed = traceback.format_exc()[-_LONGEST_LINE:]
                took = {"seconds": 0.0, "used": time.process_time() - started, "grown": 0, "whole": 0}
                _tell(answers, {"case": number, "outcome": "cannot be made", "detail": failed, **took})
                continue
            began = time.process_time()
            outcome, detail = _outcome(reader, path)
            ended, whole = time.process_time(), _peak()
            used = ended - started
            took = {"seconds": ended - began, "used": used, "grown": max(0, whole - resident), "whole": whole}
            _tell(answers, {"case": number, "outcome": outcome, "detail": detail, **took})
            if used > seconds:
                break
        os.chdir("/")


def _outcome(reader: Reader, path: Path) -> tuple[str, str]:
    from costmodel.base.errors import ProjectError

    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, reader.most_seconds)
    try:
        reader.read(path)
        return "result", ""
    except (ProjectError, OSError) as error:
        said = str(error)
        if reader.names_file and path.name not in said:
            return "names no file", said[:_LONGEST_LINE]
        return "refused", said[:_LONGEST_LINE]
    except _TooLongError:
        return "hangs", traceback.format_exc()[-_LONGEST_LINE:]
    except MemoryError:
        return "takes 2 GiB", traceback.format_exc()[-_LONGEST_LINE:]
    except BaseException as error:
        text = f"{type(error).__name__}: {str(error)[:300]}\n" + "".join(traceback.format_tb(error.__traceback__)[-6:])
        return "traceback", text[:_LONGEST_LINE]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _TooLongError(BaseException):
    """The time of one input is up."""


def _too_long(number: int, frame: Any) -> None:
    raise _TooLongError


def _warm(reader: Reader, seeds: list[Seed], folder: Path) -> None:
    """What a first call loads is no growth; that seeds are read at all is told by their own cases."""
    for number in range(-len(seeds), 0):
        _outcome(reader, reader.case(folder, seeds, number, random.Random(0)))


def _limit_memory() -> None:
    """Allocations beyond ``MOST_BYTES`` fail from now on."""
    with open("/proc/self/status", encoding="ascii") as file:
        held = next(int(line.split()[1]) for line in file if line.startswith("VmData:")) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (held + MOST_BYTES, held + MOST_BYTES))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
