"""Parts as a profile of single layers shows them: each from a standing start, its time with the gaps of the host.

vTrain (Bang et al., MICRO 2024) profiles embedding, one layer and head one by one, then puts iterations together from
these times and from a table of all-reduces. A part takes what host and device need for it when neither is ahead;
transfers of tensor parallelism are added, hidden by nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from costmodel.model.cost_model import CostModel
from costmodel.operators.collective_transfer import CollectiveTransfer
from e2e.parallelism.condense import NOTHING, Condenser
from e2e.parallelism.layers.pieces import Item, LayerCollective, Part, Pieces, Work
from e2e.price.pricing import HostOverheads, duration_of, operator_prices
from e2e.step.execution_graph import CallInfo, Duration, HostWork


@dataclass
class Profiler:
    """``overheads``: of the profiled host; ``collectives`` prices transfers among ``tp`` ranks on ``nodes`` nodes."""

    model: CostModel
    overheads: HostOverheads
    collectives: CostModel
    tp: int
    nodes: int = 1

    def __post_init__(self) -> None:
        self._condenser = Condenser(self.overheads, kernels=1)

    def pieces(self, pieces: Pieces) -> Pieces:
        """All parts of ``pieces``, each as one task. Gradients of later micro-batches cost what the first ones do."""

        def parts(given: Mapping[Any, Part]) -> dict[Any, Part]:
            return {
                name: replace(part, items=self._whole(part.items, pieces.calls, str(name)))
                for name, part in given.items()
            }

        backward = parts(pieces.backward)
        forward = parts(pieces.forward)
        return replace(pieces, forward=forward, backward=backward, accumulate=backward, core={}, chosen={}, needed={})

    def items(self, items: tuple[Item, ...], calls: Mapping[int, CallInfo]) -> tuple[Item, ...]:
        """A single list of items as one task."""
        return self._whole(items, calls, "optimizer")

    def priced(self, items: tuple[Item, ...], calls: Mapping[int, CallInfo]) -> tuple[Item, ...]:
        """``items`` with the prices of the host and of the kernels by themselves, as they are profiled."""
        condensed = self._condenser.items(items, calls)
        counts = Counter(operator for item in condensed if isinstance(item, Work) for operator in item.operators)
        (prices,) = operator_prices([counts], self.model)
        return tuple(
            replace(item, duration=duration_of(item, prices)) if isinstance(item, Work) else item for item in condensed
        )

    def _whole(self, items: tuple[Item, ...], calls: Mapping[int, CallInfo], name: str) -> tuple[Item, ...]:
        seconds = standing_start(self.priced(items, calls)) + self._transfers(items)
        duration = Duration(seconds, seconds, seconds, "profile", "fitted")
        call = next((item.call for item in items if isinstance(item, Work)), None)
        return (Work(f"part {name}", "kernel", (), call, duration, NOTHING),)

    def _transfers(self, items: tuple[Item, ...]) -> float:
        wanted = [
            CollectiveTransfer(item.kind, item.size_bytes, self.tp, self.nodes)  # type: ignore[arg-type]
            for item in items
            if isinstance(item, LayerCollective)
        ]
        return sum(estimate.seconds for estimate in self.collectives.estimate(wanted)) if wanted else 0.0


def standing_start(items: tuple[Item, ...]) -> float:
    """Seconds from an idle machine until host and device have ended priced ``items``, kernels one after another."""
    host = device = 0.0
    for item in items:
        if isinstance(item, HostWork) and item.duration is not None:
            host += item.duration.seconds
        elif isinstance(item, Work) and item.duration is not None:
            device = max(host, device) + item.duration.seconds
    return max(host, device)
