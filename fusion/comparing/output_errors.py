"""How far outputs are from a reference: one set of figures for every engine, precision and quantised file.

The reference is what the model computes in FP64 or by ONNX Runtime in FP32. All outputs count, over as many inputs as
are compared; of a figure that differs between outputs the worst is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np


@dataclass(frozen=True)
class OutputErrors:
    """Of all outputs over ``compared_inputs`` inputs.

    ``max_abs_error``: largest absolute difference; ``max_relative_error``: largest one relative to the largest absolute
    value of that output on that input (to 1 where the output is zero); ``mean_relative_error``: mean absolute
    difference relative to the same, of the worst output. ``cosine``: least cosine of the angle between an output and
    its reference, both as one vector (``None`` if no output has floating point). ``top1_agreement``: share of samples
    whose greatest score is that of the reference (``None`` if no output has scores, see :func:`is_of_scores`).

    Of integers and booleans both relative errors are the share of elements that differ: where two classes are all but
    equal, rounding decides which is the greater, and their numbers may be far apart. An output that is missing, has
    another shape, or values that are not finite where the reference's are, has infinite errors, a cosine of 0 and no
    agreement.
    """

    max_abs_error: float
    max_relative_error: float
    mean_relative_error: float
    cosine: float | None
    top1_agreement: float | None
    compared_inputs: int

    @property
    def comparable(self) -> bool:
        """Whether every output is there, and finite where the reference is."""
        return bool(np.isfinite(self.max_abs_error))

    def to_json(self) -> dict[str, float | int | None]:
        """JSON-able; keys are the names of the fields."""
        return asdict(self)


def errors_json(errors: OutputErrors | None) -> dict[str, float | int | None]:
    """What :meth:`OutputErrors.to_json` gives, every figure ``None`` where nothing was compared."""
    return dict.fromkeys(field.name for field in fields(OutputErrors)) if errors is None else errors.to_json()


class ErrorTally:
    """Collects errors input by input, so that no outputs need be kept."""

    def __init__(self) -> None:
        self._inputs = 0
        self._absolute: list[float] = []
        self._relative: list[float] = []
        self._means: dict[str, list[float]] = {}
        self._cosines: list[float] = []
        self._agreeing = self._samples = 0

    def add(self, outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> None:
        """Outputs on one input; those that ``reference`` does not name are left out."""
        self._inputs += 1
        for name, expected in reference.items():
            self._add(name, outputs.get(name), expected)

    def errors(self) -> OutputErrors:
        """Of everything that was added; without any, no error."""
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
    """Errors of one network's outputs on each input in turn, in the order of ``references``."""
    tally = ErrorTally()
    for actual, expected in zip(outputs, references, strict=True):
        tally.add(actual, expected)
    return tally.errors()


def is_of_scores(output: np.ndarray) -> bool:
    """Whether it holds a score of every class for every sample: (samples, classes), perhaps with ones behind."""
    return (
        output.dtype.kind not in "iub"
        and output.ndim >= 2
        and output.shape[1] > 1
        and all(extent == 1 for extent in output.shape[2:])
    )


def _difference(actual: np.ndarray | None, expected: np.ndarray) -> np.ndarray | None:
    """Absolute differences, none where both are the same or not a number; ``None`` if they cannot be compared."""
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
    """Of the finite elements; 1 where both are the same, 0 where one is zero."""
    finite = np.isfinite(expected)
    # Scaled first: squares of large values would overflow.
    scale = _largest(expected)
    ours, theirs = actual[finite].astype(np.float64) / scale, expected[finite].astype(np.float64) / scale
    if np.array_equal(ours, theirs):
        return 1.0  # also of zeros
    norms = float(np.linalg.norm(ours)), float(np.linalg.norm(theirs))
    if not all(norms):
        return 0.0
    return float(np.clip(np.dot(ours, theirs) / (norms[0] * norms[1]), -1.0, 1.0))


def _agreeing(actual: np.ndarray, expected: np.ndarray) -> int:
    """Samples whose greatest score is one of the greatest of the reference."""
    ours = actual.reshape(len(actual), -1).argmax(axis=1)
    theirs = expected.reshape(len(expected), -1)
    return int(np.sum(theirs[np.arange(len(theirs)), ours] == theirs.max(axis=1)))
