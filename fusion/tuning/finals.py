"""Final comparison of whole networks in alternating runs: the fastest is shipped.

Tuning selects fusions by kernel times inside rehearsals. The time of the compiled network also depends on the other
operators compiled by TVM, layout conversions and the memory plan. So the network with the selected fusions, the one
without any, and the one with only the clearly gaining ones are all built and timed in alternation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fusion.comparing.engine import ENGINES, REFERENCE, TUNED, UNFUSED_ENGINE, EngineWorkload, select_engines
from fusion.comparing.layer_table import LostLayers
from fusion.comparing.output_errors import OutputErrors, error_inputs, errors_json
from fusion.comparing.timing import (
    LEAST_ROUNDS,
    Crew,
    EngineTiming,
    NotMeasured,
    Sampling,
    TimedEngine,
    measure_engines,
    quantized_file,
)
from fusion.model.conv_graph import FusionPlan, cover, unfused_plan, unfused_seconds

if TYPE_CHECKING:
    from costmodel.base.errors import Say
    from costmodel.operators.layers import Operator
    from fusion.acceptance.output_check import Verdict
    from fusion.comparing.engine_worker import Worker
    from fusion.model.conv_graph import Graph, Site
    from fusion.relax.machine_code import MemoryPlan
    from fusion.tuning.network_tuning import TunedKernels
    from schedules.contract.template import Config

FUSED, PARTLY, UNFUSED_NETWORK = "fused", "partly fused", "unfused"
# Name of the network stored entirely in float32, among networks with layers in a shorter type.
FLOAT32_NETWORK = "float32"
# A fused kernel gains clearly if it takes less than this fraction of its separate kernels.
CLEAR_GAIN = 0.95
# Maximum number of comparisons of networks without a significant difference.
MOST_REPEATS = 3
# Engines that are timed in any case.
_OWN = (TUNED, UNFUSED_ENGINE, REFERENCE)
PLANNED_BYTES = ("activation_bytes", "weight_bytes", "scratch_bytes")


@dataclass(frozen=True, eq=False)
class FinalNetwork:
    """A network to build. ``configs``: of every kernel that has one."""

    name: str
    plan: FusionPlan
    configs: Mapping[Operator, Config]

    @property
    def fused_sites(self) -> int:
        """Number of groups with more than one layer."""
        return sum(group.is_fused for group in self.plan.groups)

    def same_as(self, other: FinalNetwork) -> bool:
        """True if both have the same kernels in the same configurations."""
        return self._kernels() == other._kernels()

    def _kernels(self) -> list[tuple[tuple[str, ...], dict[str, int]]]:
        return [
            (tuple(node.name for node in group.nodes), dict(self.configs.get(group.operator, {})))
            for group in self.plan.groups
        ]


@dataclass(frozen=True)
class Entry:
    """One network in the finals. ``ratio_to_unfused``: median over the rounds, below 1 if it is faster."""

    name: str
    fused_sites: int
    median_seconds: float
    ratio_to_unfused: float
    lower_quartile_ratio: float
    upper_quartile_ratio: float
    rounds: int


@dataclass(frozen=True)
class Finals:
    """All networks of the comparison, fastest first."""

    entries: tuple[Entry, ...]
    # True if the fastest wins significantly more rounds than each other network.
    differ_clearly: bool
    # Median seconds of engines that are no candidates.
    others: Mapping[str, float]

    @property
    def winner(self) -> str:
        """Name of the fastest network."""
        return self.entries[0].name

    def entry(self, name: str) -> Entry:
        """Entry of the network ``name``."""
        return next(entry for entry in self.entries if entry.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary for ``summary.json``."""
        return {
            "shipped": self.winner,
            "decided": self.differ_clearly,
            "networks": [asdict(entry) for entry in self.entries],
        }


