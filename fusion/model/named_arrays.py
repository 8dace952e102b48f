"""Named arrays of a model: random ones, files, and checks against its interface."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.broken_archives import BROKEN_ARCHIVE
from costmodel.base.errors import InputError, OutputError
from costmodel.base.foreign_files import open_arrays
from costmodel.base.plain_json import MALFORMED
from costmodel.base.whole_file import whole_file
from fusion.model.tensor_info import TensorInfo

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
