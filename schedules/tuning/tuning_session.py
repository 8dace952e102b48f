"""One run of the tuner: its budget, its counters, and progress messages."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from costmodel.operators.layers import Operator
from schedules.contract.template import Config
from schedules.measuring.measure_messages import MeasureOutcome
from schedules.tuning.trial_search import TaskState

# Cost of comparing a finalist: it is already compiled, then sampled, and verified before and after.
COMPARE_SECONDS = 0.05
COMPARE_RUNS = 10


@dataclass(frozen=True)
class TuningProgress:
    """State after one trial, or after one comparison of finalists (``stage`` is ``compare``). Times in seconds.

    ``trial`` of ``trials``: in this run. ``network_seconds``: sum over the tasks of occurrences times best, once every
    task has a result. ``eta_seconds``: until the trials or the time run out.
    """

    stage: Literal["search", "compare"]
    operator: Operator
    config: Config
    outcome: MeasureOutcome
    best_seconds: float | None
    trial: int
    trials: int
    tasks: int
    network_seconds: float | None
    elapsed_seconds: float
    eta_seconds: float


class TuningSession:
    """Budget and counters of one run."""

    def __init__(self, states: list[TaskState], trials: int | None, seconds: float | None) -> None:
        self.states = states
        left = sum(state.left for state in states)
        self.trials = left if trials is None else min(trials, left)
        self.trial = 0
        self.failures = 0
        self.touched: set[Operator] = set()
        self._limit_seconds = seconds
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self._start

    @property
    def _trial_seconds(self) -> float:
        """Mean wall time of a trial so far."""
        return self.elapsed / self.trial if self.trial else 0.0

    @property
    def over(self) -> bool:
        """True if the time is over."""
        return self._limit_seconds is not None and self.elapsed >= self._limit_seconds

    def may_continue(self, finalists: int) -> bool:
        """True if trials and time are left, without the time reserved for the final comparisons."""
        if self.trial >= self.trials:
            return False
        reserved = self._compare_seconds(finalists)
        # A first result for every task is more important than comparisons.
        if any(not state.history and state.left for state in self.states):
            reserved = 0.0
        return self._limit_seconds is None or self.elapsed + reserved < self._limit_seconds

    def _compare_seconds(self, finalists: int) -> float:
        """Seconds of all final comparisons; kernels with one result need none."""
        found = 0.0
        for state in self.states:
            if state.operator in self.touched and state.best_seconds is not None:
                competitors = min(finalists, len(state.history))
                if competitors > 1:
                    found += competitors * (COMPARE_SECONDS + COMPARE_RUNS * state.best_seconds)
        return found

    def count(self, state: TaskState, outcome: MeasureOutcome) -> None:
        """Count one trial of ``state`` and its outcome."""
        self.trial += 1
        self.failures += not outcome.ok
        self.touched.add(state.operator)

    def progress(
        self, stage: Literal["search", "compare"], state: TaskState, config: Config, outcome: MeasureOutcome
    ) -> TuningProgress:
        """Progress message after a trial."""
        best = [(task.occurrences, task.best_seconds) for task in self.states]
        network = sum(count * (seconds or 0.0) for count, seconds in best)
        eta = (self.trials - self.trial) * self._trial_seconds
        if self._limit_seconds is not None:
            eta = min(eta, max(0.0, self._limit_seconds - self.elapsed))
        return TuningProgress(
            stage=stage,
            operator=state.operator,
            config=config,
            outcome=outcome,
            best_seconds=state.best_seconds,
            trial=self.trial,
            trials=self.trials,
            tasks=len(self.states),
            network_seconds=None if any(seconds is None for _, seconds in best) else network,
            elapsed_seconds=self.elapsed,
            eta_seconds=eta,
        )
