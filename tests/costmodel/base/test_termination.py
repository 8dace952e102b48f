"""Processes that are asked to end, and processes that outlive who started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from costmodel.base.command_line import guarded
from costmodel.base.process import Terminated, interruptible_start, terminable

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

HOLDS = """
import sys, tempfile, time
import typer
from costmodel.base.command_line import ProgramGroup, guarded

app = typer.Typer(cls=ProgramGroup)

@app.command()
@guarded("stopped; all is kept")
def command():
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        try:
            print("held", flush=True)
            time.sleep(60)
        finally:
            print("released", flush=True)
            time.sleep(0.3)

app(args=[], prog_name="tool")
"""


def _listening() -> None:
    """As of a terminal: who runs the tests may ignore these (``nohup``), and children would, too."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def started(code: str, *arguments: object, **options) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, preexec_fn=_listening, **options,
    )  # fmt: skip
    assert process.stdout is not None
    return process


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGTERM, 143, "stopped; all is kept (SIGTERM)\n"),
        (signal.SIGHUP, 129, "stopped; all is kept (SIGHUP)\n"),
        (signal.SIGINT, 130, "stopped; all is kept\n"),
    ],
)
def test_who_is_asked_to_end_releases_what_it_holds(tmp_path: Path, number: int, status: int, line: str):
    process = started(HOLDS, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    process.send_signal(number)
    assert process.stdout.readline() == "released\n"
    if number != signal.SIGINT:
        process.send_signal(number)  # as `timeout` does; the way up is not cut short
    _, said = process.communicate()
    assert (process.returncode, said, list(tmp_path.iterdir())) == (status, line, [])


def test_what_is_ignored_stays_so_and_all_is_as_before_in_the_end():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as of `nohup`
    other = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler, behind tests that start it
    try:
        with terminable():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
            with pytest.raises(Terminated, match="SIGTERM"):
                os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with terminable():
            pass
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, other)


def test_nothing_takes_it_for_an_error():
    assert not issubclass(Terminated, Exception) and Terminated("SIGTERM").status == 143


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C is after the test what it was before."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_while_a_program_is_loaded_is_one_line(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended, interruptible_start():
        raise KeyboardInterrupt
    assert ended.value.code == 130 and capsys.readouterr().err == "stopped\n"


ENDS = """
import atexit, time
from costmodel.base.process import interruptible_start

def end():
    print("ending", flush=True)
    time.sleep(60)

atexit.register(end)
with interruptible_start():
    pass
"""


def test_ctrl_c_while_the_interpreter_ends_is_told_as_no_error():
    process = started(ENDS)
    assert process.stdout is not None and process.stdout.readline() == "ending\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (-signal.SIGINT, "")


PARENT = """
import subprocess, sys, time
child = "import sys, time\\nfrom costmodel.base.process import end_with_parent\\nend_with_parent()\\n"
child += "print('ready', flush=True)\\ntime.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, start_new_session=True)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(600)
"""


def alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_ends_with_a_parent_that_was_killed():
    parent = started(PARENT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.communicate()
    for _ in range(200):
        if not alive(child):
            break
        time.sleep(0.05)
    assert not alive(child)


def test_a_child_whose_parent_had_ended_before_ends_at_once():
    code = "from costmodel.base.process import end_with_parent; end_with_parent(1 << 21); print('goes on')"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


GROUP = """
import subprocess, sys
from costmodel.base.process import interrupts_held
with interrupts_held():
    child = subprocess.Popen([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"])
try:
    child.wait()
except KeyboardInterrupt:
    print("parent", child.poll(), flush=True)
    child.kill()
"""


def test_ctrl_c_passes_a_child_that_was_started_with_it_held():
    process = started(GROUP, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate()
    assert (said, errors) == ("parent None\n", "")


@pytest.mark.parametrize(
    ("end", "status", "line"),
    [(KeyboardInterrupt(), 130, "stopped\n"), (Terminated("SIGTERM"), 143, "stopped (SIGTERM)\n")],
)
def test_an_end_that_an_extension_module_made_an_error_of_is_one(end: BaseException, status: int, line: str, capsys):
    @guarded()
    def command() -> None:
        try:
            raise SystemError("a module returned a result with an exception set") from end
        except SystemError as error:
            raise ImportError("no such module") from error

    with pytest.raises(typer.Exit) as exit_:
        command()
    assert exit_.value.exit_code == status and capsys.readouterr().err == line


def test_an_error_that_no_end_was_behind_stays_one(capsys):
    @guarded()
    def command() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("of its own") from None

    with pytest.raises(RuntimeError, match="of its own"):
        command()


@pytest.mark.usefixtures("heard")
def test_an_interrupted_import_of_an_extension_module_is_told_at_the_start(capsys):
    with pytest.raises(SystemExit) as exit_, interruptible_start():
        raise SystemError("a module returned a result with an exception set") from KeyboardInterrupt()
    assert exit_.value.code == 130 and capsys.readouterr().err == "stopped\n"
