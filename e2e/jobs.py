"""What ``python -m e2e predict`` is asked for, and who answers: one GPU, many GPUs, or a recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.errors import InputError, MachineError
from costmodel.machine_catalog import load_machine
from costmodel.machine_records import Machine

if TYPE_CHECKING:
    from costmodel.cluster import Cluster
    from e2e.operators import OperatorTrace
    from e2e.predictor import Result, Setting
    from e2e.skew import Skew


@dataclass(frozen=True)
class Workload:
    """What runs: exactly one of ``model``, ``model_config``, ``script`` and recorded ``traces`` or ``kineto``."""

    model: str | None = None
    model_config: Path | None = None
    script: str | None = None
    traces: tuple[str, ...] = ()
    kineto: tuple[str, ...] = ()
    tables: Path | None = None


@dataclass(frozen=True)
class StepOptions:
    """The step of that workload. ``batch_size``: ``None`` is 1, or the default of a script or a sharding plan."""

    batch_size: int | None = None
    sequence_length: int | None = None
    mode: Any = "train"
    dtype: Any = "float32"
    attention: Any = "eager"
    cuda_graph: bool = False
    overheads: Path | None = None
    compiled: bool = False

    @property
    def samples(self) -> int:
        """The batch size of anything but a script."""
        return 1 if self.batch_size is None else self.batch_size


@dataclass(frozen=True)
class Where:
    """On what: ``gpu`` is a name or file; ``gpus`` and ``nodes``: of the whole job; ``retarget``: another GPU;
    ``ranks``: those of a script to capture, where it does not show that they differ; ``skew``: how ranks vary.
    """

    gpu: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    network: str | None = None
    parallel: str | None = None
    sharding: Path | None = None
    retarget: str | None = None
    ranks: tuple[int, ...] = ()
    skew: Skew | None = None


@dataclass(frozen=True)
class Job:
    """One request."""

    workload: Workload
    step: StepOptions
    where: Where


def predict_job(job: Job) -> Result:
    """The prediction; ``InputError`` for options that contradict each other. A warning names those without effect."""
    result = _predict(job)
    ignored = _without_effect(job)
    if not ignored:
        return result
    recorded = "a recorded step brings its own" if job.workload.kineto or job.workload.traces else "not used here"
    warnings = [*result.prediction.warnings, f"{', '.join(ignored)}: without effect, {recorded}"]
    prediction: Any = replace(result.prediction, warnings=warnings)
    return replace(result, prediction=prediction)


def _without_effect(job: Job) -> list[str]:
    """Options that were given and that this kind of prediction does not use."""
    workload, step, where = job.workload, job.step, job.where
    recorded, sharded = bool(workload.kineto or workload.traces), where.sharding is not None
    given = {
        "--batch-size": recorded and step.batch_size is not None,
        "--sequence-length": (recorded or sharded) and step.sequence_length is not None,
        "--mode": recorded and step.mode != "train",
        "--ranks": bool(where.ranks) and workload.script is None,
    }
    return [option for option, ignored in given.items() if ignored]


def _predict(job: Job) -> Result:
    from e2e.traces.recorded_run import expand_files

    workload, where = job.workload, job.where
    if workload.kineto:
        return _recording(job)
    if where.retarget is not None:
        raise InputError("--retarget moves a recorded run; give --kineto and --trace")
    if where.gpu is None:
        raise InputError("give --gpu: a name (`python -m costmodel machines`) or a YAML file")
    if where.sharding is not None or workload.tables is not None:
        return _sharded(job)
    if where.parallel is not None:
        return _parallel(job)
    if where.gpus is not None and workload.script is not None:
        return _distributed_script(job)
    _refuse(bool(where.ranks), "--ranks names ranks of a --script on several --gpus")
    several = (where.gpus or 1) > 1 or (where.nodes or 1) > 1 or len(expand_files(workload.traces)) > 1
    if several and not workload.traces:
        raise InputError(
            f"{where.gpus or where.nodes} {'GPUs' if where.gpus else 'nodes'}: say how the work is spread, such as "
            "--parallel dp=8 or --parallel fsdp=8 (a --script says it itself)"
        )
    _refuse(where.skew is not None and not several, "--skew is for several ranks; give --parallel, or --gpus")
    _refuse(
        where.network is not None and not several, "--network is for jobs of several nodes; give --parallel and --nodes"
    )
    return _single(job)


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise InputError(message)


def parse_ranks(text: str | None) -> tuple[int, ...]:
    """``"0,7"`` -> (0, 7); ``InputError`` for anything else."""
    if text is None:
        return ()
    fields = [field.strip() for field in text.split(",")]
    if not all(field.isdigit() for field in fields):
        raise InputError(f"--ranks {text}: expected numbers such as 0,7")
    return tuple(int(field) for field in fields)


def gpu_machine(name: str) -> Machine:
    """The GPU ``name``; ``MachineError`` if it is none."""
    machine = load_machine(name)
    if machine.kind != "gpu":
        raise MachineError(f"{name}: is a {machine.kind} machine; `python -m costmodel machines` lists the GPUs")
    return machine


def _recording(job: Job) -> Result:
    from e2e.recorded_prediction import Recording, predict_recording

    workload, step, where = job.workload, job.step, job.where
    others = [name for name in ("model", "model_config", "script") if getattr(workload, name) is not None]
    _refuse(bool(others), "--kineto goes with --trace alone; leave --model, --model-config and --script out")
    _refuse(step.overheads is not None, "--kineto brings its own host overheads; leave --overheads out")
    _refuse(where.gpus is not None, "--gpus: a recorded run has its own number of ranks; leave it out")
    _refuse(where.parallel is not None, "--parallel: a recorded run is spread as it was; leave it out")
    _refuse(where.skew is not None, "--skew: a recorded run has its own; leave it out")
    _refuse(step.compiled, "--compile: a recorded run was compiled or not; leave it out")
    moved = where.retarget is not None
    _refuse(where.network is not None and not moved, "--network goes with --retarget: a recorded run had its own")
    return predict_recording(
        Recording(
            kineto=workload.kineto,
            traces=workload.traces,
            gpu=where.gpu,
            retarget=where.retarget,
            nodes=where.nodes or 1,
            network=where.network,
            tf32=step.dtype == "tf32",
            cuda_graph=step.cuda_graph,
        )
    )


def _setting(job: Job, machine: Machine) -> Setting:
    from e2e.predictor import Setting
    from e2e.shared_overheads import load_overheads

    step = job.step
    table = load_overheads(step.overheads)
    return Setting(machine, table, tf32=step.dtype == "tf32", cuda_graph=step.cuda_graph, compiled=step.compiled)


def _single(job: Job) -> Result:
    from costmodel.cluster import single_gpu
    from e2e.collective_names import kind_of
    from e2e.lowered_step import lower_step
    from e2e.predictor import predict
    from e2e.sources import Source, read_source
    from e2e.traces.recorded_run import expand_files

    workload, step, where = job.workload, job.step, job.where
    assert where.gpu is not None
    machine = gpu_machine(where.gpu)
    files = expand_files(workload.traces)
    if len(files) > 1:
        return _traced_ranks(job, files)
    trace = files[0] if files else None
    shape = (step.batch_size, step.sequence_length, step.mode, step.dtype, step.attention)
    operators = read_source(Source(workload.model, workload.model_config, workload.script, trace, *shape))
    collectives = trace is not None and any(kind_of(call.name) for call in operators.calls)
    if trace is not None and (where.gpus or _told_ranks(operators)) > 1 or (collectives and where.gpus == 1):
        return _traced_rank(job, operators)
    if collectives:
        raise InputError(f"{trace}: a rank of a job with collectives; give --gpus, the number of its ranks")
    setting = _setting(job, machine)
    lowered = lower_step(operators, setting)
    return predict(lowered.graph, setting, single_gpu(machine), lowered.memory, warnings=lowered.warnings)


def _traced_ranks(job: Job, files: Sequence[Path]) -> Result:
    """The execution traces of all ranks of a job, whose collectives meet; kernels and host times are predicted."""
    from e2e.graph import ExecutionGraph
    from e2e.lowered_step import lowering_warnings
    from e2e.lowering import LoweringOptions, lower
    from e2e.lowering.recorded_ranks import ranks_of_job
    from e2e.memory import peak_memory
    from e2e.predictor import predict
    from e2e.sources import Source, read_source

    workload, where, count = job.workload, job.where, len(files)
    others = [workload.model, workload.model_config, workload.script]
    _refuse(any(each is not None for each in others), "give --trace alone, without --model, --model-config, --script")
    _refuse(where.gpus not in (None, count), f"--gpus {where.gpus}: there are traces of {count} ranks; leave it out")
    _refuse(job.step.compiled, "--compile is for one GPU yet; leave it out")
    traces = ranks_of_job([read_source(Source(trace=path)) for path in files])
    options = LoweringOptions(tf32=job.step.dtype == "tf32")
    source = f"{traces[0].source} and {count - 1} other ranks"
    graph = ExecutionGraph(tuple(lower(trace, options) for trace in traces), {}, source)
    memory = {trace.rank: peak_memory(trace) for trace in traces}
    warnings = list(dict.fromkeys(line for rank in graph.ranks for line in lowering_warnings(rank)))
    cluster = _cluster(job, count)
    return predict(graph, _setting(job, cluster.machine), cluster, memory, warnings=warnings, skew=where.skew)


def _traced_rank(job: Job, operators: OperatorTrace) -> Result:
    """The execution trace of one rank of a job; all others are taken as alike. Older traces do not tell how many."""
    from e2e.graph import ExecutionGraph
    from e2e.lowered_step import lowering_warnings
    from e2e.lowering import LoweringOptions, lower
    from e2e.memory import peak_memory
    from e2e.predictor import predict

    told = _told_ranks(operators)
    gpus = job.where.gpus or told
    if told not in (1, gpus):
        raise InputError(f"{operators.source}: of a job of {told} ranks; --gpus says {gpus}")
    _refuse(job.step.compiled, "--compile is for one GPU yet; leave it out")
    rank = lower(replace(operators, world_size=gpus), LoweringOptions(tf32=job.step.dtype == "tf32"))
    cluster = _cluster(job, gpus)
    graph = ExecutionGraph((rank,), {rank.rank: gpus}, operators.source)
    memory = {rank.rank: peak_memory(operators)}
    warnings = lowering_warnings(rank)
    if gpus > 1:
        warnings.append(f"the trace is of one rank; the other {gpus - 1} are taken as alike")
    return predict(graph, _setting(job, cluster.machine), cluster, memory, warnings=warnings, skew=job.where.skew)


def _told_ranks(operators: OperatorTrace) -> int:
    """Ranks of the job as far as the trace tells; 1 if it does not."""
    return max([operators.world_size, *(len(ranks) for ranks in operators.process_groups.values())])


def _cluster(job: Job, gpus: int) -> Cluster:
    from costmodel.cluster import load_cluster

    assert job.where.gpu is not None
    return load_cluster(job.where.gpu, gpus, job.where.nodes or 1, job.where.network)


def _parallel(job: Job) -> Result:
    """Built-in transformers and Hugging Face configurations, spread as ``--parallel`` says."""
    from e2e.parallelism import Step, build, parse_parallel
    from e2e.parallelism.condense import Condenser
    from e2e.predictor import predict

    workload, step, where = job.workload, job.step, job.where
    _refuse(workload.script is not None, "--parallel is for built-in models; a --script says itself how it is spread")
    _refuse(bool(workload.traces), "--parallel is for built-in models; an execution trace is of one rank")
    given = [each for each in (workload.model, workload.model_config) if each is not None]
    _refuse(len(given) != 1, "--parallel: give exactly one of --model and --model-config")
    _refuse(step.compiled, "--compile is for one GPU yet; leave it out with --parallel")
    _refuse(step.mode != "train", f"--parallel predicts training steps; leave --mode {step.mode} out")
    assert where.parallel is not None
    spec = parse_parallel(where.parallel, where.gpus)
    cluster = _cluster(job, spec.world_size)
    setting = _setting(job, cluster.machine)
    condenser = Condenser(setting.overheads)
    parts = Step(step.samples, step.sequence_length, step.dtype, step.attention)
    built = build(given[0], spec, parts, condenser=condenser)
    result = predict(built.graph, setting, cluster, built.memory, warnings=built.warnings, skew=where.skew)
    tokens = built.samples * built.sequence_length
    rate = tokens / result.prediction.iteration_seconds / spec.world_size
    note = (
        f"a step is {built.samples:,} sequences of {built.sequence_length:,} tokens (batch size {step.samples} x "
        f"{spec.micro_batches} micro-batches x {spec.replicas} replicas): {rate:,.0f} tokens/s per GPU"
    )
    return replace(result, prediction=replace(result.prediction, notes=(note,)))


def _distributed_script(job: Job) -> Result:
    """The user's own DDP, FSDP2, tensor-parallel or pipeline script."""
    from e2e.capture.distributed import capture_distributed
    from e2e.capture.options import CaptureOptions
    from e2e.capture.script import Fallback
    from e2e.lowered_step import lowering_warnings
    from e2e.predictor import predict

    workload, step, where = job.workload, job.step, job.where
    assert workload.script is not None and where.gpus is not None
    others = [workload.model, workload.model_config, *workload.traces]
    _refuse(any(each is not None for each in others), "give --script alone, without --model, --model-config, --trace")
    _refuse(step.compiled, "--compile is for one GPU yet; leave it out")
    cluster = _cluster(job, where.gpus)
    captured = capture_distributed(
        workload.script,
        where.gpus,
        CaptureOptions(mode=step.mode, dtype=step.dtype, attention=step.attention),
        parameters={
            "batch_size": Fallback(1) if step.batch_size is None else step.batch_size,
            "sequence_length": step.sequence_length,
        },
        gpus_per_node=cluster.gpus_per_node,
        ranks=where.ranks or None,
    )
    # Ranks that differ do mostly the same: each thing is said once.
    warnings = list(dict.fromkeys(line for rank in captured.graph.ranks for line in lowering_warnings(rank)))
    if captured.compiled:
        warnings.append("the script compiles its model (torch.compile): predicted as eager code on several GPUs")
    setting = _setting(job, cluster.machine)
    return predict(captured.graph, setting, cluster, captured.memory, warnings=warnings, skew=where.skew)


