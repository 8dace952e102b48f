"""Check of outputs against double precision, with tolerances derived from rounding errors.

The allowed error of float32 differs by more than a factor of a million between outputs: a saturated sigmoid of 1e-5
is accurate to one rounding of 1, a logit to a few roundings of itself. Errors are therefore not related to the
largest value of an output. The reference is evaluated in FP64 once unchanged, and once with a random error of one
rounding in every operation; the difference estimates, per element, the rounding error of this output on this input.
Our error may be a multiple of that estimate combined with the error of ONNX Runtime.

FP64: the graph is evaluated node by node with the reference implementation of the ``onnx`` package (window operators:
:mod:`fusion.acceptance.reference_operators`) on the model as stored in the file. It shares no code with our importer
and kernels, nor with another runtime.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.base.errors import TuningError
from fusion.comparing.output_errors import output_errors
from fusion.model.library_messages import sentence
from fusion.model.named_arrays import Arrays, TensorInfo
from fusion.relax.onnx.model_file import opset_of
from fusion.relax.onnx.preparation import change_types, drop_unread_results, half_types, holds_half

if TYPE_CHECKING:
    from onnx import ModelProto


# Relative rounding error of one operation in float32 and in float16.
SINGLE_UNIT, HALF_UNIT = 2.0**-24, 2.0**-11
# Sums of many products: rounding affects every term and the result.
_SUMS = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "GlobalAveragePool", "AveragePool", "ReduceMean", "ReduceSum"}
    | {"LSTM", "GRU"}
)
# Operators that move, select or compare values: no rounding error.
_EXACT = frozenset(
    {"Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Concat", "Split", "Slice", "Gather", "Pad"}
    | {"Expand", "Tile", "Relu", "Clip", "Max", "Min", "MaxPool", "GlobalMaxPool", "Cast", "Dropout", "Where", "Neg"}
    | {"Abs", "DepthToSpace", "SpaceToDepth"}
)
# Bounded functions: approximated with an absolute error of one rounding of 1, also for small values.
_BOUNDED = frozenset(
    {"Sigmoid", "Tanh", "Erf", "Softmax", "HardSigmoid", "HardSwish", "Gelu", "Mish", "Softplus", "LSTM", "GRU"}
)
# Operators whose results depend on shapes only.
_OF_SHAPES = frozenset({"Shape", "Size"})
_NOISE_LENGTH = 2**20


class NoReference(Exception):
    """Raised if the model cannot be evaluated in FP64; the message gives the reason."""


class Rounding:
    """Random errors of the size of one rounding; deterministic for a given ``seed``."""

    def __init__(self, unit: float, seed: int) -> None:
        self._unit = unit
        self._generator = np.random.default_rng(seed)
        self._noise = np.tile(unit * self._generator.standard_normal(_NOISE_LENGTH), 2)

    def relative(self, array: np.ndarray) -> np.ndarray:
        """Return ``array`` with a relative error of one rounding in every element."""
        return array + array * self._draw(array)

    def bounded(self, array: np.ndarray) -> np.ndarray:
        """Return ``array`` with a relative error and an absolute error of one rounding of 1 in every element."""
        return self.relative(array) + self._draw(array)

    def _draw(self, array: np.ndarray) -> np.ndarray:
        """Return noise of the shape of ``array``, a slice of one precomputed vector: drawing new numbers would take
        longer than the network.
        """
        start = int(self._generator.integers(_NOISE_LENGTH))
        row = self._noise[start : start + _NOISE_LENGTH]
        return (
            np.resize(row, array.size).reshape(array.shape)
            if array.size > row.size
            else row[: array.size].reshape(array.shape)
        )


class DoubleModel:
    """An ONNX model with static input shapes, evaluated in FP64. Raises ``NoReference`` if it cannot be evaluated."""

    def __init__(self, model: ModelProto) -> None:
        from onnx import TensorProto
        from onnx.reference import ReferenceEvaluator

        from fusion.acceptance.reference_operators import OPERATORS

        self.unit = HALF_UNIT if holds_half(model.graph) else SINGLE_UNIT
        double = change_types(model, _floats(), TensorProto.DOUBLE)
        drop_unread_results(double.graph)
        usable = [each for each in OPERATORS if _fits(each.__name__, opset_of(model))]
        try:
            evaluator = ReferenceEvaluator(double, new_ops=list(usable))
            self._known: dict[str, Any] = {"": None, **evaluator.rt_inits_}
            self._outputs = [value.name for value in double.graph.output]
            self._nodes: list[Any] = []
            self._split(evaluator.rt_nodes_, {value.name for value in double.graph.input} - self._known.keys())
        except Exception as error:  # the evaluator raises anything on what it does not know
            raise NoReference(sentence(error)) from error

    def run(self, inputs: Arrays, rounding: Rounding | None = None, deadline: float | None = None) -> Arrays:
        """Return the outputs by name, floating point ones in FP64.

        ``deadline`` is a time of ``time.monotonic``. Raises ``NoReference``.
        """
        results = {**self._known, **{name: _double(array) for name, array in inputs.items()}}
        uses = Counter(name for node in self._nodes for name in node.input)
        uses.update(self._outputs)
        for node in self._nodes:
            if deadline is not None and time.monotonic() > deadline:
                raise NoReference("it takes too long in double precision")
            try:
                values = _evaluate(node, results, rounding)
            except NoReference:
                raise
            except Exception as error:  # as above
                raise NoReference(f"{node.op_type} {node.onnx_node.name!r}: {sentence(error)}") from error
            results.update(zip(node.output, values, strict=False))
            for name in node.input:
                uses[name] -= 1
                if not uses[name] and name not in self._known:
                    del results[name]  # large models would not fit into memory with all of them
        return {name: np.asarray(results[name]) for name in self._outputs}

    def _split(self, nodes: Sequence[Any], varying: set[str]) -> None:
        """Evaluate the nodes that do not depend on inputs once; keep the other nodes for every run."""
        varying = set(varying)
        for node in nodes:
            nested = node.need_context()
            if nested or varying.intersection(node.input):
                self._nodes.append(node)
                varying.update(node.output)
            else:
                self._known.update(zip(node.output, _evaluate(node, self._known, None), strict=False))


def _evaluate(node: Any, results: Mapping[str, Any], rounding: Rounding | None) -> Sequence[Any]:
    arguments = [results[name] for name in node.input]
    if node.need_context():
        return node.run(*arguments, context=dict(results))
    if rounding is None or node.op_type in _EXACT:
        return node.run(*arguments)
    if node.op_type in _SUMS and _is_double(arguments[0]):
        arguments[0] = rounding.relative(arguments[0])
    disturb = rounding.bounded if node.op_type in _BOUNDED else rounding.relative
    return [disturb(value) if _is_double(value) else value for value in node.run(*arguments)]


def _is_double(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float64


def _double(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else array


def _fits(operator: str, opset: int) -> bool:
    """True if this project's reference of ``operator`` implements that opset."""
    return {"Resize": opset >= 11}.get(operator, True)


