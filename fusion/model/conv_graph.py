"""Model as a graph: layers that our kernels compute and all other calls, the number type of every layer, the chains
of convolutions that can be fused ("sites"), and the choice among them.

Nodes hold Relax variables as opaque keys; :mod:`fusion.relax.extract` reads a graph out of a module, so that
importing this module needs no TVM. All sums are float32, whatever number type a layer is stored in.

A site is a chain of convolutions that one template computes in one kernel. Intermediates of a site have one reader
and a convolution has one data input, so the links between the nodes of all sites form disjoint simple chains, also in
models with branches, and every site is an interval of one chain. Overlapping sites are weighted intervals; dynamic
programming over the chain, ``best[i] = min(best[i-1] + unfused[i], min over sites [s, i] of best[s-1] + fused[s,
i])``, is exact (:func:`select`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from costmodel.base.errors import InputError
from costmodel.operators.layers import ChannelNorm, Conv2d, Dense, FusedConvs, Operator, Pool2d

if TYPE_CHECKING:
    from tvm import relax

    from schedules.contract.cpu_target import CpuTarget
    from schedules.contract.template import Parameters


_RESULT = "result "


def identifier(name: str) -> str:
    """``name`` as the name of a Relax variable: letters, digits and underscores."""
    text = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return text if text and not text[0].isdigit() else f"n_{text}"


def result_name(index: int) -> str:
    """Name of output ``index`` of a network, whose variable has lost its name; it is not a valid identifier."""
    return f"{_RESULT}{index}"


def result_index(name: str) -> int | None:
    """Index in a :func:`result_name`, or None for any other name."""
    return int(name.removeprefix(_RESULT)) if name.startswith(_RESULT) else None


@dataclass(frozen=True, eq=False)
class Node:
    """One convolution, dense layer, pooling or normalisation with its epilogue."""

    # Name of the convolution's variable (of the ONNX node); unique.
    name: str
    operator: Conv2d | Pool2d | Dense | ChannelNorm
    data: relax.Var
    residual: relax.Var | None
    # Weights of one layer; empty for pooling.
    parameters: tuple[Parameters, ...]
    # Last of ``covered``, the only one read outside.
    output: relax.Var
    # Variables that one kernel replaces, in program order.
    covered: tuple[relax.Var, ...]
    # Number of its binding block; variables local to a block cannot be read in another.
    block: int = 0
    # Factors of ``data`` per image and channel.
    gate: relax.Var | None = None


@dataclass(frozen=True, eq=False)
class Other:
    """A call that no node covers. ``operator``: TVM's name, e.g. ``relax.nn.softmax``; ``reason``: why."""

    name: str
    operator: str
    output: relax.Var
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Graph:
    """A network; nodes and others are in program order of their outputs."""

    nodes: tuple[Node, ...]
    others: tuple[Other, ...] = ()
    # Number of uses of each variable.
    counts: Mapping[relax.Var, int] = field(default_factory=dict)
    # Variables computed from each variable.
    readers: Mapping[relax.Var, tuple[relax.Var, ...]] = field(default_factory=dict)

    def use_counts(self) -> Mapping[relax.Var, int]:
        """Number of reads of each variable, as an argument or as a result of the function."""
        return self.counts


FLOAT32: Literal["float32"] = "float32"
BFLOAT16: Literal["bfloat16"] = "bfloat16"
INT8: Literal["int8"] = "int8"
# User options; `auto`: bfloat16 where it is worth its error; `int8`: a float model is quantised.
Precision = Literal["float32", "bfloat16", "int8", "auto"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8", "auto")


def in_dtype(operator: Any, dtype: str) -> Any:
    """``operator`` (one layer) with its tensors in ``dtype``."""
    return operator if operator.dtype == dtype else replace(operator, dtype=dtype)


def layers_covered(graph: Graph, dtype: str, cpu: CpuTarget) -> frozenset[str]:
    """Names of the layers that our kernels compute in ``dtype`` on ``cpu``; quantised layers are excluded."""
    from schedules.kernels.template_table import template_for

    known: dict[Operator, bool] = {}
    for node in graph.nodes:
        if node.operator.dtype == INT8:
            known[node.operator] = False
        if node.operator not in known:
            known[node.operator] = template_for(in_dtype(node.operator, dtype), cpu) is not None
    return frozenset(node.name for node in graph.nodes if known[node.operator])


def stored_in(graph: Graph, names: Collection[str], dtype: str) -> Graph:
    """``graph`` with the layers ``names`` in ``dtype``, others unchanged."""
    nodes = [
        replace(node, operator=in_dtype(node.operator, dtype)) if node.name in names else node for node in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))


def require_float(graph: Graph, precision: str) -> None:
    """Raise ``InputError`` if ``precision`` is not float32 and the model is quantised: its file defines the types."""
    quantised = sum(node.operator.dtype == INT8 for node in graph.nodes)
    if precision != FLOAT32 and quantised:
        raise InputError(
            f"--precision {precision}: the model is quantised, {quantised} of its {len(graph.nodes)} layers are "
            "computed in whole numbers as its file says; leave --precision out, or take the float model"
        )


