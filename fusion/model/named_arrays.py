"""Named arrays of a model: its interface, random inputs, ``.npz`` files, and the user's samples of its inputs
(calibration data: one array per input, the first axis is the samples).
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError, OutputError
from costmodel.base.input_files import BROKEN_ARCHIVE, MALFORMED, open_arrays
from costmodel.base.output_files import whole_file


@dataclass(frozen=True)
class TensorInfo:
    """One named input or output of the model. ``shape`` is static; ``dtype`` is NumPy's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


Arrays = dict[str, np.ndarray]
TVM_ALIGNMENT = 64


def random_arrays(tensors: Iterable[TensorInfo], seed: int = 0) -> Arrays:
    """Reproducible random inputs, never all zero: standard normal values, or 0 and 1 for integers and booleans.

    Integers stay small because a model may use them as indices.
    """
    generator = np.random.default_rng(seed)
    return {tensor.name: _random(generator, tensor) for tensor in tensors}


def check_arrays(arrays: Mapping[str, np.ndarray], tensors: Iterable[TensorInfo], source: str) -> Arrays:
    """Arrays in C order, in the interface's order. Raises ``InputError`` naming the first one that does not match."""
    expected = {tensor.name: tensor for tensor in tensors}
    names = ", ".join(expected)
    for name in expected:
        if name not in arrays:
            raise InputError(f"{source}: input '{name}' is missing; the model takes {names}")
    for name in arrays:
        if name not in expected:
            raise InputError(f"{source}: the model has no input '{name}'; it takes {names}")
    for name, tensor in expected.items():
        array = arrays[name]
        if array.shape != tensor.shape:
            raise InputError(
                f"{source}: input '{name}' has shape {array.shape}, the model takes {tensor.shape}; "
                "give it that shape, or tune the model for this one"
            )
        if array.dtype != np.dtype(tensor.dtype):
            raise InputError(
                f"{source}: input '{name}' is {array.dtype}, the model takes {tensor.dtype}; "
                f"convert it with .astype('{tensor.dtype}')"
            )
    return {name: np.require(arrays[name], requirements="C") for name in expected}


def to_tvm(array: Any) -> Any:
    """Convert to a TVM tensor.

    NumPy arrays are copied; tensors of other libraries (DLPack) are used in place if they are contiguous and aligned to
    64 bytes.
    """
    from tvm import runtime

    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack__"):
        return runtime.tensor(np.asarray(array, order="C"))
    view = np.from_dlpack(array)
    if view.flags.c_contiguous and view.ctypes.data % TVM_ALIGNMENT == 0:
        return runtime.from_dlpack(array)
    return runtime.tensor(np.array(view, order="C"))


def read_npz(path: Path) -> Arrays:
    """Read all arrays of an ``.npz`` file; pickled objects are refused. Raises ``InputError``."""
    try:
        with open_arrays(path) as loaded:
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise InputError(f"{path}: a single array; save named ones with numpy.savez({path.name!r}, NAME=array)")
            return {name: _member(path, loaded, name) for name in loaded.files}
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (*MALFORMED, *BROKEN_ARCHIVE) as error:
        raise InputError(f"{path}: not a readable .npz file of plain arrays; save it again with numpy.savez") from error


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an ``.npz`` file atomically. Raises ``OutputError``.

    ``numpy.savez`` takes names as keywords and so cannot write outputs called ``file``; this can.
    """
    if path.is_dir():
        raise OutputError(f"{path}: is a directory; name an .npz file")
    try:
        with whole_file(path) as stream, zipfile.ZipFile(stream, "w", allowZip64=True) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
    except OSError as error:
        raise OutputError(
            f"{path}: cannot write: {error.strerror or error}; choose another place, or free some"
        ) from error


def _member(path: Path, archive: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    try:
        array = archive[name]
    except ValueError as error:
        reason = "holds Python objects, which are refused" if "allow_pickle" in str(error) else "is damaged"
        raise InputError(f"{path}: array '{name}' {reason}; save plain numbers") from error
    except (*MALFORMED, *BROKEN_ARCHIVE, OSError) as error:
        raise InputError(f"{path}: array '{name}' is damaged; save it again") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: member '{name}' is no array; save arrays with numpy.savez")
    return array


def _random(generator: np.random.Generator, tensor: TensorInfo) -> np.ndarray:
    dtype = np.dtype(tensor.dtype)
    if dtype.kind in "iub":
        return generator.integers(0, 2, tensor.shape).astype(dtype)
    return generator.standard_normal(tensor.shape).astype(dtype)


# Maximum number of calls for measuring errors, evenly spread: every candidate network runs on each.
MOST_TOLD = 48
# Hold out every n-th call, for errors on inputs not used for calibration.
HELD_OUT = 5
ONE_SAMPLE = "one sample alone: errors are told on what it was calibrated with, on other inputs they are larger"


@dataclass(frozen=True)
class DeclaredInput:
    """An input as declared by the model; None is an open dimension. ``dtype`` is NumPy's name."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True)
