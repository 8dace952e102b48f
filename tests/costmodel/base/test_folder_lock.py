"""Two processes that write one folder: the second one is told so; readers go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from costmodel.base.errors import OutputError
from costmodel.base.folder_lock import lock_folder

HOLDS = """
import sys
from pathlib import Path
from costmodel.base.folder_lock import lock_folder
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
        with pytest.raises(OutputError, match=f"{folder}: another process is writing results here"):
            lock_folder(folder, "results")
        first.kill()  # a killed process holds nothing
    lock_folder(folder, "results").close()
    lock_folder(folder, "results").close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file/x: results cannot be written: Not a directory"):
        lock_folder(tmp_path / "file" / "x", "results")
