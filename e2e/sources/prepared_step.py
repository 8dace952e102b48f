"""Step that is ready to be priced, with what sources make it from, and the function that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from costmodel.machines.cluster import Cluster, load_cluster, load_gpu, single_gpu
from costmodel.machines.machine_records import Machine
from e2e.capture.models.stacks import stack_of
from e2e.explain.more_passes import with_more_passes
from e2e.explain.prediction import RareWork, mean_step, throughput_of
from e2e.explain.predictor import PredictionResult, RecordedSite, Setting, explain_once, predict_graph
from e2e.explain.utilisation import utilisation_of
from e2e.price.host_overheads import load_overheads
from e2e.step.execution_graph import ExecutionGraph
from e2e.step.memory import MemoryUsage
from e2e.step.option_fields import Options
from e2e.step.options import NO_TF32, ClusterOptions, StepOptions, Tf32Switches, check_units

if TYPE_CHECKING:
    from e2e.capture.missing.loaders import Loading
    from e2e.price.speed_band import SpeedBand
    from e2e.whatif.speeds import SpeedChange
    from e2e.whatif.traced_rank import TracedRank


# Tolerance of a replay, which has every duration as recorded; a larger error is due to a misinterpreted wait.
REPLAY_ERROR = 0.03
# Share of a step from which on the loading of its data is told: other machines' cores may be half as fast.
LOADING_SHARE = 0.5


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
    # The step with one pass of accumulated gradients fewer, and how many more than in this one there are.
    fewer: PreparedStep | None = None
    more_passes: int = 0
    # Work of the program in some steps only, and of the workers of its data loaders beside every step.
    rare: Sequence[RareWork] = ()
    loading: Sequence[Loading] = ()
    # The step with tokens balanced among experts, if they are not; used for the utilisation, since the model's FLOPs
    # are the same.
    balanced: ExecutionGraph | None = None


# --- made from a request ---------------------------------------------------------------------------


def cluster_of(asked: ClusterOptions, gpus: int) -> Cluster:
    """Return a cluster of ``gpus`` GPUs; raises ``InputError`` or ``MachineError`` if it is not possible."""
    machine = load_gpu(asked.gpu)
    if gpus == (asked.nodes or 1) == 1:
        return single_gpu(machine)
    return load_cluster(asked.gpu, gpus, asked.nodes, asked.network)


def step_setting(request: Options, machine: Machine, options: StepOptions | None = None) -> Setting:
    """Return the software stack of the step of ``request`` on ``machine``.

    Raises ``InputError`` for number types that the machine does not compute.
    """
    options = options or StepOptions()
    check_units(options.precision, machine)
    return Setting(
        machine,
        load_overheads(getattr(request, "overheads", None), machine.chip().architecture),
        cuda_graph=getattr(request, "cuda_graph", False),
        compiled=options.compile,
        older_libraries=stack_of(options.stack).older_libraries,
    )


def on_machine(options: StepOptions, machine: Machine, own: Tf32Switches = NO_TF32) -> StepOptions:
    """Return ``options`` with the operations that run in TF32 on ``machine``.

    ``own``: TF32 switches of a script, in addition to the request. Ignored on GPUs without TF32 units.
    """
    usable = own.on(machine)
    asked = options.dtype == "tf32" and "tf32" in machine.compute
    return replace(options, tf32=replace(usable, products=usable.products or asked))


def step_options(request: Options, **settled: Any) -> StepOptions:
    """Return the options of the step of ``request``; ``settled``: values that override it or fill it in."""
    found = StepOptions.of(request, dtype=getattr(request, "dtype", None) or "float32", **settled)
    return replace(found, optimizer=found.optimizer or stack_of(found.stack).optimizer_form)


def placed_values(cluster: Cluster) -> dict[str, str]:
    """Return the placement of several GPUs, by option."""
    return {"--nodes": f"{cluster.nodes} ({cluster.name})"}


# --- run -------------------------------------------------------------------------------------------


def run_step(step: PreparedStep) -> PredictionResult:
    """Price, simulate and explain ``step``; adds the throughput if the batch is known."""
    found = _predicted(step)
    if step.fewer is not None:
        fewer = _predicted(replace(step.fewer, memory=step.memory)).prediction
        found = replace(found, prediction=with_more_passes(found.prediction, fewer, step.more_passes))
    if step.recorded_seconds is not None:
        found = _beside_recorded(found, step.recorded_seconds)
    if step.balanced is not None:
        used = utilisation_of(step.balanced, step.setting.machine, found.prediction.iteration_seconds)
        found = replace(found, prediction=replace(found.prediction, utilisation=used))
    old, batch = found.prediction, step.batch
    mean = mean_step(old.iteration_seconds, old.interval_seconds, step.rare)
    found = _beside_loading(replace(found, prediction=replace(old, mean=mean)), step.loading)
    if batch is None:
        return found
    old = found.prediction
    seconds = old.iteration_seconds if mean is None else mean.iteration_seconds
    rate = throughput_of(batch.samples, batch.sequence_length, seconds, old.gpus, batch.made_of)
    rate = replace(rate, batch_size=batch.batch_size)
    return replace(found, prediction=replace(old, throughput=rate))


def with_remarks(
    answer: PredictionResult, *, warnings: Sequence[str] = (), notes: Sequence[str] = ()
) -> PredictionResult:
    """Return ``answer`` with additional ``warnings`` and ``notes`` after its own."""
    if not warnings and not notes:
        return answer
    old = answer.prediction
    new = replace(old, warnings=[*old.warnings, *warnings], notes=(*old.notes, *notes))
    return replace(answer, prediction=new)


def _beside_loading(found: PredictionResult, loading: Sequence[Loading]) -> PredictionResult:
    """Add a warning if workers need so long for the data of a step that it may wait for them."""
    slowest = max(loading, key=lambda each: each.seconds, default=None)
    if slowest is None or slowest.seconds < LOADING_SHARE * found.prediction.iteration_seconds:
        return found
    line = (
        f"a data loader takes {slowest.seconds * 1e3:,.1f} ms a step, {slowest.core_seconds * 1e3:,.1f} ms of a core "
        f"of the machine that predicts, shared by {slowest.workers} workers: the step may wait for its data, and the "
        "predicted time does not include that"
    )
    return with_remarks(found, warnings=[line])


def _beside_recorded(found: PredictionResult, recorded: float) -> PredictionResult:
    """Add a note with the recorded time, or a warning if the replay does not reproduce it."""
    replayed = found.prediction.iteration_seconds
    error = replayed / recorded - 1.0
    line = f"recorded {recorded * 1e3:.3f} ms, replayed {replayed * 1e3:.3f} ms ({error:+.1%})"
    if abs(error) <= REPLAY_ERROR:
        return with_remarks(found, notes=[line])
    return with_remarks(found, warnings=[f"{line}: the replay is wrong, and so is what it is broken down into"])


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
    return predict_graph(
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