class CalibrationData:
    """Samples, grouped into calls of the model."""

    # All samples of every input.
    arrays: Mapping[str, np.ndarray]
    # Samples per call along the leading dimension, None for an input without a sample dimension.
    extents: Mapping[str, int | None]
    calls: int
    # Origin in words.
    source: str

    def call(self, index: int) -> Arrays:
        """Return the inputs of call ``index``."""
        found = {}
        for name, array in self.arrays.items():
            extent = self.extents[name]
            found[name] = np.ascontiguousarray(
                array[index] if extent is None else array[index * extent : (index + 1) * extent]
            )
        return found

    def split(self) -> tuple[list[int], list[int]]:
        """(Calls for calibration, held-out calls): every fifth is held out; of fewer the last one, but never the
        only one.
        """
        held_out = [index for index in range(self.calls) if index % HELD_OUT == HELD_OUT - 1]
        held_out = held_out or list(range(1, self.calls))[-1:]
        return [index for index in range(self.calls) if index not in set(held_out)], held_out

    def require_spread(self) -> None:
        """Raise ``InputError`` if an input is constant within each sample.

        Activation ranges cannot be calibrated with these. Inputs with one element are allowed.
        """
        for name, array in self.arrays.items():
            flat = array.reshape(max(1, self.calls), -1)
            if array.dtype.kind == "f" and flat.shape[1] > 1 and (flat == flat[:, :1]).all():
                raise InputError(
                    f"{self.source}: input '{name}' is one number all over each sample ({float(flat[0, 0]):g} in the "
                    "first): ranges of activations cannot be learned from that; give real inputs"
                )

    def named(self, calls: Sequence[int]) -> dict[str, Arrays]:
        """Inputs of ``calls`` by name for measuring errors, at most ``MOST_TOLD`` of them."""
        step = -(-len(calls) // MOST_TOLD)
        return {f"{Path(self.source).name} {index + 1}": self.call(index) for index in calls[::step]}

    def __iter__(self) -> Iterator[Arrays]:
        return map(self.call, range(self.calls))


def read_calibration(path: Path, inputs: Sequence[DeclaredInput]) -> CalibrationData:
    """Read the samples in ``path``.

    Raises ``InputError`` that names file and input: missing or unknown names, other shapes or dtypes, values that are
    not finite, fewer samples than the model takes at once, inputs with different numbers of samples.
    """
    arrays = read_npz(path)
    names = ", ".join(declared.name for declared in inputs)
    for name in arrays:
        if name not in {declared.name for declared in inputs}:
            raise InputError(f"{path}: the model has no input '{name}'; it takes {names}")
    calls: dict[str, int] = {}
    extents: dict[str, int | None] = {}
    for declared in inputs:
        if declared.name not in arrays:
            raise InputError(f"{path}: input '{declared.name}' is missing; the model takes {names}")
        array = arrays[declared.name]
        _check_values(path, declared, array)
        extents[declared.name] = _extent(path, declared, array)
        calls[declared.name] = len(array) // (extents[declared.name] or 1)
        if not calls[declared.name]:
            wanted = extents[declared.name] or 1
            raise InputError(
                f"{path}: input '{declared.name}' has {len(array)} samples, the model takes {wanted} at once: "
                "give that many or more, some hundred pictures like those it will see"
            )
    if len(set(calls.values())) != 1:
        listed = ", ".join(f"{count} of '{name}'" for name, count in calls.items())
        raise InputError(f"{path}: inputs with different numbers of samples: {listed}; save as many of each")
    ordered = {declared.name: arrays[declared.name] for declared in inputs}
    return CalibrationData(ordered, extents, next(iter(calls.values())), str(path))


def random_calibration(tensors: Sequence[TensorInfo], calls: int) -> CalibrationData:
    """``calls`` random calls for inputs with known shapes; their activation ranges are not those of real pictures."""
    made = [random_arrays(tensors, seed) for seed in range(calls)]
    arrays = {tensor.name: np.stack([each[tensor.name] for each in made]) for tensor in tensors}
    return CalibrationData(arrays, dict.fromkeys(arrays), calls, "random numbers")


def _check_values(path: Path, declared: DeclaredInput, array: np.ndarray) -> None:
    if array.dtype != np.dtype(declared.dtype):
        raise InputError(
            f"{path}: input '{declared.name}' is {array.dtype}, the model takes {declared.dtype}: "
            f"save it with .astype('{declared.dtype}')"
        )
    if array.dtype.kind not in "iub" and not np.isfinite(array).all():
        sample = int(np.argmin(np.isfinite(array.reshape(len(array), -1)).all(axis=1))) if array.ndim else 0
        raise InputError(
            f"{path}: input '{declared.name}' holds NaN or infinite values, first in sample {sample}; "
            "leave such samples out"
        )


def _extent(path: Path, declared: DeclaredInput, array: np.ndarray) -> int | None:
    """Number of samples per call, or None if the array has one axis more than the input."""
    shape = declared.shape
    if array.ndim == len(shape) + 1 and _fits(array.shape[1:], shape):
        return None
    if shape and array.ndim == len(shape) and _fits(array.shape[1:], shape[1:]):
        return shape[0] or 1
    told = ", ".join("?" if size is None else str(size) for size in shape)
    raise InputError(
        f"{path}: input '{declared.name}' has shape {array.shape}, the model takes ({told}): "
        "the first axis must be samples, the others those of one"
    )


def _fits(shape: tuple[int, ...], declared: tuple[int | None, ...]) -> bool:
    return all(size is None or size == extent for size, extent in zip(declared, shape, strict=True))
