"""Rings that NCCL can build among GPUs joined by links from one to the other (hybrid cube mesh of a DGX-1).

NCCL's search (src/graph/search.cc) looks for rings through all GPUs of a group, each over links of its own, and runs
every ring both ways; the bus bandwidth of a group is that of its rings together. Where no ring exists it lets a hop
pass through a third GPU of the group ("NVB": since 2.10, whose release notes name it for cube meshes); before, such a
group went over PCIe.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

Pair = tuple[int, int]
# A hop through a third GPU is written into its memory and read from there: a read asks with a packet of one flit on the
# way back, where the ring of the other direction runs, so that 8 of 10 flits are data instead of 8 of 9.
RELAYED_SHARE = 0.9


@lru_cache(maxsize=256)
def ring_links(links: tuple[tuple[int, int, int], ...], gpus: tuple[int, ...], relays: bool = True) -> float:
    """How many links' worth of bandwidth one GPU of ``gpus`` (two or more) has in the rings of this group, one
    direction; 0 where links form no ring. ``links``: (GPU, GPU, links between them). ``relays``: hops may pass through
    a third GPU.
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
    """The links that each ring through all of ``gpus`` takes, one direction of travel of each ring."""
    first, *others = gpus
    for order in itertools.permutations(others):
        if order[0] > order[-1]:  # the same ring the other way round
            continue
        hops = [_hop(a, b, gpus, room, relayed) for a, b in itertools.pairwise((first, *order, first))]
        for choice in itertools.product(*hops):
            yield Counter(pair for hop in choice for pair in hop)


def _hop(a: int, b: int, gpus: Sequence[int], room: Mapping[Pair, int], relayed: bool) -> list[tuple[Pair, ...]]:
    """The ways from ``a`` to ``b``: their own links, else through a third GPU; none where there is no way."""
    if room.get(_pair(a, b), 0):
        return [(_pair(a, b),)]
    ways = [(_pair(a, c), _pair(c, b)) for c in gpus if c not in (a, b)] if relayed else []
    return [(one, two) for one, two in ways if room.get(one, 0) and room.get(two, 0)]


def _fits(ring: Counter[Pair], room: Mapping[Pair, int]) -> bool:
    return all(room.get(pair, 0) >= count for pair, count in ring.items())


def _most(rings: Sequence[Counter[Pair]], room: Mapping[Pair, int]) -> int:
    """The most of ``rings``, each as often as wanted, that fit ``room`` together."""
    best = 0
    for place, ring in enumerate(rings):
        left = {pair: count - ring.get(pair, 0) for pair, count in room.items()}
        best = max(best, 1 + _most([each for each in rings[place:] if _fits(each, left)], left))
        if best * len(ring) + len(ring) > sum(room.values()):  # no room for one more
            break
    return best
