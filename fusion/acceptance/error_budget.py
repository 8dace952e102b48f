"""Which layers are stored in a shorter type: as many as an error budget allows, those first that save most for their
error.

Errors are largest differences relative to the largest value of an output, over all inputs that count
(:class:`fusion.comparing.output_errors.OutputErrors`). What a layer costs is measured with it alone in the shorter
type, what a set of layers costs with all of them: roundings neither simply add up nor cancel.
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

# What `--precision auto` allows where nobody says: a hundredth of the largest value of an output, 2.5 roundings of it.
DEFAULT_MAX_ERROR = 0.01
# Of the budget so much is given out: what kernels compute differs by other roundings from what was measured.
GIVEN_OUT = 0.8
# Points of the frontier between no layer and all of them.
FRONTIER_POINTS = 6
# Errors are measured on so many inputs at least: a random one and a picture.
LEAST_INPUTS = 2
# Figures of errors that a point of the frontier tells besides the largest.
_TOLD = ("mean_relative_error", "cosine", "top1_agreement", "compared_inputs")
# An error below this is no reason to prefer one layer to another.
_NEGLIGIBLE_ERROR = 1e-7


class BudgetExceeded(TuningError):
    """Outputs are right as far as the number types let them be, and off by more than the user allows."""

    def __init__(self, message: str, error: float) -> None:
        super().__init__(message)
        self.error = error


class Rounding(Protocol):
    """Computes the outputs of a model with any of its layers in the shorter type."""

    def outputs(self, inputs: Arrays, rounded: Collection[str]) -> Arrays: ...


@dataclass(frozen=True)
class FrontierPoint:
    """A network with so many ``layers`` in the shorter type, those of ``rounded``. ``seconds``: of its kernels one by
    one and of the conversions between them, by which it was chosen or not; ``error``: the largest, as measured with
    rounded layers.

    ``predicted_seconds`` by the roofline; ``measured_seconds`` with measured kernels (``None`` where one has not been);
    ``raced_seconds``: of the whole network in turns with others, where it was built. ``errors``: all figures of them.
    """

    layers: int
    seconds: float
    error: float
    chosen: bool = False
    rounded: frozenset[str] = frozenset()
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    raced_seconds: float | None = None
    errors: OutputErrors | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-able: without the names of the layers."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("rounded", "errors")}
        return {**own, **{name: value for name, value in errors_json(self.errors).items() if name in _TOLD}}


@dataclass(frozen=True)
class PrecisionChoice:
    """``rounded``: names of the layers in the shorter type; ``kept``: those that could be but stay in float32.

    ``sensitivity``: the error of each layer by itself; ``frontier``: fewest layers first.
    """

    rounded: frozenset[str]
    kept: tuple[str, ...]
    error: float
    sensitivity: Mapping[str, float]
    frontier: tuple[FrontierPoint, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-able, for ``summary.json``."""
        return {
            "float32_layers": list(self.kept),
            "expected_error": self.error,
            "sensitivity": dict(self.sensitivity),
            "frontier": [point.to_json() for point in self.frontier],
        }