def _floats() -> tuple[int, ...]:
    from onnx import TensorProto

    return (TensorProto.FLOAT, *half_types())


# Allowed multiples of the estimated rounding error: of one element, and in the mean of an output. Long sums have more
# than one rounding error per term; ONNX Runtime's own outputs reach 3 in the mean, a layer with an error of 1 % some
# thousands.
ELEMENT_FACTOR, MEAN_FACTOR = 64.0, 16.0
# The same for layers in bfloat16, which are rounded where kernels round: our outputs differ from the estimate only by
# chance. Where all outputs move together, one draw of six in a hundred and fifty is beyond four times their mean.
ROUNDED_ELEMENT_FACTOR, ROUNDED_MEAN_FACTOR = 16.0, 4.0
# Relative error of one rounding to bfloat16, the type that outputs are stored in too.
ROUNDED_UNIT = 2.0**-9
# Reject the reference if the error of ONNX Runtime is above this multiple of the allowed one.
BELIEVED = 4.0
# Quantised networks: a sum halfway between two integers may be rounded to either.
ONE_STEP = 1.001
# Integer outputs (classes, masks): share of elements that may differ, in addition to those changed by rounding.
DIFFERENT_SHARE = 5e-4
# Without an FP64 reference: largest difference from ONNX Runtime relative to the largest value of an output, and the
# same if some tensor has 16 bits (one rounding is up to 1e-3, and sums are accumulated in other precisions).
TOLERANCE, HALF_TOLERANCE = 5e-4, 5e-2
# Default time limit of the reference in seconds; no reference is used if the first input takes this factor longer.
REFERENCE_SECONDS = 20.0
LONGEST_FACTOR = 6.0
# Number of adjacent elements along the last axes whose rounding errors are averaged: a single one may be near zero.
_NEIGHBOURS = 9


