"""Build directories: whole or not there; refused by name when something is wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.base.errors import InputError, OutputError
from fusion.model import build_folder
from fusion.model.build_folder import (
    MANIFEST,
    MODEL,
    SUMMARY,
    UNFUSED_MODULE,
    Manifest,
    check_runnable,
    file_digest,
    prepare_directory,
    read_artifact,
    write_artifact,
    write_failure,
)
from fusion.model.named_arrays import TensorInfo

MANIFEST_OF_TEST = Manifest(
    model_path="model.onnx",
    model_sha256="0" * 64,
    inputs=(TensorInfo("x", (1, 3), "float32"),),
    outputs=(TensorInfo("y", (), "int64"),),
    mcpu="haswell",
    cpu_flags=("avx2", "fma"),
    threads=2,
    tvm_version="0.27.0",
)


class Library:
    """Stands in for TVM's executable: writes ``content``, or raises ``error`` after half of it."""

    def __init__(self, content: bytes, error: Exception | None = None) -> None:
        self.content, self.error = content, error

    def export_library(self, file_name: str) -> None:
        Path(file_name).write_bytes(self.content[: len(self.content) // 2] if self.error else self.content)
        if self.error:
            raise self.error


@pytest.fixture
def build(tmp_path: Path) -> Path:
    executables = {MODEL: Library(b"fused"), UNFUSED_MODULE: Library(b"unfused")}
    return write_artifact(tmp_path / "build", MANIFEST_OF_TEST, executables, {"trials": 3}).directory


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_what_was_written_is_read_back(build: Path):
    artifact = read_artifact(build)
    expected = {**MANIFEST_OF_TEST.__dict__, "files": artifact.manifest.files}
    assert artifact.manifest == Manifest(**expected)
    assert (build / MODEL).read_bytes() == b"fused"
    assert artifact.library(UNFUSED_MODULE) == build / UNFUSED_MODULE
    assert json.loads((build / SUMMARY).read_text()) == {"trials": 3}
    assert set(files(build)) == {MODEL, UNFUSED_MODULE, SUMMARY, MANIFEST}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left"),
        (RuntimeError("linking failed:\ncannot find -lm"), "linking failed: cannot find -lm"),
        (
            RuntimeError("g++ -shared -fPIC -o a.so b.o\nld: final link failed: No space left on device"),
            "no space left on ",
        ),
    ],
)
def test_a_failed_write_keeps_the_old_build_and_nothing_of_the_new(build: Path, error: Exception, words: str):
    before = files(build)
    with pytest.raises(OutputError, match=words):
        write_artifact(build, MANIFEST_OF_TEST, {MODEL: Library(b"new model", error)}, {})
    assert files(build) == before
    read_artifact(build)


def test_a_second_write_replaces_and_drops_a_module_that_is_gone(build: Path):
    write_artifact(build, MANIFEST_OF_TEST, {MODEL: Library(b"better")}, {})
    artifact = read_artifact(build)
    assert artifact.library(UNFUSED_MODULE) is None
    assert not (build / UNFUSED_MODULE).exists()
    assert (build / MODEL).read_bytes() == b"better"


def damage(build: Path, how: str) -> None:
    manifest = json.loads((build / MANIFEST).read_text())
    if how == "flipped":
        (build / MODEL).write_bytes(b"fusee")
    elif how == "no model":
        (build / MODEL).unlink()
    elif how == "no manifest":
        (build / MANIFEST).unlink()
    elif how == "truncated manifest":
        (build / MANIFEST).write_text((build / MANIFEST).read_text()[:40])
    elif how == "other format":
        (build / MANIFEST).write_text(json.dumps({**manifest, "format": 99}))
    elif how == "field gone":
        (build / MANIFEST).write_text(json.dumps({k: v for k, v in manifest.items() if k != "inputs"}))
    elif how == "unknown field":
        (build / MANIFEST).write_text(json.dumps({**manifest, "colour": "red"}))
    elif how == "outside":
        outside = shutil.copy(build / MODEL, build.parent / MODEL)
        listed = {**manifest["files"], "../model.so": file_digest(Path(outside))}
        (build / MANIFEST).write_text(json.dumps({**manifest, "files": listed}))
    elif how == "no model listed":
        (build / MANIFEST).write_text(json.dumps({**manifest, "files": {}}))


