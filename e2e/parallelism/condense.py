"""Fewer, longer tasks: runs of kernels of a part priced and put together, for models of very many kernels.

A run of ``kernels`` launches becomes one: the host spends what it spends for all of them, then the device what they
take together. Host and device still overlap run by run; within a run the order is lost, which delays the device by at
most one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from costmodel.interface import CostModel
from e2e.graph import CallInfo, Duration, HostWork, Source
from e2e.parallelism.pieces import Item, Part, Pieces, Work
from e2e.pricing import LAUNCH_CALLS, Overheads

KERNELS = 8
NOTHING = Duration(0.0, 0.0, 0.0, "host", "fitted")
_LEAST_KNOWN_FIRST: tuple[Source, ...] = ("analytic", "fitted", "measured")


@dataclass
class Condenser:
    """``model`` prices kernels, ``overheads`` the host, as :func:`e2e.pricing.price` does."""

    model: CostModel
    overheads: Overheads
    kernels: int = KERNELS
    _prices: dict[Any, Duration] = field(default_factory=dict)
    _host: dict[tuple[str, str], float] = field(default_factory=dict)

    def pieces(self, pieces: Pieces) -> Pieces:
        """All parts of ``pieces``."""
        self._price([item for parts in _all(pieces) for part in parts.values() for item in part.items])

        def parts(given: Mapping[Any, Part]) -> dict[Any, Part]:
            return {
                name: replace(part, items=self._condensed(part.items, pieces.calls)) for name, part in given.items()
            }

        forward, backward, accumulate, core = (parts(given) for given in _all(pieces))
        return replace(pieces, forward=forward, backward=backward, accumulate=accumulate, core=core)

    def items(self, items: tuple[Item, ...], calls: Mapping[int, CallInfo]) -> tuple[Item, ...]:
        """A single list of items, such as an optimizer's."""
        self._price(items)
        return self._condensed(items, calls)

    def _price(self, items: Iterable[Item]) -> None:
        """Each distinct operator once."""
        works = [item for item in items if isinstance(item, Work)]
        new = dict.fromkeys(operator for work in works for operator in work.operators if operator not in self._prices)
        for operator, estimate in zip(new, self.model.estimate(list(new)), strict=True):
            self._prices[operator] = Duration(
                estimate.seconds, estimate.lower, estimate.upper, estimate.bound, estimate.source
            )

    def _condensed(self, items: tuple[Item, ...], calls: Mapping[int, CallInfo]) -> tuple[Item, ...]:
        launching = {item.call for item in items if isinstance(item, HostWork) and item.kind == "T2"}
        found: list[Item] = []
        run: list[Work] = []
        host: dict[str, float] = {}
        for item in items:
            if isinstance(item, HostWork):
                host[item.kind] = host.get(item.kind, 0.0) + self._seconds(item, calls, launching)
                continue
            if isinstance(item, Work):
                run.append(item)
                host["T4"] = host.get("T4", 0.0) + self._host_seconds("T4", LAUNCH_CALLS[item.kind])
            if not isinstance(item, Work) or len(run) == self.kernels:
                found += self._flushed(host, run)
                run, host = [], {}
            if not isinstance(item, Work):
                found.append(item)
        return (*found, *self._flushed(host, run))

    def _flushed(self, host: Mapping[str, float], run: list[Work]) -> list[Item]:
        call = run[0].call if run else None
        works: list[Item] = [
            HostWork(kind, call, Duration(seconds, seconds, seconds, "host", "fitted"))  # type: ignore[arg-type]
            for kind, seconds in host.items()
        ]
        return [*works, self._together(run)] if run else works

    def _together(self, run: list[Work]) -> Work:
        parts = [self._prices[operator] for work in run for operator in work.operators]
        longest = max(parts, key=lambda part: part.seconds)
        duration = Duration(
            sum(part.seconds for part in parts),
            sum(part.lower for part in parts),
            sum(part.upper for part in parts),
            longest.bound,
            min((part.source for part in parts), key=_LEAST_KNOWN_FIRST.index),
        )
        name = run[0].name if len(run) == 1 else f"{run[0].name} and {len(run) - 1} more"
        operators = tuple(operator for work in run for operator in work.operators)
        return Work(name, run[0].kind, operators, run[0].call, duration, NOTHING)

    def _seconds(self, item: HostWork, calls: Mapping[int, CallInfo], launching: set[int | None]) -> float:
        kind = "whole" if item.kind == "T5" and item.call not in launching else item.kind
        name = "" if item.call is None or item.call not in calls else calls[item.call].name
        return self._host_seconds(kind, name)

    def _host_seconds(self, kind: str, name: str) -> float:
        if (kind, name) not in self._host:
            self._host[kind, name] = self.overheads.seconds(kind, name)
        return self._host[kind, name]


def _all(pieces: Pieces) -> tuple[Mapping[Any, Part], ...]:
    return pieces.forward, pieces.backward, pieces.accumulate, pieces.core
