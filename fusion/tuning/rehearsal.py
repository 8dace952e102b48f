"""Measurement of kernels inside the network, to select the configurations and fusions that are fastest there.

A kernel timed alone finds its input in the cache of the core that reads it. In the network the input comes from the
previous kernel, possibly in another core's cache, which changes the order of the best configurations and the gain of
a fusion. The network is run in variants that together contain every configuration and fusion in question; variants
alternate, and every kernel is timed in each. The best result is refined inside the network (:func:`refine`).
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
from typing import Any, Protocol

from costmodel.base.errors import InputError, OutputError
from costmodel.base.input_files import decoded
from costmodel.base.output_files import write_whole
from costmodel.cost_model import ConfigKey, config_key
from costmodel.operators.any_operator import to_record
from costmodel.operators.layers import Operator
from fusion.model.conv_graph import FusionPlan, Graph, Group, Site, cover, select, unfused_plan
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config
from schedules.measuring.kernel_program import WARMUP_RUNS
from schedules.measuring.timing_protocol import KernelCandidate, KernelProgram, KernelStep, MeasureOutcome
from schedules.tuning.tuning_records import environment


@dataclass(frozen=True, eq=False)
class Variant:
    """A network: its kernels and their configurations. Kernels without a configuration are omitted when it runs."""

    plan: FusionPlan
    configs: Mapping[Operator, Config]

    @property
    def groups(self) -> list[Group]:
        """Groups of the plan that have a configuration, in its order."""
        return [group for group in self.plan.groups if group.operator in self.configs]

    def program(self) -> KernelProgram:
        """Kernels in order, each with the indices of the kernels whose outputs it reads."""
        producer: dict[Any, int] = {}
        steps = []
        for index, group in enumerate(self.groups):
            first, last = group.nodes[0], group.nodes[-1]
            residual = None if last.residual is None else producer.get(last.residual)
            gate = None if first.gate is None else producer.get(first.gate)
            candidate = (group.operator, dict(self.configs[group.operator]))
            steps.append(KernelStep(candidate, producer.get(first.data), residual, gate))
            producer[last.output] = index
        return tuple(steps)


FILE = "rehearsals.jsonl"
# Duration of alternating runs, divided into rounds: a shared machine is slow for seconds at a time, and the fastest
# round of each kernel counts.
TURNS_SECONDS = 8.0
# Maximum share of the remaining time: refined and final networks are timed too.
TURNS_SHARE = 0.25
LEAST_ROUNDS, MOST_ROUNDS = 3, 20
# Runs of each network per round; fewer for slow networks, so that the minimum number of rounds fits.
RUNS, LEAST_RUNS = 12, 3

# Number of networks compared at the end: the refined ones with and without fusion, and the initial one.
_LAST_NETWORKS = 3
# Maximum number of times that accepted changes are applied and further ones tried.
SWEEPS = 3
# Minimum relative saving of a change over the affected kernels; smaller ones may be noise.
LEAST_GAIN = 0.01

# Outcomes of networks in alternating runs, in order; and whether there is time for them.
Measure = Callable[[Sequence[Variant]], Sequence[MeasureOutcome]]
Affordable = Callable[[Sequence[Variant]], bool]


class Rehearsing(Protocol):
    """Interface of :class:`schedules.measuring.measure_runner.Runner` used by a rehearsal."""

    def rehearse(
        self, programs: Sequence[KernelProgram], rounds: int = 5, runs: int = RUNS
    ) -> list[MeasureOutcome]: ...

    def compilation_seconds(self, candidates: Collection[KernelCandidate]) -> float: ...


@dataclass(frozen=True)
class Rehearsed:
    """The fastest network found: its ``plan`` and the configurations of all kernels."""

    plan: FusionPlan
    configs: Mapping[Operator, Config]
    # Configurations of the network without fusion, refined likewise.
    unfused_configs: Mapping[Operator, Config]
    # Time of every kernel run in a network, in its best configuration there.
    seconds: Mapping[Operator, float]
    # Interrupted with Ctrl-C before it was refined.
    interrupted: bool = False
    # Time of the whole network, None if it was not run.
    total: float | None = None


def rehearse(
    graph: Graph,
    sites: Sequence[Site],
    pool: Mapping[Operator, Sequence[Config]],
    first: Variant,
    store: RehearsalStore,
    runner: Rehearsing,
) -> Rehearsed | None:
    """Find the fastest network of the configurations in ``pool`` (best first) and the fusions in ``sites``.

    ``first``: the choice by kernels measured alone; it is kept unless another network is faster. None if no network
    could be run, or if there is no time for it. Ctrl-C after all variants have run returns the best result so far.
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
    """Reduce the configurations of each kernel to the number that fits into the time, at least one.

    With one each, only a few networks remain: separate layers, and non-overlapping sites fused together.
    """
    depth = max(map(len, pool.values()), default=0)
    while depth > 1 and not affordable(list(variants(graph, sites, pool))):
        depth -= 1
        pool = {operator: configs[:depth] for operator, configs in pool.items()}
    return pool


