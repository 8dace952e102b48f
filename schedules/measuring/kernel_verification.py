"""Verification of kernels: seeded random arguments of an operator, expected outputs between guard bands, and kernels
whose output was correct before and after timing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.operators.layers import ChannelNorm, Conv2d, Dense, FusedConvs, Operator, Pool2d
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.operator_reference import reference
from schedules.contract.template import (
    Parameters,
    QuantisedAddition,
    Requantisation,
    Template,
    TensorSpec,
    block,
    numpy_dtype,
    stored,
    unblock,
)
from schedules.measuring.timing_protocol import FailureKind, rotation_copies

_GUARD_BYTES = 4096
_GUARD = 0xA5
_ALIGNMENT = 64  # alignment of TVM's allocations


class WrongValues(Exception):
    """Raised if a kernel wrote wrong values, or outside its output."""


def unwritten_value(dtype: np.dtype) -> float:
    """Initial value of outputs of ``dtype``, for detecting unwritten elements: NaN, or an arbitrary byte."""
    return _GUARD if dtype == np.uint8 else float("nan")


class GuardedOutput:
    """An output array between two guard bands, filled with :func:`unwritten_value`."""

    def __init__(self, spec: TensorSpec) -> None:
        size = spec.size_bytes
        self._raw = np.empty(size + 2 * _GUARD_BYTES + _ALIGNMENT, np.uint8)
        self._start = _GUARD_BYTES + -(self._raw.ctypes.data + _GUARD_BYTES) % _ALIGNMENT
        self._stop = self._start + size
        self.array: np.ndarray = self._raw[self._start : self._stop].view(numpy_dtype(spec.dtype)).reshape(spec.shape)
        self.reset()

    def reset(self) -> None:
        """Fill the guards, and the output with :func:`unwritten_value`, before a run."""
        self._raw[: self._start] = _GUARD
        self._raw[self._stop :] = _GUARD
        self.array[...] = unwritten_value(self.array.dtype)

    @property
    def guards_intact(self) -> bool:
        """True if the kernel wrote nothing outside its output."""
        return bool((self._raw[: self._start] == _GUARD).all() and (self._raw[self._stop :] == _GUARD).all())


@dataclass(frozen=True, eq=False)
class VerificationCase:
    """Arguments and expected output of the kernels of one operator."""

    # Argument tuples with different copies of the constants.
    rotation: tuple[tuple[Any, ...], ...]
    output: GuardedOutput
    output_spec: TensorSpec
    # In framework layout, before rounding to the dtype of the output.
    expected: np.ndarray
    # See the functions of the same names.
    tolerance: float
    margin: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Memory of the arguments and of the expected values in bytes."""
        tensors = {id(tensor): tensor for arguments in self.rotation for tensor in arguments}
        return self.expected.nbytes + sum(
            numpy_dtype(str(tensor.dtype)).itemsize * math.prod(tensor.shape) for tensor in tensors.values()
        )

    def verify(self) -> None:
        """Raise ``WrongValues`` unless the output has the expected values."""
        if not self.output.guards_intact:
            raise WrongValues("wrote outside its output")
        actual = self.output.array.astype(np.float32)
        if not np.isfinite(actual).all():
            raise WrongValues("left elements of the output unwritten, or not finite")
        if self.output_spec.layout == "blocked":
            actual = unblock(actual, self.expected.shape[1])
        error = np.abs(actual.reshape(self.expected.shape) - self.expected)
        limit = self.margin + self.tolerance * (1.0 + np.abs(self.expected))
        worst = np.unravel_index(int(np.argmax(error - limit)), error.shape)
        if error[worst] > limit[worst]:
            place = ", ".join(str(int(i)) for i in worst)
            raise WrongValues(
                f"element ({place}) is {actual.reshape(self.expected.shape)[worst]:.6g} instead of "
                f"{self.expected[worst]:.6g} (tolerance {limit[worst]:.2g})"
            )


