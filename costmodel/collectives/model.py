"""The cost model of collectives on one cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from costmodel.cluster import Cluster
from costmodel.collective_operators import CollectiveTransfer
from costmodel.collectives.physics import Analysis, analyse
from costmodel.errors import UnsupportedOperatorError
from costmodel.interface import CostModel, Estimate

# log(measured / analytic) of systems without measurements: half to twice.
UNMEASURED_MARGIN = 0.7


class CollectiveModel(CostModel):
    """Prices :class:`CollectiveTransfer` on ``cluster``."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def estimate(self, operators: Sequence[Any]) -> list[Estimate]:
        return [self._estimate(each) for each in operators]

    def _estimate(self, transfer: Any) -> Estimate:
        if not isinstance(transfer, CollectiveTransfer):
            raise UnsupportedOperatorError(f"no collective: {type(transfer).__name__}")
        analysis = analyse(transfer, self.cluster)
        seconds = analysis.seconds
        lower, upper = seconds * math.exp(-UNMEASURED_MARGIN), seconds * math.exp(UNMEASURED_MARGIN)
        return Estimate(seconds, lower, upper, bound_of(analysis), breakdown_of(analysis), "analytic")


def bound_of(analysis: Analysis) -> str:
    """What limits: ``latency``, ``link:gpu`` or ``link:network``."""
    terms = {
        "latency": analysis.latency_seconds,
        "link:gpu": analysis.gpu_seconds,
        "link:network": analysis.network_seconds,
    }
    return max(terms, key=lambda name: terms[name])


def breakdown_of(analysis: Analysis) -> dict[str, float | str]:
    """The terms behind the analytic time."""
    return {
        "analytic_seconds": analysis.seconds,
        "algorithm": analysis.algorithm,
        "protocol": analysis.protocol,
        "latency_seconds": analysis.latency_seconds,
        "gpu_link_seconds": analysis.gpu_seconds,
        "network_seconds": analysis.network_seconds,
    }


def collective_cost_model(cluster: Cluster, directory: Path | None = None) -> CostModel:
    """Prices every :class:`CollectiveTransfer` on ``cluster``."""
    return CollectiveModel(cluster)
