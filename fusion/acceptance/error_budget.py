"""Which layers are stored in bfloat16: as many as an error budget allows, those first that save most for their error.

Errors are largest differences relative to the largest value of an output, over all inputs that count
(:class:`fusion.comparing.output_errors.OutputErrors`). What a layer costs is measured with it alone in bfloat16, what a
set of layers costs with all of them: roundings neither simply add up nor cancel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import TuningError
from fusion.comparing.output_errors import ErrorTally, OutputErrors
from fusion.model.named_arrays import Arrays

if TYPE_CHECKING:
    from fusion.acceptance.rounded_layers import RoundedRuns

# What `--precision auto` allows where nobody says: a hundredth of the largest value of an output, 2.5 roundings of it.
DEFAULT_MAX_ERROR = 0.01
# Of the budget so much is given out: what kernels compute differs by other roundings from what was measured.
GIVEN_OUT = 0.8
# Points of the frontier between no layer and all of them.
FRONTIER_POINTS = 6
# An error below this is no reason to prefer one layer to another.
_NEGLIGIBLE_ERROR = 1e-7


class BudgetExceeded(TuningError):
    """Outputs are right as far as bfloat16 lets them be, and off by more than the user allows."""

    def __init__(self, message: str, error: float) -> None:
        super().__init__(message)
        self.error = error


@dataclass(frozen=True)
class FrontierPoint:
    """A network with so many ``layers`` in bfloat16. ``seconds``: of its kernels, predicted or measured by themselves;
    ``error``: as measured with rounded layers.
    """

    layers: int
    seconds: float
    error: float
    chosen: bool = False


@dataclass(frozen=True)
class PrecisionChoice:
    """``rounded``: names of the layers in bfloat16; ``kept``: those that could be but stay in float32.

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
            "frontier": [asdict(point) for point in self.frontier],
        }


class BudgetInputs:
    """Inputs that errors are measured on, and what ONNX Runtime computes there in float32."""

    def __init__(self, runs: RoundedRuns, inputs: Mapping[str, Arrays], outputs: Collection[str]) -> None:
        """``inputs`` by name; errors are those of the ``outputs`` called so."""
        self.names = tuple(inputs)
        self._runs = runs
        self._inputs = list(inputs.values())
        self._known: dict[tuple[frozenset[str], int | None], float] = {}
        self._references = [_of(runs.outputs(each, ()), outputs) for each in self._inputs]

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

    def error_of(self, rounded: Collection[str], first: int | None = None) -> float:
        """The largest relative error with the layers ``rounded`` in bfloat16; measured once."""
        key = frozenset(rounded), first
        if key not in self._known:
            found = self.errors(lambda given: self._runs.outputs(given, rounded), first)
            self._known[key] = found.max_relative_error
        return self._known[key]


@dataclass(frozen=True, eq=False)
class RoundedLimit:
    """How far a network with layers in bfloat16 may be off: on the inputs of ``measured`` at most ``max_error``;
    without one as far as rounding explains.
    """

    runs: RoundedRuns
    measured: BudgetInputs
    max_error: float | None = None

    def require(self, model: Path, network: str, run: Callable[[Arrays], Arrays]) -> OutputErrors:
        """Errors of what ``run`` computes; :class:`BudgetExceeded` for more than is allowed."""
        errors = self.measured.errors(run)
        found = errors.max_relative_error
        if self.max_error is not None and not found <= self.max_error:
            raise BudgetExceeded(
                f"{model}: outputs of the {network} network are off by {found:.2g} of the largest value, more than "
                f"--max-error {self.max_error:g} allows; allow more, or choose --precision auto, which leaves "
                "layers in float32",
                found,
            )
        return errors


def _of(outputs: Arrays, names: Collection[str]) -> Arrays:
    return {name: array for name, array in outputs.items() if name in names}


def sensitivities(measured: BudgetInputs, layers: Iterable[str], seconds: float) -> dict[str, float]:
    """The error of each layer alone in bfloat16, on as many of the inputs as ``seconds`` do for, one at least."""
    names = list(layers)
    started = time.monotonic()
    found: dict[str, float] = {}
    first = 1
    for number, name in enumerate(names):
        found[name] = measured.error_of([name], first)
        if not number:
            each = time.monotonic() - started
            first = max(1, min(len(measured.inputs), int(seconds / (max(each, 1e-6) * len(names)))))
            found[name] = measured.error_of([name], first)
    return found


def choose_layers(
    sensitivity: Mapping[str, float],
    network_seconds: Callable[[Collection[str]], float],
    error_of: Callable[[Collection[str]], float],
    max_error: float,
    points: int = FRONTIER_POINTS,
) -> PrecisionChoice:
    """The fastest network within ``max_error``: layers by seconds saved for their error, as far as the whole allows.

    ``network_seconds``: of the network with these layers in bfloat16; ``error_of``: its error, measured; ``points``: of
    the frontier that are measured though the search does not ask for them.
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
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if error(middle) <= GIVEN_OUT * max_error else (low, middle)
    chosen = _without_losses(order[:low], network_seconds)
    for point in range(1, points + 1):
        error(round(point * len(order) / points))
    frontier = [
        FrontierPoint(count, network_seconds(order[:count]), found, chosen=count == low and len(chosen) == low)
        for count, found in sorted(known.items())
    ]
    own = known[low]
    if len(chosen) < low:
        own = error_of(chosen) if chosen else 0.0
        frontier.append(FrontierPoint(len(chosen), network_seconds(chosen), own, chosen=True))
        frontier.sort(key=lambda each: (each.layers, not each.chosen))
    kept = tuple(name for name in sensitivity if name not in chosen)
    return PrecisionChoice(frozenset(chosen), kept, own, dict(sensitivity), tuple(frontier))


def _order(sensitivity: Mapping[str, float], network_seconds: Callable[[Collection[str]], float]) -> list[str]:
    """Layers that save time when all others are in bfloat16 too, those first that save most for their error.

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
