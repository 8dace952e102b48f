"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from costmodel.base.errors import OutputError
from costmodel.base.output_files import check_outputs, check_writable, remove_partials, whole_file, write_whole


def test_content_arrives_and_nothing_else(tmp_path):
    write_whole(tmp_path / "text", "größer\n")
    write_whole(tmp_path / "bytes", b"\x00\xff")
    assert (tmp_path / "text").read_bytes() == "größer\n".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff"
    assert sorted(os.listdir(tmp_path)) == ["bytes", "text"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(tmp_path, failure):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(failure), whole_file(path) as stream:
        stream.write(b"new")
        raise failure
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_the_old_file_is_there_until_the_end(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with whole_file(path) as stream:
        stream.write(b"new")
        stream.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_two_writers_do_not_share_a_name(tmp_path):
    path = tmp_path / "file"
    with whole_file(path) as first, whole_file(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_text() == "first"  # the outer block ends last
    assert os.listdir(tmp_path) == ["file"]


def test_mode_is_kept_or_that_of_a_new_file(tmp_path):
    old, new, other = tmp_path / "old", tmp_path / "new", tmp_path / "other"
    old.write_text("x")
    old.chmod(0o640)
    write_whole(old, "y")
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    write_whole(new, "y")
    other.write_text("y")
    assert new.stat().st_mode == other.stat().st_mode


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink() and target.read_text() == "new"


def test_what_is_no_file_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, "through")
    reader.join(timeout=60)
    assert found == [b"through"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_where_nothing_can_be_written_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "file", "x")
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, "x")


def test_long_names_have_room_for_the_other_name(tmp_path):
    path = tmp_path / ("n" * 250)
    write_whole(path, "x")
    assert path.read_text() == "x"


def test_lines_are_appended_whole_or_not_at_all(tmp_path):
    """A write that the file's limit cuts short stands for the end of the disk."""
    path = tmp_path / "lines"
    code = (
        "import resource, signal, sys; from costmodel.base.output_files import append_whole\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "stream = open(sys.argv[1], 'ab', buffering=0); append_whole(stream, b'twelve bytes')\n"
        "try:\n    append_whole(stream, b'twelve more.')\n"
        "except OSError as error:\n    print(error.strerror)"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd=root, check=True
    )  # fmt: skip
    assert path.read_bytes() == b"twelve bytes" and done.stdout == "No space left on device\n"


def test_what_killed_processes_left_is_taken_away(tmp_path):
    (tmp_path / "file.partial").write_text("a file of somebody")
    with pytest.raises(RuntimeError), whole_file(tmp_path / "file") as stream:
        stream.write(b"half")
        (left,) = (path for path in tmp_path.iterdir() if path.name.startswith("."))
        (tmp_path / left.name.replace("file", "other")).write_bytes(b"half")
        raise RuntimeError
    assert len(os.listdir(tmp_path)) == 2
    remove_partials(tmp_path, tmp_path / "absent")
    assert os.listdir(tmp_path) == ["file.partial"]


def test_what_can_be_written_is_known_before(tmp_path):
    (tmp_path / "old").write_text("old")
    for path in (tmp_path / "old", tmp_path / "new", "/dev/null"):
        check_writable(Path(path), "--report")
    check_writable(tmp_path / "folder" / "new", "-o", makes_folder=True)
    assert (tmp_path / "old").read_text() == "old" and sorted(os.listdir(tmp_path)) == ["folder", "old"]


@pytest.mark.parametrize("makes_folder", [False, True])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "is a directory; name a file"),
        ("file/x", "cannot be written (Not a directory); name another file"),
        ("x" * 300, "cannot be written (File name too long); name another file"),
        ("a\0b", "cannot be written (a zero byte in the name); name another file"),
    ],
)
def test_what_cannot_be_written_is_told_before(tmp_path, name, told, makes_folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as caught:
        check_writable(tmp_path / name, "--report", makes_folder)
    assert str(caught.value) == f"--report {tmp_path / name}: {told}"


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(OutputError, match=f"--report .*/x: there is no folder {tmp_path}/none; make it"):
        check_writable(tmp_path / "none" / "x", "--report")


def test_a_file_of_two_options_is_told(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "model")
    check_outputs({"--report": tmp_path / "report", "--plot": None, "--timeline": tmp_path / "time"})
    check_outputs({"--report": "/dev/null", "--timeline": "/dev/null"})
    with pytest.raises(OutputError, match="--report .*/link: is the file of --model; name another"):
        check_outputs({"--report": tmp_path / "link"}, {"--model": tmp_path / "model"})
