"""Kernel tuner: a cost model ranks the next configurations of a kernel, a worker measures, every result is stored,
until the budget of the run ends.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from costmodel.cost_model import ConfigKey, Measurement, config_key
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Template
from schedules.measuring.timing_protocol import KernelCandidate, MeasureOutcome
from schedules.tuning.tuning_records import Record, RecordStore

# Share of random configurations while a kernel family is unknown to the model.
UNINFORMED_EXPLORATION = 0.3


@runtime_checkable
class Ranker(Protocol):
    """Interface of a learned cost model used by the tuner."""

    def rank(self, operator: Operator, configs: Sequence[Config]) -> Sequence[int]:
        """Indices into ``configs``, expected fastest first; the given order means no prediction."""
        ...

    def update(self, measurements: Iterable[Measurement]) -> None:
        """Train on these measurements, in addition to earlier ones."""
        ...


@dataclass
class TaskState:
    """A kernel being tuned: its space, measured configurations, and history."""

    operator: Operator
    occurrences: int
    # Maximum number of measured configurations, earlier runs included.
    trials: int
    space: Sequence[Config]
    measured: set[ConfigKey] = field(default_factory=set)
    # Best seconds after every successful trial.
    history: list[float] = field(default_factory=list)
    # Algorithm of a configuration, if the space has several.
    algorithm: Callable[[Config], str] = lambda config: ""
    # Configurations measured before any ranking.
    first: Sequence[Config] = ()
    # Configurations of the operator measured on the same kind of CPU before, which reduces the expected gain.
    elsewhere: int = 0

    @property
    def best_seconds(self) -> float | None:
        """Fastest time so far in seconds, or None before the first."""
        return self.history[-1] if self.history else None

    @property
    def left(self) -> int:
        """Number of remaining trials."""
        return max(0, min(self.trials, len(self.space)) - len(self.measured))

    def note(self, config: Mapping[str, int], seconds: float | None) -> None:
        """Record a trial; ``seconds`` None: it failed."""
        self.measured.add(config_key(config))
        if seconds is not None:
            self.history.append(min(seconds, self.history[-1] if self.history else seconds))

    def untried_algorithms(self) -> set[str]:
        """Algorithms without a measured configuration; empty if there is only one."""
        known = {self.algorithm(config) for config in self.space}
        return known - {self.algorithm(dict(key)) for key in self.measured} if len(known) > 1 else set()

    def expected_gain(self, window: int = 16, trust: float = 0.5) -> float:
        """Seconds per network run that one more trial may save.

        As in the gradient scheduler of Ansor (Zheng et al., OSDI 2020, section 6): ``trust`` times the slope over the
        last ``window`` trials, and for the rest the optimistic assumption that the best time falls by ``1/n`` at trial
        n.
        """
        if not self.history:
            return float("inf")
        count = max(1, len(self.measured) + self.elsewhere)
        recent = self.history[-min(window, len(self.history)) :]
        slope = (recent[0] - recent[-1]) / len(recent)
        return self.occurrences * (trust * slope + (1.0 - trust) * recent[-1] / count)


def next_task(states: Sequence[TaskState], minimum: int) -> TaskState | None:
    """Next kernel: first those with fewer than ``minimum`` trials, then the one with the largest expected gain."""
    open_states = [state for state in states if state.left]
    if not open_states:
        return None
    behind = [state for state in open_states if len(state.measured) < minimum]
    if behind:
        return min(behind, key=lambda state: len(state.measured))
    return max(open_states, key=lambda state: state.expected_gain())


def next_batch(state: TaskState, ranker: Ranker, size: int, exploration: float, rng: random.Random) -> list[Config]:
    """Up to ``size`` unmeasured configurations: those of ``state.first``, then the best ranked, with a share of random
    ones.

    While the ranker has no prediction, the order of the space is used (the template's analytic cost), with more random
    ones. Configurations that differ from one in the batch in a single knob are postponed: both together give the model
    little more information than one. An untried algorithm comes first, with its best ranked configuration: analytic
    costs are least reliable between algorithms.
    """
    size = min(size, state.left)
    batch = [config for config in state.first if config_key(config) not in state.measured][:size]
    if len(batch) == size:
        return batch
    seen = state.measured | {config_key(config) for config in batch}
    fresh = [config for config in state.space if config_key(config) not in seen]
    order = list(ranker.rank(state.operator, fresh))
    if order == list(range(len(fresh))):
        exploration = max(exploration, UNINFORMED_EXPLORATION)
    ranked = [fresh[index] for index in order]
    # The first configurations include the best of each algorithm in the records.
    untried = state.untried_algorithms() - {state.algorithm(config) for config in batch}
    while ranked and len(batch) < size:
        if untried:
            index = next(i for i, config in enumerate(ranked) if state.algorithm(config) in untried)
            untried.remove(state.algorithm(ranked[index]))
        elif rng.random() < exploration:
            index = rng.randrange(len(ranked))
        else:
            index = next((i for i, config in enumerate(ranked) if not _near(config, batch)), 0)
        batch.append(ranked.pop(index))
    return batch


def _near(config: Config, batch: Sequence[Config]) -> bool:
    return any(
        config.keys() == other.keys() and sum(config[knob] != other[knob] for knob in config) <= 1 for other in batch
    )


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


# Repeat a comparison if all finalists are slower than in their first measurement by this factor, as they were
# disturbed; and the maximum number of comparisons.
DISTURBED = 1.25
COMPARE_ATTEMPTS = 4


class MeasuringRunner(Protocol):
    """Interface of :class:`schedules.measuring.measure_runner.Runner` used by the tuner."""

    def measure_batch(
        self, operator: Operator, configs: Sequence[Config], best_seconds: float | None = None
    ) -> Iterator[tuple[Config, MeasureOutcome]]: ...

    def compare(self, arms: Sequence[Sequence[KernelCandidate]]) -> list[MeasureOutcome]: ...


@dataclass(frozen=True)
class TuningTask:
    """A kernel to tune with at most ``trials`` measured configurations, earlier runs included.

    ``occurrences``: number of runs in the network; equal operators are merged and their occurrences added.
    """

    operator: Operator
    trials: int
    occurrences: int = 1


@dataclass(frozen=True)
class SearchSettings:
    """``minimum_trials`` go to every task before any gets more. ``finalists`` are compared again at the end."""

    batch: int = 8
    exploration: float = 0.1
    minimum_trials: int = 2
    finalists: int = 4
    finalist_ratio: float = 1.2
    seed: int = 0


@dataclass(frozen=True)
class TuningResult:
    """Result of a run; ``unsolved`` operators, without a configuration that builds, runs and verifies, are not in
    ``best``.
    """

    best: Mapping[Operator, Record]
    unsolved: tuple[Operator, ...]
    trials: int
    failures: int
    seconds: float
    interrupted: bool


class Guessing(Protocol):
    """Interface of :class:`schedules.tuning.kernel_ranking.KernelGuesses` used by the tuner."""

    def first(self, operator: Operator) -> Sequence[Config]: ...

    def trials(self, operator: Operator) -> int: ...

    def space(self, operator: Operator) -> Sequence[Config]: ...


class Tuner:
    """Tunes for one CPU into one store. ``progress`` is called after every trial; ``guesses``: prior knowledge."""

    def __init__(
        self,
        store: RecordStore,
        cpu: CpuTarget,
        cost_model: Ranker,
        runner: MeasuringRunner,
        progress: Callable[[TuningProgress], None] | None = None,
        *,
        settings: SearchSettings | None = None,
        templates: Callable[[Operator, CpuTarget], Template | None] | None = None,
        guesses: Guessing | None = None,
    ) -> None:
        self._store = store
        self._cpu = cpu
        self._cost_model = cost_model
        self._runner = runner
        self._progress = progress or (lambda state: None)
        self._settings = settings or SearchSettings()
        self._templates = templates or _default_templates
        self._guesses = guesses

    def tune(
        self, tasks: Sequence[TuningTask], *, trials: int | None = None, seconds: float | None = None
    ) -> TuningResult:
        """Measure up to ``trials`` new configurations in total, for up to ``seconds`` of wall time.

        Ctrl-C ends it early: the result is marked, and has the best so far. Configurations in the store count as
        measured and are not measured again.
        """
        session = TuningSession(self._states(tasks), trials, seconds)
        interrupted = False
        try:
            self._learn_from_store()
            self._search(session)
            self._compare_finalists(session)
        except KeyboardInterrupt:
            interrupted = True
        operators = [state.operator for state in session.states]
        found = {operator: self._store.best(operator) for operator in operators}
        return TuningResult(
            best={operator: record for operator, record in found.items() if record is not None},
            unsolved=tuple(operator for operator, record in found.items() if record is None),
            trials=session.trial,
            failures=session.failures,
            seconds=session.elapsed,
            interrupted=interrupted,
        )

    def _states(self, tasks: Sequence[TuningTask]) -> list[TaskState]:
        """One state per distinct operator, with the results in the store."""
        merged: dict[Operator, TuningTask] = {}
        for task in tasks:
            known = merged.get(task.operator, TuningTask(task.operator, 0, 0))
            merged[task.operator] = TuningTask(
                task.operator, max(known.trials, task.trials), known.occurrences + task.occurrences
            )
        return [self._state(task) for task in merged.values()]

    def _state(self, task: TuningTask) -> TaskState:
        template = self._templates(task.operator, self._cpu)
        if template is None:
            raise ValueError(f"no template covers {task.operator}")
        space: Sequence[Config]
        first: Sequence[Config] = ()
        elsewhere = 0
        if self._guesses is None:
            space = template.space(task.operator, self._cpu)
        else:
            space, first = self._guesses.space(task.operator), self._guesses.first(task.operator)
            elsewhere = self._guesses.trials(task.operator)
        state = TaskState(
            task.operator,
            task.occurrences,
            task.trials,
            space,
            algorithm=lambda config: template.for_config(config).family,
            first=first,
            elsewhere=elsewhere,
        )
        legal = {config_key(config) for config in space}
        for record in self._store.all(task.operator):
            if config_key(record.config) in legal:
                state.note(record.config, record.seconds)
        for failure in self._store.failures(task.operator):
            if config_key(failure.config) in legal:
                state.note(failure.config, None)
        best = self._store.best(task.operator)
        if best is not None and state.history:
            state.history.append(best.seconds)
        return state

    def _learn_from_store(self) -> None:
        records = [record for operator in self._store.operators() for record in self._store.all(operator)]
        if records:
            self._cost_model.update([Measurement(r.operator, r.config, r.seconds) for r in records])

    def _search(self, session: TuningSession) -> None:
        rng = random.Random(self._settings.seed)
        while session.may_continue(self._settings.finalists):
            state = next_task(session.states, self._settings.minimum_trials)
            if state is None:
                return
            behind = self._settings.minimum_trials - len(state.measured)
            size = min(behind if behind > 0 else self._settings.batch, session.trials - session.trial)
            batch = next_batch(state, self._cost_model, size, self._settings.exploration, rng)
            self._measure(session, state, batch)

    def _measure(self, session: TuningSession, state: TaskState, batch: Sequence[Config]) -> None:
        measured: list[Measurement] = []
        for config, outcome in self._runner.measure_batch(state.operator, batch, state.best_seconds):
            if outcome.seconds is None:
                self._store.add_failure(state.operator, config, outcome.error or "run", outcome.message)
            else:
                self._store.add(state.operator, config, outcome.seconds)
                measured.append(Measurement(state.operator, config, outcome.seconds))
            state.note(config, outcome.seconds)
            session.count(state, outcome)
            self._progress(session.progress("search", state, config, outcome))
            if not session.may_continue(self._settings.finalists):
                break
        if measured:
            self._cost_model.update(measured)

    def _compare_finalists(self, session: TuningSession) -> None:
        """Time the best few of every task against each other: the fastest single measurement may be luck."""
        for state in session.states:
            if session.over:
                return
            best = self._store.best(state.operator)
            if best is None or (best.confirmed and state.operator not in session.touched):
                continue
            finalists = self._store.near_best(state.operator, self._settings.finalist_ratio, self._settings.finalists)
            if len(finalists) < 2:
                continue
            results = self._compare(state.operator, finalists)
            if not results:
                continue
            self._store.confirm(state.operator, [(config, _seconds(outcome)) for config, outcome in results])
            winner, outcome = min(results, key=lambda result: _seconds(result[1]))
            state.history.append(_seconds(outcome))
            self._progress(session.progress("compare", state, winner, outcome))

    def _compare(self, operator: Operator, finalists: Sequence[Config]) -> list[tuple[Config, MeasureOutcome]]:
        """Working finalists with their fastest outcomes; repeated while all are clearly slower than before."""
        known = {config_key(record.config): record.seconds for record in self._store.all(operator)}
        least: dict[int, MeasureOutcome] = {}
        for _ in range(COMPARE_ATTEMPTS):
            outcomes = self._runner.compare([[(operator, config)] for config in finalists])
            for index, outcome in enumerate(outcomes):
                if outcome.seconds is not None and outcome.seconds < _seconds(least.get(index)):
                    least[index] = outcome
            slowness = [_seconds(each) / known[config_key(finalists[index])] for index, each in least.items()]
            if not slowness or min(slowness) <= DISTURBED:
                break
        return [(finalists[index], outcome) for index, outcome in sorted(least.items())]


def _seconds(outcome: MeasureOutcome | None) -> float:
    """Time of an outcome; infinite without one."""
    return math.inf if outcome is None or outcome.seconds is None else outcome.seconds


def _default_templates(operator: Operator, cpu: CpuTarget) -> Template | None:
    from schedules.kernels.template_table import template_for

    return template_for(operator, cpu)