@dataclass(frozen=True)
class Expected:
    """Expected outputs on one input."""

    name: str
    inputs: Arrays
    # Outputs of ONNX Runtime.
    runtime: Arrays
    # FP64 outputs, None without a reference.
    reference: Arrays | None
    # Estimated rounding error of each element (of integers: the share of changed elements).
    rounding: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """Worst result over all outputs."""

    # Error as a fraction of the allowed error.
    share: float
    # Largest absolute difference of that output.
    error: float
    output: str
    probe: str


@dataclass(frozen=True)
class OutputCheck:
    """Expected outputs of a model and the allowed errors."""

    model: Path
    expected: tuple[Expected, ...]
    unit: float
    # Outputs of the model; other known tensors are compared if a network returns them.
    interface: tuple[TensorInfo, ...]
    # Allowed error without an FP64 reference.
    tolerance: float = TOLERANCE
    # Reason for not comparing with FP64, None if compared.
    unchecked: str | None = None
    factors: tuple[float, float] = (ELEMENT_FACTOR, MEAN_FACTOR)
    # Outputs are integers times a scale; they may differ by one step from ONNX Runtime's integer kernels.
    in_steps: bool = False

    def with_rounded_layers(self, draws: Callable[[Arrays], Sequence[tuple[Arrays, Arrays]]]) -> OutputCheck:
        """Return the check of a network with layers in bfloat16.

        ``draws`` returns pairs of ONNX Runtime outputs near an input: with layers that round their inputs and outputs,
        and without (:class:`fusion.acceptance.rounded_layers.RoundedRuns`). The allowed error is a multiple of their
        difference. Without an FP64 reference, outputs are compared with ONNX Runtime, with the same tolerances.
        """
        expected = tuple(_expect_rounded(each, draws(each.inputs)) for each in self.expected)
        for info in self.interface:
            if any(each.reference is None or info.name not in each.reference for each in expected):
                raise TuningError(
                    f"{self.model}: output {info.name!r} cannot be told with layers in bfloat16; "
                    "choose --precision float32"
                )
        factors = ROUNDED_ELEMENT_FACTOR, ROUNDED_MEAN_FACTOR
        return replace(self, expected=expected, unit=max(self.unit, ROUNDED_UNIT), factors=factors)

    def verdict(self, outputs: Sequence[Arrays]) -> Verdict:
        """Return the worst verdict over all outputs; ``outputs`` has one entry per input."""
        worst = [
            verdict
            for expected, actual in zip(self.expected, outputs, strict=True)
            for verdict in self._verdicts(expected, actual)
        ]
        return max(worst, key=lambda each: (not each.share <= 1.0, each.share))

    def require(self, network: str, outputs: Sequence[Arrays]) -> Verdict:
        """Return the verdict; raise ``TuningError`` if an output exceeds the allowed error."""
        found = self.verdict(outputs)
        if found.share <= 1.0:
            return found
        if self._overflows(found):
            raise TuningError(
                f"{self.model}: the model itself overflows float32: ONNX Runtime's {found.output!r} holds infinity or "
                f"NaN on the {found.probe} input, and what overflows depends on the order of sums, so that nothing can "
                "be compared; export the model with smaller weights"
            )
        against = "ONNX Runtime" if self.unchecked else "the model in double precision"
        raise TuningError(
            f"{self.model}: outputs of the {network} network are wrong: {found.output!r} differs from {against} by "
            f"{found.error:.2g} on the {found.probe} input, {found.share:.3g} times what rounding explains; "
            "nothing is written, the records are kept; report it with the model"
        )

    def _overflows(self, verdict: Verdict) -> bool:
        """True if ours differs by infinity where ONNX Runtime's own outputs are not all finite."""
        if np.isfinite(verdict.error):
            return False
        expected = next(each for each in self.expected if each.name == verdict.probe)
        return verdict.output in expected.runtime and not _all_finite(expected.runtime[verdict.output])

    def nothing_finite(self) -> list[str]:
        """One warning for each output without any finite value on the first input: its comparison is meaningless."""
        first = self.expected[0]
        return [
            f"all values of output {info.name!r} are NaN or infinite on the {first.name} input, in ONNX Runtime too: "
            "its check says nothing; look for a negative variance, a division by zero or an overflow in the model"
            for info in self.interface
            if info.name in first.runtime and _none_finite(first.runtime[info.name])
        ]

    def to_json(self, verdict: Verdict, exposes: Sequence[str] = ()) -> dict[str, object]:
        """Return a JSON-able dictionary for ``summary.json``; ``exposes``: compared tensors inside the model."""
        return {
            "reference": "ONNX Runtime" if self.unchecked else "ONNX model in FP64",
            "why_not_fp64": self.unchecked,
            "inputs": [expected.name for expected in self.expected],
            "compared_inside": list(exposes),
            "worst_share_of_allowed": verdict.share,
            "worst_output": verdict.output,
            "worst_input": verdict.probe,
        }

    def _verdicts(self, expected: Expected, actual: Arrays) -> list[Verdict]:
        found = []
        for name in {info.name: None for info in self.interface} | dict.fromkeys(actual):
            if expected.reference is not None and name not in expected.reference:
                continue  # inside the model, and unknown with rounded layers
            if expected.reference is None:
                given = {name: actual[name]} if name in actual else {}
                errors = output_errors(given, {name: expected.runtime[name]})
                share, error = _share(errors.max_relative_error, self.tolerance), errors.max_abs_error
                step = output_step(expected.runtime[name]) if self.in_steps else None
                if step is not None:
                    share = _share(error, ONE_STEP * step)
            else:
                reference, rounding = expected.reference[name], expected.rounding[name]
                share, error = deviation(actual.get(name), reference, rounding, self.unit, self.factors)
            found.append(Verdict(share, error, name, expected.name))
        return found


