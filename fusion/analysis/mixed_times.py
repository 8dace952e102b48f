"""What a network takes with some of its layers in a shorter number type: kernels one by one, and what is converted.

A tensor that one layer writes and another reads in a different number type passes through the cores once more, which
the roofline prices by its bytes; so does an image that the first layer reads as the model gives it, in a shorter type.
Where a tensor is blocked or unblocked anyway, that kernel converts it.
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
    """The roofline's seconds of every layer of ``graph`` in float32 and in ``dtype``."""
    roofline = RooflineModel(machine, threads, network_bytes(graph))
    operators = {in_dtype(node.operator, each): None for node in graph.nodes for each in (FLOAT32, dtype)}
    return {each: found.seconds for each, found in zip(operators, roofline.estimate(list(operators)), strict=True)}


def comparable(
    graph: Graph, predicted: Mapping[Operator, float], measured: Mapping[Operator, float], dtype: str
) -> dict[Operator, float]:
    """``measured`` where a layer has been measured in both number types; ``predicted`` for both where not."""
    seconds = dict(predicted)
    for node in graph.nodes:
        both = [in_dtype(node.operator, each) for each in (FLOAT32, dtype)]
        if all(each in measured for each in both):
            seconds.update((each, measured[each]) for each in both)
    return seconds


def followers(graph: Graph) -> set[str]:
    """Names of pooling and normalisation: what they read and write is rounded by the layers around them anyway."""
    return {node.name for node in graph.nodes if not isinstance(node.operator, Conv2d | Dense)}


class MixedTimes:
    """Seconds of ``graph``, which is in float32, with layers in ``dtype``. ``layers``: those that can be; ``seconds``:
    of each layer in both number types.
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
        """``rounded``, and what follows such layers without being a convolution or a dense layer."""
        found = set(rounded)
        for node in self._graph.nodes:
            before = self._made.get(node.data)
            if node.name in self._followers and before is not None and before.name in found:
                found.add(node.name)
        return found

    def __call__(self, rounded: Collection[str]) -> float:
        """Seconds with the layers ``rounded`` in the shorter type."""
        names = self.with_followers(rounded)
        own = sum(self._seconds[self._stored(node, names)] for node in self._graph.nodes)
        return own + sum(map(self._conversion_seconds, self.converted_values(rounded)))

    def known(self, rounded: Collection[str], measured: Mapping[Operator, float]) -> bool:
        """Whether every kernel of that network is in ``measured``."""
        names = self.with_followers(rounded)
        return all(self._stored(node, names) in measured for node in self._graph.nodes)

    def converted_values(self, rounded: Collection[str]) -> list[int]:
        """The size of each tensor that exists in both number types, in elements: of results of layers, and of inputs of
        the model. Other operators widen as they read and round as they write.
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
        """One pass: all bytes of one side are read, all of the other written."""
        sizes = [elements * element_bytes(dtype) for dtype in (FLOAT32, self._dtype)]
        machine, threads = self._machine, self._cpu.threads
        level = machine.level_holding(sum(sizes) / threads, threads)
        moved = level.seconds(sizes[0], threads) + level.seconds(sizes[1], threads, write=True)
        return moved + machine.region_seconds(threads)


def _elements(size: int, dtype: str) -> int:
    return size // element_bytes(dtype)