def precision_of(graph: Graph) -> str:
    """Common number type of all layers with weights (without any: of all layers), or ``mixed``.

    Pooling between quantised layers may be float32 (averages), and does not count as mixed.
    """
    layers = [node for node in graph.nodes if node.parameters] or graph.nodes
    found = {node.operator.dtype for node in layers} or {FLOAT32}
    return found.pop() if len(found) == 1 else "mixed"


def layers_in(graph: Graph, dtype: str) -> frozenset[str]:
    """Names of the layers of ``graph`` that are stored in ``dtype``."""
    return frozenset(node.name for node in graph.nodes if node.operator.dtype == dtype)


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


@dataclass(frozen=True, eq=False)
class Group:
    """Nodes computed by one kernel; ``operator`` describes that kernel."""

    nodes: tuple[Node, ...]
    operator: Operator

    @property
    def is_fused(self) -> bool:
        """True if one kernel computes several layers."""
        return len(self.nodes) > 1


@dataclass(frozen=True, eq=False)
class FusionPlan:
    """Partition of the graph's nodes into groups, in program order of their last node."""

    groups: tuple[Group, ...]

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Distinct operators to build, in order of first use."""
        return tuple(dict.fromkeys(group.operator for group in self.groups))

    def fuses(self, site: Site) -> bool:
        """True if the plan computes exactly this site by one kernel."""
        return tuple(node.name for node in site.nodes) in self._names

    @cached_property
    def _names(self) -> frozenset[tuple[str, ...]]:
        return frozenset(tuple(node.name for node in group.nodes) for group in self.groups)


def unfused_plan(graph: Graph) -> FusionPlan:
    """Plan with a separate kernel for every node."""
    return FusionPlan(tuple(Group((node,), node.operator) for node in graph.nodes))


def select(graph: Graph, sites: Sequence[Site], seconds: Mapping[Operator, float]) -> FusionPlan:
    """Plan with the smallest total ``seconds``; a fused site is never slower than its separate nodes.

    ``seconds``: measured time of each operator. A site is considered only if its own kernel and every kernel it
    replaces have been measured. Ties are resolved in favour of fewer fused nodes.
    """
    candidates = [site for site in sites if _measured_faster(site, seconds)]
    ending: dict[str, list[Site]] = {}
    for site in candidates:
        ending.setdefault(site.nodes[-1].name, []).append(site)
    return cover(graph, [site for chain in _chains(candidates) for site in _best_cover(chain, ending, seconds)])


def cover(graph: Graph, chosen: Sequence[Site]) -> FusionPlan:
    """Plan that fuses the ``chosen`` sites, which must not overlap, and has separate kernels for all other nodes."""
    last = {site.nodes[-1].name: site for site in chosen}
    inside = {node.name for site in chosen for node in site.nodes[:-1]}
    groups = []
    for node in graph.nodes:
        if node.name in last:
            groups.append(Group(last[node.name].nodes, last[node.name].operator))
        elif node.name not in inside:
            groups.append(Group((node,), node.operator))
    return FusionPlan(tuple(groups))


def unfused_seconds(site: Site, seconds: Mapping[Operator, float]) -> float | None:
    """Sum of the times of the site's separate kernels, or None if one has no measurement."""
    times = [seconds.get(node.operator) for node in site.nodes]
    return None if None in times else sum(time for time in times if time is not None)


def _measured_faster(site: Site, seconds: Mapping[Operator, float]) -> bool:
    """True if the fused kernel is faster; a slower site is part of no optimal cover."""
    fused, unfused = seconds.get(site.operator), unfused_seconds(site, seconds)
    return fused is not None and unfused is not None and fused < unfused


def _chains(sites: Sequence[Site]) -> list[list[Node]]:
    """Nodes of all sites as maximal chains."""
    nodes: dict[str, Node] = {}
    after: dict[str, str] = {}
    for site in sites:
        nodes.update((node.name, node) for node in site.nodes)
        for first, second in zip(site.nodes, site.nodes[1:], strict=False):
            assert after.setdefault(first.name, second.name) == second.name, "an intermediate with two users"
    heads = nodes.keys() - set(after.values())
    chains = []
    for head in (name for name in nodes if name in heads):
        chain = [nodes[head]]
        while chain[-1].name in after:
            chain.append(nodes[after[chain[-1].name]])
        chains.append(chain)
    return chains


def _best_cover(
    chain: Sequence[Node], ending: Mapping[str, Sequence[Site]], seconds: Mapping[Operator, float]
) -> list[Site]:
    """Sites of the fastest cover of one chain; ``ending``: sites by the name of their last node."""
    # best[i]: (seconds, fused nodes, last site) of the first i nodes; fewer fused nodes break ties.
    best: list[tuple[float, int, Site | None]] = [(0.0, 0, None)]
    for index, node in enumerate(chain):
        total, fused, _ = best[index]
        options: list[tuple[float, int, Site | None]] = [(total + seconds[node.operator], fused, None)]
        for site in ending.get(node.name, ()):
            total, fused, _ = best[index + 1 - len(site.nodes)]
            options.append((total + seconds[site.operator], fused + len(site.nodes), site))
        best.append(min(options, key=lambda option: option[:2]))
    chosen: list[Site] = []
    end = len(chain)
    while end:
        site_here = best[end][2]
        if site_here is not None:
            chosen.append(site_here)
        end -= 1 if site_here is None else len(site_here.nodes)
    return chosen[::-1]
