"""Two engines layer by layer: what each of them takes for the same nodes of the ONNX graph.

Engines fuse differently, so neither side's kernels are the rows. A row is the least set of nodes that both sides
compute in kernels of their own: kernels that share a node are in one row. What is not said by a profile is inferred as
its engine works. Ours name the last node of a kernel: nodes before it that no kernel claims are inside it. Others name
one node or more of a fused kernel: an activation or addition of ours that none of theirs claims is inside the kernel
before it. Kernels that belong to no node (conversions of layouts, mostly) are the line of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion.comparing.engines.base import LayerTime
from fusion.model.layer_names import identifier

# In the types of operators that no other kernel computes on the side.
_PRODUCTS = ("Conv", "Gemm", "MatMul", "LSTM", "GRU", "RNN")


@dataclass(frozen=True)
class GraphNode:
    """A node of the ONNX graph. ``name``: for people; ``aliases``: whatever a profile may call it."""

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: tuple[str, ...] = ()

    @property
    def is_product(self) -> bool:
        """Whether it multiplies with weights, or might."""
        return any(each in self.operator for each in _PRODUCTS)


@dataclass(frozen=True)
class LayerRow:
    """Nodes that both engines compute by themselves, products first; seconds scaled to the network's, ``None`` where an
    engine has no kernel for them. ``lost_seconds``: ours less theirs, below zero where ours are faster.
    """

    layers: tuple[str, ...]
    ours_seconds: float | None
    theirs_seconds: float | None
    lost_seconds: float
    ours_kernels: tuple[str, ...]
    theirs_kernels: tuple[str, ...]


@dataclass(frozen=True)
class LayerTable:
    """Where the time of a network goes in our build and in ``engine``; ``rows``: what loses most first.

    ``*_network_seconds``: medians of the network, measured in turns. ``*_profiled_seconds``: sums of the layers as the
    profiles have them; each side's layers are scaled by the first over the second, so that the differences of all rows
    and of ``others`` add up to that of the networks. ``lost_seconds``: the sum of the rows where ours are slower,
    ``gained_seconds``: of those where they are faster.
    """

    engine: str
    rows: tuple[LayerRow, ...]
    others: LayerRow
    ours_network_seconds: float
    theirs_network_seconds: float
    ours_profiled_seconds: float
    theirs_profiled_seconds: float
    lost_seconds: float
    gained_seconds: float


def read_nodes(model: Path) -> list[GraphNode]:
    """The nodes of an ONNX file in its order, which is one that they can be run in; without constants."""
    import onnx

    nodes = onnx.load(str(model), load_external_data=False).graph.node
    return [
        graph_node(node.name, node.op_type, tuple(node.input), tuple(node.output), index)
        for index, node in enumerate(nodes)
        if node.op_type != "Constant"
    ]


def graph_node(name: str, operator: str, inputs: Sequence[str], outputs: Sequence[str], index: int) -> GraphNode:
    """The node ``index`` of a graph. Without a name it is called by its first output, by ONNX Runtime by operator and
    index; in our networks as a Relax variable.
    """
    written = tuple(filter(None, outputs))
    called = name or next(iter(written), operator)
    nameless = () if name else (f"{operator}_{index}",)
    aliases = (called, *written, *nameless, *map(identifier, (called, *written)))
    return GraphNode(called, operator, tuple(filter(None, inputs)), written, aliases)


def join_layers(
    engine: str,
    nodes: Sequence[GraphNode],
    ours: Sequence[LayerTime],
    theirs: Sequence[LayerTime],
    ours_network_seconds: float,
    theirs_network_seconds: float,
) -> LayerTable:
    """The profiles ``ours`` and ``theirs`` of the graph of ``nodes``, beside each other."""
    index = {alias: number for number, node in reversed(list(enumerate(nodes))) for alias in reversed(node.aliases)}
    own = [_claimed(index, kernel.names, derived=True) for kernel in ours]
    peer = [_claimed(index, kernel.names, derived=False) for kernel in theirs]
    sets = _Sets(len(nodes))
    for claims in own:
        sets.unite(claims)
    _take_in_unclaimed(nodes, {node for claims in own for node in claims}, sets)
    for claims in peer:
        sets.unite(claims)
    _attach_to_producers(nodes, own, peer, sets)

    scale = _share(ours_network_seconds, ours), _share(theirs_network_seconds, theirs)
    members: dict[int, list[int]] = {}
    for number in range(len(nodes)):
        members.setdefault(sets.find(number), []).append(number)

    def row(layers: tuple[str, ...], root: int | None) -> LayerRow:
        mine = [kernel for kernel, claims in zip(ours, own, strict=True) if sets.of(claims) == root]
        other = [kernel for kernel, claims in zip(theirs, peer, strict=True) if sets.of(claims) == root]
        seconds = [
            sum(each.seconds for each in found) * factor if found else None
            for found, factor in zip((mine, other), scale, strict=True)
        ]
        lost = (seconds[0] or 0.0) - (seconds[1] or 0.0)
        return LayerRow(layers, seconds[0], seconds[1], lost, _kernels(mine), _kernels(other))

    def names(group: Sequence[int]) -> tuple[str, ...]:
        return tuple(nodes[number].name for number in sorted(group, key=lambda number: not nodes[number].is_product))

    found = [row(names(group), root) for root, group in members.items()]
    rows = [each for each in found if each.ours_seconds is not None or each.theirs_seconds is not None]
    rows.sort(key=lambda each: -each.lost_seconds)
    others = row((), None)
    differences = [each.lost_seconds for each in (*rows, others)]
    return LayerTable(
        engine=engine,
        rows=tuple(rows),
        others=others,
        ours_network_seconds=ours_network_seconds,
        theirs_network_seconds=theirs_network_seconds,
        ours_profiled_seconds=sum(each.seconds for each in ours),
        theirs_profiled_seconds=sum(each.seconds for each in theirs),
        lost_seconds=sum(each for each in differences if each > 0),
        gained_seconds=-sum(each for each in differences if each < 0),
    )


class _Sets:
    """Disjoint sets of numbers."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, number: int) -> int:
        """What stands for the set of ``number``."""
        while self._parent[number] != number:
            number = self._parent[number]
        return number

    def unite(self, numbers: Iterable[int]) -> None:
        """One set of those of all ``numbers``."""
        roots = sorted({self.find(number) for number in numbers})
        for root in roots[1:]:
            self._parent[root] = roots[0]

    def of(self, claims: Sequence[int]) -> int | None:
        """What stands for the set of a kernel, ``None`` for one without nodes."""
        return self.find(claims[0]) if claims else None


