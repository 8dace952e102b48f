"""Which tasks share their GPU with collectives, and for how much of their time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.collectives import collective_cost_model
from costmodel.gpu.families.rates import kernel_floor
from costmodel.machines.cluster import load_cluster
from costmodel.machines.machine_file import load_machine
from costmodel.operators.collective_transfer import CollectiveTransfer
from costmodel.operators.device_work import MemoryCopy
from e2e.price.collective_pricing import kernel_loads, load_on
from e2e.step.execution_graph import ExecutionGraph, GpuLoad, Kernel, Task
from tests.e2e.drawn_graphs import Drawing, together

GPU = load_machine("a100-sxm-80gb")
FLOOR = kernel_floor(GPU)
TAKEN = GpuLoad(0.3, 0.2)


def with_tasks(graph: ExecutionGraph, place: int, *tasks: Task) -> ExecutionGraph:
    rank = replace(graph.ranks[place], tasks=tasks)
    return replace(graph, ranks=(*graph.ranks[:place], rank, *graph.ranks[place + 1 :]))


def priced(*floors: float) -> ExecutionGraph:
    """A collective that says what it takes, and kernels so many times as long as the shortest one."""
    d = Drawing()
    d.collective("c", 1.0, 0, ranks=(0,))
    for count in floors:
        d.kernel("k", count * FLOOR)
    graph = together(d)
    first, *others = graph.ranks[0].tasks
    return with_tasks(graph, 0, replace(first, load=TAKEN), *others)


def unpriced(graph: ExecutionGraph) -> ExecutionGraph:
    """All ranks without durations."""
    for place, rank in enumerate(graph.ranks):
        graph = with_tasks(graph, place, *(replace(task, duration=None) for task in rank.tasks))
    return graph


def loads(before: ExecutionGraph, graph: ExecutionGraph) -> list[GpuLoad | None]:
    return [task.load for task in kernel_loads(before, graph, GPU).ranks[0].tasks]


@pytest.mark.parametrize(
    ("floors", "busy"),
    # 1 - 1/1.02 is less than half a twentieth, 1 - 1/1.04 is more; 1 - 1/3 is nearest to thirteen.
    [(0.5, None), (1.0, None), (1.02, None), (1.04, 0.05), (2.0, 0.5), (3.0, 0.65), (10.0, 0.9), (1e6, 1.0)],
)
def test_a_kernel_is_busy_but_for_its_start_in_twentieths(floors, busy):
    graph = priced(floors)
    assert loads(unpriced(graph), graph) == [TAKEN, None if busy is None else GpuLoad(pytest.approx(busy))]


@pytest.mark.parametrize(
    ("kind", "shares"),
    [("host_to_device", False), ("device_to_host", False), ("device_to_device", True), ("memset", True),
     ("peer", True)],
)  # fmt: skip
def test_copies_between_host_and_device_take_little_of_the_gpu(kind, shares):
    graph = priced(1e6)
    collective, task = graph.ranks[0].tasks
    graph = with_tasks(graph, 0, collective, replace(task, operators=(MemoryCopy(1000, kind),)))
    assert loads(unpriced(graph), graph) == [TAKEN, GpuLoad(1.0) if shares else None]


def test_what_has_no_price_yet_and_collectives_keep_the_load_they_have():
    graph = priced(1e6, 1e6)
    collective, first, second = graph.ranks[0].tasks
    other = replace(collective, id=2, load=None)
    partly = with_tasks(graph, 0, collective, replace(first, duration=None), other)
    assert loads(unpriced(graph), partly) == [TAKEN, None, None]


def test_each_rank_by_itself():
    """The second rank has no collective with a load: its kernels have none either."""
    graph = priced(1e6)
    d = Drawing(1)
    d.kernel("k", 1e6 * FLOOR)
    graph = replace(graph, ranks=(*graph.ranks, d.graph()))
    found = kernel_loads(unpriced(graph), graph, GPU)
    assert [[task.load for task in rank.tasks] for rank in found.ranks] == [[TAKEN, GpuLoad(1.0)], [None]]


def test_several_kernels_in_one_task_start_as_often():
    graph = priced(8)
    collective, task = graph.ranks[0].tasks
    kernels = tuple(Kernel("k", "kernel", ()) for _ in range(4))
    graph = with_tasks(graph, 0, collective, replace(task, kernels=kernels))
    assert loads(unpriced(graph), graph) == [TAKEN, GpuLoad(0.5)]


def test_recorded_kernels_have_none():
    graph = priced(4, 4)
    assert loads(graph, graph) == [TAKEN, None, None]


@pytest.mark.parametrize(("gpu", "low", "high"), [("a100-sxm-80gb", 1.70, 1.85), ("h100-sxm", 1.35, 2.0)])
def test_the_slowdown_is_as_published(gpu: str, low: float, high: float) -> None:
    """Beside an all-gather in a node: NCCL issue 1428; NVIDIA forum 337991, PyTorch issue 143988 and pull 179937."""
    cluster = load_cluster(gpu, 8)
    transfer = CollectiveTransfer("all_gather", 50e6, 8)
    load = load_on(cluster)(transfer, collective_cost_model(cluster).estimate([transfer])[0].seconds)
    assert low <= (1 + load.memory) / (1 - load.held) <= high
