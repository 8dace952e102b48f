"""Setting of a step from its request: GPUs, software stack and step options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from costmodel.base.errors import MachineError
from costmodel.machines.cluster import Cluster, load_cluster, single_gpu
from costmodel.machines.cluster_file import find_cluster
from costmodel.machines.machine_file import load_machine
from costmodel.machines.machine_records import Machine
from e2e.capture.models.stacks import stack_of
from e2e.explain.predictor import Setting
from e2e.price.host_overheads import load_overheads
from e2e.sources import request as parts
from e2e.step.option_fields import Options
from e2e.step.options import NO_TF32, StepOptions, Tf32Switches, check_units


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


def placed_values(cluster: Cluster) -> dict[str, str]:
    """Return the placement of several GPUs, by option."""
    return {"--nodes": f"{cluster.nodes} ({cluster.name})"}
