"""Transfers that use the same links at the same time slow each other down: max-min fair shares.

A link has rate 1. A transfer alone runs at speed 1 and then takes a given share of each link it uses; at speed v it
takes v times that. Speeds rise together from zero; when a link is full, those that use it stay as they are (progressive
filling: Bertsekas and Gallager, Data Networks, 2nd ed., section 6.5.2). No speed exceeds 1, no link is overloaded, and
every transfer below speed 1 uses a full link on which no other is faster.

Speeds change only when a transfer begins or ends, so a calendar of these moments is enough. The caller moves it on one
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
Links = Mapping[str, float]


@dataclass(slots=True, eq=False)
class LinkTransfer:
    """``what`` moves from ``start`` and would take ``seconds`` alone. ``speed`` since ``since``, when ``rest`` seconds
    (alone) were left; ``end`` at that speed. ``order``: of arrival here.
    """

    order: int
    what: Any
    start: float
    seconds: float
    links: Links
    speed: float = 0.0
    since: float = 0.0
    rest: float = 0.0
    end: float = inf


@dataclass(slots=True)
class LinkSharing:
    """All transfers of a simulation that use links with a name. Moments never go back."""

    _order: Any = field(default_factory=count)
    # (start, order, transfer) of those that have not begun; (end, order, transfer), some out of date, of the others.
    _waiting: list[tuple[float, int, LinkTransfer]] = field(default_factory=list)
    _ends: list[tuple[float, int, LinkTransfer]] = field(default_factory=list)
    _users: dict[str, set[LinkTransfer]] = field(default_factory=dict)

    def add(self, what: Any, start: float, seconds: float, links: Links) -> None:
        """``what`` begins at ``start``, not before the last moment that :meth:`step` reached."""
        used = {name: min(share, 1.0) for name, share in links.items() if share > 0}
        order = next(self._order)
        heapq.heappush(self._waiting, (start, order, LinkTransfer(order, what, start, seconds, used)))

    def next_moment(self) -> float:
        """When the next transfer begins or ends; infinity if there is none."""
        self._drop_outdated()
        starts = self._waiting[0][0] if self._waiting else inf
        return min(starts, self._ends[0][0] if self._ends else inf)

    def step(self) -> LinkTransfer | None:
        """Moves on to the next moment; returns the transfer that ends there, ``None`` if one begins."""
        self._drop_outdated()
        # What ends makes room for what begins at the same moment.
        if self._ends and (not self._waiting or self._ends[0][0] <= self._waiting[0][0]):
            end, _, transfer = heapq.heappop(self._ends)
            self._leave(transfer, end)
            return transfer
        start, _, transfer = heapq.heappop(self._waiting)
        self._begin(transfer, start)
        return None

    def _drop_outdated(self) -> None:
        while self._ends and self._ends[0][2].end != self._ends[0][0]:
            heapq.heappop(self._ends)

    def _begin(self, transfer: LinkTransfer, now: float) -> None:
        transfer.since, transfer.rest = now, transfer.seconds
        for name in transfer.links:
            self._users.setdefault(name, set()).add(transfer)
        self._share(transfer, now)

    def _leave(self, transfer: LinkTransfer, now: float) -> None:
        transfer.end = inf
        touched: set[LinkTransfer] = set()
        for name in transfer.links:
            self._users[name].discard(transfer)
            touched |= self._users[name]
        while touched:
            touched -= self._share(min(touched, key=lambda each: each.order), now)

    def _share(self, seed: LinkTransfer, now: float) -> set[LinkTransfer]:
        """New speeds for all that share links with ``seed``, directly or through others; returns these."""
        members = self._connected(seed)
        # In a fixed order, so that rounding is the same in every run.
        speeds = fair_speeds({member: member.links for member in sorted(members, key=lambda each: each.order)})
        for member, speed in speeds.items():
            if speed != member.speed:
                member.rest = max(member.rest - member.speed * (now - member.since), 0.0)
                member.since, member.speed = now, speed
                member.end = now + member.rest / speed
                heapq.heappush(self._ends, (member.end, next(self._order), member))
        return members

    def _connected(self, seed: LinkTransfer) -> set[LinkTransfer]:
        found, border = {seed}, [seed]
        while border:
            for name in border.pop().links:
                new = self._users[name] - found
                found |= new
                border.extend(new)
        return found


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
