"""What is no file, or too large a one, in the place of every file that others may have written: each reader refuses it
in a line that names it, at once and before it fills the memory.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from costmodel.base import input_files
from costmodel.base.errors import ProjectError
from tests.foreign_files.readers import READERS, in_time, require

NAMES = [name for name in READERS if name != "options"]


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    made = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket may be 107 characters long
    try:
        made.bind(path.name)
    finally:
        os.chdir(here)
    made.close()


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(3 << 30)  # without blocks: it takes no room


KINDS: dict[str, Callable[[Path], None]] = {
    each.__name__: each for each in (zero, pipe, unix_socket, folder, huge)
}  # fmt: skip


def whole_cases(name: str, tmp_path: Path) -> list[tuple[Path, list[Path]]]:
    """Each seed as it is, and the files of it."""
    reader, found = READERS[name], []
    for number, seed in enumerate(reader.seeds(tmp_path)):
        place = tmp_path / f"seed-{number}"
        place.mkdir()
        path = place / seed.name
        seed.write(seed.content, None, path)
        found.append((path, sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_of_its_kind_is_refused(name, tmp_path, monkeypatch):
    require(name)
    seen = 0
    for path, files in whole_cases(name, tmp_path)[:2]:
        for file in files:
            content = file.read_bytes()
            for kind, make in KINDS.items():
                file.unlink()
                make(file)
                with in_time(f"{name}: {file.name} as {kind}"):
                    try:
                        READERS[name].read(path)
                    except ProjectError as error:
                        seen += 1
                        assert "\n" not in str(error) and file.name in str(error), f"{kind}: {error}"
                file.rmdir() if kind == "folder" else file.unlink()
                file.write_bytes(content)
    assert seen >= len(KINDS) - 1


def test_what_unpacks_to_more_than_its_kind_is_refused_while_it_is_unpacked(tmp_path, monkeypatch):
    """Valid events, and rows of a table, without end."""
    monkeypatch.setitem(input_files.MOST_BYTES, "trace", 1 << 20)
    monkeypatch.setitem(input_files.MOST_BYTES, "table", 1 << 20)
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.0}
    events = json.dumps({"traceEvents": [event] * 30_000}).encode()
    rows = b"operator,median_s,error,source\n" + b"{},1.0,,x\n" * 200_000
    for name, content, file in (("kineto", events, "a.json.gz"), ("measured", rows, "a.csv.gz")):
        path = tmp_path / file
        path.write_bytes(gzip.compress(content))
        assert path.stat().st_size < 1 << 17 < 1 << 20 < len(content)
        with pytest.raises(ProjectError, match="unpacks to more than the 1 MiB that such a file may have"):
            READERS[name].read(path)
    monkeypatch.setitem(input_files.MOST_BYTES, "arrays", 1 << 20)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1 << 18, 8)))
    with pytest.raises(ProjectError, match="unpacked are more than the 1 MiB"):
        READERS["samples"].read(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["kineto", "execution-trace", "measured"])
def test_a_file_of_more_small_parts_than_memory_and_time_allow_is_refused(name, tmp_path, monkeypatch):
    """A few megabytes unpack to millions of the smallest events or rows, which take more than large ones."""
    require(name)
    for kind, (_, what) in input_files.MOST_PARTS.items():
        monkeypatch.setitem(input_files.MOST_PARTS, kind, (1, what))
    path, _ = whole_cases(name, tmp_path)[0]
    with pytest.raises(ProjectError, match=r"cannot be read \(it has more than the 1 (events|rows)"):
        READERS[name].read(path)


def test_a_file_as_large_as_its_kind_may_be_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(input_files.MOST_BYTES, "record", 1000)
    content = bytes(random.Random(0).randbytes(1000))
    for data in (content, gzip.compress(content, mtime=0)[:1000]):
        (tmp_path / "a").write_bytes(data)
    assert len(data) == 1000
    (tmp_path / "a").write_bytes(content)
    assert input_files.read_bytes(tmp_path / "a", "record") == content
    (tmp_path / "a").write_bytes(content + b"x")
    with pytest.raises(OSError, match="more than the 0 MiB"):
        input_files.read_bytes(tmp_path / "a", "record")
