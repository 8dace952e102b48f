"""Commands that are killed and asked to end once each, at moments that are always the same; more by hand:
``python -m tests.fuzz.kills --times 20``. The harness itself is tried on a toy that does each thing that must not be.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.full_disks import WRITING, run_on_full_disk
from tests.fuzz.killed_commands import COMMANDS, KilledCommand
from tests.fuzz.kills import kill, twice


def need(names: tuple[str, ...]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")


@pytest.mark.slow
# The lives of the others take minutes, and PyTorch's profiler was seen to end those of `measure` with signal 11:
# `python -m tests.fuzz.kills` runs them by hand.
@pytest.mark.parametrize(
    ("name", "signals"),
    [pytest.param("tune", ("KILL", "TERM"), marks=pytest.mark.thorough), ("fit", ("KILL", "TERM"))],
)
def test_what_is_finished_survives_and_nothing_is_left_behind(name: str, signals: tuple[str, ...], tmp_path: Path):
    need(COMMANDS[name].needs)
    report = kill(COMMANDS[name], 1, signals, 0, tmp_path)
    assert not report.findings, "\n".join(report.findings)
    assert all(report.lives[name] == 1 for name in signals)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fit"])
def test_of_two_in_one_folder_one_works(name: str, tmp_path: Path):
    need(COMMANDS[name].needs)
    report = twice(COMMANDS[name], tmp_path / "both")
    assert not report.findings, "\n".join(report.findings)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fit", pytest.param("predict-report", marks=pytest.mark.thorough)])
def test_a_full_disk_is_told(name: str, tmp_path: Path):
    need(WRITING[name].needs)
    try:
        end, findings = run_on_full_disk(WRITING[name], 4, tmp_path)
    except PermissionError as error:
        pytest.skip(f"no disk can be mounted: {error}")
    assert not findings and end == "refused", "\n".join(findings)


# --- the harness ----------------------------------------------------------------------------------

TOY = """
import subprocess, sys, tempfile, time
from pathlib import Path

bad, out = sys.argv[1], Path(sys.argv[2])
out.mkdir(exist_ok=True)
log = out / "log"
done = log.read_text().splitlines() if log.exists() else []
if bad == "forgets":
    done = []
    log.write_text("")
if bad == "litters":
    tempfile.mkdtemp()
if bad == "leaves a child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
if bad == "damages":
    (out / "damaged").write_text("")
for number in range(8 if bad == "promises" else 20):
    if str(number) in done and bad != "repeats":
        continue
    time.sleep(0.04)
    if bad == "promises":
        print("done", flush=True)
        time.sleep(0.3)
    with log.open("a") as file:
        file.write(f"{number}\\n")
    if bad != "promises":
        print("done", flush=True)
if bad == "differs" and out.parent.name != "undisturbed":
    (out / "other").write_text("")
"""
FOUND = {
    "nothing": "",
    "forgets": "finished before are lost",
    "repeats": "done twice",
    "promises": "told as finished",
    "litters": "temporary files are left",
    "leaves a child": "still there: ",
    "damages": "cannot be read",
    "differs": "another result",
}


def toy(bad: str) -> KilledCommand:
    def kept(place: Path) -> Mapping[str, Any]:
        return {line: line for line in work(place)}

    def work(place: Path) -> list[str]:
        log = place / "out" / "log"
        return log.read_text().splitlines() if log.exists() else []

    def read(place: Path) -> None:
        if (place / "out" / "damaged").exists():
            raise ValueError("damaged")

    return KilledCommand(
        "toy", lambda place: ["-c", TOY, bad, str(place / "out")], lambda place: None, kept, work,
        lambda text: text.count("done"), read, lambda place: sorted(path.name for path in (place / "out").iterdir()),
    )  # fmt: skip


@pytest.mark.parametrize("bad", FOUND)
def test_what_must_not_happen_is_found(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if bad == "leaves a child":
        monkeypatch.setattr("fuzz.kills.LOOKS_FOR_PROCESSES", 10)
    report = kill(toy(bad), 2, ("KILL", "TERM"), 1, tmp_path / "1")
    if bad == "nothing":
        assert not report.findings and report.lives["KILL"] == report.lives["TERM"] == 2
        assert report.lives["to the end"] > 1  # that of an undisturbed one, and what was gone on with
        return
    findings = list(report.findings)
    # Lives that are ended before they have written anything, as on a busy machine, show nothing: others are drawn.
    for seed in range(2, 6):
        if not any(FOUND[bad] in each for each in findings):
            findings += kill(toy(bad), 2, ("KILL", "TERM"), seed, tmp_path / str(seed)).findings
    assert any(FOUND[bad] in each for each in findings), findings


def test_two_that_work_at_once_are_found(tmp_path: Path):
    assert any("done twice" in each for each in twice(toy("nothing"), tmp_path / "both").findings)