def lost_values(probe: str, ours: Arrays, theirs: Arrays) -> list[str]:
    """One warning for each output in which ONNX Runtime (``theirs``) has NaN and ours has a number.

    ``probe`` names the value in the inputs, for the message.
    """
    found = []
    for name, expected in theirs.items():
        actual = ours.get(name)
        if expected.dtype.kind != "f" or actual is None or actual.shape != expected.shape:
            continue
        lost = int((np.isnan(expected) & np.isfinite(actual)).sum())
        if lost:
            found.append(
                f"with {probe} in its input, ONNX Runtime's output {name!r} holds NaN in "
                f"{int(np.isnan(expected).sum())} places, of which {lost} hold numbers here: do not rely on NaN to "
                "find broken inputs"
            )
    return found


def _all_finite(values: np.ndarray) -> bool:
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def _none_finite(values: np.ndarray) -> bool:
    return values.dtype.kind == "f" and values.size > 0 and not np.isfinite(values).any()


def prepare_check(
    model: Path,
    double: Callable[[], DoubleModel],
    probes: Mapping[str, Arrays],
    runtime: Callable[[Arrays], Arrays],
    tolerance: float,
    interface: tuple[TensorInfo, ...],
    seconds: float = REFERENCE_SECONDS,
    in_steps: bool = False,
) -> OutputCheck:
    """Evaluate the reference and ONNX Runtime (``runtime``) on the ``probes``; the first probe is always used.

    ``seconds`` is the approximate time limit of the reference: inputs after the first are left out beyond it, and a
    model that takes ``LONGEST_FACTOR`` times as long on the first one is compared with ONNX Runtime only. ``in_steps``
    is passed to an :class:`OutputCheck` without a reference.
    """
    try:
        expected, unit = _in_double(double, probes, runtime, seconds)
        return OutputCheck(model, expected, unit, interface, tolerance)
    except NoReference as error:
        plain = tuple(Expected(name, inputs, runtime(inputs), None, {}) for name, inputs in probes.items())
        return OutputCheck(model, plain, 0.0, interface, tolerance, str(error), in_steps=in_steps)


def output_step(output: np.ndarray) -> float | None:
    """Smallest difference of two values of an 8-bit output times a scale, or None if the output cannot be one."""
    values = np.unique(output.astype(np.float64))
    if not 1 < values.size <= 256 or not np.isfinite(values).all():
        return None
    return float(np.diff(values).min())


def _in_double(
    double: Callable[[], DoubleModel],
    probes: Mapping[str, Arrays],
    runtime: Callable[[Arrays], Arrays],
    seconds: float,
) -> tuple[tuple[Expected, ...], float]:
    model = double()
    started = time.monotonic()
    deadline = started + LONGEST_FACTOR * seconds
    found: list[Expected] = []
    for seed, (name, inputs) in enumerate(probes.items()):
        spent = time.monotonic() - started
        if found and spent * (len(found) + 1) / len(found) > seconds:
            break
        with np.errstate(all="ignore"):
            reference = model.run(inputs, deadline=deadline)
            moved = model.run(inputs, Rounding(model.unit, seed), deadline=deadline)
        found.append(expect(name, inputs, runtime(inputs), reference, moved, model.unit))
    return tuple(found), model.unit


