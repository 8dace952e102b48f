"""Output errors against a reference: inputs for comparing outputs, random and structured ones, and one set of figures
for every engine, precision and quantised file.

The reference is the model in FP64, or ONNX Runtime's FP32 outputs. All outputs over all compared inputs count; of
figures that differ between outputs the worst is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from fusion.model.named_arrays import Arrays, TensorInfo, random_arrays

# Number of rectangles in the image-like input, similar to documents and photographs.
_RECTANGLES = 12
_FIRST_PICTURE = 7
# Number of further pictures for errors of lower precisions: a single one says little about changed classes.
MORE_PICTURES = 7


def probes(tensors: Sequence[TensorInfo], seed: int = 0) -> dict[str, Arrays]:
    """Name -> one array per input, deterministic. Inputs of integers or booleans are random in all."""
    made = {"random": random_arrays(tensors, seed)}
    for name, pattern in PATTERNS.items():
        arrays = random_arrays(tensors, seed)
        for tensor in tensors:
            if arrays[tensor.name].dtype.kind not in "iub":
                arrays[tensor.name] = pattern(tensor.shape).astype(arrays[tensor.name].dtype)
        made[name] = arrays
    return made


def broken_inputs(tensors: Sequence[TensorInfo]) -> dict[str, Arrays]:
    """Random inputs with a NaN, and with an infinity, in the middle of each floating point input.

    They imitate a broken camera or an overflow. Empty without floating point inputs.
    """
    made: dict[str, Arrays] = {}
    for name, value in (("NaN", np.nan), ("infinity", np.inf)):
        arrays = random_arrays(tensors)
        floats = [
            tensor.name for tensor in tensors if arrays[tensor.name].dtype.kind == "f" and arrays[tensor.name].size
        ]
        for each in floats:
            arrays[each].reshape(-1)[arrays[each].size // 2] = value
        if floats:
            made[name] = arrays
    return made


def error_inputs(tensors: Sequence[TensorInfo], pictures: int = MORE_PICTURES) -> dict[str, Arrays]:
    """Inputs for measuring errors: the :func:`probes` and ``pictures`` further pictures like the first."""
    made = probes(tensors)
    for index in range(1, pictures + 1):
        arrays = random_arrays(tensors, index)
        for tensor in tensors:
            if arrays[tensor.name].dtype.kind not in "iub":
                picture = image_like(tensor.shape, _FIRST_PICTURE + index)
                arrays[tensor.name] = picture.astype(arrays[tensor.name].dtype)
        made[f"image-like {index + 1}"] = arrays
    return made


def image_like(shape: Sequence[int], seed: int = _FIRST_PICTURE) -> np.ndarray:
    """Picture with values from 0 to 1: smooth background, rectangles with sharp edges, little noise."""
    generator = np.random.default_rng(seed)
    image = 0.3 + 0.4 * gradient(shape)
    height, width = (shape[-2], shape[-1]) if len(shape) > 1 else (1, shape[-1] if shape else 1)
    image = image.reshape(-1, height, width)
    for _ in range(_RECTANGLES):
        top, left = generator.integers(height), generator.integers(width)
        bottom, right = top + 1 + generator.integers(1 + height // 3), left + 1 + generator.integers(1 + width // 3)
        image[:, top:bottom, left:right] = generator.random((len(image), 1, 1))
    noisy = image + 0.02 * generator.standard_normal(image.shape)
    return np.clip(noisy, 0.0, 1.0).reshape(shape)


def gradient(shape: Sequence[int]) -> np.ndarray:
    """Gradient from -1 to 1 along the last axis, plus 0 to 1 along the axis before it, centred."""
    across = np.linspace(-1.0, 1.0, shape[-1]) if shape else np.zeros(())
    down = np.linspace(0.0, 1.0, shape[-2])[:, None] if len(shape) > 1 else 0.0
    return np.broadcast_to(across + down - 0.5 * (len(shape) > 1), shape).copy()


def zeros(shape: Sequence[int]) -> np.ndarray:
    """Black image: only biases remain."""
    return np.zeros(shape)


def ones(shape: Sequence[int]) -> np.ndarray:
    """White image: borders differ from the interior only by padding."""
    return np.ones(shape)


PATTERNS: dict[str, Callable[[Sequence[int]], np.ndarray]] = {
    "image-like": image_like,
    "ones": ones,
    "gradient": gradient,
    "zeros": zeros,
}


@dataclass(frozen=True)
class OutputErrors:
    """Errors of all outputs over ``compared_inputs`` inputs.

    For integers and booleans both relative errors are the share of different elements: if two classes score almost
    equally, rounding decides, and their numbers may be far apart. An output that is missing, has another shape, or is
    not finite where the reference is, has infinite errors, a cosine of 0 and no agreement.
    """

    # Largest absolute difference.
    max_abs_error: float
    # Largest difference relative to the largest absolute value of that output on that input (to 1 if it is all zero).
    max_relative_error: float
    # Mean absolute difference relative to the same value, of the worst output.
    mean_relative_error: float
    # Smallest cosine of the angle between an output and its reference as vectors; None without floating point outputs.
    cosine: float | None
    # Share of samples with the same top score as the reference; None without score outputs (:func:`is_of_scores`).
    top1_agreement: float | None
    compared_inputs: int

    @property
    def comparable(self) -> bool:
        """True if every output is present, and finite where the reference is."""
        return bool(np.isfinite(self.max_abs_error))

    def to_json(self) -> dict[str, float | int | None]:
        """Return a JSON-able dictionary; keys are the field names."""
        return asdict(self)


def errors_json(errors: OutputErrors | None) -> dict[str, float | int | None]:
    """JSON-able dictionary of errors, with None for every figure if nothing was compared."""
    return dict.fromkeys(field.name for field in fields(OutputErrors)) if errors is None else errors.to_json()


class ErrorTally:
    """Accumulates errors input by input, without keeping outputs."""

    def __init__(self) -> None:
        self._inputs = 0
        self._absolute: list[float] = []
        self._relative: list[float] = []
        self._means: dict[str, list[float]] = {}
        self._cosines: list[float] = []
        self._agreeing = self._samples = 0

    def add(self, outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> None:
        """Add the outputs on one input; outputs that ``reference`` lacks are ignored."""
        self._inputs += 1
        for name, expected in reference.items():
            self._add(name, outputs.get(name), expected)

    def errors(self) -> OutputErrors:
        """Errors over all added inputs; zero without any."""
        return OutputErrors(
            max_abs_error=max(self._absolute, default=0.0),
            max_relative_error=max(self._relative, default=0.0),
            mean_relative_error=max((float(np.mean(each)) for each in self._means.values()), default=0.0),
            cosine=min(self._cosines, default=None),
            top1_agreement=self._agreeing / self._samples if self._samples else None,
            compared_inputs=self._inputs,
        )

    def _add(self, name: str, actual: np.ndarray | None, expected: np.ndarray) -> None:
        scores = is_of_scores(expected)
        self._samples += len(expected) if scores else 0
        counted = expected.dtype.kind in "iub"
        difference = _difference(actual, expected)
        if actual is None or difference is None:
            maximum, relative, mean, cosine = float("inf"), float("inf"), float("inf"), 0.0
        else:
            maximum = float(difference.max(initial=0.0))
            if counted:
                relative = mean = float(np.mean(actual != expected)) if expected.size else 0.0
            else:
                scale = _largest(expected)
                relative, mean = maximum / scale, float(difference.mean() if difference.size else 0.0) / scale
            cosine = 1.0 if counted else _cosine(actual, expected)
            self._agreeing += _agreeing(actual, expected) if scores else 0
        self._absolute.append(maximum)
        self._relative.append(relative)
        self._means.setdefault(name, []).append(mean)
        if not counted:
            self._cosines.append(cosine)


def output_errors(outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> OutputErrors:
    """Errors of the outputs on one input."""
    return errors_over([outputs], [reference])


def errors_over(
    outputs: Iterable[Mapping[str, np.ndarray]], references: Sequence[Mapping[str, np.ndarray]]
) -> OutputErrors:
    """Errors of one network's outputs on each input, in the order of ``references``."""
    tally = ErrorTally()
    for actual, expected in zip(outputs, references, strict=True):
        tally.add(actual, expected)
    return tally.errors()