@pytest.mark.parametrize(
    ("how", "file"),
    [
        ("flipped", MODEL),
        ("no model", MODEL),
        ("no manifest", MANIFEST),
        ("truncated manifest", MANIFEST),
        ("other format", MANIFEST),
        ("field gone", MANIFEST),
        ("unknown field", MANIFEST),
        ("outside", MANIFEST),
        ("no model listed", MANIFEST),
    ],
)
def test_damage_is_refused_in_one_line_that_names_the_file(build: Path, how: str, file: str):
    damage(build, how)
    with pytest.raises(InputError) as caught:
        read_artifact(build)
    assert str(build / file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cpu_without_the_features_is_refused_by_their_names(build: Path):
    artifact = read_artifact(build)
    check_runnable(artifact, frozenset({"avx2", "fma", "sse4_2"}), "0.27.3")
    with pytest.raises(InputError, match="this CPU lacks fma"):
        check_runnable(artifact, frozenset({"avx2"}))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_build_with_tiles_is_refused_where_the_system_refuses_them(build: Path, monkeypatch, precision: str):
    artifact = read_artifact(build)
    manifest = replace(artifact.manifest, cpu_flags=("avx2", "amx_tile"), precision=precision)
    monkeypatch.setattr(build_folder, "tiles_refused", lambda: "the operating system refuses the tile registers of AMX")
    flags = frozenset({"avx2", "amx_tile"})
    if precision == "float32":
        check_runnable(replace(artifact, manifest=manifest), flags)  # whose kernels use none
        return
    with pytest.raises(
        InputError, match="built for a CPU with AMX, but the operating system refuses.*tune the model here"
    ):
        check_runnable(replace(artifact, manifest=manifest), flags)


def test_another_series_of_tvm_is_refused(build: Path):
    with pytest.raises(InputError, match=r"built with TVM 0\.27\.0, but TVM 0\.28\.1"):
        check_runnable(read_artifact(build), frozenset({"avx2", "fma"}), "0.28.1")


def test_a_directory_that_cannot_be_made_is_refused_before_work_starts(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file, not a folder; name another folder"):
        prepare_directory(tmp_path / "file" / "build")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_refused(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        prepare_directory(tmp_path / "build")
    tmp_path.chmod(0o700)


def test_a_build_can_move(build: Path, tmp_path: Path):
    shutil.move(build, tmp_path / "elsewhere")
    assert read_artifact(tmp_path / "elsewhere").library() == tmp_path / "elsewhere" / MODEL


def test_a_full_disk_is_said_in_our_words_whatever_the_linker_says(build: Path, monkeypatch: pytest.MonkeyPatch):
    """A linker that cannot write dies of a bus error."""
    error = RuntimeError("g++ -shared -o a.so b.o\ncollect2: fatal error: ld terminated with signal 7 [Bus error]")
    assert "Bus error" in write_failure(build / MODEL, error)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0})())
    assert write_failure(build / MODEL, error) == f"no space left on {build}; free some and run again"
    denied = OSError(errno.EACCES, "Permission denied")
    assert write_failure(build / MODEL, denied) == "Permission denied"


@pytest.mark.parametrize(
    ("dtype", "known"), [("float99", False), ("bfloat16", True), ("int64", True), ("finfo x", False)]
)
def test_data_types_of_a_manifest_must_exist(build: Path, dtype: str, known: bool):
    path = build / MANIFEST
    fields = json.loads(path.read_text())
    fields["inputs"][0]["dtype"] = dtype
    path.write_text(json.dumps(fields))
    if known:
        read_artifact(build)
    else:
        with pytest.raises(InputError, match=f"manifest.json: .*'{dtype}' is no data type; tune"):
            read_artifact(build)
