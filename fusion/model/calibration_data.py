"""User samples of a model's inputs: an ``.npz`` file with one array per input, first axis samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from costmodel.base.errors import InputError
from fusion.model.named_arrays import Arrays, random_arrays, read_npz
from fusion.model.tensor_info import TensorInfo

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
