"""Record of a prediction for text, JSON and reports, with answers to what-if questions and advice.

Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Any

from costmodel.machines.machine_records import Machine
from e2e.explain.critical_path import HOST_KINDS, PathPart
from e2e.explain.rank_figures import CollectiveFigures, RankFigures, Straggler
from e2e.explain.utilisation import StepCost, StepEnergy, Utilisation
from e2e.step.memory_room import Verdict

if TYPE_CHECKING:
    from e2e.explain.breakdowns import RangeFigures


@dataclass(frozen=True)
class AskedValue:
    """Value of an option that matters for the step."""

    option: str
    value: str
    # True if the user gave it; otherwise it is the default.
    given: bool


@dataclass(frozen=True)
class Board:
    """GPU board: variant, memory and power limit."""

    name: str
    description: str
    memory_bytes: int
    power_limit_watts: float
    multiprocessors: int


@dataclass(frozen=True)
class Throughput:
    """Throughput of a step."""

    # Samples on all GPUs together.
    samples: int
    # Tokens of a sample; `None`: samples are not sequences.
    sequence_length: int | None
    samples_per_second: float
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    # Sizes whose product `samples` is, in words; may be empty.
    made_of: str = ""
    # Samples of one pass on one GPU, for scripts.
    batch_size: int | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens of one step on all GPUs together, ``None`` if samples are not sequences."""
        return None if self.sequence_length is None else self.samples * self.sequence_length


@dataclass(frozen=True)
class RareWork:
    """What a program trains with after every so many steps, such as a penalty."""

    every: int
    iteration_seconds: float
    # 80 % interval.
    interval_seconds: tuple[float, float]
    # True if it comes in place of a step, with the work of every step; otherwise besides it.
    whole: bool


@dataclass(frozen=True)
class MeanStep:
    """Mean of a step and of the rare work of a program."""

    iteration_seconds: float
    interval_seconds: tuple[float, float]
    # Steps after which the program works as before.
    every: int


def mean_step(seconds: float, interval: tuple[float, float], rare: Sequence[RareWork]) -> MeanStep | None:
    """Return the mean of a step of ``seconds`` and the ``rare`` work besides it, None without any."""
    if not rare:
        return None

    def mean(usual: float, times: Iterable[float]) -> float:
        return usual + sum((time - each.whole * usual) / each.every for each, time in zip(rare, times, strict=True))

    low, high = (mean(bound, (each.interval_seconds[side] for each in rare)) for side, bound in enumerate(interval))
    whole = mean(seconds, (each.iteration_seconds for each in rare))
    return MeanStep(whole, (low, high), lcm(*(each.every for each in rare)))


def board_of(machine: Machine) -> Board | None:
    """Return the board of ``machine``, ``None`` if it is no GPU."""
    chip = machine.gpu
    if chip is None:
        return None
    capacity = int(machine.memory[-1].capacity_bytes)
    return Board(machine.name, machine.description, capacity, chip.power_watts, chip.sm_count)


def throughput_of(
    samples: int, sequence_length: int | None, seconds: float, gpus: int, made_of: str = ""
) -> Throughput:
    """Return the throughput of a step of ``seconds`` on ``gpus`` GPUs."""
    tokens = None if sequence_length is None else samples * sequence_length / seconds
    each = None if tokens is None else tokens / gpus
    return Throughput(samples, sequence_length, samples / seconds, tokens, each, made_of)


# Number of recommended alternatives.
BEST = 3
# Least gain of a recommendation; smaller ones are within the errors of the kernel models.
WORTH_TELLING = 1.02
TOGETHER = "together"


@dataclass(frozen=True)
class Alternative:
    """One alternative setting and its prediction; without times, but with a ``problem``, if it cannot be predicted."""

    # The changed option.
    change: str
    # Requirements of the change, in words.
    needs: str
    iteration_seconds: float | None = None
    samples: int | None = None
    # Time per sample now, divided by that with the change.
    gain: float | None = None
    peak_memory_bytes: int | None = None
    # Verdict as in `e2e.explain.prediction.Prediction`.
    fits: bool | None = None
    problem: str = ""
    # Only one of several alternatives of one kind can be chosen; `TOGETHER`: several changes combined.
    kind: str = ""

    @property
    def helps(self) -> bool:
        """True if it is faster by at least :data:`WORTH_TELLING` and does not exceed the memory, as far as known."""
        return self.gain is not None and self.gain >= WORTH_TELLING and self.fits is not False


@dataclass(frozen=True)
class LargestBatch:
    """Largest ``batch_size`` (per GPU and micro-batch) whose estimated memory fits; 0: not even one sample fits."""

    batch_size: int
    # At the peak, without the optional reserve of the caching allocator.
    allocated_bytes: int
    # The search ended at its limit: larger batches may fit.
    at_least: bool = False


@dataclass(frozen=True)
class Advice:
    """All predicted alternatives and the largest batch."""

    # All alternatives, by decreasing gain.
    alternatives: Sequence[Alternative]
    largest_batch: LargestBatch | None = None
    # Alternatives skipped for lack of time.
    left: Sequence[str] = ()
    # Reason for skipping them; empty: none was skipped.
    stopped: str = ""

    @property
    def best(self) -> Sequence[Alternative]:
        """The best alternative of each kind, at most :data:`BEST`, after the combination of several if that helps."""
        found: dict[str, Alternative] = {}
        for each in self.alternatives:
            if each.helps:
                found.setdefault(each.kind or each.change, each)
        together = found.pop(TOGETHER, None)
        return [*([] if together is None else [together]), *list(found.values())[:BEST]]


