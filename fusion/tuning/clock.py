"""Time of a job: its limit, the seconds of its stages, and the display of its progress.

The time needed at the end is reserved before kernels are measured. The first check builds, loads and compares a
network like the finals; its measured time is the estimate for theirs.

Progress is a live bar on a terminal, plain lines elsewhere; always on standard error.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, replace
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from costmodel.base.errors import Say
from fusion.comparing.timing import LEAST_ROUNDS, Sampling
from schedules.tuning.kernel_tuner import TuningProgress

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


PLAIN_INTERVAL_SECONDS = 10.0


class TuningDisplay:
    """Context manager that displays stages of the command and trials of the tuner.

    ``told``: callback that receives plain lines instead. If an end is set (:meth:`ends_at`), lines show the time left
    of the whole job, otherwise that of the search.
    """

    def __init__(self, console: Console | None = None, told: Say | None = None) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._told = told
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._printed = 0.0
        self._end = math.inf

    def ends_at(self, end: float) -> None:
        """Set the end of the job as a time of ``time.monotonic``; infinite: unknown."""
        self._end = end

    def stage(self, name: str) -> None:
        """Show the start of a stage."""
        left = self._end - time.monotonic()
        self.say(f"{name} ({clock(left)} left)" if math.isfinite(left) and left > 0 else name)

    def say(self, message: str) -> None:
        """Show one line."""
        if self._told is None:
            self._console.print(message, markup=False, soft_wrap=True)
        else:
            self._told(message)

    def trial(self, state: TuningProgress, network_seconds: float | None) -> None:
        """Show a trial of the tuner; ``network_seconds``: sum of the best kernels so far."""
        line = progress_line(state, network_seconds, self._end - time.monotonic())
        if self._told is not None or not self._console.is_terminal:
            now = time.monotonic()
            if now - self._printed >= PLAIN_INTERVAL_SECONDS:
                self._printed = now
                self.say(line)
            return
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("")
        assert self._task is not None
        self._bar.update(self._task, description=line, completed=state.trial, total=state.trials)

    def finish_trials(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._task = None, None

    def __enter__(self) -> TuningDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish_trials()


def progress_line(state: TuningProgress, network_seconds: float | None, left: float = math.inf) -> str:
    """``tuning 47 kernels, trial 120/2000, best kernels so far 2.310 ms, 1:20 left``.

    ``left``: seconds left of the whole job; if infinite, those of the search are shown.
    """
    doing = "comparing finalists" if state.stage == "compare" else f"tuning {state.tasks} kernels"
    best = "" if network_seconds is None else f", best kernels so far {network_seconds * 1e3:.3f} ms"
    seconds = left if math.isfinite(left) else state.eta_seconds
    return f"{doing}, trial {state.trial}/{state.trials}{best}, {clock(seconds)} left"


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours if needed."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
