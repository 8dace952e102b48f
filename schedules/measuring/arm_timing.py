"""Timing protocol of one kernel, or of several against each other.

All competitors ("arms") are sampled alternately, A B C A B C, so that a slow phase of a shared machine affects all of
them. A sample is the mean over a short burst of calls; the minimum over the samples estimates the undisturbed time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

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