class BudgetInputs:
    """Inputs that errors are measured on, and what ONNX Runtime computes there in float32."""

    def __init__(
        self,
        runs: Rounding,
        inputs: Mapping[str, Arrays],
        outputs: Collection[str],
        seconds: float = math.inf,
    ) -> None:
        """``inputs`` by name; errors are those of the ``outputs`` called so. As many inputs count as can be computed in
        ``seconds``, two at least.
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
        """In the order of the names."""
        return self._inputs

    def errors(self, outputs: Callable[[Arrays], Arrays], first: int | None = None) -> OutputErrors:
        """Of what ``outputs`` computes; on the ``first`` of them alone, where that is said."""
        tally = ErrorTally()
        for given, reference in list(zip(self._inputs, self._references, strict=True))[:first]:
            tally.add(outputs(given), reference)
        return tally.errors()

    def errors_of(self, rounded: Collection[str], first: int | None = None) -> OutputErrors:
        """With the layers ``rounded`` in the shorter type; measured once."""
        count = len(self._inputs) if first is None else min(first, len(self._inputs))
        key = frozenset(rounded), count
        if key not in self._known:
            self._known[key] = self.errors(lambda given: self._runs.outputs(given, rounded), count)
        return self._known[key]

    def error_of(self, rounded: Collection[str], first: int | None = None) -> float:
        """The largest relative error of :meth:`errors_of`."""
        return self.errors_of(rounded, first).max_relative_error

    def fitting(self, seconds: float, sets: int) -> int:
        """Of how many inputs ``sets`` of rounded layers can be measured in ``seconds``: two at least."""
        started = time.monotonic()
        self._runs.outputs(self._inputs[0], ())
        each = max(time.monotonic() - started, 1e-6)
        return max(LEAST_INPUTS, min(len(self._inputs), int(seconds / (sets * each))))


@dataclass(frozen=True, eq=False)
class RoundedLimit:
    """How far a network with layers in a shorter type may be off: on the inputs of ``measured`` at most ``max_error``;
    without one as far as rounding explains. ``advice``: what to do about one that errs more.
    """

    runs: RoundedRuns | None
    measured: BudgetInputs
    max_error: float | None = None
    advice: str = "allow more, or choose --precision auto, which leaves layers in float32"

    def require(self, model: Path, network: str, run: Callable[[Arrays], Arrays]) -> OutputErrors:
        """Errors of what ``run`` computes; :class:`BudgetExceeded` for more than is allowed."""
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
    """The error of each layer alone in the shorter type, on as many of the inputs as ``seconds`` do for.

    Where that is not one for each layer, neighbours are measured together, and each of them is said to cost what all of
    them do.
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
        if not found:  # as many inputs as all layers have time for
            first = max(1, min(len(measured.inputs), int(seconds / (each * len(names)))))
            error = measured.error_of(group, first)
        found.update(dict.fromkeys(group, error))
        left = max(1, len(names) - len(found))
        size = max(1, min(left, math.ceil(left * first * each / max(end - time.monotonic(), 1e-9))))
        if size > 1 and first > 1:
            first, size = 1, 1  # the machine has become slower: one input each is better than groups
    return found


def choose_layers(
    sensitivity: Mapping[str, float],
    network_seconds: Callable[[Collection[str]], float],
    error_of: Callable[[Collection[str]], float],
    max_error: float,
    points: int = FRONTIER_POINTS,
    in_time: Callable[[], bool] = lambda: True,
) -> PrecisionChoice:
    """The fastest network within ``max_error``: layers by seconds saved for their error, as far as the whole allows.

    ``network_seconds``: of the network with these layers in the shorter type; ``error_of``: its error, measured;
    ``points``: of the frontier that are measured though the search does not ask for them. No more errors are measured
    than needed once it is not ``in_time``: what is chosen is within the budget all the same.
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
    """Layers that save time when all others are in the shorter type too, those first that save most for their error.

    Not when they are alone: a layer between two of float32 pays for two conversions.
    """
    everything = list(sensitivity)
    whole = network_seconds(everything)
    saved = {name: network_seconds([each for each in everything if each != name]) - whole for name in everything}
    gaining = [name for name in everything if saved[name] > 0]
    return sorted(gaining, key=lambda name: -saved[name] / max(sensitivity[name], _NEGLIGIBLE_ERROR))


def _without_losses(chosen: Sequence[str], network_seconds: Callable[[Collection[str]], float]) -> list[str]:
    """``chosen`` without layers that save less than the conversions around them cost; none where all lose."""
    best = list(chosen)
    changed = True
    while changed and best:
        changed = False
        for name in list(best):
            fewer = [each for each in best if each != name]
            if network_seconds(fewer) <= network_seconds(best):
                best, changed = fewer, True
    return best
