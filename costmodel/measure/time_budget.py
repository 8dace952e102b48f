"""Time budget of a suite and its progress lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from costmodel.base.errors import InputError
from costmodel.base.say import Say

_REPORT_SECONDS = 10.0


class TimeBudget:
    """Budget of ``minutes`` from construction; ``InputError`` unless above zero. ``clock`` (seconds) is replaced in
    tests.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 < minutes < math.inf:
            raise InputError(f"--minutes {minutes}: must be above zero")
        self._clock = clock
        self._start = clock()
        self.seconds = 60 * minutes

    def restart(self) -> None:
        """Restart the budget, to exclude the loading of libraries and waiting for other ranks."""
        self._start = self._clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def left(self, needed: float = 0.0) -> bool:
        """True if ``needed`` more seconds fit."""
        return self.elapsed + needed < self.seconds


class SuiteProgress:
    """Progress reporter: at most every ten seconds, work done and time left (or the estimate for the rest, if less)."""

    def __init__(self, budget: TimeBudget, report: Say, total: int | None = None) -> None:
        self._budget, self._report, self._total = budget, report, total
        self._last = 0.0
        self.done = 0

    def step(self, what: str) -> None:
        """Count one finished piece of work and report if due."""
        self.done += 1
        if self._budget.elapsed - self._last < _REPORT_SECONDS:
            return
        self._last = self._budget.elapsed
        left = max(self._budget.seconds - self._budget.elapsed, 0.0)
        if self._total:
            left = min(left, self._budget.elapsed / self.done * (self._total - self.done))
        of = f" of {self._total}" if self._total else ""
        self._report(f"{self.done}{of} done, {self._budget.elapsed:.0f} s, about {left:.0f} s left; last: {what}")
