"""Clusters: GPUs of one kind in nodes, the links inside a node and the network between nodes.

Files are read by :mod:`costmodel.machines.cluster_file`; a GPU's name alone stands for the system in which it is
usually sold.

Point-to-point links (hybrid cube mesh of a DGX-1) are used in rings. NCCL's search (src/graph/search.cc) finds rings
through all GPUs of a group, each over its own links, and runs every ring in both directions; the bus bandwidth of a
group is that of its rings together. Where none exists, hops pass through other GPUs: such a number of GPUs is given the
rings of the next larger one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
from packaging.version import InvalidVersion, Version

from costmodel.base.errors import InputError, MachineError
from costmodel.base.units import whole_number
from costmodel.machines.cluster_file import (
    ClusterFile,
    NetworkFile,
    Topology,
    cluster_of_gpu,
    find_cluster,
    find_network,
)
from costmodel.machines.machine_file import load_machine
from costmodel.machines.machine_records import Link, Machine

Pair = tuple[int, int]


@lru_cache(maxsize=256)
def ring_links(links: tuple[tuple[int, int, int], ...], gpus: tuple[int, ...]) -> float:
    """Bandwidth of one GPU of ``gpus`` (two or more) in the rings of this group, one direction, in units of links; 0 if
    links form no ring. ``links``: (GPU, GPU, links between them).
    """
    room = {_pair(a, b): count for a, b, count in links if a in gpus and b in gpus}
    if len(gpus) == 2:
        return float(room.get(_pair(*gpus), 0))
    return 2.0 * _most([each for each in _rings(gpus) if _fits(each, room)], room)


def _pair(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)


def _rings(gpus: Sequence[int]) -> Iterator[Counter[Pair]]:
    """Links used by each ring through all of ``gpus``, one direction of each ring."""
    first, *others = gpus
    for order in itertools.permutations(others):
        if order[0] < order[-1]:  # else the same ring in the other direction
            yield Counter(_pair(a, b) for a, b in itertools.pairwise((first, *order, first)))


def _fits(ring: Counter[Pair], room: Mapping[Pair, int]) -> bool:
    return all(room.get(pair, 0) >= count for pair, count in ring.items())


def _most(rings: Sequence[Counter[Pair]], room: Mapping[Pair, int]) -> int:
    """Largest number of ``rings``, with repetition, that fit ``room`` together."""
    best = 0
    for place, ring in enumerate(rings):
        left = {pair: count - ring.get(pair, 0) for pair, count in room.items()}
        best = max(best, 1 + _most([each for each in rings[place:] if _fits(each, left)], left))
        if best * len(ring) + len(ring) > sum(room.values()):  # no room for one more
            break
    return best


Found = TypeVar("Found")
_MOST_CARDS = 512  # network cards of a node
# Largest job: some ten times the largest in existence; each group of ranks is written out.
MOST_GPUS = 1 << 20


def nccl_version(text: str) -> Version:
    """Version of NCCL, to be compared; below all others where ``text`` is empty or no version."""
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


@dataclass(frozen=True)
class Cluster:
    """Cluster of ``nodes`` nodes with ``gpus_per_node`` participating GPUs each."""

    name: str
    machine: Machine
    gpus_per_node: int
    nodes: int
    # Link of one GPU inside its node.
    intra_node: Link
    # One network card; None for one node.
    network: Link | None
    # `switch` (every pair at full rate), `mesh` (NVLinks from GPU to GPU), `pairs` (NVLink bridges between two, the
    # rest through the host), `host` (PCIe).
    topology: Topology = "switch"
    # GPUs of a node, participating or not.
    node_gpus: int = 8
    # Network cards of a node.
    network_cards: int = 1
    # (communicating GPUs of a node, share of the link's bandwidth that they reach), ascending.
    usable: tuple[tuple[int, float], ...] = ((2, 1.0),)
    # NCCL version whose measurements are used; the newest measured if empty.
    nccl: str = ""
    source: str = field(default="", compare=False)
    # Bytes/s of a node's main memory, all sockets together; None if unknown.
    host_memory: float | None = None
    # True if NCCL may use in-switch reductions where supported.
    in_switch: bool = True
    # Name of the network.
    network_name: str = ""
    # True if only the GPU was named: the nodes are the usual ones with it, and so is their network.
    network_assumed: bool = field(default=False, compare=False)

    @property
    def network_text(self) -> str:
        """The network in the syntax of ``--network``, and a GPU's share of it by the datasheet; empty if none
        is used.
        """
        if self.network is None or self.nodes == 1:
            return ""
        cards, most = self.network_cards, self.network.datasheet or self.network.bandwidth
        share = most * cards / self.node_gpus * 8 / 1e9
        return f"{self.network_name}:{cards} ({cards} x {most * 8 / 1e9:g} Gb/s a node, {share:g} Gb/s per GPU)"

    @property
    def host_bandwidth(self) -> float | None:
        """Bytes/s of the host's memory per participating GPU."""
        return None if self.host_memory is None else self.host_memory / self.gpus_per_node

    @property
    def gpus(self) -> int:
        """Number of participating GPUs."""
        return self.gpus_per_node * self.nodes

    def usable_share(self, gpus: int) -> float:
        """Share of the link's bandwidth that ``gpus`` communicating GPUs of a node reach.

        Between two counts a power law of their number; through a host, which relays all traffic between pairs, of the
        number of pairs.
        """
        counts, shares = zip(*self.usable, strict=True)
        places = [_crowd(self.topology, count) for count in (max(gpus, 2), *counts)]
        return float(np.exp(np.interp(places[0], places[1:], np.log(shares))))

    def node_bandwidth(self) -> float:
        """Bytes/s of all network cards of a node together; :class:`MachineError` without a network."""
        return self.network_link().bandwidth * self.network_cards

    def network_link(self) -> Link:
        """One network card; :class:`MachineError` if the cluster has none."""
        if self.network is None:
            raise MachineError(
                f"{self.source or f'cluster {self.name!r}'}: has no network, so nothing can leave a node; "
                "name one with --network, such as infiniband-ndr:8"
            )
        return self.network


