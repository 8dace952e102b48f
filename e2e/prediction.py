"""The answer of a prediction: one record for people, JSON and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PathPart:
    """A share of the critical path: all segments of one ``kind`` and ``name``. ``waits_for``: what most waited for."""

    kind: str
    name: str
    seconds: float
    count: int
    waits_for: str


@dataclass(frozen=True)
class Prediction:
    """One steady step. Times in seconds, sizes in bytes.

    ``interval_seconds``: where the step lies with the confidence of the kernel models' intervals (80 %), taking errors
    inside a family of kernels as alike and those of families as independent. ``forward_seconds`` and so on: on the
    device, from the end of the phase before to the end of this one. ``breakdown``: device time ``by_operator``,
    ``by_bound`` and ``by_kind``. ``overheads``: host time by kind (T1-T5). ``critical_path`` sums to the step.
    ``coverage``: share of device time by source of its price. ``fits``: ``None`` where memory is not known.
    ``notes``: what was measured and what predicted, where a recording was given.
    """

    workload: str
    machine: str
    iteration_seconds: float
    interval_seconds: tuple[float, float]
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    gpu_active_seconds: float
    gpu_idle_seconds: float
    host_bound_fraction: float
    breakdown: Mapping[str, Mapping[str, float]]
    overheads: Mapping[str, float]
    critical_path: Sequence[PathPart]
    peak_memory_bytes: int | None
    memory_breakdown: Mapping[str, int]
    memory_capacity_bytes: int
    fits: bool | None
    coverage: Mapping[str, float]
    kernels: int
    operators: int
    warnings: Sequence[str]
    notes: Sequence[str] = ()


def prediction_record(prediction: Prediction) -> dict[str, Any]:
    """The JSON document."""
    record = asdict(prediction)
    record["interval_seconds"] = list(prediction.interval_seconds)
    return record
