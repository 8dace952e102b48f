"""Samples of a user: what is taken, and one line for whatever does not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from costmodel.base.errors import InputError
from fusion.model.named_arrays import DeclaredInput, TensorInfo, random_calibration, read_calibration

IMAGE = DeclaredInput("x", (None, 3, 4, None), "float32")


def write(path: Path, **arrays) -> Path:
    np.savez(path, **arrays)
    return path


def test_an_open_leading_dimension_takes_one_sample_at_a_time(tmp_path):
    samples = np.arange(6 * 3 * 4 * 5, dtype=np.float32).reshape(6, 3, 4, 5)
    data = read_calibration(write(tmp_path / "d.npz", x=samples), [IMAGE])
    assert data.calls == 6
    np.testing.assert_array_equal(data.call(4)["x"], samples[4:5])
    assert len(list(data)) == 6


def test_a_static_batch_takes_as_many_at_a_time_and_leaves_the_rest(tmp_path):
    samples = np.random.default_rng(0).random((7, 2), np.float32)
    data = read_calibration(write(tmp_path / "d.npz", x=samples), [DeclaredInput("x", (3, 2), "float32")])
    assert data.calls == 2
    np.testing.assert_array_equal(data.call(1)["x"], samples[3:6])


def test_an_input_without_a_dimension_for_samples_gets_one_in_the_file(tmp_path):
    rows, scalars = np.random.default_rng(0).random((5, 4, 2), np.float32), np.arange(5, dtype=np.int64)
    inputs = [DeclaredInput("x", (4, 2), "float32"), DeclaredInput("n", (), "int64")]
    data = read_calibration(write(tmp_path / "d.npz", x=rows, n=scalars), inputs)
    np.testing.assert_array_equal(data.call(3)["x"], rows[3])
    assert data.call(3)["n"] == 3 and data.calls == 5


def test_one_call_in_five_is_held_out_and_one_of_two_to_four(tmp_path):
    def split(count: int):
        samples = np.zeros((count, 2), np.float32)
        path = write(tmp_path / "d.npz", x=samples)
        return read_calibration(path, [DeclaredInput("x", (1, 2), "float32")]).split()

    assert split(1) == ([0], [])
    assert split(4) == ([0, 1, 2], [3])
    assert split(5) == ([0, 1, 2, 3], [4])
    calibrated, held_out = split(23)
    assert len(held_out) == 4 and sorted(calibrated + held_out) == list(range(23))


BAD = {
    "unknown name": ({"y": np.zeros((4, 3, 4, 5), np.float32)}, "the model has no input 'y'; it takes x"),
    "missing": ({}, "input 'x' is missing"),
    "rank": ({"x": np.zeros((4, 3, 4), np.float32)}, r"has shape \(4, 3, 4\), the model takes \(\?, 3, 4, \?\)"),
    "extent": ({"x": np.zeros((4, 3, 9, 5), np.float32)}, "the first axis must be samples"),
    "double": ({"x": np.zeros((4, 3, 4, 5))}, r"is float64, the model takes float32: save it with .astype"),
    "bytes": ({"x": np.zeros((4, 3, 4, 5), np.uint8)}, "is uint8, the model takes float32"),
    "none": ({"x": np.zeros((0, 3, 4, 5), np.float32)}, "has 0 samples, the model takes 1 at once"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_with_the_file_and_the_input(case, tmp_path):
    arrays, words = BAD[case]
    with pytest.raises(InputError, match=words) as caught:
        read_calibration(write(tmp_path / "data.npz", **arrays), [IMAGE])
    assert "data.npz" in str(caught.value) and "\n" not in str(caught.value)


def test_values_that_are_not_finite_are_refused_with_their_sample(tmp_path):
    for value in (np.nan, np.inf):
        samples = np.zeros((4, 3, 4, 5), np.float32)
        samples[2, 1, 0, 0] = value
        with pytest.raises(InputError, match="NaN or infinite values, first in sample 2"):
            read_calibration(write(tmp_path / "d.npz", x=samples), [IMAGE])


def test_too_few_samples_for_a_batch_and_different_numbers_are_refused(tmp_path):
    eight = DeclaredInput("x", (8, 2), "float32")
    with pytest.raises(InputError, match="has 7 samples, the model takes 8 at once"):
        read_calibration(write(tmp_path / "d.npz", x=np.zeros((7, 2), np.float32)), [eight])
    inputs = [DeclaredInput(name, (1, 2), "float32") for name in "ab"]
    arrays = {"a": np.zeros((3, 2), np.float32), "b": np.zeros((4, 2), np.float32)}
    with pytest.raises(InputError, match="different numbers of samples: 3 of 'a', 4 of 'b'"):
        read_calibration(write(tmp_path / "d.npz", **arrays), inputs)


def test_random_calls_differ_and_are_the_same_again():
    tensors = (TensorInfo("x", (1, 3), "float32"), TensorInfo("n", (2,), "int64"))
    data, again = random_calibration(tensors, 3), random_calibration(tensors, 3)
    assert data.calls == 3 and data.call(0)["x"].shape == (1, 3) and data.call(0)["n"].dtype == np.int64
    assert not np.array_equal(data.call(0)["x"], data.call(1)["x"])
    np.testing.assert_array_equal(data.call(2)["x"], again.call(2)["x"])
