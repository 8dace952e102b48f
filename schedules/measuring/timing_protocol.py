"""Timing protocol of one kernel, or of several against each other; messages between runner and worker; outcomes.

All competitors ("arms") are sampled alternately, A B C A B C, so that a slow phase of a shared machine affects all of
them. A sample is the mean over a short burst of calls; the minimum over the samples estimates the undisturbed time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Literal

from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget

KernelCall = tuple[Callable[..., object], tuple[object, ...]]


@dataclass(frozen=True)
class TimingProtocol:
    """Parameters of timing; seconds are wall time of one arm."""

    # Duration of a burst: long against the clock's resolution, short against scheduling disturbances.
    sample_seconds: float = 1e-3
    # Sampling time per arm after ``min_samples``.
    budget_seconds: float = 20e-3
    warmup_seconds: float = 2e-3
    min_samples: int = 3
    # An arm slower than the best known time by this factor stops after ``min_samples``.
    abandon_ratio: float = 1.5
    # An arm slower by this factor stops only after ``patience`` pauses of ``pause_seconds``: another process on one of
    # the cores makes every parallel region as long as a time slice of the scheduler.
    suspicious_ratio: float = 3.0
    patience: int = 3
    pause_seconds: float = 20e-3
    # Copies of the constants that the calls alternate between; None: see :func:`rotation_copies`.
    copies: int | None = None


def rotation_copies(constant_bytes: int, cpu: CpuTarget) -> int:
    """Number of copies of the weights that together are twice the L2 caches of all threads.

    In a network all other layers run between two calls, so a layer's weights come from the level that holds the whole
    model, mostly the last-level cache, whereas its input was just written. Repeated calls on one copy would read the
    weights from
    """
    if constant_bytes == 0:
        return 1
    footprint = 2 * cpu.threads * cpu.l2_bytes
    return min(max(2, 1 + -(-footprint // constant_bytes)), 256)


@dataclass
class Arm:
    """Calls in rotation. One execution of the arm is ``steps`` consecutive calls.

    ``overhead_seconds``: cost of the calls of one execution without any work; subtracted from every sample.
    """

    calls: Sequence[KernelCall]
    steps: int
    overhead_seconds: float = 0.0
    samples: list[float] = field(default_factory=list)
    _rotation: Iterator[KernelCall] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rotation = itertools.cycle(self.calls)

    @property
    def seconds(self) -> float:
        """Minimum over the samples."""
        return min(self.samples)

    @property
    def median_seconds(self) -> float:
        """Median seconds of one call over all rounds."""
        return median(self.samples)

    def run(self, executions: int) -> float:
        """Seconds of one execution including overhead, mean over ``executions``."""
        calls = itertools.islice(self._rotation, executions * self.steps)
        start = time.perf_counter()
        for function, arguments in calls:
            function(*arguments)
        return (time.perf_counter() - start) / executions

    def sample(self, executions: int) -> float:
        """Take one sample; return its wall seconds."""
        seconds = self.run(executions)
        self.samples.append(max(seconds - self.overhead_seconds, 1e-9))
        return seconds * executions


def time_arms(
    arms: Sequence[Arm],
    protocol: TimingProtocol,
    best_seconds: float | None = None,
    before: Callable[[int], None] = lambda index: None,
) -> None:
    """Fill ``samples`` of all arms alternately; ``before`` is called with the index of the next arm."""
    bursts = [_warm_up(arm, protocol, partial(before, index)) for index, arm in enumerate(arms)]
    spent = [0.0] * len(arms)
    pauses = 0
    active = set(range(len(arms)))
    while active:
        for index in sorted(active):
            arm = arms[index]
            before(index)
            spent[index] += arm.sample(bursts[index])
            if len(arm.samples) < protocol.min_samples:
                continue
            slowness = 0.0 if best_seconds is None else arm.seconds / best_seconds
            if slowness > protocol.suspicious_ratio and pauses < protocol.patience:
                pauses += 1
                time.sleep(protocol.pause_seconds)
                continue
            hopeless = slowness > protocol.abandon_ratio
            if hopeless or spent[index] >= protocol.budget_seconds:
                active.discard(index)


def _warm_up(arm: Arm, protocol: TimingProtocol, before: Callable[[], None]) -> int:
    """Run the arm for the warm-up time; return the number of executions that fill one sample."""
    spent, seconds = 0.0, float("inf")
    while spent < protocol.warmup_seconds or seconds == float("inf"):
        before()
        once = arm.run(1)
        spent += once
        seconds = min(seconds, once)
    return max(1, round(protocol.sample_seconds / seconds))


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