def make_case(operator: Operator, template: Template, cpu: CpuTarget, copies: int | None = None) -> VerificationCase:
    """Random arguments of ``operator`` as TVM tensors, with ``copies`` of the constants (None: default rule)."""
    rng = np.random.default_rng(0)
    signature = template.signature(operator, cpu)
    # A standard deviation of 2 reaches both ends of ReLU6 and of the hard activations.
    data = _normal(rng, operator.input_shape, 2.0) if operator.dtype != "int8" else _bytes(rng, operator.input_shape)
    parameters = random_parameters(operator, rng)
    has_residual = signature.residual is not None
    residual = _normal(rng, operator.output_shape, 1.0) if has_residual else None
    if has_residual and operator.dtype == "int8":
        residual = _bytes(rng, operator.output_shape)
    gate = _gate(operator, rng)
    constants = template.pack(operator, parameters, cpu)
    output = GuardedOutput(signature.output)
    first: tuple[Any, ...] = (_tensor(_laid_out(data, signature.data, cpu, rng)),)
    if signature.gate is not None and gate is not None:
        first = (*first, _tensor(_laid_out(gate, signature.gate, cpu, rng)))
    last: tuple[Any, ...] = (tensor_over(output.array),)
    if signature.residual is not None and residual is not None:
        last = (_tensor(_laid_out(residual, signature.residual, cpu, rng)), *last)
    count = copies or rotation_copies(sum(constant.nbytes for constant in constants), cpu)
    rotation = tuple((*first, *(_tensor(constant) for constant in constants), *last) for _ in range(count))
    expected = reference(operator, data, parameters, residual, gate, rounded=False)
    return VerificationCase(rotation, output, signature.output, expected, tolerance(operator), margin(operator))


def _gate(operator: Operator, rng: np.random.Generator) -> np.ndarray | None:
    """Factors of a gated convolution between zero and one, like those of a sigmoid."""
    if not isinstance(operator, Conv2d) or not operator.gated:
        return None
    return rng.random(operator.gate_shape, dtype=np.float32)


def input_tensor(shape: tuple[int, ...], spec: TensorSpec, cpu: CpuTarget) -> Any:
    """Random values of framework ``shape`` as a TVM tensor in the layout of ``spec``."""
    rng = np.random.default_rng(0)
    return _tensor(_laid_out(_normal(rng, shape, 1.0), spec, cpu, rng))


def random_parameters(operator: Operator, rng: np.random.Generator) -> list[Parameters]:
    """Weights scaled by the square root of the reduction length, so that layers preserve the standard deviation."""
    parameters = []
    for layer in layers(operator):
        if layer.dtype == "int8":
            parameters.append(_quantised_parameters(layer, rng))
            continue
        weight = _normal(rng, layer.weight_shape, 1.0 / math.sqrt(math.prod(layer.weight_shape[1:])))
        bias = _normal(rng, (layer.weight_shape[0],), 1.0) if layer.epilogue.bias else None
        affine = [_normal(rng, (layer.weight_shape[0],), 1.0) for _ in range(2)] if layer.epilogue.affine else []
        before = isinstance(layer, Conv2d) and layer.prologue is not None and layer.prologue.affine
        inputs = [_normal(rng, (layer.input_shape[1],), 1.0) for _ in range(2)] if before else [None, None]
        slopes = _normal(rng, (layer.weight_shape[0],), 0.5) if layer.epilogue.activation == "prelu" else None
        scale, shift = affine or (None, None)
        parameters.append(Parameters(weight, bias, scale, shift, inputs[0], inputs[1], slopes))
    return parameters


