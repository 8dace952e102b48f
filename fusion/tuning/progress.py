"""Progress display of ``tune``: a live bar on a terminal, plain lines elsewhere; always on standard error."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from costmodel.base.say import Say
from schedules.tuning.tuning_session import TuningProgress

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
        line = describe(state, network_seconds, self._end - time.monotonic())
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


def describe(state: TuningProgress, network_seconds: float | None, left: float = math.inf) -> str:
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
