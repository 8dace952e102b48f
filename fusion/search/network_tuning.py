"""Which kernels of a model are tuned, in which order and for how long, and what is known of them afterwards.

First every kernel gets a few trials, which tells the sites that cannot win; the rest of the budget goes to the
others. Then the best configurations and fusions are compared inside the network (:mod:`fusion.search.rehearsal`). What
that leaves of a limited time goes into trials again, and what they found is compared again.

Kernels come in the order of what they are predicted to take, sites in that of what they are predicted to save: where
the time does not do for all, it is spent on those that matter.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from costmodel.operators.layers import FusedConvs, Operator
from fusion.model.candidates import Site
from fusion.model.conv_graph import Graph
from fusion.model.selection import FusionPlan, select, unfused_seconds
from fusion.model.timed_network import Variant
from fusion.search.rehearsal import RehearsalStore, Rehearsed, Rehearsing, affordable_pool, rehearse
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, WorkSplit
from schedules.kernels.template_table import template_for
from schedules.records.record_store import RecordStore
from schedules.tuning.kernel_guesses import KernelGuesses
from schedules.tuning.kernel_tuner import MeasuringRunner, SearchSettings, Tuner, TuningResult, TuningTask
from schedules.tuning.trial_search import Ranker
from schedules.tuning.tuning_session import TuningProgress

# Trials of every kernel before sites are dropped, and the share of the time they may take.
SCREENING_TRIALS = 4
SCREENING_SHARE = 0.5
# A site whose best fused kernel is slower than this, relative to its kernels apart, is given up after screening.
HOPELESS = 1.4
# Of every kernel so many configurations are run in the network, if they are no slower than this relative to the best;
# and fusions that are no slower than this relative to their kernels apart.
REHEARSED_CONFIGS = 4
REHEARSED_RATIO = 1.15
# The fastest configuration of another way to share the work is run as well, up to so many times slower.
OTHER_SPLIT_RATIO = 1.5
REHEARSAL_SHARE = 0.2
# Of the time that is left for comparisons in the network, what trials of other ways to share the work may take.
SPLITS_SHARE = 0.3
# Less than this share of the time is not worth another round of trials and comparisons; of what turns out to be left
# at the end (``TuningBudget.spare``) no fewer seconds are.
WORTHWHILE_SHARE = 0.15
LEAST_SECONDS = 4.0
# A kernel that is found so much faster by itself after the last comparison in the network takes its new configuration.
FOUND_LATER = 0.9


@dataclass(frozen=True)
class TuningBudget:
    """``trials`` per kernel; ``seconds`` in all (``None``: until the trials are done).

    ``spare``: asked when these are over, with what is known by then, for how many more there are after all: what
    comes after tuning is known better than before.
    """

    trials: int
    seconds: float | None = None
    spare: Callable[[TunedKernels], float | None] | None = None


class NetworkRunner(MeasuringRunner, Rehearsing, Protocol):
    """Measures kernels by themselves and in networks."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """``elapsed_seconds`` after tuning began, ``trials`` measured: the best kernels by themselves then summed to
    ``network_seconds``.
    """

    elapsed_seconds: float
    trials: int
    network_seconds: float


@dataclass(frozen=True)
class TunedKernels:
    """Best configuration and seconds of every measured kernel, each by itself, and the network made of them.

    ``trials``: measured in this run; ``unsolved``: kernels of single nodes that failed in every configuration tried;
    ``rehearsed``: ``None`` if it was interrupted before, there was no time for it, or nothing could be run.
    ``careful``: the best configurations that round no more than a sum of products one by one; ``expected``: seconds of
    kernels that were not measured, where records or a ranking tell. ``curve``: how this run came to it.
    """

    configs: Mapping[Operator, Config]
    seconds: Mapping[Operator, float]
    rehearsed: Rehearsed | None
    unsolved: tuple[Operator, ...]
    trials: int
    failures: int
    interrupted: bool
    careful: Mapping[Operator, Config] = field(default_factory=dict)
    expected: Mapping[Operator, float] = field(default_factory=dict)
    curve: tuple[CurvePoint, ...] = ()

    def plan(self, graph: Graph, sites: Sequence[Site]) -> FusionPlan:
        """The fastest network known."""
        if self.rehearsed is not None:
            return self.rehearsed.plan
        return select(graph, sites, {**self.expected, **self.seconds})

    def unfused_configs(self) -> dict[Operator, Config]:
        """The configurations of the network without fusion."""
        return dict(self.configs if self.rehearsed is None else {**self.configs, **self.rehearsed.unfused_configs})

    def chosen_configs(self) -> dict[Operator, Config]:
        """The configurations of that network."""
        return {**self.configs, **(self.rehearsed.configs if self.rehearsed is not None else {})}

    def comparable_seconds(self) -> dict[Operator, float]:
        """Seconds in the network. A fused kernel that was not run there stands to its parts as it did by itself."""
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
    """The last comparison inside the network, and what kernels took by themselves when it was made."""

    rehearsed: Rehearsed
    seconds: Mapping[Operator, float]

    def with_later(self, tuned: TunedKernels) -> Rehearsed:
        """The same network, with the configurations of ``tuned`` where trials since then have found much faster ones.

        Little says how those do inside the network: a smaller gain by themselves is not taken for one.
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
    """Tunes the kernels of one graph. ``report`` receives the tuner's progress and the best network time so far."""

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
        """``predicted``: seconds of kernels before any is measured, where somebody knows."""
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
        """Screens, tunes, rehearses. Ctrl-C ends it early with what is known; the records are on disk at any time."""
        end = math.inf if budget.seconds is None else time.monotonic() + budget.seconds
        if budget.seconds == 0:  # what is known must do
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
        except KeyboardInterrupt:  # before its first trial, while it enumerates the spaces
            result = TuningResult({}, (), 0, 0, 0.0, interrupted=True)
        return replace(
            self.known(), trials=result.trials, failures=result.failures, interrupted=result.interrupted
        )  # fmt: skip

    def known(self, interrupted: bool = False) -> TunedKernels:
        """What the records say, and of kernels without one what is expected of them; nothing is measured.

        ``interrupted``: the job was stopped before it came to this network.
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
        """The layers' kernels, the longest first, then those of ``sites``, those first that are to save most."""
        layers: Counter[Operator] = Counter(node.operator for node in self._graph.nodes)
        fused: Counter[Operator] = Counter(site.operator for site in sites)
        saved: dict[Operator, float] = {site.operator: self._predicted_gain(site) for site in sites}
        ordered = sorted(layers, key=lambda each: -layers[each] * self._predicted.get(each, 0.0))
        ordered += sorted(fused, key=lambda each: -fused[each] * saved[each])
        return [TuningTask(operator, trials, (layers + fused)[operator]) for operator in ordered]

    def _predicted_gain(self, site: Site) -> float:
        """Seconds that it is predicted to save; zero where nobody knows."""
        apart = unfused_seconds(site, self._predicted)
        return 0.0 if apart is None else apart - self._predicted.get(site.operator, apart)

    def _promising(self, site: Site, limit: float = HOPELESS) -> bool:
        """Whether the fused kernel is at most ``limit`` times as slow as its kernels apart, or not known yet."""
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
        """The fastest few by themselves, and the fastest of every way to share the work among threads."""
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
        """One trial of every way to share the work that a kernel of the chosen network has not been measured in.

        For each trial whether it succeeded; the longest kernels come first. None beyond ``trials`` of a kernel, none
        after ``end``.
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
        """The most promising configuration of each untried way to share the work; none of an unmeasured kernel."""
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
    """Sum of the kernels of the best plan; ``None`` before every node's kernel has been measured once."""
    if any(node.operator not in seconds for node in graph.nodes):
        return None
    return plan_seconds(select(graph, sites, seconds), seconds)


def plan_seconds(plan: FusionPlan, seconds: Mapping[Operator, float]) -> float:
    """Sum of the kernels of ``plan``."""
    return sum(seconds[group.operator] for group in plan.groups)
