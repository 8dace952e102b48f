"""Tuning schedule of a model's kernels: selection, order, time limits and results.

First every kernel gets a few trials, which identifies sites that cannot win; the rest of the budget goes to the others.
Then the best configurations and fusions are compared inside the network (:mod:`fusion.tuning.rehearsal`). Remaining
time goes into further trials, followed by another comparison. Kernels are ordered by predicted time, sites by predicted
savings, so that a short budget is spent on the most important ones.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from costmodel.operators.layers import FusedConvs, Operator
from fusion.model.conv_graph import FusionPlan, Graph, Site, select, unfused_seconds
from fusion.tuning.rehearsal import RehearsalStore, Rehearsed, Rehearsing, Variant, affordable_pool, rehearse
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, WorkSplit
from schedules.kernels.template_table import template_for
from schedules.tuning.kernel_ranking import KernelGuesses
from schedules.tuning.kernel_tuner import (
    MeasuringRunner,
    Ranker,
    SearchSettings,
    Tuner,
    TuningProgress,
    TuningResult,
    TuningTask,
)
from schedules.tuning.tuning_records import RecordStore

# Trials of every kernel before sites are dropped, and their maximum share of the time.
SCREENING_TRIALS = 4
SCREENING_SHARE = 0.5
# After screening, drop a site whose best fused kernel is slower than its separate kernels by more than this factor.
HOPELESS = 1.4
# Run at most this many configurations per kernel in the network, each within this factor of the best; and fusions
# within this factor of their separate kernels.
REHEARSED_CONFIGS = 4
REHEARSED_RATIO = 1.15
# Also run the fastest configuration of every other work split within this factor of the best.
OTHER_SPLIT_RATIO = 1.5
REHEARSAL_SHARE = 0.2
# Maximum share of the remaining comparison time for trials of other work splits.
SPLITS_SHARE = 0.3
# Start another round of trials and comparisons only with this share of the time left, or with at least so many seconds
# if they were found to be left at the end (``TuningBudget.spare``).
WORTHWHILE_SHARE = 0.15
LEAST_SECONDS = 4.0
# Use a new configuration found after the last comparison if its separate time is below this fraction of the old one.
FOUND_LATER = 0.9


@dataclass(frozen=True)
class TuningBudget:
    """Limits of tuning."""

    # Per kernel.
    trials: int
    # Total time; None: until the trials are done.
    seconds: float | None = None
    # Called when the time is over, with the results so far; returns additional seconds. The time needed after tuning is
    # known better then.
    spare: Callable[[TunedKernels], float | None] | None = None


class NetworkRunner(MeasuringRunner, Rehearsing, Protocol):
    """Measures kernels alone and in networks."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A point of the tuning curve: ``elapsed_seconds`` after the start, with ``trials`` measured, the best kernels,
    each measured alone, summed to ``network_seconds``.
    """

    elapsed_seconds: float
    trials: int
    network_seconds: float


@dataclass(frozen=True)
class TunedKernels:
    """Best configuration and seconds of every measured kernel, each alone, and the network built from them."""

    configs: Mapping[Operator, Config]
    seconds: Mapping[Operator, float]
    # None if interrupted before, without time for it, or if nothing could be run.
    rehearsed: Rehearsed | None
    # Kernels of single nodes that failed in every configuration tried.
    unsolved: tuple[Operator, ...]
    # Measured in this run.
    trials: int
    failures: int
    interrupted: bool
    # Best configurations with rounding errors no larger than those of a plain sum of products.
    careful: Mapping[Operator, Config] = field(default_factory=dict)
    # Expected seconds of unmeasured kernels, from records or a ranking.
    expected: Mapping[Operator, float] = field(default_factory=dict)
    # Progress of this run.
    curve: tuple[CurvePoint, ...] = ()

    def plan(self, graph: Graph, sites: Sequence[Site]) -> FusionPlan:
        """Fastest network known."""
        if self.rehearsed is not None:
            return self.rehearsed.plan
        return select(graph, sites, {**self.expected, **self.seconds})

    def unfused_configs(self) -> dict[Operator, Config]:
        """Configurations of the network without fusion."""
        return dict(self.configs if self.rehearsed is None else {**self.configs, **self.rehearsed.unfused_configs})

    def chosen_configs(self) -> dict[Operator, Config]:
        """Configurations of the fastest network."""
        return {**self.configs, **(self.rehearsed.configs if self.rehearsed is not None else {})}

    def comparable_seconds(self) -> dict[Operator, float]:
        """Seconds in the network. A fused kernel that was not run there is scaled like its separate kernels."""
        if self.rehearsed is None:
            return dict(self.seconds)
        seconds = {**self.seconds, **self.rehearsed.seconds}
        for operator in self.seconds.keys() - self.rehearsed.seconds.keys():
            if isinstance(operator, FusedConvs) and all(conv in self.seconds for conv in operator.convs):
                apart = sum(self.seconds[conv] for conv in operator.convs)
                seconds[operator] *= sum(seconds[conv] for conv in operator.convs) / apart
        return seconds


@dataclass(frozen=True)
class _Compared:
    """The last comparison inside the network, and the separate times of kernels at that time."""

    rehearsed: Rehearsed
    seconds: Mapping[Operator, float]

    def with_later(self, tuned: TunedKernels) -> Rehearsed:
        """The same network with configurations of ``tuned`` that later trials found to be much faster.

        Their time inside the network is unknown, so smaller gains of separate kernels are ignored.
        """
        found = {
            operator: tuned.configs[operator]
            for operator, seconds in self.seconds.items()
            if tuned.seconds.get(operator, seconds) < FOUND_LATER * seconds
        }
        return replace(
            self.rehearsed,
            configs={**self.rehearsed.configs, **found},
            unfused_configs={**self.rehearsed.unfused_configs, **found},
            interrupted=tuned.interrupted,
        )


class NetworkTuner:
    """Tunes the kernels of one graph. ``report`` is called with the tuner's progress and the best network time so
    far.
    """

    def __init__(
        self,
        graph: Graph,
        sites: Sequence[Site],
        store: RecordStore,
        cpu: CpuTarget,
        cost_model: Ranker,
        runner: NetworkRunner,
        report: Callable[[TuningProgress, float | None], None],
        say: Callable[[str], None] = lambda _: None,
        guesses: KernelGuesses | None = None,
        predicted: Mapping[Operator, float] | None = None,
    ) -> None:
        """``predicted``: predicted seconds of kernels, if available."""
        self._graph = graph
        self._sites = sites
        self._store = store
        self._cpu = cpu
        self._cost_model = cost_model
        self._runner = runner
        self._report = report
        self._say = say
        self._guesses = guesses or KernelGuesses(cpu)
        self._predicted = predicted or {}
        self._began = time.monotonic()
        self._trials = 0
        self._curve: list[CurvePoint] = []

    def tune(self, budget: TuningBudget) -> TunedKernels:
        """Screen, tune and rehearse. Ctrl-C ends it early with the results so far; records are always on disk."""
        end = math.inf if budget.seconds is None else time.monotonic() + budget.seconds
        if budget.seconds == 0:  # use the existing records
            tuned = self.known()
            return self._rehearsed(tuned, self._sites, budget.trials, end) if tuned.seconds else tuned
        screening = TuningBudget(
            min(budget.trials, SCREENING_TRIALS), None if budget.seconds is None else SCREENING_SHARE * budget.seconds
        )
        screened = self._tune(self._sites, screening, SearchSettings(finalists=1))
        if screened.interrupted:
            return screened
        sites = [site for site in self._sites if self._promising(site)]
        trials, failures = screened.trials, screened.failures
        compared: _Compared | None = None
        while True:
            seconds = None
            if budget.seconds is not None:
                left = max(0.0, end - time.monotonic())
                seconds = left - min(REHEARSAL_SHARE * budget.seconds, left / 2)
            tuned = self._tune(sites, TuningBudget(budget.trials, seconds), SearchSettings())
            tried = tuned.trials
            if not tuned.interrupted:
                tuned = self._rehearsed(tuned, sites, budget.trials, end)
            if tuned.rehearsed is not None:
                compared = _Compared(tuned.rehearsed, tuned.seconds)
            elif compared is not None:
                tuned = replace(tuned, rehearsed=compared.with_later(tuned))
            trials, failures = trials + tuned.trials, failures + tuned.failures
            if tuned.interrupted or not tried or budget.seconds is None:
                break
            worthwhile = WORTHWHILE_SHARE * budget.seconds
            if end - time.monotonic() <= worthwhile and budget.spare is not None:
                end = max(end, time.monotonic() + (budget.spare(tuned) or 0.0))
                worthwhile = min(worthwhile, LEAST_SECONDS)
            if end - time.monotonic() <= worthwhile:
                break
        return replace(tuned, trials=trials, failures=failures)

    def _tune(self, sites: Sequence[Site], budget: TuningBudget, settings: SearchSettings) -> TunedKernels:
        tuner = Tuner(
            self._store,
            self._cpu,
            self._cost_model,
            self._runner,
            self._progress,
            settings=settings,
            guesses=self._guesses,
        )
        try:
            result = tuner.tune(self._tasks(sites, budget.trials), seconds=budget.seconds)
        except KeyboardInterrupt:  # before the first trial, while spaces are enumerated
            result = TuningResult({}, (), 0, 0, 0.0, interrupted=True)
        return replace(
            self.known(), trials=result.trials, failures=result.failures, interrupted=result.interrupted
        )  # fmt: skip

    def known(self, interrupted: bool = False) -> TunedKernels:
        """Results from records, and expectations for kernels without one; nothing is measured.

        ``interrupted``: the job was stopped before it reached this network.
        """
        alone = dict.fromkeys(node.operator for node in self._graph.nodes)
        seconds = self._seconds()
        guessed = {each: self._guesses.seconds(each) for each in self._operators() if each not in seconds}
        return TunedKernels(
            configs=self._configs(),
            seconds=seconds,
            rehearsed=None,
            unsolved=tuple(each for each in alone if self._store.best(each) is None and self._store.failures(each)),
            trials=0,
            failures=0,
            interrupted=interrupted,
            careful=self._careful(),
            expected={each: time for each, time in guessed.items() if time is not None},
            curve=tuple(self._curve),
        )

    def _tasks(self, sites: Sequence[Site], trials: int) -> list[TuningTask]:
        """Tasks for kernels of layers, longest first, then of ``sites``, largest predicted saving first."""
        layers: Counter[Operator] = Counter(node.operator for node in self._graph.nodes)
        fused: Counter[Operator] = Counter(site.operator for site in sites)
        saved: dict[Operator, float] = {site.operator: self._predicted_gain(site) for site in sites}
        ordered = sorted(layers, key=lambda each: -layers[each] * self._predicted.get(each, 0.0))
        ordered += sorted(fused, key=lambda each: -fused[each] * saved[each])
        return [TuningTask(operator, trials, (layers + fused)[operator]) for operator in ordered]

    def _predicted_gain(self, site: Site) -> float:
        """Predicted seconds saved by the site, 0 if unknown."""
        apart = unfused_seconds(site, self._predicted)
        return 0.0 if apart is None else apart - self._predicted.get(site.operator, apart)

    def _promising(self, site: Site, limit: float = HOPELESS) -> bool:
        """True if the fused kernel takes at most ``limit`` times as long as its separate kernels, or is not measured
        yet.
        """
        seconds = self._seconds()
        fused, unfused = seconds.get(site.operator), unfused_seconds(site, seconds)
        return fused is None or unfused is None or fused <= limit * unfused

    def _rehearsed(self, tuned: TunedKernels, sites: Sequence[Site], trials: int, end: float) -> TunedKernels:
        first = Variant(select(self._graph, sites, tuned.seconds), tuned.configs)
        near = [site for site in sites if self._promising(site, REHEARSED_RATIO)]
        operators = [node.operator for node in self._graph.nodes] + [site.operator for site in near]
        about = sum(tuned.seconds.get(group.operator, 0.0) for group in first.plan.groups)
        store = RehearsalStore(self._store.directory, self._cpu, about, end, self._runner.compilation_seconds)
        self._say("comparing configurations and fusions inside the network")
        try:
            now = time.monotonic()
            added = self._measure_missing_splits(first.plan.operators, trials, now + SPLITS_SHARE * (end - now))
            tuned = replace(tuned, trials=tuned.trials + len(added), failures=tuned.failures + added.count(False))
            near_best = {operator: self._rehearsal_configs(operator) for operator in dict.fromkeys(operators)}
            measured = {operator: configs for operator, configs in near_best.items() if configs}
            pool = affordable_pool(self._graph, near, measured, store.affordable)
            rehearsed = rehearse(self._graph, near, pool, first, store, self._runner)
        except KeyboardInterrupt:
            return replace(tuned, interrupted=True)
        if rehearsed is not None and rehearsed.total is not None:
            fused = sum(group.is_fused for group in rehearsed.plan.groups)
            tried = sum(site.operator in pool for site in near)
            self._say(f"best network so far {rehearsed.total * 1e3:.3f} ms, {fused} sites fused, {tried} tried in it")
        return replace(tuned, rehearsed=rehearsed, interrupted=rehearsed is not None and rehearsed.interrupted)

    def _rehearsal_configs(self, operator: Operator) -> list[Config]:
        """The fastest few configurations, and the fastest of every work split among threads."""
        configs = self._store.near_best(operator, REHEARSED_RATIO, REHEARSED_CONFIGS)
        splits = {self._work_split(operator, config) for config in configs}
        if configs and (best := self._store.best(operator)) is not None:
            for record in sorted(self._store.all(operator), key=lambda each: each.seconds):
                split = self._work_split(operator, record.config)
                if split not in splits and record.seconds <= OTHER_SPLIT_RATIO * best.seconds:
                    configs.append(record.config)
                    splits.add(split)
        return configs

    def _measure_missing_splits(self, operators: Sequence[Operator], trials: int, end: float = math.inf) -> list[bool]:
        """Measure one configuration of every untried work split of the kernels; return the success of each trial.

        The longest kernels come first. The number of trials per kernel is limited by ``trials``, the time by ``end``.
        """
        succeeded: list[bool] = []
        seconds = self._seconds()
        for operator in sorted(dict.fromkeys(operators), key=lambda each: -seconds.get(each, 0.0)):
            missing = self._missing_splits(operator, trials)
            if not missing or time.monotonic() >= end:
                continue
            for config, outcome in self._runner.measure_batch(operator, missing):
                if outcome.seconds is None:
                    self._store.add_failure(operator, config, outcome.error or "run", outcome.message)
                else:
                    self._store.add(operator, config, outcome.seconds)
                succeeded.append(outcome.ok)
        return succeeded

    def _missing_splits(self, operator: Operator, trials: int) -> list[Config]:
        """Most promising configuration of each untried work split; empty for an unmeasured kernel."""
        template = template_for(operator, self._cpu)
        tried = [record.config for record in self._store.all(operator)]
        tried += [failure.config for failure in self._store.failures(operator)]
        if template is None or not tried:
            return []
        known = {template.work_split(config, self._cpu) for config in tried}
        missing: dict[WorkSplit, Config] = {}
        for config in self._guesses.space(operator):
            split = template.work_split(config, self._cpu)
            if split not in known:
                missing.setdefault(split, config)
        return list(missing.values())[: max(0, trials - len(tried))]

    def _work_split(self, operator: Operator, config: Config) -> WorkSplit:
        template = template_for(operator, self._cpu)
        assert template is not None, "only kernels of a template are measured"
        return template.work_split(config, self._cpu)

    def _seconds(self) -> dict[Operator, float]:
        records = {operator: self._store.best(operator) for operator in self._operators()}
        return {operator: record.seconds for operator, record in records.items() if record is not None}

    def _configs(self) -> dict[Operator, Config]:
        records = {operator: self._store.best(operator) for operator in self._operators()}
        return {operator: record.config for operator, record in records.items() if record is not None}

    def _careful(self) -> dict[Operator, Config]:
        found: dict[Operator, Config] = {}
        for operator in dict.fromkeys(self._operators()):
            template = template_for(operator, self._cpu)
            for record in sorted(self._store.all(operator), key=lambda each: each.seconds):
                if template is not None and template.relative_rounding(record.config) <= 1.0:
                    found.setdefault(operator, record.config)
        return found

    def _operators(self) -> list[Operator]:
        return [*(node.operator for node in self._graph.nodes), *(site.operator for site in self._sites)]

    def _progress(self, state: TuningProgress) -> None:
        found = network_seconds(self._graph, self._sites, self._seconds())
        self._trials += state.stage == "search"
        if found is not None and (not self._curve or found < self._curve[-1].network_seconds):
            self._curve.append(CurvePoint(time.monotonic() - self._began, self._trials, found))
        self._report(state, found)


def network_seconds(graph: Graph, sites: Sequence[Site], seconds: Mapping[Operator, float]) -> float | None:
    """Sum of the kernel times of the best plan, or None until every node's kernel has been measured."""
    if any(node.operator not in seconds for node in graph.nodes):
        return None
    return plan_seconds(select(graph, sites, seconds), seconds)


def plan_seconds(plan: FusionPlan, seconds: Mapping[Operator, float]) -> float:
    """Sum of the kernel times of ``plan``."""
    return sum(seconds[group.operator] for group in plan.groups)
