"""What uses the same links or the same GPU at the same time slows each other down: max-min fair shares.

A link has rate 1. A transfer alone runs at speed 1 and then takes a given share of each link it uses; at speed v it
takes v times that. Speeds rise together from zero; when a link is full, those that use it stay as they are (progressive
filling: Bertsekas and Gallager, Data Networks, 2nd ed., section 6.5.2). No speed exceeds 1, no link is overloaded, and
every transfer below speed 1 uses a full link on which no other is faster.

Of a GPU two things are shared: its memory, which is a link like others, and its multiprocessors. A collective keeps
those that its blocks sit on; a kernel beside it has the rest, and its speed is that share of the one the links allow.
What these shares are: :mod:`e2e.price.contention`.

Speeds change only when something begins or ends, so a calendar of these moments is enough. The caller moves it on one
moment at a time, and only once nothing can begin earlier.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

# A link as full as rounding lets it be.
_FULL = 1.0 - 1e-12
# Multiprocessors that collectives leave to kernels at the least: a kernel goes on, however many there are.
_LEAST_LEFT = 0.05
Links = Mapping[str, float]


@dataclass(slots=True, eq=False)
class LinkTransfer:
    """``what`` moves from ``start`` and would take ``seconds`` alone. ``speed`` since ``since``, when ``rest`` seconds
    (alone) were left; ``end`` at that speed. ``order``: of arrival here.

    ``held``: share of the multiprocessors of GPUs, by their memories' names, that it keeps; ``gpu``: of a kernel, the
    one whose memory is its only link, and whose multiprocessors it needs for the same share of its time.
    """

    order: int
    what: Any
    start: float
    seconds: float
    links: Links
    held: Links
    gpu: str = ""
    speed: float = 0.0
    since: float = 0.0
    rest: float = 0.0
    end: float = inf
    # Its links as a key: asked for at every moment.
    shape: tuple[tuple[str, float], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.use(self.links)

    def use(self, links: Links) -> None:
        """Takes these shares of links from now on."""
        self.links, self.shape = links, tuple(links.items())


@dataclass(slots=True)
class LinkSharing:
    """All transfers and kernels of a simulation that use links with a name. Moments never go back."""

    _order: Any = field(default_factory=count)
    # (start, order, transfer) of those that have not begun; (end, order, transfer), some out of date, of the others.
    _waiting: list[tuple[float, int, LinkTransfer]] = field(default_factory=list)
    _ends: list[tuple[float, int, LinkTransfer]] = field(default_factory=list)
    _users: dict[str, set[LinkTransfer]] = field(default_factory=dict)
    # Fair speeds by what takes part: a step has few combinations.
    _known: dict[tuple[tuple[tuple[str, float], ...], ...], tuple[float, ...]] = field(default_factory=dict)

    def add(self, what: Any, start: float, seconds: float, links: Links, held: Links | None = None) -> None:
        """``what`` begins at ``start``, not before the last moment that :meth:`step` reached."""
        used = {name: min(share, 1.0) for name, share in links.items() if share > 0}
        order = next(self._order)
        transfer = LinkTransfer(order, what, start, seconds, used, held or {})
        heapq.heappush(self._waiting, (start, order, transfer))

    def add_kernel(self, what: Any, start: float, seconds: float, gpu: str, busy: float) -> None:
        """``what`` runs on ``gpu`` and keeps its memory and its multiprocessors busy for the share ``busy`` of its
        time alone.
        """
        order = next(self._order)
        kernel = LinkTransfer(order, what, start, seconds, {gpu: busy}, {}, gpu)
        heapq.heappush(self._waiting, (start, order, kernel))

    def next_moment(self) -> float:
        """When the next transfer begins or ends; infinity if there is none."""
        ends = self._ends
        while ends and ends[0][2].end != ends[0][0]:
            heapq.heappop(ends)
        starts = self._waiting[0][0] if self._waiting else inf
        return min(starts, ends[0][0] if ends else inf)

    def step(self) -> LinkTransfer | None:
        """Moves on to the moment that :meth:`next_moment` told; returns the transfer that ends there, ``None`` if one
        begins. A kernel that ends is still there, for the caller to :meth:`leave` or :meth:`succeed`.
        """
        # What ends makes room for what begins at the same moment.
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
        """``what`` takes the place of ``kernel``, which ends ``now``: most are alike, and then no speed changes."""
        kernel.what, kernel.rest, kernel.since = what, seconds, now
        if busy == kernel.links[kernel.gpu]:
            kernel.end = now + seconds / kernel.speed
            heapq.heappush(self._ends, (kernel.end, next(self._order), kernel))
            return
        kernel.use({kernel.gpu: busy})
        kernel.speed = 0.0
        self._share(kernel, now)

    def leave(self, transfer: LinkTransfer, now: float) -> None:
        """``transfer`` has ended ``now``: others have what it used."""
        transfer.end = inf
        touched: set[LinkTransfer] = set()
        for name in transfer.links:
            self._users[name].discard(transfer)
            touched |= self._users[name]
        while touched:
            touched -= self._share(min(touched, key=_order_of), now)

    def _share(self, seed: LinkTransfer, now: float) -> set[LinkTransfer]:
        """New speeds for all that share links with ``seed``, directly or through others; returns these."""
        members = self._connected(seed)
        # In a fixed order, so that rounding is the same in every run.
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
    """Max-min fair speeds (0 to 1) of transfers that each take a share (0 to 1) of some links at speed 1."""
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
    """Share of each link that all take together at speed 1."""
    load: dict[str, float] = {}
    for links in transfers:
        for name, share in links.items():
            load[name] = load.get(name, 0.0) + share
    return load
