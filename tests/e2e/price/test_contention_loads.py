"""What tasks take of their GPU: kernels that were predicted, beside collectives that were; nothing recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.gpu.families.rates import kernel_floor
from costmodel.machines.cluster import load_cluster
from costmodel.machines.machine_file import load_machine
from costmodel.operators.collective_transfer import CollectiveTransfer
from costmodel.operators.device_work import MemoryCopy
from e2e.price.collective_pricing import kernel_loads, load_on
from e2e.step.execution_graph import ExecutionGraph, GpuLoad, Kernel
from tests.e2e.drawn_graphs import Drawing, together

GPU = load_machine("a100-sxm-80gb")
FLOOR = kernel_floor(GPU)


TAKEN = GpuLoad(0.3, 0.2)


def priced(*floors: float, load: GpuLoad | None = TAKEN) -> ExecutionGraph:
    """A collective, and kernels so many times as long as the shortest one."""
    d = Drawing()
    d.collective("c", 1.0, 0, ranks=(0,))
    for count in floors:
        d.kernel("k", count * FLOOR)
    graph = together(d)
    first, *others = graph.ranks[0].tasks
    return replace(graph, ranks=(replace(graph.ranks[0], tasks=(replace(first, load=load), *others)),))


def unpriced(graph: ExecutionGraph) -> ExecutionGraph:
    tasks = tuple(replace(task, duration=None) for task in graph.ranks[0].tasks)
    return replace(graph, ranks=(replace(graph.ranks[0], tasks=tasks),))


def loads(before: ExecutionGraph, graph: ExecutionGraph) -> list[GpuLoad | None]:
    return [task.load for task in kernel_loads(before, graph, GPU).ranks[0].tasks[1:]]


def test_a_kernel_is_busy_but_for_its_start() -> None:
    graph = priced(1, 2, 4, 1000)
    assert loads(unpriced(graph), graph) == [None, GpuLoad(0.5), GpuLoad(0.75), GpuLoad(1.0)]


def test_several_kernels_in_one_task_start_as_often() -> None:
    graph = priced(8)
    first, task = graph.ranks[0].tasks
    kernels = tuple(Kernel("k", "kernel", ()) for _ in range(4))
    graph = replace(graph, ranks=(replace(graph.ranks[0], tasks=(first, replace(task, kernels=kernels))),))
    assert loads(unpriced(graph), graph) == [GpuLoad(0.5)]


def test_recorded_kernels_and_copies_over_the_bus_have_none() -> None:
    graph = priced(4, 4)
    assert loads(graph, graph) == [None, None]
    first, copy, kernel = graph.ranks[0].tasks
    copy = replace(copy, operators=(MemoryCopy(1000, "host_to_device"),))
    graph = replace(graph, ranks=(replace(graph.ranks[0], tasks=(first, copy, kernel)),))
    assert loads(unpriced(graph), graph) == [None, GpuLoad(0.75)]


def test_without_collectives_that_say_what_they_take_nothing_has_a_load() -> None:
    graph = priced(4, load=None)
    assert loads(unpriced(graph), graph) == [None]


@pytest.mark.parametrize(("gpu", "low", "high"), [("a100-sxm-80gb", 1.70, 1.85), ("h100-sxm", 1.35, 2.0)])
def test_the_slowdown_is_as_published(gpu: str, low: float, high: float) -> None:
    """Beside an all-gather in a node: NCCL issue 1428; NVIDIA forum 337991, PyTorch issue 143988 and pull 179937."""
    cluster = load_cluster(gpu, 8)
    from costmodel.collectives import collective_cost_model

    transfer = CollectiveTransfer("all_gather", 50e6, 8)
    load = load_on(cluster)(transfer, collective_cost_model(cluster).estimate([transfer])[0].seconds)
    assert low <= (1 + load.memory) / (1 - load.held) <= high