def variants(graph: Graph, sites: Sequence[Site], pool: Mapping[Operator, Sequence[Config]]) -> Iterator[Variant]:
    """Yield networks that together contain every kernel of ``pool``, best configurations first."""
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
    """Non-overlapping sites, those with most remaining configurations first.

    Sites without remaining configurations are excluded, so that their layers run as separate kernels.
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
    """Number of rounds within ``seconds`` if one run of all networks takes ``turn_seconds``."""
    wanted = seconds / (RUNS * turn_seconds) if turn_seconds else MOST_ROUNDS
    return int(min(max(wanted, LEAST_ROUNDS), MOST_ROUNDS))


def runs(turn_seconds: float, seconds: float = TURNS_SECONDS) -> int:
    """Number of runs of each network per round within ``seconds``."""
    wanted = seconds / (LEAST_ROUNDS * turn_seconds) if turn_seconds else RUNS
    return int(min(max(wanted, LEAST_RUNS), RUNS))


@dataclass(frozen=True)
class ConfigChange:
    """Setting ``operator`` to ``config`` saves ``seconds`` of the network, including its readers."""

    operator: Operator
    config: Config
    seconds: float


def refine(
    chosen: Variant,
    pool: Mapping[Operator, Sequence[Config]],
    measure: Measure,
    affordable: Affordable = lambda tried: True,
) -> Variant:
    """``chosen`` with other configurations of ``pool`` that save time; ``chosen`` itself if it is not slower.

    Stops once a trial is not ``affordable``.
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
    """Independent changes that save time, largest saving first."""
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
    """Sets of independent changes that together contain every other configuration of ``pool``."""
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
    """Data dependencies between the kernels of a program."""

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
        """Steps whose time depends on ``operator``: its own and those that read its output."""
        return self._concerned[operator]

    def interact(self, one: Operator, other: Operator) -> bool:
        """True if a step depends on both kernels. A kernel interacts with itself."""
        return not self._concerned[one].isdisjoint(self._concerned[other])


class RehearsalStore:
    """Outcomes in ``directory``, keyed by the networks of a measurement, CPU and TVM version."""

    def __init__(
        self,
        directory: Path,
        cpu: CpuTarget,
        network_seconds: float = 0.0,
        end: float = math.inf,
        compilation: Callable[[Collection[KernelCandidate]], float] = lambda candidates: 0.0,
    ) -> None:
        """Open the store.

        - ``network_seconds``: approximate time of one run of the network, for the number of rounds
        - ``end``: time limit (``time.monotonic``)
        - ``compilation``: estimates the seconds of compiling kernels beforehand
        """
        self._path = directory / FILE
        self._network_seconds = network_seconds
        self._end = end
        self._compilation = compilation
        # Includes the shorter types: float32 networks are measured again if only those changed.
        self._environment = environment(cpu, "bfloat16")
        # Longest preparation per network so far in seconds: creating weights, starting the worker.
        self._preparation = 0.0
        self._known = dict(_read(self._path))

    def outcomes(self, tried: Sequence[Variant], runner: Rehearsing) -> list[MeasureOutcome]:
        """Outcomes of all variants in alternating runs, or the stored ones of the same measurement."""
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
        """True if the outcomes are stored, or if there is time to measure them and the final networks.

        A later run without any time left thus produces the same network.
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
        """Duration of alternating runs in seconds, limited to a share of the remaining time."""
        return min(TURNS_SECONDS, TURNS_SHARE * max(0.0, self._end - time.monotonic()))

    def _expected(self, networks: int, seconds: float) -> float:
        """Expected seconds for ``networks`` networks in alternation with a limit of ``seconds``, including warm-up."""
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
        """Store outcomes. The file is small and rewritten as a whole, so that it is always complete."""
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
    """Read all results; damaged lines are skipped and measured again."""
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
