"""Which kernels of a model are tuned, in which order, and what is known of them afterwards.

First every kernel gets a few trials, which tells the sites that cannot win; the rest of the budget goes to the
others. At last the two arms of every site that is left take turns (:mod:`fusion.duels`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from costmodel.operators import FusedConvs, Operator
from fusion.candidates import Site
from fusion.duels import Duel, DuelStore
from fusion.graph import Graph
from fusion.selection import Plan, select, unfused_seconds
from schedules.database import RecordStore
from schedules.search import Ranker
from schedules.target import CpuTarget
from schedules.template import Config
from schedules.tuner import MeasuringRunner, Progress, SearchSettings, Task, Tuner

# Trials of every kernel before sites are dropped, and the share of the time they may take.
SCREENING_TRIALS = 4
SCREENING_SHARE = 0.5
# A site whose best fused kernel is slower than this, relative to its kernels apart, is given up after screening.
HOPELESS = 1.4
DUEL_SECONDS = 1.0


@dataclass(frozen=True)
class Budget:
    """``trials`` per kernel; ``seconds`` in all (``None``: until the trials are done)."""

    trials: int
    seconds: float | None = None


@dataclass(frozen=True)
class TunedKernels:
    """Best configuration and seconds of every measured kernel, and the duels of the sites.

    ``trials``: measured in this run; ``unsolved``: kernels of single nodes that failed in every configuration tried.
    """

    configs: Mapping[Operator, Config]
    seconds: Mapping[Operator, float]
    duels: Mapping[FusedConvs, Duel]
    unsolved: tuple[Operator, ...]
    trials: int
    failures: int
    interrupted: bool

    def comparable_seconds(self) -> dict[Operator, float]:
        """Seconds in which a fused kernel stands to its parts as it did in their duel."""
        seconds = dict(self.seconds)
        for operator, duel in self.duels.items():
            if all(conv in self.seconds for conv in operator.convs):
                apart = sum(self.seconds[conv] for conv in operator.convs)
                seconds[operator] = apart * duel.fused_seconds / duel.unfused_seconds
        return seconds


class KernelTuner:
    """Tunes the kernels of one graph. ``report`` receives the tuner's progress and the best network time so far."""

    def __init__(
        self,
        graph: Graph,
        sites: Sequence[Site],
        store: RecordStore,
        cpu: CpuTarget,
        cost_model: Ranker,
        runner: MeasuringRunner,
        report: Callable[[Progress, float | None], None],
    ) -> None:
        self._graph = graph
        self._sites = sites
        self._store = store
        self._cpu = cpu
        self._cost_model = cost_model
        self._runner = runner
        self._report = report

    def tune(self, budget: Budget) -> TunedKernels:
        """Screens, tunes, duels. Ctrl-C ends it early with what is known; the records are on disk at any time."""
        end = None if budget.seconds is None else time.monotonic() + budget.seconds
        screening = Budget(
            min(budget.trials, SCREENING_TRIALS), None if budget.seconds is None else SCREENING_SHARE * budget.seconds
        )
        screened = self._tune(self._sites, screening, SearchSettings(finalists=1))
        if screened.interrupted:
            return screened
        sites = [site for site in self._sites if self._promising(site)]
        duelling = DUEL_SECONDS * len({site.operator for site in sites})
        seconds = None if end is None else max(0.0, end - time.monotonic() - duelling)
        tuned = self._tune(sites, Budget(budget.trials, seconds), SearchSettings())
        tuned = replace(
            tuned, trials=screened.trials + tuned.trials, failures=screened.failures + tuned.failures
        )
        return tuned if tuned.interrupted else self._with_duels(tuned, sites)

    def _tune(self, sites: Sequence[Site], budget: Budget, settings: SearchSettings) -> TunedKernels:
        tuner = Tuner(
            self._store, self._cpu, self._cost_model, self._runner, self._progress, settings=settings
        )
        result = tuner.tune(self._tasks(sites, budget.trials), seconds=budget.seconds)
        alone = {node.operator for node in self._graph.nodes}
        return TunedKernels(
            configs=self._configs(),
            seconds=self._seconds(),
            duels={},
            unsolved=tuple(each for each in result.unsolved if each in alone and self._store.failures(each)),
            trials=result.trials,
            failures=result.failures,
            interrupted=result.interrupted,
        )

    def _tasks(self, sites: Sequence[Site], trials: int) -> list[Task]:
        operators = [node.operator for node in self._graph.nodes] + [site.operator for site in sites]
        return [Task(operator, trials, occurrences) for operator, occurrences in Counter(operators).items()]

    def _promising(self, site: Site) -> bool:
        """Whether more trials may still let the fused kernel win."""
        seconds = self._seconds()
        fused, unfused = seconds.get(site.operator), unfused_seconds(site, seconds)
        return fused is None or unfused is None or fused <= HOPELESS * unfused

    def _with_duels(self, tuned: TunedKernels, sites: Sequence[Site]) -> TunedKernels:
        store = DuelStore(self._store.directory, self._cpu)
        duels: dict[FusedConvs, Duel] = {}
        try:
            for fused in dict.fromkeys(site.operator for site in sites):
                if not all(operator in tuned.configs for operator in (fused, *fused.convs)):
                    continue
                apart = [(conv, tuned.configs[conv]) for conv in fused.convs]
                expected = Duel(tuned.seconds[fused], sum(tuned.seconds[conv] for conv in fused.convs))
                duel = store.duel((fused, tuned.configs[fused]), apart, self._runner, expected)
                if duel is not None:
                    duels[fused] = duel
        except KeyboardInterrupt:
            return replace(tuned, duels=duels, interrupted=True)
        return replace(tuned, duels=duels)

    def _seconds(self) -> dict[Operator, float]:
        records = {operator: self._store.best(operator) for operator in self._operators()}
        return {operator: record.seconds for operator, record in records.items() if record is not None}

    def _configs(self) -> dict[Operator, Config]:
        records = {operator: self._store.best(operator) for operator in self._operators()}
        return {operator: record.config for operator, record in records.items() if record is not None}

    def _operators(self) -> list[Operator]:
        return [*(node.operator for node in self._graph.nodes), *(site.operator for site in self._sites)]

    def _progress(self, state: Progress) -> None:
        self._report(state, network_seconds(self._graph, self._sites, self._seconds()))


def network_seconds(graph: Graph, sites: Sequence[Site], seconds: Mapping[Operator, float]) -> float | None:
    """Sum of the kernels of the best plan; ``None`` before every node's kernel has been measured once."""
    if any(node.operator not in seconds for node in graph.nodes):
        return None
    return plan_seconds(select(graph, sites, seconds), seconds)


def plan_seconds(plan: Plan, seconds: Mapping[Operator, float]) -> float:
    """Sum of the kernels of ``plan``."""
    return sum(seconds[group.operator] for group in plan.groups)