def sort_alternatives(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """Sort alternatives: helpful ones by gain, then unhelpful ones, those that do not fit, those without prediction."""
    return sorted(
        alternatives, key=lambda each: (not each.helps, each.gain is None, each.fits is False, -(each.gain or 0.0))
    )


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

    # Rank that computes longest; its phases (e2e/explain/breakdowns.py) sum to the critical path.
    critical_path_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    other_seconds: float
    gpu_active_seconds: float
    gpu_idle_seconds: float
    # Share of the critical path.
    host_bound_fraction: float
    # Device time `by_operator`, `by_bound`, `by_kind` and, for programs, `by_line`; host time by kind, T1 to T5.
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
    # Of a program that does some of its work in some steps only; `throughput` is that of the mean then.
    mean: MeanStep | None = None
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


_COMMUNICATION = ("collective transfer", "collective wait", "bubble")
_DEVICE = ("compute", "memory", "kernel", "copy")
AS_IT_IS = "as it is"
# Relative difference below which two steps count as equal.
_SAME = 1e-3


@dataclass(frozen=True)
class WhatIfRow:
    """A step with the change of ``question``; the first row of a table is the unchanged step :data:`AS_IT_IS`."""

    question: str
    iteration_seconds: float
    # Interval of the step time itself.
    interval_seconds: tuple[float, float]
    # Time of the unchanged step divided by this one (1.25: a fifth less time).
    gain: float
    # Ratio of the times per sample, if the question changes a known number of samples.
    gain_per_sample: float | None
    # Critical path on the `host`, the `device`, in `communication` and `other`; `longest`: its longest part.
    path_seconds: Mapping[str, float]
    longest: PathPart
    # Samples of a pass on one GPU, as counted by `--batch-size`; only if the question changes them.
    samples: int | None = None
    # True if it fits the memory; `None`: unknown.
    fits: bool | None = None
    # Warnings that the unchanged step does not have.
    warnings: Sequence[str] = ()
    # 80 % interval of the gain, without errors common to both steps (e2e/whatif/paired_intervals.py); `None` if the
    # step is too large to simulate again
    gain_interval: tuple[float, float] | None = None
    # Other rows that cannot be told apart from this one: which is faster per sample is unknown.
    alike: Sequence[str] = ()

    @property
    def worth(self) -> float:
        """Gain per sample, or per step where the number of samples is unchanged or unknown."""
        return self.gain if self.gain_per_sample is None else self.gain_per_sample

    @property
    def gain_per_sample_interval(self) -> tuple[float, float] | None:
        """Interval of ``gain_per_sample``, like ``gain_interval``."""
        if self.gain_interval is None or self.gain_per_sample is None:
            return None
        low, high = (each * self.gain_per_sample / self.gain for each in self.gain_interval)
        return low, high

    @property
    def shares(self) -> Mapping[str, float]:
        """Shares of the critical path."""
        whole = sum(self.path_seconds.values()) or 1.0
        return {name: seconds / whole for name, seconds in self.path_seconds.items()}


def what_if_row(
    question: str,
    answer: Prediction,
    as_it_is: Prediction,
    samples: int | None = None,
    samples_before: int | None = None,
) -> WhatIfRow:
    """Make the row of ``answer``, compared with ``as_it_is``.

    ``samples``: of its step, ``samples_before``: of the latter.
    """
    gain = as_it_is.iteration_seconds / answer.iteration_seconds
    known = samples is not None and samples_before is not None and samples != samples_before
    return WhatIfRow(
        question,
        answer.iteration_seconds,
        answer.interval_seconds,
        gain,
        gain * samples / samples_before if known and samples and samples_before else None,
        _parts(answer.attribution),
        max(answer.critical_path, key=lambda part: part.seconds),
        samples,
        answer.fits,
        tuple(line for line in answer.warnings if _told(line) not in {_told(each) for each in as_it_is.warnings}),
    )


def with_gain_intervals(
    rows: Sequence[WhatIfRow], ratio: Callable[[int, int], tuple[float, float] | None]
) -> tuple[WhatIfRow, ...]:
    """Return ``rows``, unchanged step first, with the intervals of their gains.

    ``ratio``: function of two places of rows that returns the factors by which their ratio may be lower and higher.
    """
    found: list[WhatIfRow] = []
    for place, row in enumerate(rows):
        off = ratio(0, place)
        if off is None:
            return tuple(rows)
        alike = [
            other.question
            for at, other in enumerate(rows)
            if at != place and _overlaps(row.worth / other.worth, ratio(at, place))
        ]
        interval = (row.gain * off[0], row.gain * off[1])
        found.append(replace(row, gain_interval=interval, alike=tuple(alike)))
    return tuple(found)


def _overlaps(times: float, off: tuple[float, float] | None) -> bool:
    """True if a step predicted to be ``times`` as fast as another one may be equally fast."""
    return off is not None and times * off[0] <= 1.0 + _SAME and times * off[1] >= 1.0 - _SAME


def _told(warning: str) -> str:
    """Return a warning without its digits."""
    return "".join(letter for letter in warning if not letter.isdigit())


def _parts(attribution: Mapping[str, float]) -> dict[str, float]:
    groups = {"host": HOST_KINDS, "device": _DEVICE, "communication": _COMMUNICATION}
    found = {name: sum(attribution.get(kind, 0.0) for kind in kinds) for name, kinds in groups.items()}
    return found | {"other": max(sum(attribution.values()) - sum(found.values()), 0.0)}
