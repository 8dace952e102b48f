"""The machine part of a request: the cluster of a job, which for one GPU is a node of one, and its setting."""

from __future__ import annotations

from costmodel.base.errors import InputError, MachineError
from costmodel.machines.cluster import Cluster, load_cluster, single_gpu
from costmodel.machines.cluster_file import find_cluster
from costmodel.machines.machine_catalog import load_machine
from costmodel.machines.machine_records import Machine
from e2e.explain.predictor import Setting
from e2e.price.shared_overheads import load_overheads
from e2e.sources.request import ConfigurationOptions, MachineOptions, PredictRequest


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


def one_gpu(request: PredictRequest) -> Cluster:
    """The node of one GPU on which a step runs by itself; ``InputError`` where more nodes are asked for."""
    nodes = request.machine.nodes or 1
    if nodes > 1:
        raise InputError(f"--nodes {nodes}: the step runs on one GPU; give --gpus, the GPUs of the whole job")
    assert request.machine.gpu is not None
    return single_gpu(gpu_machine(request.machine.gpu))


def setting_of(configuration: ConfigurationOptions, machine: Machine) -> Setting:
    """The software stack that ``configuration`` asks for, on ``machine``."""
    return Setting(
        machine,
        load_overheads(configuration.overheads),
        tf32=configuration.dtype == "tf32",
        cuda_graph=configuration.cuda_graph,
        compiled=configuration.compiled,
    )
