"""Two processes that write one folder: the second one is told so; readers go on."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from costmodel.base.errors import OutputError
from costmodel.base.output_files import LOCK, lock_folder

HOLDS = """
import sys
from pathlib import Path
from costmodel.base.output_files import lock_folder
lock = lock_folder(Path(sys.argv[1]), "results")
print("held", flush=True)
sys.stdin.read()
"""


def test_the_second_writer_is_told_until_the_first_one_ends(tmp_path: Path):
    folder = tmp_path / "new"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None and first.stdin is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(OutputError) as refused:
            lock_folder(folder, "results")
        line = f"{folder}: another process is writing results here (process {first.pid}: -c {folder}); wait"
        assert str(refused.value).startswith(line)
        first.kill()  # a killed process holds nothing
    assert (folder / LOCK).exists()  # and takes nothing away
    lock_folder(folder, "results").close()
    with lock_folder(folder, "results"):
        assert (folder / LOCK).read_text().startswith(f"{os.getpid()} ")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("text", ["", "99999999 elsewhere", "no number here\n", "\xff\x00" * 900])
def test_what_a_lock_says_decides_nothing(tmp_path: Path, text: str):
    """A stale file does not lock, whatever is in it; a held one does."""
    (tmp_path / LOCK).write_text(text)
    with lock_folder(tmp_path, "results"):
        (tmp_path / LOCK).write_text(text)
        with pytest.raises(OutputError, match="another process is writing results here; wait"):
            lock_folder(tmp_path, "results")


def test_a_folder_that_was_made_for_the_lock_goes_with_it_unless_it_is_used(tmp_path: Path):
    lock_folder(tmp_path / "empty", "results").close()
    with lock_folder(tmp_path / "used", "results"):
        (tmp_path / "used" / "result").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["result"]


def test_who_waited_for_a_lock_that_was_taken_away_takes_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its file was opened before the holder took it away, and locked afterwards: two would hold two files."""
    first, locked = lock_folder(tmp_path, "results"), fcntl.flock

    def too_late(*arguments: int) -> None:
        monkeypatch.setattr(fcntl, "flock", locked)
        first.close()
        locked(*arguments)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with lock_folder(tmp_path, "results"), pytest.raises(OutputError, match="another process"):
        lock_folder(tmp_path, "results")


def test_the_holder_takes_away_what_killed_ones_left(tmp_path: Path):
    (tmp_path / ".checking-1" / "deep").mkdir(parents=True)
    (tmp_path / ".checking-2").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("")
    (tmp_path / ".checking-3").symlink_to(tmp_path / "elsewhere")
    with lock_folder(tmp_path, "results") as lock:
        lock.clear(".checking-*")
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"] and (tmp_path / "elsewhere" / "file").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file/x: results cannot be written: Not a directory"):
        lock_folder(tmp_path / "file" / "x", "results")
