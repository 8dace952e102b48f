"""What runs command lines in forks, and what is held against how they ended; the command lines themselves by hand:
``python -m tests.fuzz.options``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.loaded_programs import LoadedPrograms
from tests.fuzz.option_cases import CASES, OptionCase
from tests.fuzz.option_inputs import paths
from tests.fuzz.options import OptionEnd, run_case


@pytest.fixture(scope="module")
def programs() -> Iterator[LoadedPrograms]:
    with LoadedPrograms() as found:
        yield found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("work", "messages"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_fork_is_what_python_runs(programs: LoadedPrograms, tmp_path: Path):
    (tmp_path / "told.py").write_text(
        "import os, sys\nprint(__name__, sys.argv[1:], os.environ['SAID'], os.getcwd())\nsys.exit(7)"
    )
    process = programs.start(["-m", "told", "a b"], tmp_path, tmp_path / "out.txt", {"SAID": "here"})
    assert process.wait() == 7 and process.used > 0 and process.peak_bytes > 1 << 20
    assert (tmp_path / "out.txt").read_text() == f"__main__ ['a b'] here {tmp_path}\n"


def test_a_fork_can_be_killed_with_its_session(programs: LoadedPrograms, tmp_path: Path):
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)")
    process = programs.start(["-m", "sleeps"], tmp_path, tmp_path / "out.txt")
    assert process.poll() is None and os.getsid(process.pid) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_what_a_command_line_loaded_is_loaded(tmp_path: Path):
    (tmp_path / "loads.py").write_text("import decimal")
    with LoadedPrograms() as programs:
        programs.learn(["-m", "loads"], tmp_path)
        (tmp_path / "asks.py").write_text("import sys; sys.exit('decimal' in sys.modules)")
        assert programs.start(["-m", "asks"], tmp_path, tmp_path / "out.txt").wait() == 1


def test_a_command_line_that_is_refused_is_fine(programs: LoadedPrograms, place: Path):
    end = run_case(programs, "costmodel", OptionCase(("machines", "nope")), place, {})
    assert end.status == 2 and "unknown machine 'nope'" in end.errors and not end.findings()


@pytest.mark.parametrize(
    ("status", "output", "errors", "seconds", "finding"),
    [
        (0, "done", "", 30.0, ""),
        (2, "", "error: --trials 0: must be above zero", 0.1, ""),
        (2, "Usage: fusion", "", 0.1, ""),
        (0, "", "", 0.1, "says nothing"),
        (1, "", "Traceback (most recent call last):\n...", 0.1, "status 1"),
        (0, "done", "Exception ignored in: <function f>", 0.1, "a traceback"),
        (2, "", "", 0.1, "0 lines that say why"),
        (2, "", "error: one\nerror: two", 0.1, "2 lines that say why"),
        (2, "", "error: late", 21.0, "refused after 21 s"),
        (-11, "", "", 0.1, "status -11"),
        (None, "", "", 0.1, "hangs"),
    ],
)
def test_what_must_not_be_is_found(status: int | None, output: str, errors: str, seconds: float, finding: str):
    found = OptionEnd(OptionCase(("tune",)), status, output, errors, seconds).findings()
    assert finding in found if finding else not found


@pytest.mark.parametrize("program", CASES)
def test_command_lines_are_many_and_different(program: str, tmp_path: Path):
    cases = CASES[program](tmp_path)
    assert len(cases) == len(set(cases)) > 500
    assert {case.user for case in cases} == {None, 65534}  # those that root could read or write
    assert all(any(path in case.words for case in cases) for path in paths(tmp_path, "yaml"))