def is_of_scores(output: np.ndarray) -> bool:
    """True if the output has class scores per sample: shape (samples, classes), possibly with trailing ones."""
    return (
        output.dtype.kind not in "iub"
        and output.ndim >= 2
        and output.shape[1] > 1
        and all(extent == 1 for extent in output.shape[2:])
    )


def _difference(actual: np.ndarray | None, expected: np.ndarray) -> np.ndarray | None:
    """Absolute differences, 0 where both are equal or NaN; None if not comparable."""
    if actual is None or actual.shape != expected.shape:
        return None
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(actual.astype(np.float64) - expected.astype(np.float64)))
    return difference if np.isfinite(difference).all() else None


def _largest(expected: np.ndarray) -> float:
    magnitudes = np.abs(expected[np.isfinite(expected)].astype(np.float64))
    return float(magnitudes.max(initial=0.0)) or 1.0


def _cosine(actual: np.ndarray, expected: np.ndarray) -> float:
    """Cosine over the finite elements; 1 if both are equal, 0 if one is zero."""
    finite = np.isfinite(expected)
    # Scale first: squares of large values would overflow.
    scale = _largest(expected)
    ours, theirs = actual[finite].astype(np.float64) / scale, expected[finite].astype(np.float64) / scale
    if np.array_equal(ours, theirs):
        return 1.0  # also if both are zero
    norms = float(np.linalg.norm(ours)), float(np.linalg.norm(theirs))
    if not all(norms):
        return 0.0
    return float(np.clip(np.dot(ours, theirs) / (norms[0] * norms[1]), -1.0, 1.0))


def _agreeing(actual: np.ndarray, expected: np.ndarray) -> int:
    """Number of samples whose top score is among the top scores of the reference."""
    ours = actual.reshape(len(actual), -1).argmax(axis=1)
    theirs = expected.reshape(len(expected), -1)
    return int(np.sum(theirs[np.arange(len(theirs)), ours] == theirs.max(axis=1)))