def expect(name: str, inputs: Arrays, runtime: Arrays, reference: Arrays, moved: Arrays, unit: float) -> Expected:
    """Expected outputs from ONNX Runtime's (``runtime``), FP64 (``reference``) and FP64 with rounding errors
    (``moved``).

    Raises ``NoReference`` if ONNX Runtime contradicts the reference.
    """
    rounding: dict[str, np.ndarray] = {}
    for output, values in reference.items():
        theirs = runtime.get(output)
        if theirs is None or theirs.shape != values.shape or moved[output].shape != values.shape:
            raise NoReference(f"the shape of output {output!r} is another in double precision")
        share, _ = deviation(theirs, values, _movement(moved[output], values), unit)
        if not share <= BELIEVED:
            raise NoReference(f"ONNX Runtime's output {output!r} is not that of double precision")
        own, other = _movement(moved[output], values), _movement(theirs, values)
        rounding[output] = np.maximum(own, other) if values.dtype.kind in "iub" else np.hypot(own, other)
    return Expected(name, inputs, runtime, reference, rounding)


def _expect_rounded(expected: Expected, draws: Sequence[tuple[Arrays, Arrays]]) -> Expected:
    """``expected`` for rounded layers; ``draws``: outputs with rounded layers and without, near the same input."""
    plain = expected.reference is None
    reference: dict[str, np.ndarray] = {}
    rounding: dict[str, np.ndarray] = {}
    for name, values in (expected.runtime if expected.reference is None else expected.reference).items():
        if any(name not in moved or moved[name].shape != values.shape for moved, _ in draws):
            continue
        reference[name] = values
        own = np.sqrt(np.mean([_movement(moved[name], apart[name]) ** 2 for moved, apart in draws], axis=0))
        if values.dtype.kind in "iub":
            rounding[name] = own if plain else np.maximum(own, expected.rounding[name])
        else:
            rounding[name] = own if plain else np.hypot(own, expected.rounding[name])
    return replace(expected, reference=reference, rounding=rounding)


def deviation(
    actual: np.ndarray | None,
    reference: np.ndarray,
    rounding: np.ndarray,
    unit: float,
    factors: tuple[float, float] = (ELEMENT_FACTOR, MEAN_FACTOR),
) -> tuple[float, float]:
    """Return (fraction of the allowed deviation, largest absolute deviation).

    Both are infinite if shapes or the positions of non-finite values differ.
    """
    if actual is None or actual.shape != reference.shape:
        return float("inf"), float("inf")
    if not reference.size:
        return 0.0, 0.0
    if reference.dtype.kind in "iub":
        different = float(np.mean(actual != reference))
        return different / (DIFFERENT_SHARE + 3.0 * float(rounding)), different
    finite = np.isfinite(reference)
    if not np.array_equal(actual[~finite], reference[~finite], equal_nan=True):
        return float("inf"), float("inf")
    error = np.where(finite, np.abs(actual.astype(np.float64) - np.where(finite, reference, 0.0)), 0.0)
    if not np.isfinite(error).all():
        return float("inf"), float("inf")
    # Lower bound where the estimate is zero: rounding of the element itself, and of the largest of the output.
    own = unit * np.abs(reference, where=finite, out=np.zeros(reference.shape))
    allowed = rounding + own + 0.01 * float(own.max())
    if not allowed.any():  # all zeros without rounding errors: a network without biases on an empty image
        return (float("inf") if error.any() else 0.0), float(error.max())
    mean = np.sqrt(np.mean(error**2)) / np.sqrt(np.mean(allowed**2))
    single = float(np.max(np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)))
    of_element, of_mean = factors
    return max(_share(float(mean), of_mean), _share(single, of_element)), float(error.max())


def _movement(moved: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Difference of each element, averaged with its neighbours along the last two axes."""
    from scipy.ndimage import uniform_filter

    if reference.dtype.kind in "iub":
        return np.asarray(np.mean(moved != reference) if reference.size else 0.0)
    with np.errstate(all="ignore"):
        squares = (moved.astype(np.float64) - reference) ** 2
    squares = np.where(np.isfinite(squares), squares, 0.0)
    if not squares.ndim or not squares.size:
        return np.sqrt(squares)
    wide = [axis for axis in range(max(0, squares.ndim - 2), squares.ndim) if squares.shape[axis] > 1]
    window = [1] * squares.ndim
    for axis in wide:
        window[axis] = 3 if len(wide) == 2 else _NEIGHBOURS
    # Running sums may leave a negative zero.
    return np.sqrt(np.maximum(uniform_filter(squares, window, mode="nearest"), 0.0))


def _share(value: float, allowed: float) -> float:
    return value / allowed if np.isfinite(value) else float("inf")
