"""Captures on disk: used again by the same user, never loaded where somebody else made them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from e2e.parallelism import capture_cache
from e2e.parallelism.capture_cache import load_or_make


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    capture_cache._key.cache_clear()
    yield tmp_path / "cache" / "costmodel" / "capture-key"
    capture_cache._key.cache_clear()


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_capture_is_made_once_also_for_the_next_process(tmp_path: Path, own_key: Path):
    assert load_or_make(tmp_path, "key", lambda: [1, 2]) == [1, 2]
    capture_cache._key.cache_clear()  # as in another process
    assert load_or_make(tmp_path, "key", lambda: pytest.fail("made again")) == [1, 2]
    assert own_key.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("seal", [b"", b"\0" * 32])
def test_what_somebody_else_made_is_not_loaded(tmp_path: Path, seal: bytes):
    sprung = tmp_path / "sprung"
    (tmp_path / "key.pickle").write_bytes(seal + pickle.dumps(Trap(str(sprung))))
    assert load_or_make(tmp_path, "key", lambda: "made anew") == "made anew"
    assert not sprung.exists()
    assert load_or_make(tmp_path, "key", lambda: pytest.fail("made again")) == "made anew"


def test_a_folder_of_another_user_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    load_or_make(tmp_path, "key", lambda: "theirs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of another user"))
    capture_cache._key.cache_clear()
    assert load_or_make(tmp_path, "key", lambda: "own") == "own"


def test_without_a_place_for_the_key_captures_are_made_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_or_make(tmp_path, "key", lambda: 3) == 3
