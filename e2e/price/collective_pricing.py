"""Durations of collectives, the links that they use, and the load on a GPU of kernels and collectives side by side.

This is where the cost of a collective is asked, from a model of transfers on a cluster; its physics are in
:mod:`costmodel.collectives`.

A collective occupies the multiprocessors of its thread blocks and moves its bytes through the memory
(:mod:`costmodel.collectives.physics`). A kernel keeps the memory system busy while it runs, from DRAM or from L2,
except during its start. Beside a collective that holds the fraction ``h`` of the multiprocessors and uses the fraction
``c`` of the memory, both run at ``1 / (1 + c)``, and the kernel at ``1 - h`` of that
(:mod:`e2e.simulate.link_sharing`). No figure here is fitted. Slowdown of kernels beside an all-gather:

    A100 SXM, product 1.76, attention 1.83 (nccl issue 1428)                              here 1.72
    H100 SXM, products 1.70 (NVIDIA developer forum 337991), 2 (pytorch issue 143988),
              1.3 to 1.4 (pytorch pull request 179937)                                    here 1.63

Recorded durations include the effect of concurrent work: such tasks have no load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

from costmodel.base.errors import InputError
from costmodel.cost_model import CostModel, Estimate
from costmodel.gpu.families.rates import kernel_floor
from costmodel.machines.machine_records import Machine
from costmodel.operators.collective_transfer import COLLECTIVE_KINDS, CollectiveKind, CollectiveTransfer
from costmodel.operators.device_work import MemoryCopy
from e2e.step.collective_names import ACROSS_NODES, POINT_TO_POINT
from e2e.step.execution_graph import Collective, Duration, ExecutionGraph, GpuLoad, RankGraph, Task

if TYPE_CHECKING:
    from costmodel.machines.cluster import Cluster


NOTHING = Duration(0.0, 0.0, 0.0, "", "analytic")
# Load on each GPU of a transfer of the given seconds.
LoadOf = Callable[[CollectiveTransfer, float], GpuLoad]


class NodeLayout(Protocol):
    """Part of the interface of :class:`costmodel.machines.cluster.Cluster` used here: ranks fill its nodes in order."""

    @property
    def name(self) -> str:
        """Name of the cluster."""
        ...

    @property
    def gpus_per_node(self) -> int:
        """GPUs of the job on each node."""
        ...

    @property
    def nodes(self) -> int:
        """Number of nodes of the job."""
        ...

    @property
    def node_gpus(self) -> int:
        """Number of GPUs of a whole node."""
        ...

    @property
    def network_cards(self) -> int:
        """Number of network cards of a node."""
        ...


def price_collectives(
    graph: ExecutionGraph, cluster: NodeLayout, model: CostModel, load: LoadOf | None = None
) -> ExecutionGraph:
    """Return ``graph`` with transfer time and links of every collective without a duration.

    ``model`` prices :class:`CollectiveTransfer`; ``load`` gives the load on a GPU (default: none). Raise ``InputError``
    if a group has ranks that ``cluster`` does not have.
    """
    exchanges = _exchanges(graph)
    transfers = {key: _transfer(exchange, graph, cluster) for key, exchange in exchanges.items()}
    distinct = list(dict.fromkeys(transfer for transfer in transfers.values() if transfer is not None))
    estimates = dict(zip(distinct, model.estimate(distinct), strict=True)) if distinct else {}

    def priced(rank: RankGraph) -> RankGraph:
        return replace(rank, tasks=tuple(one(rank.rank, task) for task in rank.tasks))

    def one(rank: int, task: Task) -> Task:
        if task.collective is None or task.duration is not None:
            return task
        transfer = transfers[_key(task.collective)]
        if transfer is None:
            return replace(task, duration=NOTHING)
        estimate = estimates[transfer]
        links = _links(rank, transfer, estimate, cluster)
        links = _directed(links, task.collective.kind)
        taken = None if load is None else load(transfer, estimate.seconds)
        return replace(task, duration=_duration(estimate, task.collective.pieces), links=links, load=taken)

    return replace(graph, ranks=tuple(priced(rank) for rank in graph.ranks))


@dataclass
class _Exchange:
    """One collective over all its ranks in the graph: the largest bytes sent and received by any of them."""

    collective: Collective
    sent: int = 0
    received: int = 0
    uneven: bool = False

    def add(self, collective: Collective) -> None:
        self.uneven |= collective.received_bytes is not None or collective.size_bytes != self.collective.size_bytes
        self.sent = max(self.sent, collective.size_bytes * collective.pieces)
        self.received = max(self.received, collective.received_bytes or 0)


def _key(collective: Collective) -> tuple[str, int]:
    return collective.group, collective.sequence


def _exchanges(graph: ExecutionGraph) -> dict[tuple[str, int], _Exchange]:
    found: dict[tuple[str, int], _Exchange] = {}
    for rank in graph.ranks:
        for task in rank.tasks:
            if task.collective is not None and task.duration is None:
                key = _key(task.collective)
                found.setdefault(key, _Exchange(task.collective)).add(task.collective)
    return found


def _transfer(exchange: _Exchange, graph: ExecutionGraph, cluster: NodeLayout) -> CollectiveTransfer | None:
    """Return the transfer of a collective, or None for a group of one rank, which moves nothing."""
    collective = exchange.collective
    nodes = _nodes(collective, cluster)
    size = len(collective.ranks)
    if size == 1:
        return None
    busiest = None
    if exchange.uneven and collective.kind == "all_to_all":
        # The part that a rank keeps is not recorded; an even share is assumed.
        busiest = max(exchange.sent, exchange.received) * (size - 1) / size
    return CollectiveTransfer(
        kind=_kind(collective),
        size_bytes=exchange.sent,
        ranks=size,
        nodes=nodes,
        busiest_bytes=busiest,
        sharing=_sharing(collective, nodes, graph.multiplicity, cluster),
        span=_span(collective, cluster),
        puts=collective.group.startswith(ACROSS_NODES),
    )


def _span(collective: Collective, cluster: NodeLayout) -> int:
    """Return the distance of the group's ranks in a node, in GPUs including the first and last; 0 if they are
    neighbours.
    """
    places: dict[int, list[int]] = {}
    for rank in collective.ranks:
        places.setdefault(rank // cluster.gpus_per_node, []).append(rank)
    spans = [(max(ranks) - min(ranks) + 1, len(ranks)) for ranks in places.values()]
    return max((span for span, count in spans if span > count), default=0)


def _kind(collective: Collective) -> CollectiveKind:
    kind = "send_recv" if collective.kind in POINT_TO_POINT else collective.kind
    if kind not in COLLECTIVE_KINDS:
        raise InputError(
            f"{collective.kind} of group {collective.group!r}: no such collective is priced; known: "
            f"{', '.join(COLLECTIVE_KINDS)}"
        )
    return cast(CollectiveKind, kind)


def _nodes(collective: Collective, cluster: NodeLayout) -> int:
    world = cluster.gpus_per_node * cluster.nodes
    last = max(collective.ranks)
    if last >= world:
        raise InputError(
            f"{collective.kind} of group {collective.group!r} has rank {last}, but {cluster.name} has {world} GPUs; "
            "give --gpus and --nodes of the whole job"
        )
    return len({rank // cluster.gpus_per_node for rank in collective.ranks})


def _sharing(collective: Collective, nodes: int, multiplicity: Mapping[int, int], cluster: NodeLayout) -> int:
    """Return the number of identical groups, folded into this one, that share a node's network at the same time."""
    if nodes == 1:
        return 1
    size = len(collective.ranks)
    # Ranks represented by the members of this group, in groups like this one.
    alike = sum(multiplicity.get(rank, 1) for rank in collective.ranks if rank in multiplicity) // size
    return max(1, min(alike, cluster.gpus_per_node * nodes // size))


def _links(
    rank: int, transfer: CollectiveTransfer, estimate: Estimate, cluster: NodeLayout
) -> tuple[tuple[str, float], ...]:
    """Return the GPU's port and, between nodes, the network of its node, each with the fraction used.

    A transfer occupies a link for the part of its time that its bytes need there, from the model's breakdown. A group
    reaches the node's cards of its own GPUs; groups folded into this one use theirs at the same time.
    """
    links = ((f"gpu {rank}", _busy("gpu_link_seconds", estimate)),)
    if transfer.nodes == 1:
        return links
    reached = transfer.ranks_per_node * max(1.0, cluster.network_cards / cluster.node_gpus)
    cards = min(1.0, transfer.sharing * reached / cluster.network_cards)
    network = (f"network of node {rank // cluster.gpus_per_node}", cards * _busy("network_seconds", estimate))
    return (*links, network)


def _directed(links: tuple[tuple[str, float], ...], kind: str) -> tuple[tuple[str, float], ...]:
    """Split full-duplex links by direction: a send uses the outgoing one, a receive the incoming one, other collectives
    both.
    """
    ways = {"send": ("out",), "recv": ("in",)}.get(kind, ("out", "in"))
    return tuple((f"{name} {way}", share) for name, share in links for way in ways)


def _busy(term: str, estimate: Estimate) -> float:
    """Return the fraction of the (analytic) time in ``term`` of the breakdown; 1 if the model does not give it."""
    part, whole = estimate.breakdown.get(term), estimate.breakdown.get("analytic_seconds", estimate.seconds)
    if not isinstance(part, float) or not isinstance(whole, float) or whole <= 0:
        return 1.0
    return min(1.0, part / whole)


def _duration(estimate: Estimate, pieces: int) -> Duration:
    seconds, lower, upper = (each / pieces for each in (estimate.seconds, estimate.lower, estimate.upper))
    return Duration(seconds, lower, upper, estimate.bound, estimate.source)


# Busy fractions of kernels are rounded to multiples of 1 / _STEPS, so that the simulator has few distinct loads.
_STEPS = 20


def load_on(cluster: Cluster) -> Callable[[CollectiveTransfer, float], GpuLoad]:
    """Return the function (transfer, seconds) -> load on each GPU of ``cluster``."""

    def load(transfer: CollectiveTransfer, seconds: float) -> GpuLoad:
        # Slow to import, and not needed by a graph without collectives.
        from costmodel.collectives.physics import occupancy

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
