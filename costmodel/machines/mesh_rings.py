"""Rings that NCCL can build among GPUs with point-to-point links (hybrid cube mesh of a DGX-1).

NCCL's search (src/graph/search.cc) finds rings through all GPUs of a group, each over its own links, and runs every
ring in both directions; the bus bandwidth of a group is that of its rings together. If no ring exists, a hop may pass
through a third GPU of the group ("NVB": since 2.10, whose release notes name it for cube meshes); before, such a group
used PCIe.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

Pair = tuple[int, int]
# A hop through a third GPU is written into its memory and read from there: a read sends a request packet of one flit in
# the opposite direction, where the ring of that direction runs, so that 8 of 10 flits are data instead of 8 of 9.
RELAYED_SHARE = 0.9


@lru_cache(maxsize=256)
def ring_links(links: tuple[tuple[int, int, int], ...], gpus: tuple[int, ...], relays: bool = True) -> float:
    """Bandwidth of one GPU of ``gpus`` (two or more) in the rings of this group, one direction, in units of links; 0 if
    links form no ring. ``links``: (GPU, GPU, links between them). ``relays``: hops may pass through a third GPU.
    """
    room = {_pair(a, b): count for a, b, count in links if a in gpus and b in gpus}
    if len(gpus) == 2:
        return float(room.get(_pair(*gpus), 0))
    straight = _most([each for each in _rings(gpus, room, relayed=False) if _fits(each, room)], room)
    if straight or not relays:
        return 2.0 * straight
    return 2.0 * RELAYED_SHARE * _most([each for each in _rings(gpus, room, relayed=True) if _fits(each, room)], room)


def _pair(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)


def _rings(gpus: Sequence[int], room: Mapping[Pair, int], relayed: bool) -> Iterator[Counter[Pair]]:
    """Links used by each ring through all of ``gpus``, one direction of each ring."""
    first, *others = gpus
    for order in itertools.permutations(others):
        if order[0] > order[-1]:  # the same ring in the other direction
            continue
        hops = [_hop(a, b, gpus, room, relayed) for a, b in itertools.pairwise((first, *order, first))]
        for choice in itertools.product(*hops):
            yield Counter(pair for hop in choice for pair in hop)


def _hop(a: int, b: int, gpus: Sequence[int], room: Mapping[Pair, int], relayed: bool) -> list[tuple[Pair, ...]]:
    """Paths from ``a`` to ``b``: their direct link, else through a third GPU; empty if there is no path."""
    if room.get(_pair(a, b), 0):
        return [(_pair(a, b),)]
    ways = [(_pair(a, c), _pair(c, b)) for c in gpus if c not in (a, b)] if relayed else []
    return [(one, two) for one, two in ways if room.get(one, 0) and room.get(two, 0)]


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
