"""What all commands do alike with errors, and options with several values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from costmodel.base.command_line import guarded, repeat_options
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
    assert repeat_options(arguments, several) == expanded.split()
    assert repeat_options(["predict", "--trace", "a", "--trace", "b"], several) == [
        "predict",
        "--trace",
        "a",
        "--trace",
        "b",
    ]
    assert repeat_options(["predict", "--gpu", "t4", "x"], several) == ["predict", "--gpu", "t4", "x"]


FULL = """
import sys
import typer
from typing import Annotated, Literal
from costmodel.base.command_line import ProgramGroup, guarded, program_name, version_command

app = typer.Typer(name="tool", cls=ProgramGroup, help="A tool.", no_args_is_help=True)
app.callback()(version_command)

@app.command()
@guarded()
def count(
    length: Annotated[int, typer.Option(min=1)] = 3,
    size: int = 1,
    free_share: float = 0.5,
    kind: Literal["near", "far"] = "near",
):
    for number in range(length):
        print(number)
    bytearray(size << 50 if size > 1 else 1)

@app.command()
def other():
    "Another."

app(prog_name=sys.argv.pop(1))
"""


def program(*arguments: str, output=subprocess.PIPE, name: str = "tool"):
    words = [sys.executable, "-c", FULL, name, *arguments]
    # The shell is named in the test, not found among the processes above it.
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    return subprocess.run(words, stdout=output, stderr=subprocess.PIPE, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("count", "--length", "0"), ("--length", "greater than or equal to 1")),
        (("count", "--length", "x"), ("--length", "integer")),
        (("count", "--lenght", "3"), ("--lenght", "--length")),
        (("cuont",), ("cuont",)),
        (("count", "--size"), ("--size",)),
        (("count", "--size", "9"), ("out of memory",)),
        (("count", "--free-share", "nan"), ("--free-share nan: give a finite number",)),
        (("count", "--free-share", "1e999"), ("--free-share inf: give a finite number",)),
        (("count", "--kind", "Near"), ("'--kind': 'Near' is not one of 'near', 'far'",)),
    ],
)
def test_a_wrong_command_line_is_one_line_too(arguments: tuple[str, ...], words: tuple[str, ...]):
    done = program(*arguments)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and all(word in line for word in words), line


def test_an_option_that_is_like_none_gets_no_other_one():
    """Typer alone would offer --length for --strength."""
    (line,) = program("count", "--strength", "3").stderr.splitlines()
    assert line.startswith("error: No such option: --strength; ") and "Possible" not in line


def test_help_is_help():
    assert program("--help").returncode == 0 and "A tool." in program("--help").stdout
    nothing = program()
    assert nothing.returncode == 2 and "A tool." in nothing.stdout + nothing.stderr


def test_the_version_is_told():
    done = program("--version")
    assert done.returncode == 0 and done.stdout.startswith("fusion-costmodel ") and ", Python 3." in done.stdout


def test_a_full_disk_behind_the_output_is_one_line():
    with open("/dev/full", "w") as full:
        done = program("count", output=full)
    assert done.returncode == 2
    assert done.stderr == "error: output: No space left on device\n"


def test_help_on_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = program("count", "--help", output=full)
    assert (done.returncode, done.stderr) == (2, "error: output: No space left on device\n")


def test_an_output_that_is_closed_is_no_error():
    words = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", FULL, "tool", "count"]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_completion_is_for_the_command():
    script = program("--show-completion", "bash")
    assert "_TOOL_COMPLETE" in script.stdout, script.stderr
    done = program("--show-completion", name="python -m tool")
    assert (
        done.returncode == 2 and done.stderr.startswith("error: --show-completion: ") and "`tool --show" in done.stderr
    )


def test_names_of_megabytes_and_signs_of_terminals_are_cut():
    line = run(InputError(f"file: {'x' * 10**6} \x1b[31m end")).stderr
    assert len(line) < 1300 and line.endswith("\\x1b[31m end\n")


@pytest.mark.parametrize(
    ("words", "value", "refused"),
    [
        (["-o", ""], Path(""), True),
        (["--output="], Path(""), True),
        (["m.onnx", ""], [Path("m.onnx"), Path("")], True),
        (["-o", "."], Path("."), False),
        (["-o", "./", "--note", ""], Path("."), False),
        (["--note", ""], Path("build"), False),
        ([], Path("."), False),
    ],
)
def test_an_empty_name_is_not_this_folder(words, value, refused, monkeypatch, capsys):
    done = []

    @guarded()
    def command(output: object) -> None:
        done.append(output)

    monkeypatch.setattr("sys.argv", ["tool", *words])
    if refused:
        with pytest.raises(typer.Exit) as ended:
            command(output=value)
        assert ended.value.exit_code == 2 and capsys.readouterr().err.startswith("error: output: an empty name")
    else:
        command(output=value)
    assert done == ([] if refused else [value])
