"""Files of clusters and networks: strict YAML. Every mistake is a :class:`MachineError` naming file and key.

machines/cluster/dgx-h100.yaml          machines/network/infiniband-ndr.yaml
name: dgx-h100                          name: infiniband-ndr
kind: cluster                           kind: network
description: ...                        description: ...
machine: h100-sxm      # a GPU          bandwidth: 48 GB/s   # of one card, one direction, sustained
usual: true            # of that GPU    datasheet: 50 GB/s   # optional
gpus_per_node: 8                        latency: 5 us        # GPU memory to GPU memory, one small message
intra_node:                             cards_per_node: 1    # optional: of `--network NAME` without a number
  link: nvlink         # nvlink | pcie: of the GPU's links            origin: ...
  topology: switch     # switch | mesh | pairs | host
  bandwidth: 360 GB/s  # optional: instead of the GPU's own
  latency: 2 us        # optional
  usable: {2: 1.0, 8: 0.25}   # optional: share of the bandwidth reached by that number of GPUs
  links: [[0, 1, 1], [0, 3, 2]]   # instead, of a mesh: GPU, GPU, links between them; of `bandwidth` all of one GPU's
  origin: ...
network:               # optional
  name: infiniband-ndr
  cards_per_node: 8
  origin: ...
nccl: 2.27.3           # optional: version whose measurements price
in_switch: false       # optional: switches that could add do not (NCCL_NVLS_ENABLE=0)
host_memory:           # optional: main memory of a node, all sockets together
  bandwidth: 490 GB/s  # sustained
  datasheet: 614 GB/s  # optional
  origin: ...
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from costmodel.base.errors import MachineError
from costmodel.machines.machine_file import PACKAGED_DIRECTORY, load_machine, machine_files, offered, user_directory
from costmodel.machines.machine_records import Bandwidth, Count, FileRecord, Machine, Name, NotInFile, Seconds, Text
from costmodel.machines.record_file import StrictModel, convert_record, read_mapping

Topology = Literal["switch", "mesh", "pairs", "host"]
# Without a file: one pair of GPUs takes all of the host's bandwidth, n / 2 pairs share it.
_HOST_SHARES = ((2, 1.0), (4, 0.5), (8, 0.25))
_SUFFIXES = (".yaml", ".yml")
# Suffix of the name of a GPU's node that has no file.
_NODE = "-node"


@dataclass(frozen=True)
class ClusterFile:
    """Content of a cluster file, in SI units."""

    name: str
    # Name of the GPU.
    machine: str
    gpus_per_node: int
    link: Literal["nvlink", "pcie"]
    topology: Topology
    bandwidth: float | None = None
    latency: float | None = None
    # Name of the network.
    network: str | None = None
    network_cards: int = 1
    usable: tuple[tuple[int, float], ...] = ((2, 1.0),)
    # GPU-to-GPU links: each pair and its number of links.
    mesh: tuple[tuple[int, int, int], ...] = ()
    nccl: str = ""
    # True if NCCL may use in-switch reductions.
    in_switch: bool = True
    usual: bool = False
    description: str = ""
    source: str = ""
    host_memory: float | None = None


@dataclass(frozen=True)
class NetworkFile(FileRecord):
    """One network card: bytes/s in one direction; seconds of one small message from GPU to GPU."""

    name: Name
    kind: Literal["network"]
    description: Text
    bandwidth: Bandwidth
    latency: Seconds
    origin: Text
    datasheet: Bandwidth | None = None
    # Default number of cards per node; None: as many as the cluster's own network has.
    cards_per_node: Count | None = None
    source: Annotated[str, NotInFile()] = ""


_Joined = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=3, max_length=3)]  # GPU, GPU, links


class _IntraNode(StrictModel):
    link: Literal["nvlink", "pcie"]
    topology: Topology
    bandwidth: Bandwidth | None = None
    latency: Seconds | None = None
    usable: dict[Annotated[int, Field(ge=2)], Annotated[float, Field(gt=0, le=1)]] = {2: 1.0}
    links: list[_Joined] = []
    origin: Text


class _NetworkOfNode(StrictModel):
    name: Text
    cards_per_node: Count
    origin: Text


class _HostMemory(StrictModel):
    bandwidth: Bandwidth
    datasheet: Bandwidth | None = None
    origin: Text


class _Cluster(StrictModel):
    name: Name
    kind: Literal["cluster"]
    description: Text
    machine: Text
    usual: bool = False
    gpus_per_node: Count
    intra_node: _IntraNode
    network: _NetworkOfNode | None = None
    nccl: str = ""
    in_switch: bool = True
    host_memory: _HostMemory | None = None


def cluster_files() -> dict[str, Path]:
    """Files of all clusters known by name; the user's (folder ``cluster``) override packaged ones."""
    return _files("cluster")


