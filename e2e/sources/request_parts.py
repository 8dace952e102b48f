"""Parts of a request as the records of those who work with them: the cluster (of one GPU: a node of one), the setting,
how a step is captured.
"""

from __future__ import annotations

from costmodel.base.errors import InputError, MachineError
from costmodel.machines.cluster import Cluster, load_cluster, single_gpu
from costmodel.machines.cluster_file import find_cluster
from costmodel.machines.machine_catalog import load_machine
from costmodel.machines.machine_records import Machine
from costmodel.operators.attention import AttentionKernel
from e2e.capture.models.stacks import stack_of
from e2e.capture.options import CaptureOptions
from e2e.capture.tf32_switches import NO_TF32, Tf32Switches
from e2e.explain.predictor import Setting
from e2e.lowering import LoweringOptions
from e2e.price.shared_overheads import load_overheads
from e2e.sources.asked.request import ConfigurationOptions, MachineOptions, PredictRequest
from e2e.step.choices import AttentionForm
from e2e.step.precision import check_units

# Said of a model's inference over whole sequences.
FORWARD_ALONE = "the step is one forward pass over all its tokens (prefill), without a cache of earlier ones"


def forward_note(request: PredictRequest) -> str:
    """What is said of a model's inference: whole sequences, or tokens behind a cache."""
    cached = request.workload.cache_length
    if cached is None:
        return FORWARD_ALONE
    tokens = request.workload.sequence_length or 1
    return f"the step decodes {tokens} token{'s' if tokens > 1 else ''} of each sequence behind {cached} in a cache"


def gpu_machine(name: str) -> Machine:
    """The GPU ``name``, a machine's or a cluster's; ``MachineError`` if it is none."""
    cluster = find_cluster(name)
    machine = load_machine(name if cluster is None else cluster.machine)
    if machine.kind != "gpu":
        raise MachineError(f"{name}: is a {machine.kind} machine; `python -m costmodel machines` lists the GPUs")
    return machine


def cluster_of(asked: MachineOptions, gpus: int) -> Cluster:
    """``gpus`` GPUs of what is ``asked``; ``InputError`` or ``MachineError`` where there are none such."""
    assert asked.gpu is not None
    machine, nodes = gpu_machine(asked.gpu), asked.nodes or 1
    if gpus == nodes == 1:
        return single_gpu(machine)
    return load_cluster(asked.gpu, gpus, nodes, asked.network)


def one_gpu(asked: MachineOptions) -> Cluster:
    """The node of one GPU on which a step runs by itself; ``InputError`` where more nodes are asked for."""
    nodes = asked.nodes or 1
    if nodes > 1:
        raise InputError(f"--nodes {nodes}: the step runs on one GPU; give --gpus, the GPUs of the whole job")
    assert asked.gpu is not None
    return single_gpu(gpu_machine(asked.gpu))


def setting_of(configuration: ConfigurationOptions, machine: Machine) -> Setting:
    """The software stack that ``configuration`` asks for, on ``machine``; ``InputError`` for number types that it does
    not compute.
    """
    check_units(configuration.precision, machine)
    return Setting(
        machine,
        load_overheads(configuration.overheads, machine.chip().architecture),
        cuda_graph=configuration.cuda_graph,
        compiled=configuration.compiled,
        older_libraries=stack_of(configuration.stack).older_libraries,
    )


def lowering_options(
    configuration: ConfigurationOptions,
    machine: Machine,
    attention: AttentionKernel | None = None,
    own: Tf32Switches = NO_TF32,
) -> LoweringOptions:
    """How operators become kernels of ``machine``. ``attention``: the kernel of fused attention (``None``: those that a
    trace names); ``own``: the switches of a script, beside what is asked for. A GPU without units for TF32 passes over
    all of them.
    """
    asked, usable = configuration.dtype == "tf32", own.on(machine)
    return LoweringOptions(
        tf32=usable.products or (asked and "tf32" in machine.compute),
        tf32_convolutions=usable.convolutions,
        tf32_recurrent=usable.recurrent,
        attention=attention,
        routing=configuration.routing,
    )


def capture_options(request: PredictRequest, attention: AttentionForm = "eager") -> CaptureOptions:
    """How a step is captured; ``attention``: where none is asked for."""
    configuration = request.configuration
    return CaptureOptions(
        request.workload.mode,
        configuration.number_type,
        configuration.attention or attention,
        configuration.optimizer or stack_of(configuration.stack).optimizer_form,
        configuration.stack,
        configuration.lora,
        layout=configuration.layout,
        mixture=configuration.mixture,
        precision=configuration.precision,
        document_length=request.workload.document_length,
        cache_length=request.workload.cache_length,
        linear_attention=configuration.linear_attention,
        bucket_mb=request.bucket_mb,
        master_weights=request.master_weights,
    )


def taken_values(request: PredictRequest, length: int | None, optimizer: str, attention: str) -> dict[str, str]:
    """By option, what a built-in model or a configuration took where nothing was asked. ``length``: its tokens
    (``None``: it has no sequences); ``optimizer``: the class, empty without one.
    """
    workload, configuration = request.workload, request.configuration
    taken = {"--batch-size": str(workload.samples)}
    if length is None:
        taken["--layout"] = f"{configuration.layout} (NCHW)"
    else:
        meaning = "products and softmax apart" if attention in ("eager", "math") else "fused"
        taken |= {"--sequence-length": str(length), "--attention": f"{attention} ({meaning})"}
        taken["--stack"] = "the library's modules as they are"
    if optimizer:
        form = configuration.optimizer or stack_of(configuration.stack).optimizer_form
        taken["--optimizer"] = f"{form} ({optimizer})"
    return taken


def meant_values(request: PredictRequest, machine: Machine, cluster: object) -> dict[str, str]:
    """By option, what its value means on ``machine`` and ``cluster`` where the value alone does not say it."""
    meant = {}
    if isinstance(cluster, Cluster) and cluster.network_text:
        meant["--network"] = cluster.network_text
    if request.configuration.dtype == "tf32" and "tf32" not in machine.compute:
        meant["--dtype"] = f"tf32 (computed in float32: {machine.name} has no units for TF32)"
    return meant


def placed_values(cluster: Cluster) -> dict[str, str]:
    """By option, where several GPUs are."""
    return {"--nodes": f"{cluster.nodes} ({cluster.name})"}
