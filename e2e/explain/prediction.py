"""Record of a prediction for text, JSON and reports. Times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from e2e.explain.range_figures import RangeFigures
    from e2e.explain.what_if_row import WhatIfRow

from e2e.explain.alternatives import Advice
from e2e.explain.energy import StepCost, StepEnergy
from e2e.explain.step_facts import AskedValue, Board, Throughput
from e2e.explain.utilisation import Utilisation
from e2e.step.memory_room import Verdict


@dataclass(frozen=True)
class PathPart:
    """Part of the critical path: all segments of one ``kind`` and ``name``."""

    kind: str
    name: str
    seconds: float
    count: int
    # What the segments mostly waited for.
    waits_for: str


@dataclass(frozen=True)
class RankFigures:
    """Figures of one rank of the graph within one step."""

    rank: int
    # Number of identical ranks that it represents.
    multiplicity: int
    # Time from its end of the previous step to its end of this one.
    step_seconds: float
    # Time in which some kernel runs.
    compute_seconds: float
    # Time in which some collective is on a stream, waiting included.
    communication_seconds: float
    # Time in which a transfer is under way and no kernel runs.
    exposed_transfer_seconds: float
    # Time without kernels and transfers, held up by other ranks in a collective.
    exposed_wait_seconds: float
    # Time without kernels and transfers, held up by its neighbours in a pipeline.
    bubble_seconds: float
    # Time without kernels and transfers, held up by its own host, which has nothing ready.
    idle_seconds: float
    # The rank's own critical path by kind, waits included (e2e/explain/rank_attribution.py); sums to the step's window.
    attribution: Mapping[str, float]
    # Part of the critical path across ranks on this rank; 0 if the step never waits for it.
    path_seconds: float = 0.0
    # Launches and operator calls of one step.
    kernels: int = 0
    operators: int = 0
    # Peak with the `reserve` of the caching allocator, where that is simulated; `memory_breakdown` sums to it.
    peak_memory_bytes: int | None = None
    memory_breakdown: Mapping[str, int] | None = None
    fits: bool | None = None

    @property
    def allocated_bytes(self) -> int | None:
        """Bytes in use at the peak, without the allocator's reserve."""
        if self.peak_memory_bytes is None:
            return None
        return self.peak_memory_bytes - (self.memory_breakdown or {}).get("reserve", 0)


@dataclass(frozen=True)
class CollectiveFigures:
    """Figures of one collective of the step."""

    name: str
    kind: str
    group: str
    sequence: int
    # Number of ranks that take part.
    ranks: int
    # The largest contribution of a rank.
    size_bytes: int
    # Time from the last arrival to the end, of which `sharing_seconds` are due to other users of the same links.
    transfer_seconds: float
    sharing_seconds: float
    # Rank of the graph -> time from its arrival to the last one.
    waiting_seconds: Mapping[int, float]
    last_rank: int
    # Begin and end of the transfer, from the start of the step.
    start_seconds: float
    end_seconds: float
    source: str

    @property
    def skew_seconds(self) -> float:
        """Seconds between the first and the last arrival."""
        return max(self.waiting_seconds.values(), default=0.0)


@dataclass(frozen=True)
class Straggler:
    """Rank that came last in ``collectives`` of the step and delayed the second last by ``caused_seconds``."""

    rank: int
    collectives: int
    caused_seconds: float


@dataclass(frozen=True)
class Prediction:
    """One steady step of ``gpus`` GPUs on ``nodes`` nodes, by the distinct ranks among them; one GPU is one rank."""

    # Workload and hardware.
    workload: str
    machine: str
    cluster: str
    gpus: int
    nodes: int

    # Time of a step, and its 80 % interval (e2e/explain/intervals.py).
    iteration_seconds: float
    interval_seconds: tuple[float, float]

    # Rank that computes longest; its phases (e2e/explain/phase_times.py) sum to the critical path.
    critical_path_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    other_seconds: float
    gpu_active_seconds: float
    gpu_idle_seconds: float
    # Share of the critical path.
    host_bound_fraction: float
    # Device time `by_operator`, `by_bound` and `by_kind`; host time by kind, T1 to T5.
    breakdown: Mapping[str, Mapping[str, float]]
    overheads: Mapping[str, float]

    # The step across ranks; both sum to `critical_path_seconds`.
    attribution: Mapping[str, float]
    critical_path: Sequence[PathPart]

    ranks: Sequence[RankFigures]
    collectives: Sequence[CollectiveFigures]
    stragglers: Sequence[Straggler]

    # Memory of the fullest rank.
    peak_memory_bytes: int | None
    memory_breakdown: Mapping[str, int]
    # Capacity of the card and the part of it usable for tensors (e2e/step/memory_room.py); whether it suffices.
    memory_capacity_bytes: int
    memory_room_bytes: int
    memory_verdict: Verdict
    # None: it may not fit, or the memory of some rank is unknown.
    fits: bool | None
    # Description of the shortage, if it does not fit.
    memory_shortage: str | None

    # Share of the device time of all ranks by source of its price.
    coverage: Mapping[str, float]
    # Launches and operator calls of the distinct ranks, each counted once.
    kernels: int
    operators: int

    warnings: Sequence[str]
    # Remarks about the step: which parts were recorded and which are predicted.
    notes: Sequence[str] = ()
    asked: Sequence[AskedValue] = ()

    # Facts besides the times.
    board: Board | None = None
    throughput: Throughput | None = None
    utilisation: Utilisation | None = None
    energy: StepEnergy | None = None
    cost: StepCost | None = None

    # Optional answers: other settings; the step as it is and with the change of each what-if question.
    advice: Advice | None = None
    what_if: Sequence[WhatIfRow] = ()
    # Ranges named by the script, on the rank that computes longest and on its critical path.
    ranges: Sequence[RangeFigures] = ()
    # True if the host launches all `kernels` of a rank as one CUDA graph.
    cuda_graph: bool = False

    @property
    def longest_computing(self) -> RankFigures:
        """Return the figures of the rank whose GPU computes longest."""
        return max(self.ranks, key=lambda rank: rank.compute_seconds)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        record = asdict(self)
        record["interval_seconds"] = list(self.interval_seconds)
        for row, figures in zip(record["collectives"], self.collectives, strict=True):
            row["skew_seconds"] = figures.skew_seconds
        for row, answer in zip(record["what_if"], self.what_if, strict=True):
            row["gain_per_sample_interval"] = answer.gain_per_sample_interval
        if self.advice is not None:
            record["advice"]["best"] = [each.change for each in self.advice.best]
        return record