def network_files() -> dict[str, Path]:
    """Files of all networks known by name; the user's (folder ``network``) override packaged ones."""
    return _files("network")


def read_cluster(path: Path) -> ClusterFile:
    """Read the cluster described by the YAML file ``path``; :class:`MachineError` names the file and the key."""
    file = convert_record(_document(path), _Cluster, path, MachineError)
    node, network = file.intra_node, file.network
    _check_links(file, path)
    return ClusterFile(
        name=file.name,
        machine=file.machine,
        gpus_per_node=file.gpus_per_node,
        link=node.link,
        topology=node.topology,
        bandwidth=node.bandwidth,
        latency=node.latency,
        network=None if network is None else network.name,
        network_cards=1 if network is None else network.cards_per_node,
        usable=tuple(sorted(node.usable.items())),
        mesh=tuple((a, b, count) for a, b, count in node.links),
        nccl=file.nccl,
        in_switch=file.in_switch,
        usual=file.usual,
        description=file.description,
        source=str(path),
        host_memory=None if file.host_memory is None else file.host_memory.bandwidth,
    )


def _check_links(file: _Cluster, path: Path) -> None:
    node = file.intra_node
    if not node.links:
        return
    pairs = {frozenset((a, b)) for a, b, _ in node.links}
    ends = {gpu for pair in pairs for gpu in pair}
    if node.topology != "mesh" or node.usable != {2: 1.0}:
        raise MachineError(
            f"{path}: intra_node.links: for the topology mesh, and instead of usable; leave one of them out"
        )
    once = len(pairs) == len(node.links) and all(len(pair) == 2 for pair in pairs)
    if not once or ends != set(range(file.gpus_per_node)) or not all(count for _, _, count in node.links):
        raise MachineError(
            f"{path}: intra_node.links: [GPU, GPU, links], each pair of GPUs 0 to {file.gpus_per_node - 1} at most once"
        )


def read_network(path: Path) -> NetworkFile:
    """Read the network described by the YAML file ``path``; :class:`MachineError` names the file and the key."""
    return replace(convert_record(_document(path), NetworkFile, path, MachineError), source=str(path))


def find_cluster(name_or_path: str | Path) -> ClusterFile | None:
    """Cluster of a name or file, or the node that :func:`cluster_of_gpu` names after its GPU; ``None`` for an unknown
    name and for files of another kind.
    """
    if _is_path(name_or_path):
        path = Path(name_or_path)
        return read_cluster(path) if _kind(path) == "cluster" else None
    known = cluster_files().get(str(name_or_path))
    return _node_by_name(str(name_or_path)) if known is None else read_cluster(known)


def _node_by_name(name: str) -> ClusterFile | None:
    """Node without a file that ``name`` names after its GPU, or ``None``."""
    gpu, machines = name.removesuffix(_NODE), machine_files()
    if gpu == name or name in machines or gpu not in machines:
        return None
    machine = load_machine(gpu)
    found = cluster_of_gpu(machine) if machine.kind == "gpu" else None
    return found if found is not None and found.name == name else None


