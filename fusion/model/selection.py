"""Selection of the sites to fuse: the fastest cover of every chain by measured kernels.

Intermediates of a site have one reader and a convolution has one data input, so the links between the nodes of all
sites form disjoint simple chains, also in models with branches, and every site is an interval of one chain. Overlapping
sites are weighted intervals; dynamic programming over the chain, ``best[i] = min(best[i-1] + unfused[i], min over sites
[s, i] of best[s-1] + fused[s, i])``, is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from costmodel.operators.layers import Operator

if TYPE_CHECKING:
    from fusion.model.candidates import Site
    from fusion.model.conv_graph import Graph, Node


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
