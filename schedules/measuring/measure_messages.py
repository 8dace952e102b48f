"""Messages between runner and worker, and the outcome of a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.measuring.arm_timing import TimingProtocol

FailureKind = Literal["build", "run", "wrong", "crash", "hang"]
KernelCandidate = tuple[Operator, Mapping[str, int]]


@dataclass(frozen=True)
class KernelStep:
    """One kernel of a program."""

    # Earlier step whose output is the data, None for a separate input; likewise for the others.
    candidate: KernelCandidate
    data: int | None = None
    residual: int | None = None
    gate: int | None = None

    @property
    def sources(self) -> tuple[int | None, ...]:
        """Steps whose outputs it reads: those of data, residual and gate."""
        return (self.data, self.residual, self.gate)


# A network's kernels in execution order.
KernelProgram = tuple[KernelStep, ...]


@dataclass(frozen=True)
class MeasureOutcome:
    """Result of measuring one candidate: ``seconds``, or the kind and message of a failure.

    ``seconds`` is the minimum and ``median_seconds`` the median over ``samples`` bursts of calls. For a program:
    seconds of the whole, and ``step_seconds`` of each step in it.
    """

    seconds: float | None
    error: FailureKind | None = None
    message: str = ""
    median_seconds: float | None = None
    samples: int = 0
    step_seconds: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        """True if there is a time."""
        return self.seconds is not None


@dataclass(frozen=True)
class Setup:
    """First message to a worker. ``templates``: ``module:function`` with the signature of ``template_for``."""

    cpu: CpuTarget
    protocol: TimingProtocol
    templates: str
    search_path: tuple[str, ...]
    phase_seconds: float


@dataclass(frozen=True)
class MeasureRequest:
    """Time these arms against each other; an arm is one candidate or several run consecutively."""

    arms: tuple[tuple[KernelCandidate, ...], ...]
    best_seconds: float | None = None


@dataclass(frozen=True)
class CompileRequest:
    """Compile these candidates in parallel for later requests; nothing is timed meanwhile.

    A compilation failure is reported only when the candidate is measured.
    """

    candidates: tuple[KernelCandidate, ...]


@dataclass(frozen=True)
class ProgramRequest:
    """Time these programs alternately, each ``runs`` times in a row, in ``rounds`` rounds."""

    programs: tuple[KernelProgram, ...]
    rounds: int
    runs: int


@dataclass(frozen=True)
class WorkerPhase:
    """Start of a phase of the worker for this arm (or program); the runner's time limit restarts."""

    name: Literal["ready", "preparing", "building", "running", "timing"]
    arm: int = 0


@dataclass(frozen=True)
class Answer:
    """Outcomes of all arms (or programs) of a request. ``tainted``: memory may be corrupt, start a new worker."""

    outcomes: tuple[MeasureOutcome, ...]
    tainted: bool = False
