"""Contention for links and GPUs by max-min fair shares: concurrent users slow each other down.

A link has rate 1. A transfer alone runs at speed 1 and then uses a given share of each of its links; at speed v it uses
v times that. Speeds rise together from zero; when a link is full, the speeds of its users are fixed (progressive
filling: Bertsekas and Gallager, Data Networks, 2nd ed., section 6.5.2). No speed exceeds 1, no link is overloaded, and
every transfer below speed 1 uses a full link on which no other transfer is faster.

Two resources of a GPU are shared: its memory, which is modelled as a link, and its multiprocessors. A collective keeps
the multiprocessors that its blocks occupy; a concurrent kernel has the rest, and its speed is that share times the
speed that the links allow. :mod:`e2e.price.collective_pricing` computes these shares.

Speeds change only when a transfer or kernel begins or ends, so a calendar of these moments is enough. The caller
advances it one moment at a time, and only once nothing can begin earlier.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

# Load from which a link counts as full, given rounding.
_FULL = 1.0 - 1e-12
# Least share of the multiprocessors that collectives leave to kernels, so that kernels always progress.
_LEAST_LEFT = 0.05
Links = Mapping[str, float]


@dataclass(slots=True, eq=False)
class LinkTransfer:
    """Transfer or kernel that begins at ``start`` and would take ``seconds`` alone."""

    # Sequence number of its arrival.
    order: int
    # Caller's object.
    what: Any
    start: float
    seconds: float
    links: Links
    # Share of multiprocessors that it keeps, by the memory names of their GPUs.
    held: Links
    # Kernels only: the GPU memory that is its only link; it needs the multiprocessors for the same share of its time.
    gpu: str = ""
    # Speed since `since`, when `rest` seconds (at speed 1) were left; `end`: predicted end at that speed.
    speed: float = 0.0
    since: float = 0.0
    rest: float = 0.0
    end: float = inf
    # Its links as a hashable key, precomputed because it is used at every moment.
    shape: tuple[tuple[str, float], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.use(self.links)

    def use(self, links: Links) -> None:
        """Set the shares of links that it uses from now on."""
        self.links, self.shape = links, tuple(links.items())


@dataclass(slots=True)
class LinkSharing:
    """All transfers and kernels of a simulation that use named links. Time never goes back."""

    _order: Any = field(default_factory=count)
    # (start, order, transfer) of those that have not begun; (end, order, transfer) of the others, some entries
    # outdated.
    _waiting: list[tuple[float, int, LinkTransfer]] = field(default_factory=list)
    _ends: list[tuple[float, int, LinkTransfer]] = field(default_factory=list)
    _users: dict[str, set[LinkTransfer]] = field(default_factory=dict)
    # Fair speeds by combination of users: a step has few combinations.
    _known: dict[tuple[tuple[tuple[str, float], ...], ...], tuple[float, ...]] = field(default_factory=dict)

    def add(self, what: Any, start: float, seconds: float, links: Links, held: Links | None = None) -> None:
        """Add a transfer that begins at ``start``, not before the last moment that :meth:`step` reached."""
        used = {name: min(share, 1.0) for name, share in links.items() if share > 0}
        order = next(self._order)
        transfer = LinkTransfer(order, what, start, seconds, used, held or {})
        heapq.heappush(self._waiting, (start, order, transfer))

    def add_kernel(self, what: Any, start: float, seconds: float, gpu: str, busy: float) -> None:
        """Add a kernel on ``gpu`` that uses its memory and multiprocessors for the share ``busy`` of its time alone."""
        order = next(self._order)
        kernel = LinkTransfer(order, what, start, seconds, {gpu: busy}, {}, gpu)
        heapq.heappush(self._waiting, (start, order, kernel))

    def next_moment(self) -> float:
        """Return the time of the next begin or end, infinity if there is none."""
        ends = self._ends
        while ends and ends[0][2].end != ends[0][0]:
            heapq.heappop(ends)
        starts = self._waiting[0][0] if self._waiting else inf
        return min(starts, ends[0][0] if ends else inf)

    def step(self) -> LinkTransfer | None:
        """Advance to :meth:`next_moment`; return the transfer that ends there, ``None`` if one begins.

        A kernel that ends stays registered until the caller calls :meth:`leave` or :meth:`succeed`.
        """
        # Ends come before begins of the same moment, which use the freed shares.
        if self._ends and (not self._waiting or self._ends[0][0] <= self._waiting[0][0]):
            end, _, transfer = heapq.heappop(self._ends)
            if not transfer.gpu:
                self.leave(transfer, end)
            return transfer
        start, _, transfer = heapq.heappop(self._waiting)
        self._begin(transfer, start)
        return None

    def _begin(self, transfer: LinkTransfer, now: float) -> None:
        transfer.since, transfer.rest = now, transfer.seconds
        for name in transfer.links:
            self._users.setdefault(name, set()).add(transfer)
        self._share(transfer, now)

    def succeed(self, kernel: LinkTransfer, what: Any, seconds: float, busy: float, now: float) -> None:
        """Replace ``kernel``, which ends ``now``, by ``what``; if both are equally busy, no speed changes."""
        kernel.what, kernel.rest, kernel.since = what, seconds, now
        if busy == kernel.links[kernel.gpu]:
            kernel.end = now + seconds / kernel.speed
            heapq.heappush(self._ends, (kernel.end, next(self._order), kernel))
            return
        kernel.use({kernel.gpu: busy})
        kernel.speed = 0.0
        self._share(kernel, now)

    def leave(self, transfer: LinkTransfer, now: float) -> None:
        """Remove ``transfer``, which has ended ``now``, and give its shares to the others."""
        transfer.end = inf
        touched: set[LinkTransfer] = set()
        for name in transfer.links:
            self._users[name].discard(transfer)
            touched |= self._users[name]
        while touched:
            touched -= self._share(min(touched, key=_order_of), now)

    def _share(self, seed: LinkTransfer, now: float) -> set[LinkTransfer]:
        """Recompute the speeds of all transfers connected with ``seed`` by shared links; return these transfers."""
        members = self._connected(seed)
        # In a fixed order, so that rounding is reproducible.
        ordered = sorted(members, key=_order_of) if len(members) > 1 else [seed]
        for member, fair in zip(ordered, self._fair(ordered), strict=True):
            speed = fair
            if member.gpu:
                held = sum(each.held.get(member.gpu, 0.0) for each in ordered if each.held)
                speed *= max(1.0 - member.links[member.gpu] * held, _LEAST_LEFT)
            if speed != member.speed:
                member.rest = max(member.rest - member.speed * (now - member.since), 0.0)
                member.since, member.speed = now, speed
                member.end = now + member.rest / speed
                heapq.heappush(self._ends, (member.end, next(self._order), member))
        return members

    def _fair(self, ordered: list[LinkTransfer]) -> tuple[float, ...]:
        key = tuple(member.shape for member in ordered)
        speeds = self._known.get(key)
        if speeds is None:
            found = fair_speeds({place: member.links for place, member in enumerate(ordered)})
            speeds = self._known[key] = tuple(found[place] for place in range(len(ordered)))
        return speeds

    def _connected(self, seed: LinkTransfer) -> set[LinkTransfer]:
        found, border = {seed}, [seed]
        while border:
            for name in border.pop().links:
                new = self._users[name] - found
                if new:
                    found |= new
                    border.extend(new)
        return found


def _order_of(transfer: LinkTransfer) -> int:
    return transfer.order


def fair_speeds(transfers: Mapping[Any, Links]) -> dict[Any, float]:
    """Return max-min fair speeds (0 to 1) of transfers that each use a share (0 to 1) of some links at speed 1."""
    speeds: dict[Any, float] = {}
    left: dict[str, float] = {}
    rising = dict(transfers)
    for links in transfers.values():
        left.update(dict.fromkeys(links, 1.0))
    level = 0.0
    while rising:
        load = _load(rising.values())
        gain = min([1.0 - level, *(left[name] / amount for name, amount in load.items())])
        level += gain
        for name, amount in load.items():
            left[name] -= gain * amount
        full = {name for name in load if left[name] <= 1.0 - _FULL}
        stopped = [each for each, links in rising.items() if level >= _FULL or not full.isdisjoint(links)]
        for each in stopped:
            speeds[each] = 1.0 if level >= _FULL else level
            del rising[each]
    return speeds


def _load(transfers: Iterable[Links]) -> dict[str, float]:
    """Return the total share of each link that the transfers use at speed 1."""
    load: dict[str, float] = {}
    for links in transfers:
        for name, share in links.items():
            load[name] = load.get(name, 0.0) + share
    return load