def find_network(name_or_path: str | Path) -> NetworkFile:
    """Network of a name or file; :class:`MachineError` suggests the nearest names."""
    if _is_path(name_or_path):
        return read_network(Path(name_or_path))
    files, name = network_files(), str(name_or_path)
    if name in files:
        return read_network(files[name])
    raise MachineError(f"unknown network {name!r}; {offered(name, files)}`python -m costmodel machines` lists all")


def cluster_of_gpu(gpu: Machine, per_node: int = 0) -> ClusterFile:
    """Usual cluster of ``gpu``, or of the machine of which it is a variant; if no file names one, eight GPUs per node
    and no network: NVLink with a switch, NVLink bridges between pairs, or through the host. Of cards on PCIe a node has
    as many as it is known to have (``per_node``), and the usual network.

    :class:`MachineError` if the GPU's file has no link.
    """
    described = [read_cluster(path) for path in cluster_files().values()]
    smaller = None
    for name in (gpu.name, gpu.variant_of):
        usual = next((each for each in described if each.usual and each.machine == name), None)
        if usual is not None and usual.topology in ("host", "pairs") and usual.gpus_per_node < per_node:
            smaller = smaller or usual
        elif usual is not None:
            # With links of its own it is another system than the measured one.
            same = name == gpu.name or load_machine(name).links == gpu.links
            return usual if same else replace(usual, name=f"{gpu.name}{_NODE}", machine=gpu.name)
    found = _assumed_cluster(gpu)
    if found.topology in ("host", "pairs"):
        found = replace(found, gpus_per_node=max(found.gpus_per_node, per_node))
    if smaller is not None:
        found = replace(found, network=smaller.network, network_cards=smaller.network_cards)
    return found


def _assumed_cluster(gpu: Machine) -> ClusterFile:
    links = {link.kind: link for link in gpu.links}
    nvlink, pcie = links.get("nvlink"), links.get("pcie")
    name, told = f"{gpu.name}{_NODE}", "eight of this GPU to a node: assumed, no file describes a system of it"
    if nvlink is not None and (nvlink.joins is None or pcie is None):
        return ClusterFile(name, gpu.name, 8, "nvlink", "switch", description=told)
    if nvlink is not None and pcie is not None:
        # Every second hop of a ring crosses a bridge: the host is shared as by half as many GPUs.
        through_host = pcie.bandwidth / nvlink.bandwidth
        shares = [(2 * count, min(1.0, through_host * share)) for count, share in _HOST_SHARES]
        usable = (2, 1.0), (3, shares[0][1]), *shares
        return ClusterFile(name, gpu.name, 8, "nvlink", "pairs", usable=usable, description=told)
    if pcie is None:
        raise MachineError(f"{gpu.source or gpu.name}: no link to other GPUs; add nvlink or pcie under links")
    return ClusterFile(name, gpu.name, 8, "pcie", "host", usable=_HOST_SHARES, description=told)


def _files(folder: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for directory in (PACKAGED_DIRECTORY / folder, user_directory() / folder):
        try:
            paths = sorted(directory.iterdir()) if directory.is_dir() else []
        except OSError as error:
            raise MachineError(
                f"{directory}: cannot be listed ({error.strerror}); check its path and permissions"
            ) from None
        found |= {path.stem: path for path in paths if path.suffix in _SUFFIXES}
    return found


def _is_path(name_or_path: str | Path) -> bool:
    text = str(name_or_path)
    return isinstance(name_or_path, Path) or os.sep in text or text.endswith(_SUFFIXES)


def _kind(path: Path) -> object:
    return _document(path).get("kind")


def _document(path: Path) -> dict[str, Any]:
    try:
        return _parsed(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise MachineError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None


@lru_cache(maxsize=256)
def _parsed(path: Path, changed: int) -> dict[str, Any]:
    """Content of ``path``, cached by its time of change, since finding a GPU's usual cluster reads all files."""
    return read_mapping(path, MachineError, "must be a mapping with name, kind, description ...")
