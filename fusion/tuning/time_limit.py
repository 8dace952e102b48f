"""Time limit of the whole job: the time needed at the end is reserved before kernels are measured.

The first check builds, loads and compares a network like the finals; its measured time is the estimate for theirs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from fusion.comparing.rounds import LEAST_ROUNDS, Sampling

# Minimum number of networks in the finals if sites can be fused: with the selected fusions, and without any.
LEAST_FINALISTS = 2
# Seconds of alternating runs: five rounds at least, fifteen if there is time; slow networks take longer.
RACE_SECONDS = 8.0
# Seconds of a block of slow networks, which limits its runs, with minimum numbers.
BLOCK_SECONDS = 0.6
LEAST_CALLS, LEAST_WARMUP = 2, 1


# Kernels compiled in the finals, relative to one network: those with changed configurations, fused and separate.
FINAL_COMPILATION = 1.5
# Lower bound for the share of trials in the remaining time: trials compile kernels too, so the time left suffices to
# compile those that they change.
TRIALS_SHARE = 0.5
# Seconds by which the job may be late rather than omit the network without fusion.
LATE_SECONDS = 5.0
# Share of a limited job for the reference in double precision, with lower and upper limits in seconds.
REFERENCE_SHARE = 0.1
LEAST_REFERENCE_SECONDS, MOST_REFERENCE_SECONDS = 3.0, 20.0


@dataclass(frozen=True)
class TimeLimit:
    """End of a job, and the time reserved for its finals."""

    # End of the whole job (``time.monotonic``); infinite without a limit.
    end: float
    # To build one network of compiled kernels, load it and compare its outputs.
    check_seconds: float
    # Additional checks of the winner, with exposed arguments of saturating functions.
    extra_checks: int = 0
    # To compile the kernels of the finals according to the present results.
    compile_seconds: float = 0.0
    # Time of one run, for estimating the final comparison.
    run_seconds: float = 0.0
    # Number of networks in the finals.
    finalists: int = LEAST_FINALISTS
    # To compile the kernels of the finals if trials change all of them.
    most_compile_seconds: float = 0.0

    @property
    def tuning_seconds(self) -> float | None:
        """Seconds from now available for measuring kernels, or None without a limit."""
        if math.isinf(self.end):
            return None
        left = self.end - self._finals_seconds(self.finalists) - self.compile_seconds - time.monotonic()
        further = max(0.0, self.most_compile_seconds - self.compile_seconds)
        return max(0.0, left - further, TRIALS_SHARE * left)

    @property
    def race_end(self) -> float:
        """Time limit of the final comparison, so that the checks after it end in time."""
        return self.end - self.extra_checks * self.check_seconds

    def allows(self, finalists: int) -> bool:
        """True if there is time to build, check and compare ``finalists`` networks from now on.

        The minimum number of networks may be a little late, as a search may be, too.
        """
        late = LATE_SECONDS if finalists <= LEAST_FINALISTS else 0.0
        return time.monotonic() + self.compile_seconds + self._finals_seconds(finalists) < self.end + late

    def _finals_seconds(self, finalists: int) -> float:
        checks = (finalists + self.extra_checks) * self.check_seconds
        sampling = race_sampling(self.run_seconds)
        block = max(sampling.seconds, (sampling.warmup + sampling.calls) * self.run_seconds)
        race = max(RACE_SECONDS, LEAST_ROUNDS * (finalists + 1) * block)
        return checks + race


def race_sampling(run_seconds: float) -> Sampling:
    """Sampling of the finals: the default, with shorter blocks if a run takes about ``run_seconds``."""
    usual = Sampling()
    fitting = int(BLOCK_SECONDS / run_seconds) if run_seconds > 0 else usual.calls + usual.warmup
    calls = min(usual.calls, max(LEAST_CALLS, fitting))
    return replace(usual, calls=calls, warmup=min(usual.warmup, max(LEAST_WARMUP, fitting - calls)))


def reference_seconds(minutes: float | None) -> float:
    """Seconds for the reference in a job of ``minutes`` (None: without a limit)."""
    wanted = math.inf if minutes is None else REFERENCE_SHARE * 60.0 * minutes
    return min(max(wanted, LEAST_REFERENCE_SECONDS), MOST_REFERENCE_SECONDS)


class StageClock:
    """Wall seconds of a job by stage, in the order in which stages ended."""

    def __init__(self, started: float) -> None:
        self.seconds: dict[str, float] = {}
        self.started = started
        self._last = started

    def ended(self, stage: str) -> None:
        """Record the time since the end of the previous stage for ``stage``."""
        now = time.monotonic()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


def end_of(minutes: float | None, started: float) -> float:
    """End (``time.monotonic``) of a job of ``minutes`` that began at ``started``; infinite without a limit."""
    return math.inf if minutes is None else started + 60.0 * minutes