def _bytes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Uniformly distributed bytes, as FP32."""
    return rng.integers(0, 256, shape).astype(np.float32)


def _quantised_parameters(layer: Conv2d | Dense | ChannelNorm, rng: np.random.Generator) -> Parameters:
    """Integer parameters whose results cover the whole range of bytes; no zero point is zero."""
    outputs = layer.weight_shape[0]
    weight = rng.integers(-127, 128, layer.weight_shape)
    bias = rng.integers(-4000, 4001, outputs) if layer.epilogue.bias else None
    # Bytes and weights have a standard deviation of about 74 each.
    spread = 74.0**2 * math.sqrt(math.prod(layer.weight_shape[1:]))
    multiplier = (80.0 / spread * rng.uniform(0.5, 1.5, outputs)).astype(np.float32)
    zero, addition, step = 131, None, 0.0
    if layer.epilogue.activation is not None:
        multiplier, step = multiplier / np.float32(32.0), 1.0 / 32.0
        bias = None if bias is None else _normal(rng, (outputs,), 1.0)
    if layer.epilogue.residual:
        addition = QuantisedAddition(
            low=3, high=250, zero=117, own_ratio=0.73, residual_ratio=0.61, fixed=4.63, offset=120
        )
        zero = 120
    slopes = _normal(rng, (outputs,), 0.5) if layer.epilogue.activation == "prelu" else None
    requantisation = Requantisation(
        multiplier, input_zero=122, low=9, high=244, zero=zero, addition=addition, step=step
    )
    return Parameters(weight.astype(np.int8), bias, slopes=slopes, requantisation=requantisation)


def layers(operator: Operator) -> Sequence[Conv2d | Dense | ChannelNorm]:
    """Layers with weights, in execution order."""
    if isinstance(operator, Pool2d):
        return ()
    return operator.convs if isinstance(operator, FusedConvs) else (operator,)


def tolerance(operator: Operator) -> float:
    """Allowed error, relative to ``1 + |expected|``.

    FP32 summation of K terms in any order has an error of at most ``K * eps * sum(|terms|)``, typically about its
    square root; ``4 * K * eps`` is between them, and far below the ``1 / sqrt(K)`` of one lost term. A bfloat16 result
    has a relative rounding error of up to 2^-8. Values between two convolutions, or after a prologue, are rounded too:
    if sums differ in their last bits, occasionally the other way, so the same is added again. Bytes are exact, except
    for a :func:`margin`.
    """
    twice = isinstance(operator, FusedConvs) or (isinstance(operator, Conv2d) and operator.prologue is not None)
    if operator.dtype == "int8":
        return 0.0
    rounding = 2.0**-8 * (2 if twice else 1) if operator.dtype == "bfloat16" else 0.0
    if isinstance(operator, Pool2d):
        reduction = operator.kernel[0] * operator.kernel[1]
    elif isinstance(operator, ChannelNorm):
        reduction = operator.channels
    else:
        reduction = sum(math.prod(layer.weight_shape[1:]) for layer in layers(operator))
    return rounding + 4.0 * (reduction + 32) * float(np.finfo(np.float32).eps)


def margin(operator: Operator) -> float:
    """Additional absolute tolerance: 1 for bytes after an activation, which kernels approximate, otherwise 0.

    A value halfway between two integers may be rounded to either, and in a chain dependent values change as much.
    """
    if operator.dtype != "int8" or isinstance(operator, Pool2d):
        return 0.0
    convs = operator.convs if isinstance(operator, FusedConvs) else (operator,)
    activated = any(isinstance(each, Conv2d | Dense) and each.epilogue.activation is not None for each in convs)
    return 1.0 if activated else 0.0


def _normal(rng: np.random.Generator, shape: tuple[int, ...], spread: float) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(spread)


def _laid_out(array: np.ndarray, spec: TensorSpec, cpu: CpuTarget, rng: np.random.Generator) -> np.ndarray:
    """``array`` in the layout of ``spec``; lanes beyond the channels get values that a kernel must not use."""
    if spec.layout == "plain":
        return stored(array.reshape(spec.shape), spec.dtype)
    blocked = block(array, cpu.lanes)
    used = array.shape[1] % cpu.lanes
    if used:
        tail = blocked[:, -1, :, :, used:]
        tail[...] = _normal(rng, tail.shape, 100.0)
    return stored(blocked, spec.dtype)


def _tensor(array: np.ndarray) -> Any:
    import tvm

    return tvm.runtime.tensor(array)


def tensor_over(array: np.ndarray) -> Any:
    """Wrap the memory of ``array`` as a TVM tensor."""
    import tvm

    if array.dtype != numpy_dtype("bfloat16"):
        return tvm.runtime.from_dlpack(array)
    bits = tvm.runtime.from_dlpack(array.view(np.uint16))  # NumPy does not export dtypes of other packages
    return bits._create_view(array.shape, "bfloat16")


class KernelFailure(Exception):
    """Raised if a kernel cannot be built or run, or computes wrong values. ``tainted``: memory may be corrupt."""

    def __init__(self, kind: FailureKind, message: str, tainted: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.tainted = tainted


@dataclass(frozen=True, eq=False)
class VerifiedKernel:
    """One kernel of an arm; ``first`` is the output it was verified with."""

    function: Callable[..., object]
    case: VerificationCase
    first: Any

    def verify_again(self) -> None:
        """Raise ``KernelFailure`` if a kernel that was correct is no longer: it has a race, or overwrites its
        inputs.
        """
        try:
            _run_and_verify(self.function, self.case, -1)
        except KernelFailure as failure:
            message = f"right at first, after the timing runs {failure}"
            raise KernelFailure(failure.kind, message, tainted=True) from failure
        if not (self.case.output.array == self.first).all():
            raise KernelFailure("wrong", "two runs on the same data differ", tainted=True)


def verified(function: Callable[..., object], case: VerificationCase) -> VerifiedKernel:
    """Run ``function`` on the first arguments of ``case``; raise ``KernelFailure`` unless its output is correct."""
    _run_and_verify(function, case, 0)
    return VerifiedKernel(function, case, case.output.array.copy())


def one_line(error: BaseException) -> str:
    """Type and last line of an error, for a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:400]


def _run_and_verify(function: Callable[..., object], case: VerificationCase, turn: int) -> None:
    case.output.reset()
    try:
        function(*case.rotation[turn])
    except Exception as error:
        raise KernelFailure("run", one_line(error)) from error
    try:
        case.verify()
    except WrongValues as error:
        raise KernelFailure("wrong", str(error), tainted=not case.output.guards_intact) from error
