"""A step that is ready to be priced, and the one function that runs it, for ``predict`` and ``sweep`` alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from e2e.explain.predictor import PredictionResult, RecordedSite, Setting, explain_once, predict
from e2e.explain.step_facts import throughput_of
from e2e.explain.utilisation import utilisation_of
from e2e.step.execution_graph import ExecutionGraph
from e2e.step.memory import MemoryUsage

if TYPE_CHECKING:
    from costmodel.machines.cluster import Cluster
    from e2e.price.speed_band import SpeedBand
    from e2e.simulate.skew import Skew
    from e2e.whatif.operators_behind import TracedRank
    from e2e.whatif.speeds import SpeedChange


# A replay has every duration as recorded; what it errs by more is a wait that it did not understand.
REPLAY_ERROR = 0.03


@dataclass(frozen=True)
class Batch:
    """What a step processes on all GPUs: ``samples``, each a sequence of ``sequence_length`` tokens (``None``: they are
    no sequences), which are ``made_of`` the sizes that were given, in words. ``batch_size``: what ``--batch-size``
    means, where that is the script's own: samples of one pass on one GPU.
    """

    samples: int
    sequence_length: int | None = None
    made_of: str = ""
    batch_size: int | None = None

    @property
    def tokens(self) -> int | None:
        """Of all samples together."""
        return None if self.sequence_length is None else self.samples * self.sequence_length


@dataclass(frozen=True)
class PreparedStep:
    """What every source makes of a request.

    ``graph``: durations that are there stay, missing ones are filled in. ``memory``: rank of the graph -> its usage.
    ``starts``: rank -> seconds by which it begins late, of a recorded iteration, which is run once from a standing
    start; ``None``: a steady step is predicted.
    ``band``: how the speeds of the GPUs of a synchronised training step differ, where whole steps told.
    ``steady``: with ``starts``, the recorded iteration is one of several alike. ``recorded_seconds``: what the step
    took, of a recording that is replayed. ``notes``: where durations come from; ``batch``: what the step processes,
    where that is told. ``taken``: by option, what the source took where nothing was asked. ``traced``: rank of the
    graph -> the operators that its tasks name, where the source has them. ``speeds``: of kernels and the host, changed
    by a question. ``balanced``: the same step with tokens shared evenly among experts, where they are not: the work of
    the model, by which its utilisation is told, is the same.
    """

    graph: ExecutionGraph
    setting: Setting
    cluster: Cluster | RecordedSite
    memory: Mapping[int, MemoryUsage]
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    skew: Skew | None = None
    band: SpeedBand | None = None
    starts: Mapping[int, float] | None = None
    steady: bool = False
    recorded_seconds: float | None = None
    batch: Batch | None = None
    taken: Mapping[str, str] = field(default_factory=dict)
    traced: Mapping[int, TracedRank] = field(default_factory=dict)
    speeds: SpeedChange | None = None
    balanced: ExecutionGraph | None = None


def run(step: PreparedStep) -> PredictionResult:
    """The prediction of ``step``, priced, simulated and explained, with its throughput where the batch is told."""
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
    """``answer`` with more ``warnings`` and ``notes`` after its own."""
    if not warnings and not notes:
        return answer
    old = answer.prediction
    new = replace(old, warnings=[*old.warnings, *warnings], notes=(*old.notes, *notes))
    return replace(answer, prediction=new)


def _beside_recorded(found: PredictionResult, recorded: float) -> PredictionResult:
    """A note of what was recorded, and a warning where the replay does not give it back."""
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
        skew=step.skew,
        band=step.band,
        altered=None if step.speeds is None else step.speeds.applied,
    )
