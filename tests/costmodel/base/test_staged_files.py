"""Files that appear together, and jobs that go on where they were stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodel.base import output_files
from costmodel.base.errors import OutputError
from costmodel.base.output_files import StagedFiles


def job(output: Path, made_from: object, stop_at: str = "") -> list[str]:
    """Makes three files, and says which it made; ``KeyboardInterrupt`` before ``stop_at``."""
    made = []
    with StagedFiles(output, "letters", made_from) as staged:
        for name in ("a.json", "sub/b.json", "c.json"):
            if name == stop_at:
                raise KeyboardInterrupt

            def make(name: str = name) -> None:
                path = staged.folder / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(f"{name} {made_from}")
                made.append(name)

            staged.once(name, make)
        staged.once("only-while-working", lambda: (staged.folder / "only-while-working").write_text(""))
        staged.install(["a.json", "sub/b.json", "c.json"])
    return made


def files(output: Path) -> dict[str, str]:
    return {path.relative_to(output).as_posix(): path.read_text() for path in output.rglob("*") if path.is_file()}


def whole(made_from: object) -> dict[str, str]:
    return {name: f"{name} {made_from}" for name in ("a.json", "c.json", "sub/b.json")}


def test_nothing_is_in_its_place_before_all_is_made(tmp_path: Path):
    job(tmp_path, "old")
    with pytest.raises(KeyboardInterrupt):
        job(tmp_path, "new", stop_at="c.json")
    assert {name: text for name, text in files(tmp_path).items() if "/" not in name or name[0] != "."} == whole("old")


def test_the_next_run_goes_on(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        job(tmp_path, "new", stop_at="c.json")
    assert job(tmp_path, "new") == ["c.json"]
    assert files(tmp_path) == whole("new")
    assert job(tmp_path, "new") == ["a.json", "sub/b.json", "c.json"]  # one that was done begins anew


def test_what_was_made_from_something_else_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(KeyboardInterrupt):
        job(tmp_path, "old", stop_at="c.json")
    assert job(tmp_path, "new") == ["a.json", "sub/b.json", "c.json"] and files(tmp_path) == whole("new")
    with pytest.raises(KeyboardInterrupt):
        job(tmp_path, "new", stop_at="c.json")
    monkeypatch.setattr(output_files, "_program", lambda: "another program")
    assert job(tmp_path, "new") == ["a.json", "sub/b.json", "c.json"] and files(tmp_path) == whole("new")


def test_one_at_a_time_and_nothing_is_left_of_one_that_made_nothing(tmp_path: Path):
    output = tmp_path / "out"
    with (
        pytest.raises(OutputError, match="another process is writing letters here"),
        StagedFiles(output, "letters", 1),
        StagedFiles(output, "letters", 2),
    ):
        pass
    assert not output.exists()