def finalists(
    graph: Graph, sites: Sequence[Site], tuned: TunedKernels, with_partly: bool = True, with_unfused: bool = True
) -> tuple[FinalNetwork, ...]:
    """Distinct networks, the one without fusion first; only the best one without time for both (``with_unfused``)."""
    selected, chosen, apart = tuned.plan(graph, sites), tuned.chosen_configs(), tuned.unfused_configs()
    networks = [FinalNetwork(UNFUSED_NETWORK, unfused_plan(graph), apart), FinalNetwork(FUSED, selected, chosen)]
    if not with_unfused:
        return (networks[0] if networks[1].same_as(networks[0]) else networks[1],)
    if with_partly:
        seconds = tuned.comparable_seconds()
        clear = [site for site in sites if selected.fuses(site) and _gains_clearly(site, seconds)]
        kernels: dict[Operator, Config] = {site.operator: chosen[site.operator] for site in clear}
        networks.append(FinalNetwork(PARTLY, cover(graph, clear), {**apart, **kernels}))
    return tuple(network for index, network in enumerate(networks) if not any(map(network.same_as, networks[:index])))


def _gains_clearly(site: Site, seconds: Mapping[Operator, float]) -> bool:
    apart = unfused_seconds(site, seconds)
    return apart is not None and seconds.get(site.operator, float("inf")) < CLEAR_GAIN * apart


