"""Comparison of two engines layer by layer: times for the same nodes of the ONNX graph, and the layers in which a
peer is faster. Profiles are taken after the timing, and only if needed.

Engines fuse differently, so a row is the smallest set of nodes that both sides compute in separate kernels: kernels
that share a node are in one row. Missing information is inferred. Ours name the last node of a kernel: preceding
nodes without a kernel are inside it. Others name one or more nodes of a fused kernel: an activation or addition of
ours that none of theirs names is inside the preceding kernel. Kernels without a node (mostly layout conversions) are
in the row ``others``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion.comparing.engine import LayerTime, Unavailable
from fusion.comparing.engine_worker import EngineFailed, Worker
from fusion.model.conv_graph import identifier
from fusion.model.named_arrays import Arrays

# Parts of the names of operators that are never fused into another kernel.
_PRODUCTS = ("Conv", "Gemm", "MatMul", "LSTM", "GRU", "RNN")


@dataclass(frozen=True)
class GraphNode:
    """A node of the ONNX graph. ``name``: for display; ``aliases``: names used in profiles."""

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: tuple[str, ...] = ()

    @property
    def is_product(self) -> bool:
        """True if the operator multiplies with weights, or may do so."""
        return any(each in self.operator for each in _PRODUCTS)


@dataclass(frozen=True)
class LayerRow:
    """Nodes that both engines compute separately from others, products first.

    Seconds are scaled to the network's, None without a kernel. ``lost_seconds``: ours minus theirs, negative if ours
    are faster.
    """

    layers: tuple[str, ...]
    ours_seconds: float | None
    theirs_seconds: float | None
    lost_seconds: float
    ours_kernels: tuple[str, ...]
    theirs_kernels: tuple[str, ...]


@dataclass(frozen=True)
class LayerTable:
    """Layer times of a network in our build and in ``engine``."""

    engine: str
    # Largest loss first.
    rows: tuple[LayerRow, ...]
    others: LayerRow
    # Medians of the whole network, measured in alternation.
    ours_network_seconds: float
    theirs_network_seconds: float
    # Sums of the profiled layers. Layers are scaled by network time over this sum, so that the differences of all rows
    # and of ``others`` add up to that of the networks.
    ours_profiled_seconds: float
    theirs_profiled_seconds: float
    # Sum over the rows where ours are slower.
    lost_seconds: float
    # Sum over the rows where ours are faster.
    gained_seconds: float


def read_nodes(model: Path) -> list[GraphNode]:
    """Nodes of an ONNX file without constants, in execution order."""
    import onnx

    nodes = onnx.load(str(model), load_external_data=False).graph.node
    return [
        graph_node(node.name, node.op_type, tuple(node.input), tuple(node.output), index)
        for index, node in enumerate(nodes)
        if node.op_type != "Constant"
    ]


def graph_node(name: str, operator: str, inputs: Sequence[str], outputs: Sequence[str], index: int) -> GraphNode:
    """Node ``index`` of a graph with its aliases.

    An unnamed node has the name of its first output; ONNX Runtime names it by operator and index. The aliases include
    the names of Relax variables in our networks.
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
    """Join the profiles ``ours`` and ``theirs`` of the graph of ``nodes``."""
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
    """Disjoint sets of numbers (union-find)."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, number: int) -> int:
        """Representative of the set of ``number``."""
        while self._parent[number] != number:
            number = self._parent[number]
        return number

    def unite(self, numbers: Iterable[int]) -> None:
        """Merge the sets of all ``numbers``."""
        roots = sorted({self.find(number) for number in numbers})
        for root in roots[1:]:
            self._parent[root] = roots[0]

    def of(self, claims: Sequence[int]) -> int | None:
        """Representative of the set of a kernel, or None for a kernel without nodes."""
        return self.find(claims[0]) if claims else None


def _claimed(index: Mapping[str, int], names: Sequence[str], derived: bool) -> list[int]:
    """Nodes that a kernel computes according to its names.

    ``derived``: names of ours, with suffixes added by the importer and passes (``conv1_sums``).
    """
    found = []
    for name in names:
        while derived and name not in index and "_" in name:
            name = name.rpartition("_")[0]
        if name in index:
            found.append(index[name])
    return found


def _take_in_unclaimed(nodes: Sequence[GraphNode], claimed: set[int], sets: _Sets) -> None:
    """Merge each node without a kernel of ours into its first reader: our kernels are named by their output."""
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
    """Merge sets with only kernels of ours and no products into the last set before them, where the peer fused them."""
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


# Duration of the profiled runs in seconds, per engine.
PROFILE_SECONDS = 0.5


@dataclass(frozen=True)
class LostLayers:
    """Layer times against the fastest peer in question with a profile; ``missing``: reasons for peers without one."""

    table: LayerTable | None = None
    missing: tuple[str, ...] = ()


def lost_layers(
    model: Path,
    inputs: Arrays,
    ours: tuple[Worker, float],
    peers: Mapping[str, tuple[Worker, float]],
    asked: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> LostLayers:
    """Compare our layers with those of the fastest peer, if a peer is faster than ours or ``asked`` is set.

    ``ours`` and each of ``peers``: an engine and its median seconds. Engines that fail are closed; none is needed
    afterwards.
    """
    worker, seconds = ours
    order = sorted((name for name in peers if asked or peers[name][1] < seconds), key=lambda name: peers[name][1])
    if not order:
        return LostLayers()
    say("timing layers")
    try:
        own = worker.layers(inputs, PROFILE_SECONDS)
    except (EngineFailed, Unavailable) as error:
        return LostLayers(None, (f"no times of our layers: {error}",))
    missing: list[str] = []
    for name in order:
        try:
            theirs: Sequence[LayerTime] = peers[name][0].layers(inputs, PROFILE_SECONDS)
        except (EngineFailed, Unavailable) as error:
            missing.append(f"no times of the layers of {name}: {error}")
            continue
        return LostLayers(join_layers(name, read_nodes(model), own, theirs, seconds, peers[name][1]), tuple(missing))
    return LostLayers(None, tuple(missing))
