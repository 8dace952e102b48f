"""Runs damaged inputs through a reader in a process of its own, and tells what must never happen.

A reader may give a result or refuse: raise the project's own error (a line, exit status 2) or an ``OSError``, which
command lines put into one line too. Anything else is a finding: another exception (a traceback for the user), 20
seconds of processor time, 2 GiB of memory, the death of the process.
"""

from __future__ import annotations

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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MOST_SECONDS = 20.0  # of processor time for one input
MOST_BYTES = 2 << 30  # beyond what the process has when it begins
_DEAF_SECONDS = 150.0  # without a word, on a machine that is shared: stuck where no clock of Python's runs
_LONGEST_LINE = 2_000


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


def fuzz(reader: str, cases: int, seconds: float, first: int = 0) -> FuzzReport:
    """Reads the seeds of ``reader``, then cases ``first`` and on, ``cases`` of them, or fewer where ``seconds`` end
    before, in which libraries' start does not count; a process that dies is followed by another.
    """
    report = FuzzReport(reader)
    began = time.monotonic()
    place, last, left = -1 if first == 0 else first, first + cases, seconds
    while place < last and left > 0:
        place, spent = _run(report, place, last, left)
        left -= spent
    report.seconds = time.monotonic() - began
    return report


def _run(report: FuzzReport, place: int, last: int, seconds: float) -> tuple[int, float]:
    """Cases from ``place`` on in one process for ``seconds`` at most; where the next one goes on, and the seconds from
    the first input on.
    """
    command = [sys.executable, str(HERE), "--worker", report.reader, "--first", str(place), "--cases", str(last)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))}
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    assert worker.stdout is not None
    current: int | None = None
    began: float | None = None

    def spent() -> float:
        return 0.0 if began is None else time.monotonic() - began

    try:
        for line in _lines(worker):
            message = json.loads(line)
            began = time.monotonic() if began is None else began
            if "begin" in message:
                current = message["begin"]
                continue
            _note(report, message)
            current, place = None, message["case"] + 1
            if spent() > seconds:
                return last, spent()
    except TimeoutError:
        report.findings.append(Finding(report.reader, place if current is None else current, "hangs"))
        report.outcomes["hangs"] += 1
        return (place if current is None else current) + 1, spent()
    finally:
        worker.kill()
        _, errors = worker.communicate()
    if worker.returncode == 0:
        return last, spent()
    died = place if current is None else current
    tail = errors.decode(errors="replace")[-1500:]
    report.findings.append(Finding(report.reader, died, f"ends the process ({worker.returncode})", tail))
    report.outcomes["dies"] += 1
    return (died + 1 if current is not None else last), spent()


def _lines(worker: subprocess.Popen[bytes]) -> Any:
    """Lines of ``worker`` as they come; ``TimeoutError`` where none comes."""
    stream = worker.stdout
    assert stream is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(_DEAF_SECONDS):
                raise TimeoutError
            piece = os.read(stream.fileno(), 1 << 16)
            if not piece:
                worker.wait()
                return
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole


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


def serve(name: str, first: int, last: int) -> None:
    """Reads cases ``first`` to ``last`` (excluded) of the reader ``name``; a line of JSON before and after each."""
    from fuzz.readers import ALL_READERS

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what libraries print

    def tell(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    reader = ALL_READERS[name]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.chdir(folder)
        seeds = reader.seeds(Path(folder))
        numbers = [*range(-len(seeds), 0), *range(last)] if first < 0 else range(first, last)
        _warm(reader, seeds, Path(folder))
        _limit_memory()
        resident = _peak()
        os.dup2(nowhere, 2)
        for number in numbers:
            tell({"begin": number})
            try:
                path = reader.case(Path(folder), seeds, number, random.Random(f"{name} {number}"))
            except Exception:
                failed = traceback.format_exc()[-_LONGEST_LINE:]
                empty = {"seconds": 0.0, "grown": 0, "whole": 0}
                tell({"case": number, "outcome": "cannot be made", "detail": failed, **empty})
                continue
            began = time.process_time()
            outcome, detail = _outcome(reader, path)
            spent = time.process_time() - began
            whole = _peak()
            took = {"seconds": spent, "grown": max(0, whole - resident), "whole": whole}
            tell({"case": number, "outcome": outcome, "detail": detail, **took})


def _outcome(reader: Any, path: Path) -> tuple[str, str]:
    from costmodel.base.errors import ProjectError

    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
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


def _warm(reader: Any, seeds: Any, folder: Path) -> None:
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
