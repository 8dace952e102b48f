"""Builds for several input shapes in one folder: written, picked from, replaced, damaged."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from pathlib import Path

import numpy as np
import pytest

import fusion
from costmodel.base.errors import InputError, OutputError
from fusion.model.build_folder import (
    MANIFEST,
    MODEL,
    Artifact,
    ProfileBuild,
    profile_names,
    read_artifact,
    read_profiles,
    write_profiles,
    write_single,
)
from fusion.model.named_arrays import TensorInfo


class Library:
    """Content that "exports", or fails."""

    def __init__(self, content: bytes, error: Exception | None = None) -> None:
        self.content, self.error = content, error

    def export_library(self, file_name: str) -> None:
        Path(file_name).write_bytes(self.content)
        if self.error is not None:
            raise self.error


def build_of(artifact: Artifact, width: int, error: Exception | None = None) -> ProfileBuild:
    inputs = tuple(dataclasses.replace(info, shape=(2, width)) for info in artifact.manifest.inputs)
    manifest = dataclasses.replace(artifact.manifest, inputs=inputs, files={})
    return ProfileBuild(f"2x{width}", manifest, {MODEL: Library(b"%d" % width, error)}, {"width": width})


@pytest.fixture
def directory(tiny_build: Artifact, tmp_path: Path) -> Path:
    write_profiles(tmp_path / "build", [build_of(tiny_build, 3), build_of(tiny_build, 5)], {"profiles": 2})
    return tmp_path / "build"


def test_names_are_the_shapes_that_differ():
    def inputs(width: int, other: int) -> tuple[TensorInfo, ...]:
        return (TensorInfo("x", (1, 3, width), "float32"), TensorInfo("y", (other,), "float32"))

    assert profile_names([inputs(4, 7), inputs(5, 7)]) == ["1x3x4", "1x3x5"]
    assert profile_names([inputs(4, 7), inputs(5, 8), inputs(5, 7)]) == ["1x3x4_7", "1x3x5_8", "1x3x5_7"]
    with pytest.raises(InputError, match="x=1,3,4 y=7: two profiles"):
        profile_names([inputs(4, 7), inputs(5, 7), inputs(4, 7)])


def test_profiles_are_whole_builds_in_the_order_asked_for(directory: Path):
    assert [(each.directory.name, each.manifest.inputs[0].shape) for each in read_profiles(directory)] == [
        ("2x3", (2, 3)),
        ("2x5", (2, 5)),
    ]
    assert read_artifact(directory / "2x5").library() == directory / "2x5" / MODEL
    with pytest.raises(InputError, match=r"name one: .*2x3, .*2x5"):
        read_artifact(directory)


def test_a_failed_write_keeps_all_old_profiles(tiny_build: Artifact, directory: Path):
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OutputError, match="no space left"):
        write_profiles(directory, [build_of(tiny_build, 4), build_of(tiny_build, 3, full)], {})
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    assert len(read_profiles(directory)) == 2


def test_what_an_earlier_build_left_is_taken_away(tiny_build: Artifact, directory: Path):
    write_profiles(directory, [build_of(tiny_build, 3), build_of(tiny_build, 7)], {})
    assert [each.directory.name for each in read_profiles(directory)] == ["2x3", "2x7"]
    assert not (directory / "2x5").exists()
    (directory / "2x3" / "notes.txt").write_text("the user's own")
    single = dataclasses.replace(build_of(tiny_build, 3), folder="")
    write_single(directory, single)
    assert [each.directory for each in read_profiles(directory)] == [directory]
    assert [path.name for path in (directory / "2x3").iterdir()] == ["notes.txt"] and not (directory / "2x7").exists()
    write_profiles(directory, [build_of(tiny_build, 3), build_of(tiny_build, 7)], {})
    assert not (directory / MODEL).exists()


def test_a_profile_of_another_build_is_refused(tiny_build: Artifact, directory: Path):
    other = directory.parent / "other"
    write_profiles(other, [build_of(tiny_build, 3), build_of(tiny_build, 6)], {})
    shutil.copyfile(other / "2x6" / MANIFEST, directory / "2x5" / MANIFEST)
    shutil.copyfile(other / "2x6" / MODEL, directory / "2x5" / MODEL)
    with pytest.raises(InputError, match=r"2x5/manifest\.json: is not the one that"):
        read_profiles(directory)


def test_a_loaded_model_picks_by_shape(tiny_build: Artifact, tmp_path: Path):
    """The network of the wider profile is the tiny one: which profile ran shows in what is computed."""

    class Wide:
        def __call__(self, arrays):
            return {"sum": arrays["a"] - arrays["b"], "file": arrays["a"]}

    model = fusion.load(tiny_build.directory)
    wide = tuple(dataclasses.replace(info, shape=(2, 5)) for info in model.inputs)
    second = dataclasses.replace(model.profiles[0], inputs=wide, model=Wide())
    both = fusion.TunedModel(model.folder, [*model.profiles, second], 1)
    a, b = np.ones((2, 5), np.float32), np.full((2, 5), 3, np.float32)
    np.testing.assert_array_equal(both(a, b)["sum"], a - b)
    np.testing.assert_array_equal(both(a=a[:, :3], b=b[:, :3])["sum"], (a + b)[:, :3])
    with pytest.raises(InputError, match=r"a=2,4 b=2,4 fits no profile; the model was tuned for a=2,3 b=2,3; a=2,5"):
        both(a[:, :4], b[:, :4])
    with pytest.raises(InputError, match="no input 'c'"):
        both(a=a, b=b, c=b)
