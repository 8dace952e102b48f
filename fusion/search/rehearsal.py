"""Kernels measured inside the network: which configuration, and which fusion, is fastest where it will run.

A kernel that is timed by itself finds its input in the cache of the core that reads it. In the network the kernel
before has left it, perhaps in another core's cache, and the order of the best configurations changes; so does the gain
of a fusion. The network is run in variants that together contain every configuration and every fusion in question; all
take turns, each kernel is timed in each. What comes out best is then refined where it runs
(:func:`refine`).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from costmodel.base.errors import InputError, OutputError
from costmodel.base.plain_json import decoded
from costmodel.base.whole_file import write_whole
from costmodel.model.measurements import ConfigKey, config_key
from costmodel.operators.layers import Operator
from costmodel.operators.serialization import to_record
from fusion.model.candidates import Site
from fusion.model.conv_graph import Graph
from fusion.model.selection import FusionPlan, cover, select, unfused_plan
from fusion.model.timed_network import Variant
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config
from schedules.measuring.kernel_program import WARMUP_RUNS
from schedules.measuring.measure_messages import KernelCandidate, KernelProgram, MeasureOutcome
from schedules.records.tuning_records import environment

FILE = "rehearsals.jsonl"
# Networks take turns for about so long, in so many rounds: a machine with other users is slow for seconds at a time,
# and of each kernel the undisturbed round counts.
TURNS_SECONDS = 8.0
# Of the time that is left, at most: the networks that are refined, and the last few, take turns too.
TURNS_SHARE = 0.25
LEAST_ROUNDS, MOST_ROUNDS = 3, 20
# Of each network in a round; fewer of networks so slow that the least rounds would take longer than that.
RUNS, LEAST_RUNS = 12, 3

# Compared at the end of a rehearsal: the refined networks with and without fusion, and the one it began with.
_LAST_NETWORKS = 3
# Changes that are found good are made and tried together with others again, so often at most.
SWEEPS = 3
# A change must save this share of the kernels that it concerns; what is less may be chance.
LEAST_GAIN = 0.01

# Outcomes of networks that take turns, in their order; and whether there is time for that.
Measure = Callable[[Sequence[Variant]], Sequence[MeasureOutcome]]
Affordable = Callable[[Sequence[Variant]], bool]


class Rehearsing(Protocol):
    """What a rehearsal asks of :class:`schedules.measuring.measure_runner.Runner`."""

    def rehearse(
        self, programs: Sequence[KernelProgram], rounds: int = 5, runs: int = RUNS
    ) -> list[MeasureOutcome]: ...

    def compilation_seconds(self, candidates: Collection[KernelCandidate]) -> float: ...


@dataclass(frozen=True)
class Rehearsed:
    """The fastest network found: its ``plan`` and the configurations of all kernels.

    ``unfused_configs``: those of the network without fusion, refined with the same care. ``seconds``: of every kernel
    that was run in a network, in its best configuration there; ``total``: of the whole network, if it was run.
    ``interrupted``: with Ctrl-C, before it was refined.
    """

    plan: FusionPlan
    configs: Mapping[Operator, Config]
    unfused_configs: Mapping[Operator, Config]
    seconds: Mapping[Operator, float]
    interrupted: bool = False
    total: float | None = None


def rehearse(
    graph: Graph,
    sites: Sequence[Site],
    pool: Mapping[Operator, Sequence[Config]],
    first: Variant,
    store: RehearsalStore,
    runner: Rehearsing,
) -> Rehearsed | None:
    """The fastest network of the configurations in ``pool`` (best first) and the fusions in ``sites``.

    ``first``: the choice by kernels measured alone; it stays unless another is faster as a whole. ``None`` if no
    network could be run at all, or no time is left for it. Ctrl-C once all have been run ends it with the best of them.
    """
    tried = list(variants(graph, sites, pool))
    if not tried or not store.affordable(tried):  # the time may be over before any kernel has been measured
        return None
    times = kernel_times(tried, store.outcomes(tried, runner))
    best = {operator: min(known.items(), key=lambda item: item[1]) for operator, known in times.items()}
    seconds = {operator: time for operator, (_, time) in best.items()}
    if any(node.operator not in seconds for node in graph.nodes if node.operator in first.configs):
        return None
    configs = {**first.configs, **{operator: dict(key) for operator, (key, _) in best.items()}}
    usable = [site for site in sites if site.operator in seconds]
    chosen = [Variant(select(graph, usable, seconds), configs), Variant(unfused_plan(graph), configs)]
    try:
        fused, unfused = (
            refine(each, pool, lambda tried: store.outcomes(tried, runner), store.affordable) for each in chosen
        )
        finalists = [fused, unfused, first]
        totals = [outcome.seconds for outcome in store.outcomes(finalists, runner)]
    except KeyboardInterrupt:
        return Rehearsed(chosen[0].plan, configs, configs, seconds, interrupted=True)
    ran = [(total, index) for index, total in enumerate(totals) if total is not None]
    if not ran:
        return None
    total, index = min(ran)
    winner = finalists[index]
    return Rehearsed(winner.plan, winner.configs, unfused.configs, seconds, total=total)


def affordable_pool(
    graph: Graph,
    sites: Sequence[Site],
    pool: Mapping[Operator, Sequence[Config]],
    affordable: Callable[[Sequence[Variant]], bool],
) -> Mapping[Operator, Sequence[Config]]:
    """As many configurations of each kernel as there is time to run in a network, one at least.

    With one of each there are only a few networks: the layers apart, and sites that do not overlap fused together.
    """
    depth = max(map(len, pool.values()), default=0)
    while depth > 1 and not affordable(list(variants(graph, sites, pool))):
        depth -= 1
        pool = {operator: configs[:depth] for operator, configs in pool.items()}
    return pool


def variants(graph: Graph, sites: Sequence[Site], pool: Mapping[Operator, Sequence[Config]]) -> Iterator[Variant]:
    """Networks that together contain every kernel of ``pool``; best configurations come first."""
    wanted = {operator: list(configs) for operator, configs in pool.items()}
    usable = [site for site in sites if site.operator in pool]
    while any(wanted.values()):
        plan = cover(graph, _disjoint(usable, wanted))
        covered = [operator for operator in plan.operators if operator in pool]
        yield Variant(plan, {operator: (wanted[operator] or pool[operator])[0] for operator in covered})
        for operator in covered:
            wanted[operator] = wanted[operator][1:]


def kernel_times(
    tried: Sequence[Variant], outcomes: Sequence[MeasureOutcome]
) -> dict[Operator, dict[ConfigKey, float]]:
    """Seconds of each kernel by configuration: mean over its places in a network, median over the networks."""
    samples: dict[Operator, dict[ConfigKey, list[float]]] = {}
    for variant, outcome in zip(tried, outcomes, strict=True):
        if outcome.seconds is None:
            continue
        places: dict[Operator, list[float]] = {}
        for group, seconds in zip(variant.groups, outcome.step_seconds, strict=True):
            places.setdefault(group.operator, []).append(seconds)
        for operator, times in places.items():
            known = samples.setdefault(operator, {})
            known.setdefault(config_key(variant.configs[operator]), []).append(sum(times) / len(times))
    return {operator: {key: median(times) for key, times in known.items()} for operator, known in samples.items()}


def _disjoint(sites: Iterable[Site], wanted: Mapping[Operator, Sequence[Config]]) -> list[Site]:
    """Sites that do not overlap, those with most configurations left first. A site without any left is not taken, so
    that its layers get their turn apart.
    """
    taken: set[str] = set()
    chosen = []
    for site in sorted(sites, key=lambda each: -len(wanted[each.operator])):
        names = {node.name for node in site.nodes}
        if wanted[site.operator] and not names & taken:
            taken |= names
            chosen.append(site)
    return chosen


def rounds(turn_seconds: float, seconds: float = TURNS_SECONDS) -> int:
    """Rounds within ``seconds`` for networks that take ``turn_seconds`` together to run once."""
    wanted = seconds / (RUNS * turn_seconds) if turn_seconds else MOST_ROUNDS
    return int(min(max(wanted, LEAST_ROUNDS), MOST_ROUNDS))


def runs(turn_seconds: float, seconds: float = TURNS_SECONDS) -> int:
    """Runs of each network in a round, likewise."""
    wanted = seconds / (LEAST_ROUNDS * turn_seconds) if turn_seconds else RUNS
    return int(min(max(wanted, LEAST_RUNS), RUNS))


@dataclass(frozen=True)
class ConfigChange:
    """``operator`` in ``config`` saves ``seconds`` of the network, its readers included."""

    operator: Operator
    config: Config
    seconds: float


def refine(
    chosen: Variant,
    pool: Mapping[Operator, Sequence[Config]],
    measure: Measure,
    affordable: Affordable = lambda tried: True,
) -> Variant:
    """``chosen`` with other configurations of ``pool`` where they save time; itself if it is no slower as a whole.

    Nothing more is tried once a trial is not ``affordable``.
    """
    best = chosen
    for _ in range(SWEEPS):
        changes = improvements(best, pool, measure, affordable)
        if not changes:
            break
        configs = {**best.configs, **{change.operator: change.config for change in changes}}
        best = Variant(best.plan, configs)
    if best is chosen:
        return chosen
    before, after = (outcome.seconds for outcome in measure([chosen, best]))
    return best if after is not None and (before is None or after < before) else chosen


def improvements(
    chosen: Variant,
    pool: Mapping[Operator, Sequence[Config]],
    measure: Measure,
    affordable: Affordable = lambda tried: True,
) -> list[ConfigChange]:
    """Changes that save time and do not concern each other, the largest first."""
    neighbours = Neighbours(chosen.program())
    tried = list(trials(chosen, pool, neighbours))
    networks = [chosen, *(Variant(chosen.plan, {**chosen.configs, **changed}) for changed in tried)]
    if not tried or not affordable(networks):
        return []
    base, *others = measure(networks)
    if base.seconds is None:
        return []
    found: list[ConfigChange] = []
    for changed, outcome in zip(tried, others, strict=True):
        if outcome.seconds is None:
            continue
        for operator, config in changed.items():
            concerned = neighbours.concerned(operator)
            before = sum(base.step_seconds[index] for index in concerned)
            saved = before - sum(outcome.step_seconds[index] for index in concerned)
            if saved > LEAST_GAIN * before:
                found.append(ConfigChange(operator, config, saved))
    accepted: list[ConfigChange] = []
    for change in sorted(found, key=lambda each: -each.seconds):
        if not any(neighbours.interact(change.operator, other.operator) for other in accepted):
            accepted.append(change)
    return accepted


def trials(
    chosen: Variant, pool: Mapping[Operator, Sequence[Config]], neighbours: Neighbours
) -> Iterator[dict[Operator, Config]]:
    """Sets of changes that do not concern each other; together every other configuration of ``pool``."""
    left = {
        operator: [config for config in pool.get(operator, ()) if config_key(config) != config_key(own)]
        for operator, own in chosen.configs.items()
        if operator in neighbours
    }
    while any(left.values()):
        changed: dict[Operator, Config] = {}
        for operator in sorted(left, key=lambda each: -len(left[each])):
            if left[operator] and not any(neighbours.interact(operator, other) for other in changed):
                changed[operator] = left[operator].pop(0)
        yield changed


class Neighbours:
    """Which kernels of a program read what others write."""

    def __init__(self, program: KernelProgram) -> None:
        self._places: dict[Operator, set[int]] = {}
        readers: dict[int, set[int]] = {}
        for index, step in enumerate(program):
            self._places.setdefault(step.candidate[0], set()).add(index)
            for source in step.sources:
                if source is not None:
                    readers.setdefault(source, set()).add(index)
        self._concerned = {
            operator: places.union(*(readers.get(place, set()) for place in places))
            for operator, places in self._places.items()
        }

    def __contains__(self, operator: Operator) -> bool:
        return operator in self._places

    def concerned(self, operator: Operator) -> set[int]:
        """Steps whose time a change of ``operator`` may alter: its own and those that read its output."""
        return self._concerned[operator]

    def interact(self, one: Operator, other: Operator) -> bool:
        """Whether some step is concerned by a change of either. A kernel interacts with itself."""
        return not self._concerned[one].isdisjoint(self._concerned[other])


class RehearsalStore:
    """Outcomes in ``directory``, keyed by all networks that took turns, CPU and TVM version."""

    def __init__(
        self,
        directory: Path,
        cpu: CpuTarget,
        network_seconds: float = 0.0,
        end: float = math.inf,
        compilation: Callable[[Collection[KernelCandidate]], float] = lambda candidates: 0.0,
    ) -> None:
        """``network_seconds``: about what one run of the network takes, for the number of rounds; ``end``: of the time
        that may be spent, on the clock of ``time.monotonic``; ``compilation``: seconds to compile kernels beforehand.
        """
        self._path = directory / FILE
        self._network_seconds = network_seconds
        self._end = end
        self._compilation = compilation
        # Of the narrow dtypes: networks of float32 alone are rehearsed anew where only those changed.
        self._environment = environment(cpu, "bfloat16")
        # Seconds of the longest preparation so far, by network: weights are made, the worker is started.
        self._preparation = 0.0
        self._known = dict(_read(self._path))

    def outcomes(self, tried: Sequence[Variant], runner: Rehearsing) -> list[MeasureOutcome]:
        """Of every variant, in turns; known from an earlier run if it ran exactly these."""
        programs = [variant.program() for variant in tried]
        key = self._key(programs)
        if key not in self._known:
            turn_seconds = len(programs) * self._network_seconds
            seconds = self._turns_seconds
            expected = self._expected(len(programs), seconds) + self._compiling(programs)
            started = time.monotonic()
            outcomes = runner.rehearse(programs, rounds(turn_seconds, seconds), runs(turn_seconds, seconds))
            took = time.monotonic() - started
            self._preparation = max(self._preparation, (took - expected) / len(programs))
            if all(outcome.seconds is None for outcome in outcomes):
                return outcomes
            self._keep(key, outcomes)
        return self._known[key]

    def affordable(self, tried: Sequence[Variant]) -> bool:
        """Whether their outcomes are known, or there is time left to measure them, and the last few after them.

        A later run without any time left thus comes to the same network.
        """
        programs = [variant.program() for variant in tried]
        if self._key(programs) in self._known:
            return True
        seconds = self._turns_seconds
        last = self._expected(_LAST_NETWORKS, seconds) + _LAST_NETWORKS * self._preparation
        first = self._expected(len(tried), seconds) + len(tried) * self._preparation + self._compiling(programs)
        return time.monotonic() + first + last < self._end

    def _compiling(self, programs: Sequence[KernelProgram]) -> float:
        return self._compilation([step.candidate for program in programs for step in program])

    @property
    def _turns_seconds(self) -> float:
        """How long networks take turns: less where a longer time would not leave any for what comes after."""
        return min(TURNS_SECONDS, TURNS_SHARE * max(0.0, self._end - time.monotonic()))

    def _expected(self, networks: int, seconds: float) -> float:
        """Seconds in which so many networks take turns for about ``seconds``, warm-up included."""
        turn_seconds = networks * self._network_seconds
        each = runs(turn_seconds, seconds) + WARMUP_RUNS
        return rounds(turn_seconds, seconds) * each * turn_seconds

    def _key(self, programs: Sequence[KernelProgram]) -> str:
        content = [
            [[to_record(step.candidate[0]), dict(step.candidate[1]), *step.sources] for step in program]
            for program in programs
        ]
        text = json.dumps([content, self._environment], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _keep(self, key: str, outcomes: list[MeasureOutcome]) -> None:
        """Writes the file anew: it is small, and so it is whole at any time."""
        known = {**self._known, key: outcomes}
        lines = [json.dumps([each, [asdict(outcome) for outcome in kept]]) for each, kept in known.items()]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, "\n".join(lines) + "\n")
        except OSError as error:
            raise OutputError(
                f"{self._path}: cannot be written: {error.strerror}; choose another place, or free some"
            ) from error
        self._known = known


def _read(path: Path) -> list[tuple[str, list[MeasureOutcome]]]:
    """All results; a damaged line is measured again."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); remove it, it is measured again") from error
    return [entry for line in lines if (entry := _parse(line)) is not None]


def _parse(line: str) -> tuple[str, list[MeasureOutcome]] | None:
    try:
        key, outcomes = decoded(line)
        return str(key), [MeasureOutcome(**{**each, "step_seconds": tuple(each["step_seconds"])}) for each in outcomes]
    except (ValueError, TypeError, KeyError):
        return None
