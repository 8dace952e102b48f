"""Fusion sites of a model: chains of convolutions that one template computes in one kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from costmodel.operators.layers import Conv2d, FusedConvs

if TYPE_CHECKING:
    from fusion.model.conv_graph import Graph, Node
    from schedules.contract.cpu_target import CpuTarget

# Longest chain that a published kernel fuses: an inverted residual (1x1 -> depthwise -> 1x1).
LONGEST_SITE = 3


@dataclass(frozen=True, eq=False)
class Site:
    """Convolutions that one kernel may compute; ``name``: node names joined by ``+``."""

    name: str
    kind: str
    nodes: tuple[Node, ...]
    operator: FusedConvs


def find_sites(graph: Graph, cpu: CpuTarget) -> list[Site]:
    """Every fusable chain, in program order of its first node; sites may overlap.

    Conditions: each intermediate has no other reader, only the last convolution adds a residual, all are in one binding
    block, and a template covers the chain.
    """
    successor = _sole_consumers(graph)
    sites = []
    for node in graph.nodes:
        for chain in _chains_from(node, successor):
            convs = tuple(member.operator for member in chain if isinstance(member.operator, Conv2d))
            operator = FusedConvs(convs)
            if _covered(operator, cpu):
                name = "+".join(member.name for member in chain)
                sites.append(Site(name, operator.kind, chain, operator))
    return sites


def _covered(operator: FusedConvs, cpu: CpuTarget) -> bool:
    from schedules.kernels.template_table import template_for

    return template_for(operator, cpu) is not None


def _sole_consumers(graph: Graph) -> dict[str, Node]:
    """Node name -> the only reader of its output, if it reads it once, as its data, in the same block."""
    uses = Counter(graph.use_counts())
    consumer = {node.data: node for node in graph.nodes}
    return {
        node.name: consumer[node.output]
        for node in graph.nodes
        if node.output in consumer and uses[node.output] == 1 and consumer[node.output].block == node.block
    }


def _chains_from(node: Node, successor: dict[str, Node]) -> Iterator[tuple[Node, ...]]:
    """Chains of two to ``LONGEST_SITE`` convolutions that start at ``node``."""
    chain = [node]
    while len(chain) < LONGEST_SITE and _may_precede(chain[-1]) and chain[-1].name in successor:
        following = successor[chain[-1].name]
        if not isinstance(following.operator, Conv2d) or following.operator.dtype != node.operator.dtype:
            return
        if chain[-1].operator.output_shape != following.operator.input_shape:
            return
        chain.append(following)
        yield tuple(chain)


def _may_precede(node: Node) -> bool:
    """True if ``node`` may precede another in a fused kernel: only the last convolution may add a residual."""
    return isinstance(node.operator, Conv2d) and node.operator.epilogue.residual is None