def race(
    networks: Mapping[str, tuple[int, TimedEngine]],
    others: Mapping[str, TimedEngine],
    end: float,
    sampling: Sampling | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Finals:
    """Time all engines in alternation, with fewer rounds near ``end`` (``time.monotonic``).

    Networks without a significant difference are timed again if there is time. ``networks``: name -> (fused sites,
    engine); ``unfused`` (or the only one) is the baseline in each round. The smallest median ratio wins even without a
    significant difference (``Finals.differ_clearly``); ties are resolved in favour of fewer fused sites. Raises
    ``EngineFailed``.
    """
    sampling = sampling or Sampling()
    engines = {name: engine for name, (_, engine) in networks.items()}
    baseline = UNFUSED_NETWORK if UNFUSED_NETWORK in networks else next(iter(networks))
    started = time.monotonic()
    first = measure_engines({**engines, **others}, baseline, sampling, end=end)
    round_seconds = (time.monotonic() - started) / len(first.timings[baseline].rounds)
    rounds = {name: list(timing.rounds) for name, timing in first.timings.items() if name in networks}
    repeats = 1
    while len(rounds) > 1 and not differ_clearly(rounds) and repeats < MOST_REPEATS:
        if time.monotonic() + LEAST_ROUNDS * round_seconds > end:
            break
        say("networks are close: comparing them again")
        again = measure_engines({name: engines[name] for name in rounds}, baseline, sampling, end=end)
        rounds = {name: rounds[name] + list(timing.rounds) for name, timing in again.timings.items()}
        repeats += 1
    entries = [_entry(name, networks[name][0], rounds, baseline) for name in rounds]
    entries.sort(key=lambda entry: (entry.ratio_to_unfused, entry.fused_sites))
    medians = {name: _median(first.timings, name) for name in others}
    return Finals(
        tuple(entries), differ_clearly(rounds), {name: each for name, each in medians.items() if each is not None}
    )


def differ_clearly(rounds: Mapping[str, Sequence[float]]) -> bool:
    """True if the fastest network beats each other one in more rounds than two standard deviations of a fair coin."""
    if len(rounds) == 1:
        return True
    fastest = min(rounds, key=lambda name: float(np.median(np.divide(rounds[name], rounds[UNFUSED_NETWORK]))))
    return all(_beats(rounds[fastest], rounds[name]) for name in rounds if name != fastest)


def _beats(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    count = len(ours)
    return int(np.sum(np.less(ours, theirs))) >= count / 2 + count**0.5


def _entry(name: str, fused_sites: int, rounds: Mapping[str, Sequence[float]], baseline: str) -> Entry:
    ratios = np.divide(rounds[name], rounds[baseline])
    return Entry(
        name=name,
        fused_sites=fused_sites,
        median_seconds=float(np.median(rounds[name])),
        ratio_to_unfused=float(np.median(ratios)),
        lower_quartile_ratio=float(np.quantile(ratios, 0.25)),
        upper_quartile_ratio=float(np.quantile(ratios, 0.75)),
        rounds=len(ratios),
    )


def _median(timings: Mapping[str, EngineTiming], name: str) -> float | None:
    return timings[name].median if name in timings else None


@dataclass(frozen=True)
class HiredPeers:
    """Engines that are loaded."""

    workers: Mapping[str, Worker] = field(default_factory=dict)
    # Execution mode of each engine, and the errors of its outputs.
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Engines that could not be loaded, with reasons.
    absent: Sequence[NotMeasured] = ()

    @property
    def notes(self) -> list[str]:
        """Reasons for requested engines without a time."""
        return [f"{entry.engine} {entry.status}: {entry.reason}" for entry in self.absent]

    def to_json(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        """Return a JSON-able dictionary for ``summary.json`` with the engines in ``seconds``."""
        return {name: {"median_seconds": seconds[name], **row} for name, row in self.rows.items() if name in seconds}


def peer_names(against: Sequence[str]) -> list[str]:
    """Names of the engines to load besides ours and ONNX Runtime. Raises ``InputError`` for an unknown one."""
    return [spec.name for spec in select_engines(against) if spec.name not in _OWN]


def check_peers(workload: EngineWorkload, against: Sequence[str], quantized: Path | None) -> None:
    """Raise ``ProjectError`` before tuning for an unknown engine, or a ``quantized`` file missing or of another
    model.
    """
    peer_names(against)
    if quantized is not None:
        quantized_file(workload.model, workload.inputs, workload.outputs, quantized, workload.cache)


def hire_peers(
    stack: ExitStack, workload: EngineWorkload, against: Sequence[str], quantized: Path | None, say: Say
) -> HiredPeers:
    """Load the engines ``against`` until ``stack`` ends, with ONNX Runtime as the reference of their errors.

    ``quantized``: as for ``compare``.
    """
    names = peer_names(against)
    if not names:
        return HiredPeers()

    def file_of_integers() -> Path:
        return quantized_file(workload.model, workload.inputs, workload.outputs, quantized, workload.cache)

    with ExitStack() as own:
        crew = Crew(own, workload, error_inputs(workload.inputs), say, file_of_integers)
        for name in (REFERENCE, *names):
            crew.hire(ENGINES[name])
        if REFERENCE in crew.hired:
            crew.hired[REFERENCE].worker.close()
        stack.enter_context(own.pop_all())
    rows = {
        name: {"mode": hired.mode, **errors_json(hired.errors)}
        for name, hired in crew.hired.items()
        if name != REFERENCE
    }
    absent = [entry for entry in crew.absent.values() if entry.engine != REFERENCE]
    return HiredPeers(crew.workers(names), rows, absent)


@dataclass(frozen=True, eq=False)
class TuneResult:
    """Result of a job: networks by name, their libraries, and the finals."""

    networks: Mapping[str, FinalNetwork]
    libraries: Mapping[str, Path]
    finals: Finals
    verdict: Verdict
    errors: OutputErrors  # of the winner, against ONNX Runtime on random inputs
    memory: Mapping[str, MemoryPlan | None]  # of each network
    growth: Mapping[str, int | None]  # memory growth of each engine's process at its first run in bytes, if known
    careful: bool = False  # built without fast algorithms whose rounding errors are too large for this model
    peers: HiredPeers = HiredPeers()  # other requested engines
    rounded_errors: OutputErrors | None = (
        None  # of the winner with layers in a shorter type, on the inputs used for errors
    )
    lost: LostLayers = LostLayers()  # layers in which another engine is faster than the winner
    unkept: Sequence[str] = ()  # outputs that lose NaNs of the input

    @property
    def shipped(self) -> FinalNetwork:
        """The network that was written."""
        return self.networks[self.finals.winner]

    @property
    def separate_name(self) -> str | None:
        """Name of the network without fusion (the winner if nothing is fused), or None if it was not built."""
        if not self.shipped.fused_sites:
            return self.finals.winner
        return UNFUSED_NETWORK if UNFUSED_NETWORK in self.networks else None

    def memory_rows(self) -> dict[str, dict[str, int | None]]:
        """Memory in bytes of the shipped network, the one without fusion and ONNX Runtime."""
        apart = UNFUSED_NETWORK if self.shipped.fused_sites else self.finals.winner
        rows: dict[str, dict[str, int | None]] = {}
        for row, name in (("tuned", self.finals.winner), ("tuned_without_fusion", apart), (REFERENCE, REFERENCE)):
            plan = self.memory.get(name)
            planned = dict.fromkeys(PLANNED_BYTES) if plan is None else asdict(plan)
            rows[row] = {**planned, "growth_bytes": self.growth.get(name)}
        return rows