def _claimed(index: Mapping[str, int], names: Sequence[str], derived: bool) -> list[int]:
    """The nodes that a kernel is known to compute. ``derived``: of names of ours, to which the importer and passes
    append what a variable is of its node (``conv1_sums``).
    """
    found = []
    for name in names:
        while derived and name not in index and "_" in name:
            name = name.rpartition("_")[0]
        if name in index:
            found.append(index[name])
    return found


def _take_in_unclaimed(nodes: Sequence[GraphNode], claimed: set[int], sets: _Sets) -> None:
    """A node without a kernel of ours joins the first that reads it: our kernels are named by what they write."""
    readers: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(number)
    inside = set(claimed)
    for number in reversed(range(len(nodes))):
        after = [reader for name in nodes[number].outputs for reader in readers.get(name, ())]
        into = next((reader for reader in sorted(after) if reader in inside), None)
        if number not in claimed and into is not None:
            sets.unite((into, number))
            inside.add(number)


def _attach_to_producers(
    nodes: Sequence[GraphNode], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], sets: _Sets
) -> None:
    """Sets with kernels of ours alone, and no products, join what comes last before them: it was fused there."""
    writer = {name: number for number, node in enumerate(nodes) for name in node.outputs}
    for claims in sorted(filter(None, ours), key=max):
        root = sets.of(claims)
        if any(sets.of(each) == root for each in theirs):
            continue
        group = [number for number in range(len(nodes)) if sets.find(number) == root]
        if any(nodes[number].is_product for number in group):
            continue
        before = {writer[name] for number in group for name in nodes[number].inputs if name in writer} - set(group)
        if before:
            sets.unite((max(before), claims[0]))


def _share(network: float, kernels: Sequence[LayerTime]) -> float:
    profiled = sum(each.seconds for each in kernels)
    return network / profiled if profiled else 1.0


def _kernels(kernels: Sequence[LayerTime]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.kernel for each in kernels))
