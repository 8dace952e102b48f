"""The search, on kernels whose times are known: no compiler, no clock."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.cost_model import Measurement, config_key
from costmodel.operators.layers import Dense, Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Template
from schedules.measuring.measure_runner import Runner
from schedules.measuring.timing_protocol import KernelCandidate, MeasureOutcome
from schedules.tuning import kernel_tuner
from schedules.tuning.kernel_tuner import (
    COMPARE_ATTEMPTS,
    COMPARE_RUNS,
    COMPARE_SECONDS,
    SearchSettings,
    TaskState,
    Tuner,
    TuningProgress,
    TuningResult,
    TuningSession,
    TuningTask,
    next_batch,
    next_task,
)
from schedules.tuning.tuning_records import RecordStore

CPU = CpuTarget(16, 32, "x86-64", (), 2, 32 * 1024, 1024 * 1024)
SMALL, LARGE = Dense(1, 4, 4), Dense(1, 4, 400)
SPACE = [{"a": a, "b": b} for a in range(8) for b in range(8)]


def true_seconds(operator: Operator, config: Config) -> float:
    """Microseconds grow with the distance from (5, 2); large is 100 times small."""
    return 1e-6 * operator.out_features / 4 * (1 + abs(config["a"] - 5) + abs(config["b"] - 2))


class FakeTemplate(Template):
    family = "fake"

    def space(self, operator: Operator, cpu: CpuTarget) -> Sequence[Config]:
        return SPACE


class FakeRunner:
    """Measures :func:`true_seconds`; fails for ``broken``; the ``interrupt``-th trial is met by Ctrl-C."""

    def __init__(self, broken: Sequence[Config] = (), interrupt: int = -1, luck: dict[int, float] | None = None):
        self.broken, self.interrupt, self.luck = list(broken), interrupt, luck or {}
        self.trials: list[tuple[Operator, Config, float | None]] = []
        self.comparisons: list[list[Config]] = []

    def measure(self, operator: Operator, config: Config, best_seconds: float | None = None) -> MeasureOutcome:
        if len(self.trials) == self.interrupt:
            raise KeyboardInterrupt
        self.trials.append((operator, config, best_seconds))
        if config in self.broken:
            return MeasureOutcome(None, "crash", "SIGSEGV")
        return MeasureOutcome(true_seconds(operator, config) * self.luck.get(len(self.trials) - 1, 1.0))

    measure_batch = Runner.measure_batch  # one after the other

    def compile_together(self, candidates):
        pass

    def compare(self, arms: Sequence[Sequence[KernelCandidate]]) -> list[MeasureOutcome]:
        self.comparisons.append([config for ((_, config),) in arms])
        return [MeasureOutcome(true_seconds(operator, config)) for ((operator, config),) in arms]


class FakeModel:
    """Likes a large ``a`` at first; knows the truth once it has seen ``enough`` measurements."""

    def __init__(self, enough: int = 10**9) -> None:
        self.enough, self.seen = enough, 0

    def rank(self, operator: Operator, configs: Sequence[Config]) -> list[int]:
        def predicted(index: int) -> float:
            config = configs[index]
            return true_seconds(operator, config) if self.seen >= self.enough else -config["a"]

        return sorted(range(len(configs)), key=predicted)

    def update(self, measurements: Iterable[Measurement]) -> None:
        self.seen += len(list(measurements))


class OneOfMany(Tuner):
    """Lets the next tuner of the test write once it has tuned."""

    def __init__(self, store: RecordStore, *arguments: Any, **options: Any) -> None:
        super().__init__(store, *arguments, **options)
        self.records = store

    def tune(self, *arguments: Any, **options: Any) -> TuningResult:
        with self.records:
            return super().tune(*arguments, **options)


def make_tuner(directory: Path, runner: FakeRunner, model: FakeModel | None = None, **options: Any) -> Tuner:
    options.setdefault("settings", SearchSettings(exploration=0.0))
    store = RecordStore(directory, CPU)
    return OneOfMany(store, CPU, model or FakeModel(), runner, templates=lambda op, cpu: FakeTemplate(), **options)


def test_measures_what_the_model_ranks_first(tmp_path: Path):
    """Two, then eight that the model likes, as far apart as two knobs are; then it has learned the truth."""
    runner = FakeRunner()
    result = make_tuner(tmp_path, runner, FakeModel(enough=10)).tune([TuningTask(SMALL, 11)])
    configs = [config for _, config, _ in runner.trials]
    assert [config["a"] for config in configs[:10]] == [7, 6, 7, 6, 5, 4, 3, 2, 1, 0]
    unmeasured = [config for config in SPACE if config not in configs[:10]]
    assert true_seconds(SMALL, configs[10]) == min(true_seconds(SMALL, config) for config in unmeasured)
    assert result.trials == 11
    assert dict(result.best[SMALL].config) == {"a": 5, "b": 2}
    assert result.best[SMALL].seconds == pytest.approx(1e-6)
    assert not result.interrupted and result.unsolved == ()


def test_nothing_is_measured_twice_and_failures_are_remembered(tmp_path: Path):
    broken = [config for config in SPACE if config["a"] == 7]
    first = FakeRunner(broken)
    result = make_tuner(tmp_path, first).tune([TuningTask(SMALL, 10)])
    assert result.failures == 2 and result.trials == 10
    second = FakeRunner(broken)
    result = make_tuner(tmp_path, second).tune([TuningTask(SMALL, 30)])
    assert result.trials == len(second.trials) == 20
    keys = [config_key(config) for _, config, _ in first.trials + second.trials]
    assert len(set(keys)) == 30
    third = FakeRunner()
    result = make_tuner(tmp_path, third).tune([TuningTask(SMALL, 30)])
    assert (third.trials, third.comparisons, result.trials) == ([], [], 0)
    good = [dict(key) for key in keys if ("a", 7) not in key]
    assert result.best[SMALL].seconds == min(true_seconds(SMALL, config) for config in good)


def test_ctrl_c_keeps_the_best_so_far(tmp_path: Path):
    result = make_tuner(tmp_path, FakeRunner(interrupt=9)).tune([TuningTask(SMALL, 60), TuningTask(LARGE, 60)])
    assert result.interrupted and result.trials == 9
    assert set(result.best) == {SMALL, LARGE}
    assert make_tuner(tmp_path, FakeRunner()).tune([TuningTask(SMALL, 60), TuningTask(LARGE, 60)]).trials == 111


def test_equal_operators_are_tuned_once(tmp_path: Path):
    runner, events = FakeRunner(), []
    tuner = make_tuner(tmp_path, runner, progress=events.append)
    result = tuner.tune([TuningTask(SMALL, 5, occurrences=2), TuningTask(Dense(1, 4, 4), 8), TuningTask(LARGE, 5)])
    assert sum(operator == SMALL for operator, _, _ in runner.trials) == 8
    assert result.trials == 13
    last: TuningProgress = events[-1]
    assert last.network_seconds == pytest.approx(3 * result.best[SMALL].seconds + result.best[LARGE].seconds)


def test_trials_go_where_the_time_is(tmp_path: Path):
    runner = FakeRunner()
    make_tuner(tmp_path, runner).tune([TuningTask(SMALL, 64), TuningTask(LARGE, 64)], trials=60)
    counts = {operator: sum(op == operator for op, _, _ in runner.trials) for operator in (SMALL, LARGE)}
    assert counts[LARGE] >= 50 and counts[SMALL] >= 2


def test_a_kernel_that_cannot_be_solved_is_named_and_the_others_go_on(tmp_path: Path):
    class Broken(FakeRunner):
        def measure(self, operator: Operator, config: Config, best_seconds: float | None = None) -> MeasureOutcome:
            good = super().measure(operator, config, best_seconds)
            return good if operator == SMALL else MeasureOutcome(None, "wrong", "element (0) is 1 instead of 2")

    result = make_tuner(tmp_path, Broken()).tune([TuningTask(LARGE, 12), TuningTask(SMALL, 12)])
    assert result.unsolved == (LARGE,) and set(result.best) == {SMALL}
    assert result.failures == 12 and result.trials == 24


def test_time_ends_the_search_but_every_kernel_has_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(100_000))
    monkeypatch.setattr("schedules.tuning.kernel_tuner.time.monotonic", lambda: float(next(clock)))
    runner, events = FakeRunner(), []
    operators = [Dense(1, 4, features) for features in range(1, 9)]
    tuner = make_tuner(tmp_path, runner, progress=events.append)
    result = tuner.tune([TuningTask(operator, 64) for operator in operators], seconds=300.0)
    assert set(result.best) == set(operators) and not result.interrupted
    assert 16 <= result.trials < 100
    assert all(event.eta_seconds >= 0 for event in events)


def test_the_best_few_are_compared_before_one_is_chosen(tmp_path: Path):
    """The second trial looks fast by luck (a tenth of its time); the comparison tells the truth."""
    runner, events = FakeRunner(luck={1: 0.1}), []
    tuner = make_tuner(
        tmp_path, runner, progress=events.append, settings=SearchSettings(exploration=0.0, finalist_ratio=20.0)
    )
    result = tuner.tune([TuningTask(SMALL, 20)])
    ((lucky, *others),) = runner.comparisons
    assert lucky == runner.trials[1][1] and len(others) == 3
    measured = {config_key(config): true_seconds(SMALL, config) for _, config, _ in runner.trials}
    assert result.best[SMALL].seconds == pytest.approx(min(measured.values()))
    assert result.best[SMALL].confirmed and events[-1].stage == "compare"


def test_a_disturbed_comparison_is_repeated(tmp_path: Path):
    """Another process takes a core during the first comparison: all finalists take a time slice of 4 ms."""

    class Disturbed(FakeRunner):
        def compare(self, arms: Sequence[Sequence[KernelCandidate]]) -> list[MeasureOutcome]:
            outcomes = super().compare(arms)
            return [MeasureOutcome(4e-3) for _ in arms] if len(self.comparisons) == 1 else outcomes

    runner = Disturbed()
    settings = SearchSettings(exploration=0.0, finalist_ratio=3.0)
    result = make_tuner(tmp_path, runner, settings=settings).tune([TuningTask(SMALL, 20)])
    best = result.best[SMALL]
    assert best.confirmed and best.seconds == true_seconds(SMALL, best.config)
    assert len(runner.comparisons) == 2 and runner.comparisons[0] == runner.comparisons[1]


def test_a_comparison_that_is_always_disturbed_ends(tmp_path: Path):
    class Disturbed(FakeRunner):
        def compare(self, arms: Sequence[Sequence[KernelCandidate]]) -> list[MeasureOutcome]:
            return [MeasureOutcome(4e-3 + outcome.seconds) for outcome in super().compare(arms)]

    runner = Disturbed()
    make_tuner(tmp_path, runner, settings=SearchSettings(exploration=0.0, finalist_ratio=3.0)).tune(
        [TuningTask(SMALL, 20)]
    )
    assert len(runner.comparisons) == COMPARE_ATTEMPTS


def test_the_runner_is_told_the_time_to_beat(tmp_path: Path):
    runner = FakeRunner()
    make_tuner(tmp_path, runner).tune([TuningTask(SMALL, 12)])
    best: float | None = None
    for operator, config, told in runner.trials:
        assert told == best
        seconds = true_seconds(operator, config)
        best = seconds if best is None else min(best, seconds)


def test_records_of_earlier_runs_teach_the_model(tmp_path: Path):
    make_tuner(tmp_path, FakeRunner()).tune([TuningTask(SMALL, 12)])
    model = FakeModel()
    make_tuner(tmp_path, FakeRunner(), model).tune([TuningTask(LARGE, 2)])
    assert model.seen == 14


# --- which task, which configurations ---


def state(best: Sequence[float], occurrences: int = 1, measured: int | None = None) -> TaskState:
    space = [{"x": x} for x in range(100)]
    count = len(best) if measured is None else measured
    return TaskState(SMALL, occurrences, 100, space, {config_key(c) for c in space[:count]}, list(best))


def test_a_task_under_the_minimum_comes_first():
    assert next_task([state([1e-3] * 5), young := state([1e-6])], minimum=2) is young


def test_gain_weighs_occurrences_slope_and_age():
    once, often = state([1.0, 1.0]), state([1.0, 1.0], occurrences=3)
    assert next_task([once, often], 2) is often
    falling, flat = state([2.0, 1.0]), state([1.0, 1.0])
    assert next_task([flat, falling], 2) is falling
    # 0.5 * slope (1/2) + 0.5 * best / trials (1/2) = 0.5
    assert falling.expected_gain() == pytest.approx(0.5)
    assert state([1.0] * 50).expected_gain() == pytest.approx(0.01)


def test_an_exhausted_task_is_not_chosen():
    assert next_task([state([1.0] * 100)], 2) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.floats(0, 1), st.integers(0, 60), st.integers(0, 2**32))
def test_a_batch_holds_distinct_unmeasured_configurations(size: int, exploration: float, measured: int, seed: int):
    task = TaskState(SMALL, 1, 64, SPACE, {config_key(config) for config in SPACE[:measured]})
    batch = next_batch(task, FakeModel(), size, exploration, random.Random(seed))
    keys = {config_key(config) for config in batch}
    assert len(batch) == len(keys) == min(size, 64 - measured)
    assert not keys & task.measured


def test_a_batch_spreads_over_the_knobs():
    """Ranked by a alone, (7, 0) ... (7, 7) come first; they differ in one knob, so the batch moves on in both."""
    batch = next_batch(TaskState(SMALL, 1, 64, SPACE), FakeModel(), 3, 0.0, random.Random(0))
    assert batch == [{"a": 7, "b": 0}, {"a": 6, "b": 1}, {"a": 5, "b": 2}]


def test_without_an_opinion_of_the_model_the_batch_is_random():
    class NoOpinion(FakeModel):
        def rank(self, operator: Operator, configs: Sequence[Config]) -> list[int]:
            return list(range(len(configs)))

    batch = next_batch(TaskState(SMALL, 1, 64, SPACE), NoOpinion(), 8, 0.0, random.Random(0))
    assert max(config["a"] for config in batch) > 3


def test_every_algorithm_is_tried_before_the_model_is_believed():
    """By ``b``; the model likes a large ``a``, and none of b = 5 (all measured already)."""
    space = [config for config in SPACE if config["b"] in (3, 5) or config["a"] < 2]
    measured = {config_key(config) for config in space if config["b"] == 5}
    state = TaskState(SMALL, 1, 64, space, measured, algorithm=lambda config: str(config["b"]))
    batch = next_batch(state, FakeModel(), 8, 0.0, random.Random(0))
    assert batch[0] == {"a": 7, "b": 3}
    assert [config["a"] for config in batch[1:7]] == [1] * 6
    assert {config["b"] for config in batch[:7]} == {0, 1, 2, 3, 4, 6, 7}
    assert batch[7] == {"a": 6, "b": 3} or batch[7]["a"] == 6


# --- with a compiler and a clock ---


def test_tunes_a_real_kernel_while_candidates_crash(tmp_path: Path):
    class Saboteur(Runner):
        """Every other candidate kills the worker."""

        turn = 0

        def measure(self, operator: Operator, config: Config, best_seconds: float | None = None) -> MeasureOutcome:
            self.turn += 1
            broken = {**config, "fault": 2} if self.turn % 2 == 0 else config
            return super().measure(operator, broken, best_seconds)

    class ByOrder(FakeModel):
        def rank(self, operator: Operator, configs: Sequence[Config]) -> list[int]:
            return list(range(len(configs)))

    operator = Dense(2, 32, 12)
    space = [{"fault": 0, "split": split} for split in (1, 2, 3, 4)]

    class WithFaults(FakeTemplate):
        def space(self, operator: Operator, cpu: CpuTarget) -> Sequence[Config]:
            return space

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1]))
        with Saboteur(CPU, templates="fake_templates:template_for") as runner, RecordStore(tmp_path, CPU) as store:
            tuner = Tuner(store, CPU, ByOrder(), runner, templates=lambda op, cpu: WithFaults())
            result = tuner.tune([TuningTask(operator, 4)])
    assert (result.trials, result.failures) == (4, 2)
    assert [failure.error for failure in store.failures(operator)] == ["crash"] * 2
    assert 1e-8 < result.best[operator].seconds < 1e-3


def test_comparisons_at_the_end_take_little_of_the_time(monkeypatch: pytest.MonkeyPatch):
    """A trial is compiled, a finalist is not: thirty kernels of a second each trial leave time for a search."""
    clock = [0.0]
    monkeypatch.setattr(kernel_tuner.time, "monotonic", lambda: clock[0])
    states = [TaskState(Dense(1, 4, 4 + index), 1, 20, SPACE) for index in range(30)]
    session = TuningSession(states, None, 60.0)
    for state in states:
        for config in SPACE[:2]:
            clock[0] += 0.5
            state.note(config, 1e-3)
            session.count(state, MeasureOutcome(1e-3))
    assert clock[0] == 30.0 and session.may_continue(finalists=4)
    reserved = 30 * 2 * (COMPARE_SECONDS + COMPARE_RUNS * 1e-3)
    clock[0] = 60.0 - reserved + 0.1
    assert not session.may_continue(finalists=4) and session.may_continue(finalists=1)
