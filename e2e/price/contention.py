"""Load on the GPU of kernels and collectives that run at the same time.

A collective occupies the multiprocessors of its thread blocks and moves its bytes through the memory
(:mod:`costmodel.collectives.occupancy`). A kernel keeps the memory system busy while it runs, from DRAM or from L2,
except during its start. Beside a collective that holds the fraction ``h`` of the multiprocessors and uses the fraction
``c`` of the memory, both run at ``1 / (1 + c)``, and the kernel at ``1 - h`` of that
(:mod:`e2e.simulate.link_sharing`). No figure here is fitted. Slowdown of kernels beside an all-gather:

    A100 SXM, product 1.76, attention 1.83 (nccl issue 1428)                              here 1.72
    H100 SXM, products 1.70 (NVIDIA developer forum 337991), 2 (pytorch issue 143988),
              1.3 to 1.4 (pytorch pull request 179937)                                    here 1.63

Recorded durations include the effect of concurrent work: such tasks have no load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from costmodel.gpu.families.rates import kernel_floor
from costmodel.machines.machine_records import Machine
from costmodel.operators.collective_transfer import CollectiveTransfer
from costmodel.operators.device_work import MemoryCopy
from e2e.step.execution_graph import ExecutionGraph, GpuLoad, RankGraph, Task

if TYPE_CHECKING:
    from costmodel.machines.cluster import Cluster

# Busy fractions of kernels are rounded to multiples of 1 / _STEPS, so that the simulator has few distinct loads.
_STEPS = 20


def load_on(cluster: Cluster) -> Callable[[CollectiveTransfer, float], GpuLoad]:
    """Return the function (transfer, seconds) -> load on each GPU of ``cluster``."""

    def load(transfer: CollectiveTransfer, seconds: float) -> GpuLoad:
        # Slow to import, and not needed by a graph without collectives.
        from costmodel.collectives.occupancy import occupancy

        taken = occupancy(transfer, seconds, cluster)
        return GpuLoad(taken.memory, taken.held)

    return load


def kernel_loads(graph: ExecutionGraph, priced: ExecutionGraph, machine: Machine) -> ExecutionGraph:
    """Return ``priced`` with the loads of kernels that had no duration in ``graph``, on ranks with collectives that
    have a load.

    Both graphs have the same tasks.
    """
    floor = kernel_floor(machine)
    ranks = (_rank_loads(*pair, floor) for pair in zip(graph.ranks, priced.ranks, strict=True))
    return replace(priced, ranks=tuple(ranks))


def _rank_loads(before: RankGraph, priced: RankGraph, floor: float) -> RankGraph:
    if all(task.load is None for task in priced.tasks):
        return priced
    pairs = zip(before.tasks, priced.tasks, strict=True)
    return replace(priced, tasks=tuple(_loaded(*pair, floor) for pair in pairs))


def _loaded(before: Task, task: Task, floor: float) -> Task:
    if before.duration is not None or task.duration is None or task.collective is not None or _over_the_bus(task):
        return task
    starting = (len(task.kernels) or 1) * floor
    busy = 1.0 - starting / task.duration.seconds if task.duration.seconds > starting else 0.0
    busy = round(busy * _STEPS) / _STEPS
    return replace(task, load=GpuLoad(busy)) if busy > 0 else task


def _over_the_bus(task: Task) -> bool:
    """True for copies from and to the host, which use little of the GPU."""
    return any(
        isinstance(operator, MemoryCopy) and operator.kind in ("host_to_device", "device_to_host")
        for operator in task.operators
    )