def _sharded(job: Job) -> Result:
    """DLRM with a sharding plan."""
    from e2e.capture.options import CaptureOptions
    from e2e.predictor import predict
    from e2e.sharding.prediction import sharded_dlrm

    workload, step, where = job.workload, job.step, job.where
    others = [workload.model_config, workload.script, *workload.traces, where.parallel]
    _refuse(workload.model not in (None, "dlrm"), "--sharding and --config are for --model dlrm")
    _refuse(any(each is not None for each in others), "--sharding places tables of --model dlrm; give no other source")
    _refuse(step.mode != "train", f"--sharding predicts training steps; leave --mode {step.mode} out")
    _refuse(step.compiled, "--compile is for one GPU yet; leave it out with --sharding")
    if where.sharding is None or workload.tables is None or where.gpus is None:
        raise InputError("give --config tables.yaml, --sharding plan.json (`python -m e2e shard` makes one) and --gpus")
    cluster = _cluster(job, where.gpus)
    options = CaptureOptions(mode=step.mode, dtype=step.dtype)
    built = sharded_dlrm(where.sharding, workload.tables, cluster, step.batch_size, options)
    setting = _setting(job, cluster.machine)
    return predict(built.graph, setting, cluster, built.memory, warnings=built.warnings, skew=where.skew)
