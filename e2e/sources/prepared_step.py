"""Step that is ready to be priced, and the function that runs it, for ``predict`` and ``sweep``.

Sources prepare it from parts of a request: the cluster (one GPU: a node of one), the setting, the capture options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import MachineError
from costmodel.machines.cluster import Cluster, load_cluster, single_gpu
from costmodel.machines.cluster_file import find_cluster
from costmodel.machines.machine_file import load_machine
from costmodel.machines.machine_records import Machine
from e2e.capture.models.stacks import stack_of
from e2e.explain.prediction import throughput_of
from e2e.explain.predictor import PredictionResult, RecordedSite, Setting, explain_once, predict
from e2e.explain.utilisation import utilisation_of
from e2e.price.host_overheads import load_overheads
from e2e.sources import request as parts
from e2e.step.execution_graph import ExecutionGraph
from e2e.step.memory import MemoryUsage
from e2e.step.option_fields import Options
from e2e.step.options import NO_TF32, StepOptions, Tf32Switches, check_units

if TYPE_CHECKING:
    from e2e.price.speed_band import SpeedBand
    from e2e.whatif.speeds import SpeedChange
    from e2e.whatif.traced_rank import TracedRank


# Note on a model's inference over whole sequences.
FORWARD_ALONE = "the step is one forward pass over all its tokens (prefill), without a cache of earlier ones"


def forward_note(cached: int | None, length: int | None) -> str:
    """Note on a model's inference: whole sequences, or decoding with a cache."""
    if cached is None:
        return FORWARD_ALONE
    tokens = length or 1
    return f"the step decodes {tokens} token{'s' if tokens > 1 else ''} of each sequence behind {cached} in a cache"


def gpu_machine(name: str) -> Machine:
    """Return the GPU ``name``, given as a machine or a cluster; raises ``MachineError`` if it is not a GPU."""
    cluster = find_cluster(name)
    machine = load_machine(name if cluster is None else cluster.machine)
    if machine.kind != "gpu":
        raise MachineError(f"{name}: is a {machine.kind} machine; `python -m costmodel machines` lists the GPUs")
    return machine


def cluster_of(asked: parts.Cluster, gpus: int) -> Cluster:
    """Return a cluster of ``gpus`` GPUs; raises ``InputError`` or ``MachineError`` if it is not possible."""
    machine, nodes = gpu_machine(asked.gpu), asked.nodes or 1
    if gpus == nodes == 1:
        return single_gpu(machine)
    return load_cluster(asked.gpu, gpus, nodes, asked.network)


def one_gpu(name: str) -> Cluster:
    """Return a node with a single GPU."""
    return single_gpu(gpu_machine(name))


def setting_of(request: parts.Request, machine: Machine, options: StepOptions | None = None) -> Setting:
    """Return the software stack of the step of ``request`` on ``machine``.

    Raises ``InputError`` for number types that the machine does not compute.
    """
    options = options or StepOptions()
    check_units(options.precision, machine)
    return Setting(
        machine,
        load_overheads(getattr(request, "overheads", None), machine.chip().architecture),
        cuda_graph=request.cuda_graph,
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


def taken_values(options: StepOptions, samples: int, length: int | None, optimizer: str) -> dict[str, str]:
    """Return the defaults that a built-in model or a configuration used, by option.

    ``length``: tokens of a sample (``None``: no sequences); ``optimizer``: its class, empty without one.
    """
    taken = {"--batch-size": str(samples)}
    if length is None:
        taken["--layout"] = f"{options.layout} (NCHW)"
    else:
        meaning = "products and softmax apart" if options.form in ("eager", "math") else "fused"
        taken |= {"--sequence-length": str(length), "--attention": f"{options.form} ({meaning})"}
        taken["--stack"] = "the library's modules as they are"
    if optimizer:
        taken["--optimizer"] = f"{options.optimizer} ({optimizer})"
    return taken


def meant_values(request: Options, machine: Machine, cluster: object) -> dict[str, str]:
    """Return the meaning of option values that depends on ``machine`` and ``cluster``, by option."""
    meant = {}
    if isinstance(cluster, Cluster) and cluster.network_text:
        meant["--network"] = cluster.network_text
    if getattr(request, "dtype", None) == "tf32" and "tf32" not in machine.compute:
        meant["--dtype"] = f"tf32 (computed in float32: {machine.name} has no units for TF32)"
    return meant


def placed_values(cluster: Cluster) -> dict[str, str]:
    """Return the placement of several GPUs, by option."""
    return {"--nodes": f"{cluster.nodes} ({cluster.name})"}


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
