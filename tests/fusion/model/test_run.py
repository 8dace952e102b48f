"""``fusion run`` on a real compiled module: named arrays in and out, everything else refused by name."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from costmodel.base.errors import InputError, OutputError
from fusion.model import named_arrays as tensors
from fusion.model.build_folder import MODEL, Artifact, TensorInfo
from fusion.model.named_arrays import check_arrays, random_arrays, read_npz, write_npz
from fusion.model.tuned_model import TunedModel, render_run, run_command

A = np.array([[1, -2, 3], [4, 5, -6]], np.float32)
B = np.array([[2, 2, -1], [0.5, 1, 1]], np.float32)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    np.savez(tmp_path / "x.npz", a=A, b=B)
    return tmp_path / "x.npz"


def test_outputs_carry_the_names_of_the_model(tiny_build: Artifact, inputs: Path, tmp_path: Path):
    result = run_command(tiny_build.directory, inputs, tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz", allow_pickle=False) as written:
        assert set(written.files) == {"sum", "file"}
        np.testing.assert_array_equal(written["sum"], A + B)
        np.testing.assert_array_equal(written["file"], np.maximum(A * B, 0))
    assert [info.name for info in result.outputs] == ["sum", "file"]
    assert "file: float32[2, 3]" in render_run(result)


def test_order_and_memory_layout_of_the_arrays_do_not_matter(tiny_build: Artifact, tmp_path: Path):
    np.savez(tmp_path / "x.npz", b=np.asfortranarray(B), a=A)
    run_command(tiny_build.directory, tmp_path / "x.npz", tmp_path / "y.npz")
    assert np.array_equal(read_npz(tmp_path / "y.npz")["sum"], A + B)


def test_a_build_for_more_threads_runs_on_the_cores_there_are(
    tiny_build: Artifact, inputs: Path, tmp_path: Path, monkeypatch
):
    """Tuned for two threads on one machine, carried to a container of one core."""
    monkeypatch.setattr("costmodel.base.process.usable_cores", lambda: 1)
    assert run_command(tiny_build.directory, inputs, tmp_path / "y.npz").threads == 1
    with pytest.raises(InputError, match="--threads 2: this process may use 1 core"):
        run_command(tiny_build.directory, inputs, tmp_path / "y.npz", threads=2)


def test_running_needs_the_runtime_of_tvm_alone(tiny_build: Artifact, inputs: Path, tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from fusion.model.tuned_model import run_command\n"
        f"run_command(Path({str(tiny_build.directory)!r}), Path({str(inputs)!r}), Path({str(tmp_path / 'y.npz')!r}))\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libtvm_runtime' in maps and 'libtvm_compiler' not in maps\n"
        "assert not {'onnx', 'onnxruntime', 'openvino', 'xgboost'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3], timeout=60)
    assert np.array_equal(read_npz(tmp_path / "y.npz")["sum"], A + B)


@pytest.mark.parametrize(
    ("given_arrays", "words"),
    [
        ({"a": A}, "input 'b' is missing"),
        ({"a": A, "b": B, "c": B}, "no input 'c'"),
        ({"A": A, "b": B}, "input 'a' is missing"),
        ({"a": A, "b": B[:1]}, r"input 'b' has shape \(1, 3\), the model takes \(2, 3\)"),
        ({"a": A.astype(np.float64), "b": B}, "input 'a' is float64, the model takes float32"),
        ({"a": A.astype(">f4"), "b": B}, "input 'a' is >f4"),
        ({"a": A, "b": np.array(["x"])}, "input 'b' has shape"),
        ({"a": A, "b": np.array([[{}, 1, 2]] * 2)}, "array 'b' holds Python objects"),
        ({}, "input 'a' is missing"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(tiny_build: Artifact, tmp_path: Path, given_arrays, words):
    np.savez(tmp_path / "x.npz", **given_arrays)
    with pytest.raises(InputError, match=words) as caught:
        run_command(tiny_build.directory, tmp_path / "x.npz", tmp_path / "y.npz")
    assert str(tmp_path / "x.npz") in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


@pytest.mark.parametrize("kind", ["absent", "directory", "text", "empty", "npy", "truncated", "no array", "bad sum"])
def test_unreadable_files_are_refused_in_one_line(tmp_path: Path, kind: str):
    path = tmp_path / "x.npz"
    np.savez(path, a=np.arange(1000.0))
    whole = path.read_bytes()
    if kind == "absent":
        path.unlink()
    elif kind == "directory":
        path.unlink()
        path.mkdir()
    elif kind == "npy":
        np.save(path.with_suffix(".npy"), A)
        path = path.with_suffix(".npy")
    elif kind == "no array":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", b"hello")
    else:
        middle = len(whole) // 2
        contents = {"text": b"hello", "empty": b"", "truncated": whole[:middle]}
        flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
        path.write_bytes(contents.get(kind, flipped))
    with pytest.raises(InputError) as caught:
        read_npz(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_library_is_refused(tiny_build: Artifact, inputs: Path, tmp_path: Path):
    build = shutil.copytree(tiny_build.directory, tmp_path / "build")
    (build / MODEL).write_bytes((build / MODEL).read_bytes()[:1000])
    with pytest.raises(InputError, match=r"model\.so: damaged"):
        run_command(build, inputs, tmp_path / "y.npz")


def test_a_full_disk_keeps_the_old_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_npz(tmp_path / "y.npz", {"y": A})

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensors.np.lib.format, "write_array", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write_npz(tmp_path / "y.npz", {"y": B})
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["y.npz"]
    np.testing.assert_array_equal(read_npz(tmp_path / "y.npz")["y"], A)


def test_a_scalar_stays_one(tmp_path: Path):
    arrays = {"total": np.array(2.5, np.float32), "column": np.arange(6.0).reshape(2, 3).T}
    write_npz(tmp_path / "y.npz", arrays)
    with np.load(tmp_path / "y.npz") as written:
        assert written["total"].shape == () and written["total"] == 2.5
        np.testing.assert_array_equal(written["column"], arrays["column"])


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8),
        arrays(st.sampled_from([np.float32, np.int64, np.bool_]), array_shapes(min_dims=0, max_dims=3, max_side=3)),
        max_size=3,
    )
)
def test_any_names_and_arrays_survive_the_file(tmp_path_factory: pytest.TempPathFactory, values):
    path = tmp_path_factory.mktemp("npz") / "y.npz"
    write_npz(path, values)
    back = read_npz(path)
    assert set(back) == set(values)
    for name, array in values.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


def test_random_inputs_are_reproducible_fit_and_are_not_zero():
    interface = [TensorInfo("x", (2, 3), "float32"), TensorInfo("i", (50,), "int64"), TensorInfo("m", (50,), "bool")]
    first, second = random_arrays(interface), random_arrays(interface)
    check_arrays(first, interface, "random")
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert first["x"].all() and set(np.unique(first["i"])) == {0, 1} and set(np.unique(first["m"])) == {False, True}


@pytest.mark.parametrize("given_arrays", [np.zeros(3), [np.zeros(3)], 3, None])
def test_run_of_no_mapping_says_what_it_takes(tiny_build: Artifact, given_arrays):
    model = TunedModel(tiny_build.directory, [], 1)
    with pytest.raises(InputError, match=r"run\(\) takes a dict of inputs by name, not .*; call the model itself"):
        model.run(given_arrays)
