"""Pictures: refused before anything is computed, the same file for the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodel.base.errors import InputError, OutputError
from costmodel.pages.charts import check_picture, picture


def drawn(path: Path) -> bytes:
    with picture(path, 3, 2, columns=2, sharey=True) as (left, right):
        left.plot([1, 2], [3, 4])
        right.set(xlabel="flop/B")
    return path.read_bytes()


def test_a_kind_of_file_that_is_not_drawn_is_refused():
    with pytest.raises(InputError, match=r"a.gif: a plot is one of .svg, .png, .pdf"):
        check_picture(Path("a.gif"), "--picture")


def test_the_same_numbers_give_the_same_file(tmp_path):
    pytest.importorskip("matplotlib")
    check_picture(tmp_path / "a.svg", "--picture")
    first, second = drawn(tmp_path / "a.svg"), drawn(tmp_path / "b.svg")
    assert first == second and b"</svg>" in first and len(first) < 60_000
    assert drawn(tmp_path / "c.png").startswith(b"\x89PNG")


def test_where_nothing_can_be_written_is_one_line(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(OutputError, match="missing/a.svg: cannot be written: No such file"):
        drawn(tmp_path / "missing" / "a.svg")
