"""Kernel tuner: a cost model ranks, a worker measures, every result is stored."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from costmodel.model.measurements import Measurement, config_key
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Template
from schedules.measuring.measure_messages import KernelCandidate, MeasureOutcome
from schedules.records.record_store import RecordStore
from schedules.records.tuning_records import Record
from schedules.tuning.trial_search import Ranker, TaskState, next_batch, next_task
from schedules.tuning.tuning_session import TuningProgress, TuningSession

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
    """Interface of :class:`schedules.tuning.kernel_guesses.KernelGuesses` used by the tuner."""

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
