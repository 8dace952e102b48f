"""Record of a prediction for text, JSON and reports. Times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from e2e.explain.range_figures import RangeFigures
    from e2e.explain.what_if_row import WhatIfRow

from e2e.explain.alternatives import Advice
from e2e.explain.collective_figures import CollectiveFigures, Straggler
from e2e.explain.energy import StepCost, StepEnergy
from e2e.explain.path_parts import PathPart
from e2e.explain.rank_figures import RankFigures
from e2e.explain.step_facts import AskedValue, Board, Throughput
from e2e.explain.utilisation import Utilisation
from e2e.step.memory_room import Verdict


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
