"""A compiled kernel whose output was correct before and after timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedules.measuring.kernel_arguments import VerificationCase, WrongValues
from schedules.measuring.measure_messages import FailureKind


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
