"""Runs the tests of a module against many sources of it: one process for each, forked where libraries are loaded.

What takes long is loading (numpy, TVM, pytest). A process loads it once, leaves out the package that the module is in
and whatever may import it, and forks; the child reads the module from the given text instead of its file and runs
pytest. So the files stay as they are, and nothing of one run is left for the next.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TextIO

from tests.library_loading import load_modules
from tests.source_imports import PACKAGES

_POLL_SECONDS = 0.02
_DEAF_POLLS = 30_000  # ten minutes of waiting; a stopped process does not count them
_MOST_BYTES = 2 << 30  # beyond what the process has when it begins
# Processor time of a test and of a whole run, by that of the longest test and of the run without a fault.
_TIMES_AS_LONG, _SECONDS_MORE = 3.0, 5.0
_NOT_IMPORTED = 91
_LONGEST_TAIL = 3_000
_OPTIONS = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov"]
# Of libraries that are loaded before pytest begins.
_OPTIONS += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]


@dataclass(frozen=True)
class TestRun:
    """What became of the tests. ``killer``: the first that failed; ``died``: they failed, or ran out of time or memory;
    ``seconds``: of processor time, ``longest``: those of one test.

    ``modules``: (name, whether of this project) of all that was loaded.
    """

    __test__ = False

    died: bool
    killer: str
    seconds: float
    longest: float = 0.0
    modules: tuple[tuple[str, bool], ...] = ()


class TestsFailError(Exception):
    """They fail without any fault, or do not load the module."""

    __test__ = False


@dataclass
class TestBed:
    """The module ``name`` in ``file`` below ``root``, and its test files. ``lower``: packages that cannot import it;
    ``options``: of pytest; ``log``: where its output goes; ``run_seconds``, ``test_seconds``: the most that a run and a
    test may take of a processor.
    """

    __test__ = False

    root: Path
    name: str
    file: str
    tests: Sequence[str]
    lower: Sequence[str] = ()
    options: Sequence[str] = ()
    run_seconds: float = 3600.0
    test_seconds: float = 600.0
    log: TextIO | None = None

    @classmethod
    def of(cls, root: Path, file: str, tests: Sequence[str], options: Sequence[str] = ()) -> TestBed:
        """Of a module of this project."""
        name = file.removesuffix(".py").replace("/", ".")
        package = name.partition(".")[0]
        return cls(root, name, file, tests, PACKAGES[: PACKAGES.index(package)], options)

    def warm_up(self) -> TestRun:
        """Runs the tests once without a fault, loads what that loaded, and takes its time for the limit.
        :class:`TestsFailError` where they fail.
        """
        source = (self.root / self.file).read_text(encoding="utf-8")
        with tempfile.TemporaryFile("w+") as self.log:
            (first,) = self.run([source])
            if first.died:
                self.log.seek(0)
                told = self.log.read()[-_LONGEST_TAIL:]
                raise TestsFailError(f"{', '.join(self.tests)} fail as things are ({first.killer})\n{told}")
        self.log = None
        self._load(first.modules)
        (again,) = self.run([source])
        self.run_seconds = _TIMES_AS_LONG * again.seconds + 2 * _SECONDS_MORE
        self.test_seconds = _TIMES_AS_LONG * again.longest + _SECONDS_MORE
        return again

    def run(self, sources: Iterable[str], jobs: int = 1) -> Iterator[TestRun]:
        """One result for each of ``sources``, in their order, ``jobs`` at the same time."""
        waiting: list[_Child] = []
        for source in sources:
            waiting.append(self._start(source))
            if len(waiting) >= jobs:
                yield waiting.pop(0).result()
        while waiting:
            yield waiting.pop(0).result()

    def run_in_turn(self, first: Sequence[str], sources: Sequence[str], jobs: int = 1) -> Iterator[TestRun]:
        """As :meth:`run`, but the tests ``first`` alone before: what these see needs no others, whose collecting takes
        most of a short run.
        """
        whole, self.tests = self.tests, first
        runs = list(self.run(sources, jobs))
        self.tests = whole
        others = self.run((source for source, run in zip(sources, runs, strict=True) if not run.died), jobs)
        return (run if run.died else next(others) for run in runs)

    def _load(self, modules: Sequence[tuple[str, bool]]) -> None:
        load_modules(name for name, ours in modules if not ours or name.partition(".")[0] in self.lower)

    def _start(self, source: str) -> _Child:
        report = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed where its child ends
        pid = os.fork()
        if pid == 0:
            try:
                status = self._tests(source, report)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                status = 1
            os._exit(status)
        return _Child(pid, report, self.file)

    def _tests(self, source: str, report: TextIO) -> int:
        import pytest

        output = os.open(os.devnull, os.O_WRONLY) if self.log is None else self.log.fileno()
        for stream in (1, 2):
            os.dup2(output, stream)
        _limit(math.ceil(self.run_seconds))
        os.chdir(self.root)
        replaced = _Replaced(self.name, self.root / self.file, source)
        sys.meta_path.insert(0, replaced)
        # What is found on this path when the child begins must be this project's.
        sys.path.insert(0, str(self.root))
        _same_examples()
        watch = _Watch(self.test_seconds)
        status = int(pytest.main([*_OPTIONS, *self.options, *self.tests], plugins=[watch]))
        modules = [(name, _is_ours(module, self.root)) for name, module in list(sys.modules.items())]
        json.dump({"killer": watch.killer, "longest": watch.longest, "modules": modules}, report)
        report.flush()
        return status or (0 if replaced.was_loaded else _NOT_IMPORTED)


@dataclass
class _Child:
    pid: int
    report: TextIO
    file: str

    def result(self) -> TestRun:
        status, used = self._wait()
        self.report.seek(0)
        text = self.report.read()
        self.report.close()
        told: dict[str, Any] = json.loads(text) if text else {}
        code = os.waitstatus_to_exitcode(status)
        if code == _NOT_IMPORTED:
            raise TestsFailError(f"no test loads {self.file}")
        killer = told.get("killer") or ("" if code == 0 else _how(code))
        modules = tuple((name, ours) for name, ours in told.get("modules", ()))
        return TestRun(code != 0, killer, used, told.get("longest", 0.0), modules)

    def _wait(self) -> tuple[int, float]:
        for _ in range(_DEAF_POLLS):
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                return status, usage.ru_utime + usage.ru_stime
            time.sleep(_POLL_SECONDS)
        os.kill(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        return status, usage.ru_utime + usage.ru_stime


def _how(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "out of time"
    return f"signal {-code}" if code < 0 else f"pytest's exit status {code}"


class _EndlessError(BaseException):
    """A test's time is up; no ``except Exception`` of what is tested takes it."""


