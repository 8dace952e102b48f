"""What all commands do alike with errors, and options with several values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from costmodel.base.command_line import guarded, repeated
from costmodel.base.errors import InputError


def run(error: BaseException | None):
    app = typer.Typer()

    @app.command()
    @guarded("stopped; all is kept")
    def command() -> None:
        print("begun")
        if error is not None:
            raise error

    return CliRunner().invoke(app, [])


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (None, 0, ""),
        (InputError("file.json: two\n lines"), 2, "error: file.json: two lines\n"),
        (PermissionError(13, "Permission denied", "out.json"), 2, "error: out.json: Permission denied\n"),
        (KeyboardInterrupt(), 130, "stopped; all is kept\n"),
    ],
)
def test_errors_of_the_user_are_one_line(error, status, line):
    done = run(error)
    assert (done.exit_code, done.stderr, done.stdout) == (status, line, "begun\n")


def test_our_own_bugs_are_not_hidden():
    assert isinstance(run(ValueError("ours")).exception, ValueError)


PRINTS = """
import typer
from costmodel.base.command_line import guarded

@guarded()
def command():
    for number in range(100_000):
        print(number)

typer.run(command)
"""


def test_a_reader_that_leaves_is_no_error(tmp_path: Path):
    (tmp_path / "prints.py").write_text(PRINTS)
    root = Path(__file__).resolve().parents[3]
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "prints.py")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root, env={"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(20) == 0


def test_options_may_have_several_values():
    several = ("--trace", "--kineto")
    arguments = ["predict", "--trace", "a", "b", "c", "--gpu", "t4", "--kineto", "d", "--json"]
    expanded = "predict --trace a --trace b --trace c --gpu t4 --kineto d --json"
    assert repeated(arguments, several) == expanded.split()
    assert repeated(["predict", "--trace", "a", "--trace", "b"], several) == ["predict", "--trace", "a", "--trace", "b"]
    assert repeated(["predict", "--gpu", "t4", "x"], several) == ["predict", "--gpu", "t4", "x"]
