"""The answer of a prediction: one record for people, JSON and reports. Times in seconds, sizes in bytes."""

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
    """A share of the critical path: all segments of one ``kind`` and ``name``. ``waits_for``: what most waited for."""

    kind: str
    name: str
    seconds: float
    count: int
    waits_for: str


@dataclass(frozen=True)
class RankFigures:
    """One rank of the graph, which stands for ``multiplicity`` alike ones, within one step.

    ``step_seconds``: from its end of the step before to its end of this one. ``compute_seconds``: some kernel runs;
    ``communication_seconds``: some collective is on a stream, waiting included; ``exposed_transfer_seconds``: a
    transfer is under way and no kernel runs. While neither does, the rank is held up by others in a collective
    (``exposed_wait_seconds``) or by its neighbours in a pipeline (``bubble_seconds``), or else ``idle_seconds``: its
    own host has nothing ready. ``attribution``: the rank's own critical path by kind
    (:mod:`e2e.explain.rank_attribution`), waits included; sums to the window of the step. ``path_seconds``: of the
    critical path across ranks what is on this one; 0 of a rank that the step never waits for. ``kernels`` and
    ``operators``: launches and operator calls of one step. ``peak_memory_bytes``: with the ``reserve`` of the caching
    allocator, where that is simulated; ``memory_breakdown`` sums to it.
    """

    rank: int
    multiplicity: int
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_transfer_seconds: float
    exposed_wait_seconds: float
    bubble_seconds: float
    idle_seconds: float
    attribution: Mapping[str, float]
    path_seconds: float = 0.0
    kernels: int = 0
    operators: int = 0
    peak_memory_bytes: int | None = None
    memory_breakdown: Mapping[str, int] | None = None
    fits: bool | None = None

    @property
    def allocated_bytes(self) -> int | None:
        """Of the peak what is in use: without the allocator's reserve."""
        if self.peak_memory_bytes is None:
            return None
        return self.peak_memory_bytes - (self.memory_breakdown or {}).get("reserve", 0)


@dataclass(frozen=True)
class CollectiveFigures:
    """One collective of the step. ``ranks``: how many take part; ``size_bytes``: the most that one puts in.

    ``transfer_seconds``: from the moment all are there to the end, of which ``sharing_seconds`` because others used the
    same links. ``waiting_seconds``: rank of the graph -> how long it had waited then; ``last_rank`` came last.
    ``start_seconds`` and ``end_seconds`` of the transfer count from the start of the step.
    """

    name: str
    kind: str
    group: str
    sequence: int
    ranks: int
    size_bytes: int
    transfer_seconds: float
    sharing_seconds: float
    waiting_seconds: Mapping[int, float]
    last_rank: int
    start_seconds: float
    end_seconds: float
    source: str

    @property
    def skew_seconds(self) -> float:
        """Between the first and the last arrival."""
        return max(self.waiting_seconds.values(), default=0.0)


@dataclass(frozen=True)
class Straggler:
    """``rank`` came last in ``collectives`` of the step and kept the second last waiting for ``caused_seconds``."""

    rank: int
    collectives: int
    caused_seconds: float


@dataclass(frozen=True)
class Prediction:
    """One steady step of ``gpus`` GPUs on ``nodes`` nodes, by the distinct ranks among them; one GPU is one rank."""

    # What is predicted, and on what.
    workload: str
    machine: str
    cluster: str
    gpus: int
    nodes: int

    # Time of a step, and where it lies with the confidence of the models' intervals (80 %; e2e/explain/intervals.py).
    iteration_seconds: float
    interval_seconds: tuple[float, float]

    # Of the rank that computes longest; the phases (e2e/explain/phase_times.py) sum to the critical path.
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
    # Of the card, and what of that is there for tensors (e2e/step/memory_room.py); whether it suffices.
    memory_capacity_bytes: int
    memory_room_bytes: int
    memory_verdict: Verdict
    # None: it may not fit, or memory is not known of all ranks.
    fits: bool | None
    # What does not fit where, if it does not.
    memory_shortage: str | None

    # Share of the device time of all ranks by source of its price.
    coverage: Mapping[str, float]
    # Launches and operator calls of the distinct ranks, each counted once however many it stands for.
    kernels: int
    operators: int

    warnings: Sequence[str]
    # What the step is; what of it was recorded and what is predicted.
    notes: Sequence[str] = ()
    asked: Sequence[AskedValue] = ()

    # Beside the times.
    board: Board | None = None
    throughput: Throughput | None = None
    utilisation: Utilisation | None = None
    energy: StepEnergy | None = None
    cost: StepCost | None = None

    # What was asked besides: other settings; the step as it is and with what each question changes.
    advice: Advice | None = None
    what_if: Sequence[WhatIfRow] = ()
    # Parts that a script named, on the rank that computes longest, and on the critical path of that rank.
    ranges: Sequence[RangeFigures] = ()
    # The host launches all `kernels` of a rank at once.
    cuda_graph: bool = False

    @property
    def longest_computing(self) -> RankFigures:
        """The figures of the rank whose GPU computes longest."""
        return max(self.ranks, key=lambda rank: rank.compute_seconds)

    def to_json(self) -> dict[str, Any]:
        """The JSON document."""
        record = asdict(self)
        record["interval_seconds"] = list(self.interval_seconds)
        for row, figures in zip(record["collectives"], self.collectives, strict=True):
            row["skew_seconds"] = figures.skew_seconds
        for row, answer in zip(record["what_if"], self.what_if, strict=True):
            row["gain_per_sample_interval"] = answer.gain_per_sample_interval
        if self.advice is not None:
            record["advice"]["best"] = [each.change for each in self.advice.best]
        return record
