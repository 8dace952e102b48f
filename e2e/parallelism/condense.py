"""Condensed kernels: runs of kernels of a part merged into one task, for models of very many kernels.

A run of ``kernels`` launches becomes one task: first all of its host time, then all of its device time. Host and device
still overlap run by run; the order within a run is lost, which delays the device by at most one run. Kernels are priced
with the whole step (:func:`e2e.price.pricing.price`), since prices may depend on its mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from e2e.parallelism.layers.pieces import Item, LayerCollective, Pieces, Work
from e2e.price.pricing import HostOverheads, HostPrices, fitted, launching_calls
from e2e.step.execution_graph import CallInfo, HostWork, Kernel, OverheadKind

KERNELS = 8
NOTHING = fitted(0.0)


@dataclass
class Condenser:
    """Merger of runs of kernels. ``overheads`` prices the host, as in :func:`e2e.price.pricing.price`."""

    overheads: HostOverheads
    kernels: int = KERNELS
    _host: HostPrices = field(init=False)

    def __post_init__(self) -> None:
        self._host = HostPrices(self.overheads)

    def pieces(self, pieces: Pieces) -> Pieces:
        """Condense all parts of ``pieces``."""
        return pieces.with_items(lambda items: self.items(items, pieces.calls))

    def items(self, items: tuple[Item, ...], calls: Mapping[int, CallInfo]) -> tuple[Item, ...]:
        """Condense one list of items, such as an optimizer's."""
        launching = launching_calls(items)
        found: list[Item] = []
        run: list[Work] = []
        host: dict[OverheadKind, float] = {}
        awaited = False  # the item after the next kernel waits for a collective
        for item in items:
            if isinstance(item, HostWork):
                host[item.kind] = host.get(item.kind, 0.0) + self._host.work(item, calls, launching).seconds
                continue
            if isinstance(item, Work):
                run.append(item)
                host["T4"] = host.get("T4", 0.0) + self._host.launch(item.kind).seconds
            if not isinstance(item, Work) or len(run) == self.kernels or awaited:
                found += _flushed(host, run)
                run, host = [], {}
                awaited = isinstance(item, LayerCollective) and item.early
            if not isinstance(item, Work):
                found.append(item)
        return (*found, *_flushed(host, run))


def _flushed(host: Mapping[OverheadKind, float], run: list[Work]) -> list[Item]:
    call = run[0].call if run else None
    works: list[Item] = [HostWork(kind, call, fitted(seconds)) for kind, seconds in host.items()]
    return [*works, _together(run)] if run else works


def _together(run: list[Work]) -> Work:
    first = replace(run[0], launch=NOTHING)
    if len(run) == 1:
        return first
    kernels = tuple(Kernel(work.name, work.kind, work.operators, work.call) for work in run)
    return replace(first, name=f"{first.name} and {len(run) - 1} more", operators=(), kernels=kernels)