def load_cluster(
    machine: str | Path | Machine, gpus: int, nodes: int | None = None, network: str | None = None, nccl: str = ""
) -> Cluster:
    """Cluster of ``gpus`` GPUs over ``nodes`` nodes of ``machine``: name or YAML file of a cluster or a GPU.

    ``gpus``: of all nodes. Without ``nodes``, as many full nodes of the usual size as needed; ``nodes`` 1 is the same
    if one node cannot hold the GPUs. Where ``machine`` is a GPU whose cards are joined by PCIe, a node is taken to hold
    the ``gpus / nodes`` cards that are asked. ``network``: a name of
    ``machines/network`` or a YAML file, ``NAME:N`` for N cards per node (default N: as in its file, else as many as the
    cluster's own network has); default: the cluster's own. Raises :class:`MachineError` for an unknown name,
    :class:`InputError` if the GPUs do not fill the nodes evenly.
    """
    file, gpu = _described(machine, gpus // nodes if nodes else 0)
    per_node = _gpus_per_node(file, gpus, 1 if nodes is None else nodes)
    nodes = gpus // per_node
    card, cards, called = _network(file, network, nodes)
    return Cluster(
        name=file.name,
        machine=gpu,
        gpus_per_node=per_node,
        nodes=nodes,
        intra_node=_intra_node(file, gpu),
        network=card,
        topology=file.topology,
        node_gpus=file.gpus_per_node,
        network_cards=cards,
        usable=_shares_of_mesh(file.mesh, file.gpus_per_node) if file.mesh else file.usable,
        nccl=nccl or file.nccl,
        source=file.source,
        host_memory=file.host_memory,
        in_switch=file.in_switch,
        network_name=called,
        network_assumed=network is None and not _names_cluster(machine),
    )


def _names_cluster(machine: str | Path | Machine) -> bool:
    return not isinstance(machine, Machine) and find_cluster(machine) is not None


def load_gpu(name: str) -> Machine:
    """Return the GPU ``name``, given as a machine or a cluster; raises ``MachineError`` if it is not a GPU."""
    cluster = find_cluster(name)
    machine = load_machine(name if cluster is None else cluster.machine)
    if machine.kind != "gpu":
        raise MachineError(f"{name}: is a {machine.kind} machine; `python -m costmodel machines` lists the GPUs")
    return machine


def single_gpu(gpu: Machine) -> Cluster:
    """Cluster of a single ``gpu``, which needs no link in its file."""
    # Nothing is sent: if the file has no link, a placeholder that takes no time is used.
    link = next(iter(gpu.links), Link("pcie", math.inf, 0.0, "not used"))
    return Cluster(gpu.name, gpu, 1, 1, link, None, node_gpus=1, source=gpu.source)


def _crowd(topology: Topology, gpus: int) -> float:
    """Logarithm of the number of GPUs that share links, or of their pairs through a host."""
    return math.log(gpus * (gpus - 1) if topology == "host" else gpus)


def _described(machine: str | Path | Machine, per_node: int) -> tuple[ClusterFile, Machine]:
    if isinstance(machine, Machine):
        return cluster_of_gpu(machine, per_node), machine
    file = find_cluster(machine)
    if file is not None:
        return file, _named(file, "machine", load_machine, file.machine)
    gpu = load_machine(machine)
    gpu.chip()
    return cluster_of_gpu(gpu, per_node), gpu


def _gpus_per_node(file: ClusterFile, gpus: int, nodes: int) -> int:
    where = file.source or f"cluster {file.name!r}"
    if gpus < 1 or nodes < 1:
        raise InputError(f"--gpus {gpus}, --nodes {nodes}: must be at least 1")
    if gpus > MOST_GPUS:
        raise InputError(f"--gpus {gpus}: jobs of at most {MOST_GPUS:,} GPUs are predicted; ask for fewer")
    if nodes == 1 and gpus > file.gpus_per_node:
        nodes = -(-gpus // file.gpus_per_node)
    if gpus % nodes:
        raise InputError(
            f"--gpus {gpus} does not fill {nodes} nodes evenly; give a multiple of {nodes}, or other --nodes"
        )
    if gpus // nodes > file.gpus_per_node:
        needed = -(-gpus // file.gpus_per_node)
        raise InputError(
            f"{where}: a node holds {file.gpus_per_node} GPUs, {gpus} over {nodes} nodes asked; "
            f"give --nodes {needed} or more"
        )
    return gpus // nodes


def _network(file: ClusterFile, asked: str | None, nodes: int) -> tuple[Link | None, int, str]:
    """One card of the network, number of cards per node, and the network's name."""
    name, colon, count = (asked or "").partition(":")
    told = whole_number(count)
    if colon and not (told and told <= _MOST_CARDS):
        raise InputError(f"--network {asked}: the number of cards must be 1 to {_MOST_CARDS}, such as infiniband-ndr:8")
    chosen = name or file.network
    if chosen is None:
        if nodes > 1:
            raise InputError(
                f"{file.source or f'cluster {file.name!r}'}: {nodes} nodes but no network; name one with --network, "
                "such as infiniband-ndr:8 (`python -m costmodel machines` lists them)"
            )
        return None, file.network_cards, ""
    if name:
        found = find_network(name)
        return _card(found), told or found.cards_per_node or file.network_cards, found.name
    found = _named(file, "network.name", find_network, chosen)
    return _card(found), file.network_cards, found.name


def _named(file: ClusterFile, key: str, find: Callable[[str], Found], name: str) -> Found:
    """Object that ``file`` names under ``key``; the :class:`MachineError` names the file."""
    try:
        return find(name)
    except MachineError as error:
        raise MachineError(f"{file.source}: {key}: {error}" if file.source else str(error)) from None


def _card(network: NetworkFile) -> Link:
    return Link("network", network.bandwidth, network.latency, network.origin, datasheet=network.datasheet)


def _shares_of_mesh(mesh: tuple[tuple[int, int, int], ...], gpus: int) -> tuple[tuple[int, float], ...]:
    """Share of all links of a GPU that the rings of the first 2, 3, ... of ``gpus`` GPUs use; of a number without rings
    that of the next one with rings, at least one link.
    """
    degree = max(sum(count for a, b, count in mesh if one in (a, b)) for one in range(gpus))
    shares, links = {}, 1.0
    for count in range(gpus, 1, -1):
        links = ring_links(mesh, tuple(range(count))) or links
        shares[count] = links / degree
    return tuple(sorted(shares.items()))


def _intra_node(file: ClusterFile, gpu: Machine) -> Link:
    link = gpu.link(file.link)
    if link is None:
        known = ", ".join(each.kind for each in gpu.links) or "none"
        raise MachineError(f"{gpu.source or gpu.name}: no {file.link} link (known: {known}); add it under links")
    bandwidth = link.bandwidth if file.bandwidth is None else file.bandwidth
    latency = link.latency_seconds if file.latency is None else file.latency
    return dataclasses.replace(link, bandwidth=bandwidth, latency_seconds=latency)
