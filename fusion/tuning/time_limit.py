"""How a limit on the whole job is kept: what the end of it needs is set aside before kernels are measured.

The first check builds, loads and compares a network, as the finals do with each of theirs: its time is theirs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from fusion.comparing.rounds import LEAST_ROUNDS, Sampling

# Networks that the finals have in any case where a site may be fused: with the selected fusions, and without any.
LEAST_FINALISTS = 2
# Networks taking turns: five rounds at least, fifteen if there is time; of slow ones the least rounds take longer.
RACE_SECONDS = 8.0
# A block of a slow network has so few runs as fit into this, and as say something all the same.
BLOCK_SECONDS = 0.6
LEAST_CALLS, LEAST_WARMUP = 2, 1


# The finals compile the kernels whose configuration changed, fused and apart: more than one network has, less than two.
FINAL_COMPILATION = 1.5
# But no more than trials have changed, which compile their kernels too: with this share of the time for them there is
# enough left to compile those that they change.
TRIALS_SHARE = 0.5
# What the network without fusion may add to the job rather than be left out.
LATE_SECONDS = 5.0
# Of a limited job the reference in double precision may take this share; never less than it takes to be of use.
REFERENCE_SHARE = 0.1
LEAST_REFERENCE_SECONDS, MOST_REFERENCE_SECONDS = 3.0, 20.0


@dataclass(frozen=True)
class TimeLimit:
    """``end``: of the whole job on the clock of ``time.monotonic``, infinite without a limit.

    ``compile_seconds``: to compile what the finals are made of as they stand now; ``most_compile_seconds``: if trials
    change every kernel of them; ``check_seconds``: to build a network of that, load it and compare its outputs;
    ``extra_checks``: of the winner once more, with what it hides; ``run_seconds``: of one run, by which the race is
    estimated; ``finalists``: networks that the finals are about.
    """

    end: float
    check_seconds: float
    extra_checks: int = 0
    compile_seconds: float = 0.0
    run_seconds: float = 0.0
    finalists: int = LEAST_FINALISTS
    most_compile_seconds: float = 0.0

    @property
    def tuning_seconds(self) -> float | None:
        """Seconds from now that may go into measuring kernels; ``None`` without a limit."""
        if math.isinf(self.end):
            return None
        left = self.end - self._finals_seconds(self.finalists) - self.compile_seconds - time.monotonic()
        further = max(0.0, self.most_compile_seconds - self.compile_seconds)
        return max(0.0, left - further, TRIALS_SHARE * left)

    @property
    def race_end(self) -> float:
        """When the networks must have been compared, so that the checks behind that end in time."""
        return self.end - self.extra_checks * self.check_seconds

    def allows(self, finalists: int) -> bool:
        """Whether there is time to build, check and compare so many networks from now on.

        The least that finals are about may be a little late, since a search is, too.
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
    """How the finals are timed: as any comparison, in shorter blocks where a run takes ``run_seconds`` or so."""
    usual = Sampling()
    fitting = int(BLOCK_SECONDS / run_seconds) if run_seconds > 0 else usual.calls + usual.warmup
    calls = min(usual.calls, max(LEAST_CALLS, fitting))
    return replace(usual, calls=calls, warmup=min(usual.warmup, max(LEAST_WARMUP, fitting - calls)))


def reference_seconds(minutes: float | None) -> float:
    """What the reference may take in a job of ``minutes`` (``None``: without a limit)."""
    wanted = math.inf if minutes is None else REFERENCE_SHARE * 60.0 * minutes
    return min(max(wanted, LEAST_REFERENCE_SECONDS), MOST_REFERENCE_SECONDS)


class StageClock:
    """Where the time of a job went: wall seconds by stage, in the order in which they ended."""

    def __init__(self, started: float) -> None:
        self.seconds: dict[str, float] = {}
        self.started = started
        self._last = started

    def ended(self, stage: str) -> None:
        """``stage`` took the time since the one before."""
        now = time.monotonic()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


def end_of(minutes: float | None, started: float) -> float:
    """When a job of ``minutes`` that began at ``started`` must end, on the clock of ``time.monotonic``."""
    return math.inf if minutes is None else started + 60.0 * minutes
