"""Cost model of collectives on one cluster.

Where the system, or a similar one, was measured: curves over the size, with the analytic model interpolating between
and extrapolating beyond the measured rank counts (``fitted``). A kind without measurements uses the curves of the most
similar kind, and transfers across nodes use single-node curves with the analytic bandwidth and latency of the network
(``analytic``, as is the pure analytic model where no similar system was measured).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from costmodel.base.errors import InputError, MachineError, UnsupportedOperatorError
from costmodel.collectives.calibration import (
    Calibration,
    CollectiveSweep,
    Curve,
    Margins,
    adds,
    architecture_of,
    between_curves,
    bracket,
    calibrations_for,
)
from costmodel.collectives.engine_reduce import reduce_of
from costmodel.collectives.physics import Constants, TransferAnalysis, analyse, can_reduce, constants
from costmodel.cost_model import CostModel, Estimate, PriceSource
from costmodel.gpu.fitted import known_as
from costmodel.machines.cluster import Cluster, load_cluster, nccl_version
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.collective_transfer import CollectiveTransfer

# Fallback kinds whose curves replace those of an unmeasured kind, most similar first: the same algorithm, half of it,
# twice.
RELATIVES: dict[str, tuple[str, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "all_gather": ("reduce_scatter", "all_reduce"),
    "reduce_scatter": ("all_gather", "all_reduce"),
    "all_to_all": ("send_recv", "all_gather", "reduce_scatter", "all_reduce"),
    "broadcast": ("all_gather", "reduce_scatter", "all_reduce"),
    "reduce": ("reduce_scatter", "all_gather", "all_reduce"),
    "send_recv": ("all_to_all", "all_gather", "all_reduce"),
    "barrier": ("all_reduce", "all_gather"),
}
# |log(measured / predicted)| of the analytic model alone that covers 80 % of rows, each system left out in turn (L40S
# 0.31 to 0.40, V100 0.12, pairs of A100 0.06).
UNMEASURED_MARGIN = 0.35
# Additions to the half-width of the interval that keep this coverage: curves of a GPU of the same architecture (H100
# and H200: 0.03 to 0.17 in all, most of it their own) or of another one (A100 0.06 to 0.16; rings of GB200, to which
# nothing is fitted, 0.26), of another kind (send_recv by all_to_all 0.33), beyond the measured range, with another
# network.
ALIKE_MARGIN, OTHER_MARGIN, KIND_MARGIN = 0.03, 0.15, 0.2
EXTRAPOLATION_MARGIN, NETWORK_MARGIN = 0.2, 0.4
# Transfers through the host among more than two cards, on a server without measurements: repetitions on one server
# differ by up to 1.7 times (docs/collectives.md).
HOST_MARGIN = 0.53
NO_MARGINS = Margins(0.1, 0.2)
_ADDED = ("all_reduce", "barrier")  # kinds that switches can reduce


@dataclass(frozen=True)
class _Source:
    """Curves that price a kind: those of ``kind`` itself or of a similar one, within a node or ``across`` nodes.

    ``own``: measured on the same GPU in the same topology, ``alike``: on a GPU of its architecture; ``machine``: the
    measured system. ``curves``: one tuple per NCCL version that is averaged.
    """

    kind: str
    across: bool
    own: bool
    alike: bool
    machine: str
    nccl: str
    margins: Margins
    curves: tuple[tuple[Curve, ...], ...]


class CollectiveModel(CostModel):
    """Cost model of :class:`CollectiveTransfer` on ``cluster``; analytic if ``tiers`` hold no usable curves. Tiers with
    measurements of the cluster come first (:func:`calibrations_for`). ``known``: analytic constants that replace the
    shipped ones.
    """

    def __init__(
        self, cluster: Cluster, tiers: Sequence[Sequence[Calibration]] = (), known: Constants | None = None
    ) -> None:
        self.cluster = cluster
        self._tiers = tiers
        self._constants = known or constants()
        self._sources: dict[tuple[str, bool], _Source | None] = {}
        self._known: dict[CollectiveTransfer, Estimate] = {}

    def estimate(self, operators: Sequence[AnyOperator]) -> list[Estimate]:
        results = []
        for each in operators:
            if not isinstance(each, CollectiveTransfer):
                raise UnsupportedOperatorError(
                    f"no collective: {type(each).__name__}; ask gpu_cost_model about kernels"
                )
            if each not in self._known:
                self._known[each] = self._estimate(each)
            results.append(self._known[each])
        return results

    def _estimate(self, transfer: CollectiveTransfer) -> Estimate:
        if transfer.engine:
            return self._by_engine(transfer)
        # a message has two ends, whatever the size of the group
        if transfer.kind == "send_recv" and transfer.ranks > 2:
            transfer = dataclasses.replace(transfer, ranks=2, nodes=min(transfer.nodes, 2))
        analysis = analyse(transfer, self.cluster, self._constants)
        library = transfer.ranks > 1 and not transfer.puts  # curves are of NCCL
        source = self._source(transfer.kind, transfer.nodes > 1) if library else None
        if source is None:
            return _record(analysis, analysis.seconds, UNMEASURED_MARGIN, "analytic", {})
        ranks, nodes, ideal = transfer.ranks, transfer.nodes, analysis.ideal_seconds
        usable = unknown_share(self.cluster, ranks)
        start = analysis.start_seconds
        versions = [between_curves(each, ranks, nodes, start, ideal, usable) for each in source.curves]
        seconds = math.prod(versions) ** (1 / len(versions))
        margin, notes = _margin(transfer, self.cluster, source, ideal)
        # The source is "fitted" only for this kind within the measured nodes and ranks; otherwise the price rests on
        # physics.
        beyond = {"ranks", "nodes"} & set(_beyond(transfer, source, ideal))
        measured = source.own and source.kind == transfer.kind and not beyond
        return _record(analysis, seconds, margin, "fitted" if measured else "analytic", notes)

    def _by_engine(self, transfer: CollectiveTransfer) -> Estimate:
        library = self._estimate(dataclasses.replace(transfer, engine=""))
        found = reduce_of(transfer, self.cluster)
        if found is None:
            return library
        kernel, own = found
        seconds = kernel.seconds(transfer, self.cluster)
        if seconds >= library.seconds:
            return library
        margin = kernel.margin + (0.0 if own else OTHER_MARGIN)
        lower, upper = seconds * math.exp(-margin), seconds * math.exp(margin)
        source: PriceSource = "fitted" if own else "analytic"
        return Estimate(seconds, lower, upper, library.bound, {"engine": transfer.engine}, source)

    def _source(self, kind: str, across: bool) -> _Source | None:
        key = (kind, across)
        if key not in self._sources:
            self._sources[key] = self._find(kind, across)
        return self._sources[key]

    def _find(self, kind: str, across: bool) -> _Source | None:
        """Find the source in the nearest tier, the kind itself before similar kinds. Across nodes, where measurements
        are few: the kind itself in any tier, then similar kinds across nodes, then single-node measurements.
        """
        names = (kind, *RELATIVES[kind])
        if across:
            found = self._first([kind], True, self._tiers) or self._first(names, True, self._tiers)
            if found is not None:
                return found
        return self._first(names, False, self._tiers)

    def _first(self, names: Sequence[str], across: bool, tiers: Sequence[Sequence[Calibration]]) -> _Source | None:
        for tier in tiers:
            for name in names:
                for calibration in tier:
                    if across and not self._same_algorithms(names[0], name, calibration):
                        continue
                    sweeps = [s for s in calibration.sweeps if s.kind == name and (s.nodes > 1) == across]
                    if sweeps:
                        return self._made(calibration, name, across, sweeps)
        return None

    def _same_algorithms(self, asked: str, kind: str, calibration: Calibration) -> bool:
        """True if measurements of ``kind`` use the same algorithms as the requested kind ``asked``: in-switch
        reductions have their own latency, so in-switch all-reduces across nodes do not predict trees, nor the rings of
        other kinds.
        """
        if kind not in _ADDED:
            return True
        return adds(calibration) == (asked in _ADDED and can_reduce(self.cluster))

    def _made(self, calibration: Calibration, kind: str, across: bool, sweeps: Sequence[CollectiveSweep]) -> _Source:
        measured_on = _measured_cluster(calibration, self.cluster)
        own = calibration.machine == self.cluster.name or calibration.gpu == known_as(self.cluster.machine)
        versions = _versions({each.nccl for each in sweeps}, self.cluster.nccl, own)
        margins = calibration.margins.get(kind, NO_MARGINS)
        curves = tuple(
            tuple(self._curve(each, measured_on, own) for each in sweeps if each.nccl == version)
            for version in versions
        )
        alike = architecture_of(calibration.gpu) == self.cluster.machine.chip().architecture
        return _Source(kind, across, own, alike, calibration.machine, ", ".join(versions), margins, curves)

    def _curve(self, sweep: CollectiveSweep, measured_on: Cluster, own: bool) -> Curve:
        curve = curve_of(sweep, measured_on, self._constants)
        if own:
            return curve
        here = analyse(CollectiveTransfer(sweep.kind, 0.0, sweep.ranks, sweep.nodes), self.cluster, self._constants)
        return dataclasses.replace(curve, slower=here.start_seconds / curve.start)


def _margin(
    transfer: CollectiveTransfer, cluster: Cluster, source: _Source, ideal: float
) -> tuple[float, dict[str, float | str]]:
    """Half-width of the interval in logarithms, and notes that explain it."""
    below, above, _ = bracket(source.curves[-1], transfer.ranks, transfer.nodes)
    notes: dict[str, float | str] = {"nccl": source.nccl or "unknown"}
    width = source.margins.size if transfer.ranks in (below.ranks, above.ranks) else source.margins.ranks
    outside = _beyond(transfer, source, ideal)
    if outside:
        notes["extrapolates"] = ", ".join(outside)
        width += EXTRAPOLATION_MARGIN + (NETWORK_MARGIN if "nodes" in outside else 0.0)
    if source.kind != transfer.kind:
        notes["fitted_on_kind"] = source.kind
        # Volumes over a network are known for all kinds, NCCL's efficiency there is not.
        width += NETWORK_MARGIN if source.across else KIND_MARGIN
    if not source.own:
        notes["fitted_on"] = source.machine
        width += ALIKE_MARGIN if source.alike else OTHER_MARGIN
    if cluster.topology in ("host", "pairs") and transfer.ranks > 2 and source.machine != cluster.name:
        width += HOST_MARGIN
    return width, notes


def _beyond(transfer: CollectiveTransfer, source: _Source, ideal: float) -> list[str]:
    """Names of the dimensions in which ``transfer`` is outside the measured range of ``source``."""
    below, above, _ = bracket(source.curves[-1], transfer.ranks, transfer.nodes)
    return [
        *(["ranks"] if not below.ranks <= transfer.ranks <= above.ranks else []),
        *(["size_bytes"] if ideal > 0 and not (below.holds(ideal) or above.holds(ideal)) else []),
        *(["nodes"] if source.across != (transfer.nodes > 1) else []),
    ]


def curve_of(sweep: CollectiveSweep, cluster: Cluster, known: Constants | None = None) -> Curve:
    """Curve of ``sweep`` over ideal seconds of the measured ``cluster``, with the NCCL version that ran."""
    cluster = dataclasses.replace(cluster, nccl=sweep.nccl or cluster.nccl)
    parts = [
        analyse(CollectiveTransfer(sweep.kind, size, sweep.ranks, sweep.nodes), cluster, known) for size in sweep.sizes
    ]
    ideal = tuple(each.ideal_seconds for each in parts)
    usable = unknown_share(cluster, sweep.ranks)
    return Curve(sweep.ranks, sweep.nodes, ideal, sweep.seconds, parts[0].start_seconds, parts[0].seconds, usable)


def unknown_share(cluster: Cluster, ranks: int) -> float:
    """Share of the links' rate that ``ranks`` GPUs of a node reach and NCCL does not account for: transfers through a
    host.

    Links between GPUs are part of NCCL's topology.
    """
    return cluster.usable_share(ranks) if cluster.topology == "host" else 1.0


def collective_cost_model(cluster: Cluster, directory: Path | None = None) -> CostModel:
    """Cost model of :class:`CollectiveTransfer` on ``cluster``. ``directory``: calibrations used instead of the shipped
    ones.

    Raises ``InputError`` for a corrupt calibration.
    """
    return CollectiveModel(cluster, calibrations_for(cluster, directory))


def _measured_cluster(calibration: Calibration, cluster: Cluster) -> Cluster:
    """The cluster on which ``calibration`` was measured: ``cluster`` itself if it is the same or the file no longer
    exists.

    Across nodes the network of the file is used: ``cluster`` may have been given another one.
    """
    nodes = max(each.nodes for each in calibration.sweeps)
    mine = calibration.machine == cluster.name
    if mine and nodes == 1:
        return cluster
    per_node = max(-(-each.ranks // each.nodes) for each in calibration.sweeps)
    try:
        return load_cluster((mine and cluster.source) or calibration.machine, per_node * nodes, nodes)
    except (MachineError, InputError):
        return cluster


def _versions(known: set[str], asked: str, own: bool) -> list[str]:
    """NCCL versions to use: the newest that is not newer than the requested version ``asked``, else the oldest. Without
    a requested version, the newest; for another system (not ``own``) all known ones, since start times differ by a
    fifth between versions two years apart and the version that will run is unknown.
    """
    ordered = sorted(known, key=nccl_version)
    if not asked and not own:
        return [each for each in ordered if each] or ordered
    older = [each for each in ordered if not asked or nccl_version(each) <= nccl_version(asked)]
    return older[-1:] or ordered[:1]


def _record(
    analysis: TransferAnalysis, seconds: float, margin: float, source: PriceSource, notes: dict[str, float | str]
) -> Estimate:
    lower, upper = seconds * math.exp(-margin), seconds * math.exp(margin)
    return Estimate(seconds, lower, upper, _bound(analysis), {**_breakdown(analysis), **notes}, source)


def _bound(analysis: TransferAnalysis) -> str:
    """Dominant term: ``latency``, ``link:gpu`` or ``link:network``."""
    terms = {
        "latency": analysis.latency_seconds,
        "link:gpu": analysis.gpu_seconds,
        "link:network": analysis.network_seconds,
    }
    return max(terms, key=lambda name: terms[name])


def _breakdown(analysis: TransferAnalysis) -> dict[str, float | str]:
    return {
        "analytic_seconds": analysis.seconds,
        "algorithm": analysis.algorithm,
        "protocol": analysis.protocol,
        "latency_seconds": analysis.latency_seconds,
        "gpu_link_seconds": analysis.gpu_seconds,
        "network_seconds": analysis.network_seconds,
    }