class _Watch:
    """Remembers the first failure, and ends a test that takes longer than ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.killer = ""
        self.longest = 0.0
        self._most, self._began = seconds, 0.0
        signal.signal(signal.SIGPROF, self._end)

    def pytest_runtest_logstart(self) -> None:
        self._began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, self._most)

    def pytest_runtest_logfinish(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        self.longest = max(self.longest, time.process_time() - self._began)

    def _end(self, number: int, frame: Any) -> None:
        raise _EndlessError

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self.killer:
            self.killer = report.nodeid


class _Replaced(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds one module, and loads it from a text."""

    def __init__(self, name: str, file: Path, source: str) -> None:
        self._name, self._file, self._source = name, file, source
        self.was_loaded = False

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        assert PathFinder.find_spec(fullname, path) is not None, f"{fullname} is no module of {path}"
        return importlib.util.spec_from_file_location(fullname, self._file, loader=self)

    def get_source(self, fullname: str) -> str:
        return self._source

    def get_code(self, fullname: str) -> CodeType:
        self.was_loaded = True
        return compile(self._source, str(self._file), "exec", dont_inherit=True)


def _same_examples() -> None:
    """Hypothesis draws the same ones in every run, remembers nothing, minds no busy machine, and looks for no simpler
    example where one has failed.
    """
    try:
        from hypothesis import HealthCheck, Phase, settings
    except ImportError:
        return
    calm = list(HealthCheck)
    drawn = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, suppress_health_check=calm, phases=drawn
    )
    settings.load_profile("mutants")


def _is_ours(module: Any, root: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(root) and not Path(file).is_relative_to(sys.prefix)


def _limit(seconds: int) -> None:
    """Processor time of this process, and memory beyond what it has."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    with open("/proc/self/status", encoding="ascii") as file:
        held = next(int(line.split()[1]) for line in file if line.startswith("VmData:")) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (held + _MOST_BYTES, held + _MOST_BYTES))
