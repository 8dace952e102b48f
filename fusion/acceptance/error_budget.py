"""Choice of the layers stored in a shorter type within an error budget, ordered by seconds saved per error.

Errors are the largest differences relative to the largest value of an output, over all inputs used
(:class:`fusion.comparing.output_errors.OutputErrors`). The error of a layer is measured with only that layer in the
shorter type, the error of a set of layers with the whole set: rounding errors neither simply add up nor cancel.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from costmodel.base.errors import TuningError
from fusion.comparing.output_errors import ErrorTally, OutputErrors, errors_json
from fusion.model.named_arrays import Arrays

if TYPE_CHECKING:
    from fusion.acceptance.rounded_layers import RoundedRuns

# Default of `--precision auto`: 1 % of the largest value of an output, 2.5 bfloat16 roundings of it.
DEFAULT_MAX_ERROR = 0.01
# Fraction of the budget that is used: roundings of the kernels differ from the measured ones.
GIVEN_OUT = 0.8
# Measured points of the frontier between no layer and all layers.
FRONTIER_POINTS = 6
# Minimum number of inputs that errors are measured on: a random one and a picture.
LEAST_INPUTS = 2
# Error figures of a frontier point that are reported besides the largest error.
_TOLD = ("mean_relative_error", "cosine", "top1_agreement", "compared_inputs")
# Errors below this value do not affect the order of layers.
_NEGLIGIBLE_ERROR = 1e-7


class BudgetExceeded(TuningError):
    """Raised if outputs are correct for their number types, but exceed the error that the user allows."""

    def __init__(self, message: str, error: float) -> None:
        super().__init__(message)
        self.error = error


class Rounding(Protocol):
    """Computes the outputs of a model with any subset of its layers in the shorter type."""

    def outputs(self, inputs: Arrays, rounded: Collection[str]) -> Arrays: ...


@dataclass(frozen=True)
class FrontierPoint:
    """A network with some layers in the shorter type."""

    # Number of layers in the shorter type.
    layers: int
    # Sum of the times of its kernels and of the conversions between them; the choice is based on it.
    seconds: float
    # Largest relative error, measured with rounded layers.
    error: float
    chosen: bool = False
    # Names of the layers in the shorter type.
    rounded: frozenset[str] = frozenset()
    # Roofline prediction.
    predicted_seconds: float | None = None
    # Sum of measured kernel times, None if a kernel was not measured.
    measured_seconds: float | None = None
    # Time of the whole network in alternating runs with others, if it was built.
    raced_seconds: float | None = None
    # All error figures.
    errors: OutputErrors | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary without the layer names."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("rounded", "errors")}
        return {**own, **{name: value for name, value in errors_json(self.errors).items() if name in _TOLD}}


@dataclass(frozen=True)
class PrecisionChoice:
    """The chosen precision of every layer."""

    # Names of the layers in the shorter type.
    rounded: frozenset[str]
    # Names of the layers that stay in float32 although they have a form in the shorter type.
    kept: tuple[str, ...]
    error: float
    # Error of each layer measured alone.
    sensitivity: Mapping[str, float]
    # Frontier points, fewest layers first.
    frontier: tuple[FrontierPoint, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary for ``summary.json``."""
        return {
            "float32_layers": list(self.kept),
            "expected_error": self.error,
            "sensitivity": dict(self.sensitivity),
            "frontier": [point.to_json() for point in self.frontier],
        }


class BudgetInputs:
    """Inputs that errors are measured on, with ONNX Runtime's float32 outputs on them."""

    def __init__(
        self,
        runs: Rounding,
        inputs: Mapping[str, Arrays],
        outputs: Collection[str],
        seconds: float = math.inf,
    ) -> None:
        """``inputs`` by name; errors are computed on the ``outputs`` of these names.

        As many inputs are used as can be computed in ``seconds``, at least two.
        """
        self._runs = runs
        self._known: dict[tuple[frozenset[str], int], OutputErrors] = {}
        self._inputs: list[Arrays] = []
        self._references: list[Arrays] = []
        started = time.monotonic()
        for each in inputs.values():
            self._references.append(_of(runs.outputs(each, ()), outputs))
            self._inputs.append(each)
            if len(self._inputs) >= LEAST_INPUTS and time.monotonic() - started > seconds:
                break
        self.names = tuple(inputs)[: len(self._inputs)]

    @property
    def inputs(self) -> Sequence[Arrays]:
        """Inputs in the order of ``names``."""
        return self._inputs

    def errors(self, outputs: Callable[[Arrays], Arrays], first: int | None = None) -> OutputErrors:
        """Return the errors of the function ``outputs`` on all inputs, or on the ``first`` ones only."""
        tally = ErrorTally()
        for given, reference in list(zip(self._inputs, self._references, strict=True))[:first]:
            tally.add(outputs(given), reference)
        return tally.errors()

    def errors_of(self, rounded: Collection[str], first: int | None = None) -> OutputErrors:
        """Return the errors with the layers ``rounded`` in the shorter type; cached."""
        count = len(self._inputs) if first is None else min(first, len(self._inputs))
        key = frozenset(rounded), count
        if key not in self._known:
            self._known[key] = self.errors(lambda given: self._runs.outputs(given, rounded), count)
        return self._known[key]

    def error_of(self, rounded: Collection[str], first: int | None = None) -> float:
        """Return the largest relative error of :meth:`errors_of`."""
        return self.errors_of(rounded, first).max_relative_error

    def fitting(self, seconds: float, sets: int) -> int:
        """Number of inputs on which ``sets`` sets of rounded layers can be measured in ``seconds``, at least two."""
        started = time.monotonic()
        self._runs.outputs(self._inputs[0], ())
        each = max(time.monotonic() - started, 1e-6)
        return max(LEAST_INPUTS, min(len(self._inputs), int(seconds / (sets * each))))


