"""Time of a network with some layers in a shorter number type: sum of its kernels and of the type conversions.

A tensor that is written in one number type and read in another needs one more pass, whose time the roofline derives
from its bytes; so does a model input that the first layer reads in a shorter type. Kernels that convert a tensor to or
from the blocked layout also convert the number type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from costmodel.cpu.roofline import RooflineModel
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import Conv2d, Dense, element_bytes
from fusion.analysis.analyzer import network_bytes
from fusion.model.precision import FLOAT32, in_dtype

if TYPE_CHECKING:
    from costmodel.operators.layers import Operator
    from fusion.model.conv_graph import Graph, Node
    from schedules.contract.cpu_target import CpuTarget


def predicted_in(graph: Graph, machine: Machine, threads: int, dtype: str) -> dict[Operator, float]:
    """Roofline seconds of every layer of ``graph`` in float32 and in ``dtype``."""
    roofline = RooflineModel(machine, threads, network_bytes(graph))
    operators = {in_dtype(node.operator, each): None for node in graph.nodes for each in (FLOAT32, dtype)}
    return {each: found.seconds for each, found in zip(operators, roofline.estimate(list(operators)), strict=True)}


def comparable(
    graph: Graph, predicted: Mapping[Operator, float], measured: Mapping[Operator, float], dtype: str
) -> dict[Operator, float]:
    """``measured`` times of layers measured in both number types, ``predicted`` ones for the others."""
    seconds = dict(predicted)
    for node in graph.nodes:
        both = [in_dtype(node.operator, each) for each in (FLOAT32, dtype)]
        if all(each in measured for each in both):
            seconds.update((each, measured[each]) for each in both)
    return seconds


def followers(graph: Graph) -> set[str]:
    """Names of pooling and normalisation nodes: the layers around them round their inputs and outputs anyway."""
    return {node.name for node in graph.nodes if not isinstance(node.operator, Conv2d | Dense)}


class MixedTimes:
    """Seconds of a float32 ``graph`` with some layers in ``dtype``.

    ``layers``: names of the layers with a form in ``dtype``; ``seconds``: of each layer in both number types.
    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        cpu: CpuTarget,
        dtype: str,
        layers: Collection[str],
        seconds: Mapping[Operator, float],
    ) -> None:
        self._graph, self._machine, self._cpu, self._dtype = graph, machine, cpu, dtype
        self._followers = followers(graph) & set(layers)
        self._seconds = seconds
        self._made = {node.output: node for node in graph.nodes}
        self._readers: dict[Any, list[Node]] = {}
        for node in graph.nodes:
            for tensor in (node.data, node.residual, node.gate):
                if tensor is not None:
                    self._readers.setdefault(tensor, []).append(node)
        others = {other.output for other in graph.others}
        self._inputs = [tensor for tensor in self._readers if tensor not in self._made and tensor not in others]

    def with_followers(self, rounded: Collection[str]) -> set[str]:
        """``rounded`` plus the nodes after these layers that are neither convolution nor dense layer."""
        found = set(rounded)
        for node in self._graph.nodes:
            before = self._made.get(node.data)
            if node.name in self._followers and before is not None and before.name in found:
                found.add(node.name)
        return found

    def __call__(self, rounded: Collection[str]) -> float:
        """Return the seconds with the layers ``rounded`` in the shorter type."""
        names = self.with_followers(rounded)
        own = sum(self._seconds[self._stored(node, names)] for node in self._graph.nodes)
        return own + sum(map(self._conversion_seconds, self.converted_values(rounded)))

    def known(self, rounded: Collection[str], measured: Mapping[Operator, float]) -> bool:
        """True if ``measured`` has every kernel of that network."""
        names = self.with_followers(rounded)
        return all(self._stored(node, names) in measured for node in self._graph.nodes)

    def converted_values(self, rounded: Collection[str]) -> list[int]:
        """Number of elements of each tensor needed in both number types: layer outputs and model inputs.

        Other operators convert while reading and writing.
        """
        names = self.with_followers(rounded)
        found = []
        for node in self._graph.nodes:
            readers = self._readers.get(node.output, ())
            if any((reader.name in names) != (node.name in names) for reader in readers):
                found.append(_elements(node.operator.output_bytes, node.operator.dtype))
        for tensor in self._inputs:
            rounding = [node for node in self._readers[tensor] if node.name in names and self._reads_plain(node)]
            found += [_elements(node.operator.input_bytes, node.operator.dtype) for node in rounding[:1]]
        return found

    def _reads_plain(self, node: Node) -> bool:
        from schedules.kernels.direct_conv2d import reads_plain_input

        return isinstance(node.operator, Conv2d) and reads_plain_input(node.operator, self._cpu.lanes)

    def _stored(self, node: Node, names: Collection[str]) -> Operator:
        return in_dtype(node.operator, self._dtype if node.name in names else FLOAT32)

    def _conversion_seconds(self, elements: int) -> float:
        """Seconds of one pass that reads all bytes in one type and writes all in the other."""
        sizes = [elements * element_bytes(dtype) for dtype in (FLOAT32, self._dtype)]
        machine, threads = self._machine, self._cpu.threads
        level = machine.level_holding(sum(sizes) / threads, threads)
        moved = level.seconds(sizes[0], threads) + level.seconds(sizes[1], threads, write=True)
        return moved + machine.region_seconds(threads)


def _elements(size: int, dtype: str) -> int:
    return size // element_bytes(dtype)
