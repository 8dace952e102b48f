"""Step that is ready to be priced, and the function that runs it, for ``predict`` and ``sweep``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from costmodel.machines.cluster import Cluster
from e2e.explain.prediction import throughput_of
from e2e.explain.predictor import PredictionResult, RecordedSite, Setting, explain_once, predict
from e2e.explain.utilisation import utilisation_of
from e2e.step.execution_graph import ExecutionGraph
from e2e.step.memory import MemoryUsage

if TYPE_CHECKING:
    from e2e.price.speed_band import SpeedBand
    from e2e.whatif.speeds import SpeedChange
    from e2e.whatif.traced_rank import TracedRank


# Tolerance of a replay, which has every duration as recorded; a larger error is due to a misinterpreted wait.
REPLAY_ERROR = 0.03


@dataclass(frozen=True)
class Batch:
    """Samples that a step processes."""

    # Samples on all GPUs.
    samples: int
    # Tokens of a sample; `None`: samples are not sequences.
    sequence_length: int | None = None
    # Factors of `samples`, in words.
    made_of: str = ""
    # Value of `--batch-size` for scripts: samples of one pass on one GPU.
    batch_size: int | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens of all samples, ``None`` if samples are not sequences."""
        return None if self.sequence_length is None else self.samples * self.sequence_length


@dataclass(frozen=True)
class PreparedStep:
    """Step prepared by a source from its request."""

    # Existing durations are kept, missing ones are filled in.
    graph: ExecutionGraph
    setting: Setting
    cluster: Cluster | RecordedSite
    # Rank of the graph -> its usage.
    memory: Mapping[int, MemoryUsage]
    warnings: Sequence[str] = ()
    # Sources of the durations.
    notes: Sequence[str] = ()
    # Standard deviation of the GPU speeds, instead of `band`.
    speed_spread: float | None = None
    # Variation of the GPU speeds in a synchronised training step, learned from whole steps.
    band: SpeedBand | None = None
    # Rank -> seconds by which it begins late, in a recorded iteration that is run once; `None`: a steady step.
    starts: Mapping[int, float] | None = None
    # True if the recorded iteration of `starts` is a steady one.
    steady: bool = False
    # Step time of a recording that is replayed.
    recorded_seconds: float | None = None
    # Samples of the step, if known.
    batch: Batch | None = None
    # Defaults of the source by option, where no value was given.
    taken: Mapping[str, str] = field(default_factory=dict)
    # Rank of the graph -> operators of its tasks, where known.
    traced: Mapping[int, TracedRank] = field(default_factory=dict)
    # Changes of kernel and host speeds by a what-if question.
    speeds: SpeedChange | None = None
    # The step with tokens balanced among experts, if they are not; used for the utilisation, since the model's FLOPs
    # are the same.
    balanced: ExecutionGraph | None = None


def run(step: PreparedStep) -> PredictionResult:
    """Price, simulate and explain ``step``; adds the throughput if the batch is known."""
    found = _predicted(step)
    if step.recorded_seconds is not None:
        found = _beside_recorded(found, step.recorded_seconds)
    if step.balanced is not None:
        used = utilisation_of(step.balanced, step.setting.machine, found.prediction.iteration_seconds)
        found = replace(found, prediction=replace(found.prediction, utilisation=used))
    if step.batch is None:
        return found
    old, batch = found.prediction, step.batch
    rate = throughput_of(batch.samples, batch.sequence_length, old.iteration_seconds, old.gpus, batch.made_of)
    rate = replace(rate, batch_size=batch.batch_size)
    return replace(found, prediction=replace(old, throughput=rate))


def told(answer: PredictionResult, *, warnings: Sequence[str] = (), notes: Sequence[str] = ()) -> PredictionResult:
    """Return ``answer`` with additional ``warnings`` and ``notes`` after its own."""
    if not warnings and not notes:
        return answer
    old = answer.prediction
    new = replace(old, warnings=[*old.warnings, *warnings], notes=(*old.notes, *notes))
    return replace(answer, prediction=new)


def _beside_recorded(found: PredictionResult, recorded: float) -> PredictionResult:
    """Add a note with the recorded time, or a warning if the replay does not reproduce it."""
    replayed = found.prediction.iteration_seconds
    error = replayed / recorded - 1.0
    line = f"recorded {recorded * 1e3:.3f} ms, replayed {replayed * 1e3:.3f} ms ({error:+.1%})"
    if abs(error) <= REPLAY_ERROR:
        return told(found, notes=[line])
    return told(found, warnings=[f"{line}: the replay is wrong, and so is what it is broken down into"])


def _predicted(step: PreparedStep) -> PredictionResult:
    if step.starts is not None:
        return explain_once(
            step.graph if step.speeds is None else step.speeds.applied(step.graph),
            step.setting.machine,
            step.cluster,
            step.memory,
            starts=step.starts,
            steady=step.steady,
            warnings=step.warnings,
            notes=step.notes,
            host_factor=step.setting.overheads.factor,
        )
    assert not isinstance(step.cluster, RecordedSite)
    return predict(
        step.graph,
        step.setting,
        step.cluster,
        step.memory,
        warnings=step.warnings,
        notes=step.notes,
        speed_spread=step.speed_spread,
        band=step.band,
        altered=None if step.speeds is None else step.speeds.applied,
    )