@dataclass(frozen=True, eq=False)
class RoundedLimit:
    """Error limit of a network with layers in a shorter type."""

    runs: RoundedRuns | None
    # Inputs that the limit applies to.
    measured: BudgetInputs
    # Largest relative error; None: as large as rounding explains.
    max_error: float | None = None
    # Advice of the error message.
    advice: str = "allow more, or choose --precision auto, which leaves layers in float32"

    def require(self, model: Path, network: str, run: Callable[[Arrays], Arrays]) -> OutputErrors:
        """Return the errors of ``run``; raise :class:`BudgetExceeded` above the limit."""
        errors = self.measured.errors(run)
        found = errors.max_relative_error
        if self.max_error is not None and not found <= self.max_error:
            raise BudgetExceeded(
                f"{model}: outputs of the {network} network are off by {found:.2g} of the largest value, more than "
                f"--max-error {self.max_error:g} allows; {self.advice}",
                found,
            )
        return errors


def _of(outputs: Arrays, names: Collection[str]) -> Arrays:
    return {name: array for name, array in outputs.items() if name in names}


def sensitivities(measured: BudgetInputs, layers: Iterable[str], seconds: float) -> dict[str, float]:
    """Error of each layer alone in the shorter type, on as many of the inputs as fit into ``seconds``.

    If there is no time for one input per layer, consecutive layers are measured together, and each gets the error of
    the group.
    """
    names = list(layers)
    end = time.monotonic() + seconds
    found: dict[str, float] = {}
    first, size = 1, 1
    while len(found) < len(names):
        group = names[len(found) : len(found) + size]
        began = time.monotonic()
        error = measured.error_of(group, first)
        each = max(time.monotonic() - began, 1e-6) / first
        if not found:  # as many inputs as fit for all layers
            first = max(1, min(len(measured.inputs), int(seconds / (each * len(names)))))
            error = measured.error_of(group, first)
        found.update(dict.fromkeys(group, error))
        left = max(1, len(names) - len(found))
        size = max(1, min(left, math.ceil(left * first * each / max(end - time.monotonic(), 1e-9))))
        if size > 1 and first > 1:
            first, size = 1, 1  # the machine has become slower: one input per layer is better than groups
    return found


def choose_layers(
    sensitivity: Mapping[str, float],
    network_seconds: Callable[[Collection[str]], float],
    error_of: Callable[[Collection[str]], float],
    max_error: float,
    points: int = FRONTIER_POINTS,
    in_time: Callable[[], bool] = lambda: True,
) -> PrecisionChoice:
    """Return the fastest network found within ``max_error``.

    Layers are added in the order of seconds saved per error while the error of the whole network fits. Once ``in_time``
    returns False, only the errors still needed are measured; the result is within the budget in any case.

    - ``network_seconds``: time of the network with the given layers in the shorter type
    - ``error_of``: measured error of that network
    - ``points``: frontier points measured in addition to those of the search
    """
    order = _order(sensitivity, network_seconds)
    known: dict[int, float] = {0: 0.0}

    def error(count: int) -> float:
        if count not in known:
            known[count] = error_of(order[:count])
        return known[count]

    low, high = 0, len(order)
    if order and error(high) <= GIVEN_OUT * max_error:
        low = high
    while high - low > 1 and in_time():
        middle = (low + high) // 2
        low, high = (middle, high) if error(middle) <= GIVEN_OUT * max_error else (low, middle)
    for point in range(1, points + 1):
        if in_time():
            error(round(point * len(order) / points))
    # Errors do not always grow with the number of layers.
    low = max(count for count, found in known.items() if found <= GIVEN_OUT * max_error)
    chosen = _without_losses(order[:low], network_seconds)

    def at(layers: Sequence[str], found: float, taken: bool) -> FrontierPoint:
        return FrontierPoint(len(layers), network_seconds(layers), found, taken, frozenset(layers))

    frontier = [at(order[:count], found, count == low and len(chosen) == low) for count, found in sorted(known.items())]
    own = known[low]
    if len(chosen) < low:
        own = error_of(chosen) if chosen else 0.0
        frontier.append(at(chosen, own, True))
        frontier.sort(key=lambda each: (each.layers, not each.chosen))
    kept = tuple(name for name in sensitivity if name not in chosen)
    return PrecisionChoice(frozenset(chosen), kept, own, dict(sensitivity), tuple(frontier))


def _order(sensitivity: Mapping[str, float], network_seconds: Callable[[Collection[str]], float]) -> list[str]:
    """Layers that save time when all others are in the shorter type too, largest saving per error first.

    A layer is not judged alone: between two float32 layers it pays for two conversions.
    """
    everything = list(sensitivity)
    whole = network_seconds(everything)
    saved = {name: network_seconds([each for each in everything if each != name]) - whole for name in everything}
    gaining = [name for name in everything if saved[name] > 0]
    return sorted(gaining, key=lambda name: -saved[name] / max(sensitivity[name], _NEGLIGIBLE_ERROR))


def _without_losses(chosen: Sequence[str], network_seconds: Callable[[Collection[str]], float]) -> list[str]:
    """``chosen`` without layers that save less than their conversions cost; empty if all lose."""
    best = list(chosen)
    changed = True
    while changed and best:
        changed = False
        for name in list(best):
            fewer = [each for each in best if each != name]
            if network_seconds(fewer) <= network_seconds(best):
                best, changed = fewer, True
    return best
