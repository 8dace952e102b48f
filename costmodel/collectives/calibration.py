"""Measured collectives: curves over the size, and the calibration files that hold them.

A curve is the time as an increasing, continuous function of the size, for one number of ranks:
t(size) = latency + excess. The excess is a function of the ideal seconds of :mod:`costmodel.collectives.physics`,
over which curves of different rank counts and systems nearly coincide; between measured sizes it follows a monotone
cubic (Fritsch and Carlson, 1980) in logarithms, beyond them it is proportional to the size.

Files ``<folder>/<machine>/collectives.json`` hold knots by NCCL version, kind and ranks. Shipped files are in
``costmodel/calibration``, the user's in the folder ``calibration`` of the user's directory
(:func:`costmodel.machines.machine_file.user_directory`); the user's take precedence.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression

from costmodel.base.errors import OutputError
from costmodel.base.output_files import write_whole
from costmodel.collectives.physics import architecture_adds, can_reduce
from costmodel.gpu.fitted import known_as
from costmodel.machines.cluster import Cluster, nccl_version
from costmodel.machines.cluster_file import cluster_files, read_cluster
from costmodel.machines.machine_file import user_directory
from costmodel.machines.record_file import read_record
from costmodel.operators.collective_transfer import CollectiveKind

# Knots are added until every measured size is met within this error, up to this many.
KNOT_ERROR, MOST_KNOTS = 0.01, 24
# Bounds on the share of latency in the time of the smallest size.
_LEAST_LATENCY, _MOST_LATENCY = 0.05, 0.97


def smooth_knots(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Knots, ascending sizes and non-decreasing seconds, from measurements in any order, with repeated sizes: the
    median of each size, single-size spikes removed (median of three, which leaves increasing data unchanged), then
    isotonic regression of the logarithms.
    """
    known = np.unique(np.asarray(sizes, dtype=float))
    groups: dict[float, list[float]] = {size: [] for size in known.tolist()}
    for size, time in zip(sizes, seconds, strict=True):
        groups[float(size)].append(float(time))
    logs = np.log([np.median(groups[size]) for size in known.tolist()])
    if len(logs) > 2:
        inner = np.median(np.stack([logs[:-2], logs[1:-1], logs[2:]]), axis=0)
        logs = np.concatenate([logs[:1], inner, logs[-1:]])
    rising = np.asarray(isotonic_regression(logs).x)
    kept = _thin(np.log(known), rising)
    times = np.maximum.accumulate([float(f"{value:.4e}") for value in np.exp(rising[kept])])
    return tuple(known[kept].tolist()), tuple(times.tolist())


def _thin(places: np.ndarray, logs: np.ndarray) -> list[int]:
    """Indices of the points needed for a monotone cubic to approximate the others."""
    kept = sorted({0, len(places) - 1})
    while len(kept) < min(len(places), MOST_KNOTS):
        errors = np.abs(_between(places[kept], logs[kept], places) - logs)
        worst = int(errors.argmax())
        if errors[worst] <= KNOT_ERROR:
            break
        kept = sorted({*kept, worst})
    return kept


def _between(places: np.ndarray, logs: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    if len(places) == 1:
        return np.full(len(wanted), logs[0])
    return np.asarray(PchipInterpolator(places, logs)(wanted))


@dataclass(frozen=True)
class Curve:
    """Time of a collective over its ideal seconds.

    The latency is estimated from the first knot: the error of the analytic time at that knot is attributed to the
    latency in proportion to its share of that time, since a large message says little about latency.
    """

    ranks: int
    nodes: int
    # Seconds of the bytes alone, at each knot.
    ideal: tuple[float, ...]
    # Measured seconds at each knot.
    seconds: tuple[float, ...]
    # Analytic seconds of the smallest message, and of the first knot.
    start: float
    first: float
    # Share of the links' rate that its ranks reach and NCCL does not account for, included in `ideal` (below 1 only
    # through a host).
    usable: float = 1.0
    # Ratio of start and hop times where the curve is used to those where it was measured.
    slower: float = 1.0
    # Seconds that do not depend on the size.
    latency: float = field(init=False)
    _cubic: Any = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        share = min(max(self.start / self.first, _LEAST_LATENCY), _MOST_LATENCY)
        off = (self.seconds[0] / self.first) ** share
        cubic = None
        if len(self.ideal) > 1:
            cubic = PchipInterpolator(np.log(self.ideal), np.log(self.seconds))
        object.__setattr__(self, "latency", min(share * self.first * off, _MOST_LATENCY * self.seconds[0]))
        object.__setattr__(self, "_cubic", cubic)

    def excess(self, ideal: float) -> float:
        """Seconds beyond the latency for bytes that ideally take ``ideal`` seconds."""
        if ideal <= 0:
            return 0.0
        first, last = self.ideal[0], self.ideal[-1]
        inside = min(max(ideal, first), last)
        time = self.seconds[0] if self._cubic is None else math.exp(float(self._cubic(math.log(inside))))
        time = min(max(time, self.seconds[0]), self.seconds[-1])
        return (time - self.latency) * (ideal / inside)

    def holds(self, ideal: float) -> bool:
        """True if ``ideal`` lies between the measured sizes, extended by a factor of two on both sides."""
        return self.ideal[0] / 2 <= ideal <= self.ideal[-1] * 2


def between_curves(
    curves: Sequence[Curve], ranks: int, nodes: int, start: float, ideal: float, usable: float = 1.0
) -> float:
    """Seconds among ``ranks`` ranks, from ``curves`` of the same or other rank counts. ``usable``: as in
    :class:`Curve`.

    The latency keeps its ratio to the analytic ``start``; the excess is interpolated at equal ``ideal`` seconds; both
    geometrically over the logarithm of ranks. Beyond the outermost counts the ratios are constant. Across nodes,
    single-node curves keep their latency, plus the analytic latency that the network adds.
    """
    below, above, weight = bracket(curves, ranks, nodes)
    if nodes > 1 and below.nodes == 1:
        slower = max(0.0, start - _mean(below.start, above.start, weight))
        latency = _mean(below.latency, above.latency, weight) + slower
    else:
        latency = start * _mean(below.latency / below.start, above.latency / above.start, weight)
    low, high = (_excess(each, ranks, nodes, ideal, usable) for each in (below, above))
    return latency + _mean(low, high, weight)


def _excess(curve: Curve, ranks: int, nodes: int, ideal: float, usable: float) -> float:
    """Excess of ``curve`` among ``ranks`` ranks: where starts and hops take k times as long, bytes of k times the ideal
    seconds have k times the excess.

    Fixed costs are amortised at equal seconds; NCCL changes its protocol at equal bytes, since it assumes unshared
    links. Where the ranks share the host's bandwidth, these two points differ; an overhead that has ended at either of
    them is not carried to other rank counts, so the smaller slowdown is used.
    """
    if curve.slower != 1.0:
        same = dataclasses.replace(curve, slower=1.0)
        return curve.slower * _excess(same, ranks, nodes, ideal / curve.slower, usable)
    if ranks == curve.ranks:
        return curve.excess(ideal)
    shift = usable / curve.usable if nodes == curve.nodes == 1 else 1.0
    return min(curve.excess(ideal), curve.excess(ideal * shift) / shift)


def _mean(low: float, high: float, weight: float) -> float:
    """Geometric mean with ``weight`` on ``high``; zero if either value is zero."""
    return low ** (1 - weight) * high**weight if low > 0 and high > 0 else 0.0


def bracket(curves: Sequence[Curve], ranks: int, nodes: int) -> tuple[Curve, Curve, float]:
    """Curves of the nearest rank counts below and above, and the weight of the upper one. Among curves of the same rank
    count, the one with the nearest number of nodes is used.
    """
    chosen: dict[int, Curve] = {}
    for each in sorted(curves, key=lambda curve: abs(math.log(curve.nodes / nodes)), reverse=True):
        chosen[each.ranks] = each
    counts = sorted(chosen)
    low = max((count for count in counts if count <= ranks), default=counts[0])
    high = min((count for count in counts if count >= ranks), default=counts[-1])
    if low >= high:
        return chosen[low], chosen[low], 0.0
    return chosen[low], chosen[high], math.log(ranks / low) / math.log(high / low)


DIRECTORY = Path(__file__).parent.parent / "calibration"
NAME = "collectives.json"


@dataclass(frozen=True)
class CollectiveSweep:
    """Measured times of one kind of collective among ``ranks`` ranks on ``nodes`` nodes, with one NCCL version (empty:
    unknown), as knots (:func:`smooth_knots`): sizes in bytes as ``CollectiveTransfer.size_bytes``, and seconds.
    """

    nccl: str
    kind: CollectiveKind
    ranks: int
    nodes: int
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.ranks:
            raise ValueError(f"{self.nodes} nodes, {self.ranks} ranks")
        if len(self.sizes) != len(self.seconds) or not self.sizes:
            raise ValueError(f"as many times as sizes, one at least; got {len(self.sizes)}, {len(self.seconds)}")
        if not (min(self.sizes) > 0 and min(self.seconds) > 0 and all(map(math.isfinite, self.seconds))):
            raise ValueError("sizes and times must be above zero and finite")
        if not (np.diff(self.sizes) > 0).all() or not (np.diff(self.seconds) >= 0).all():
            raise ValueError("sizes must ascend, times must not fall")


@dataclass(frozen=True)
class Margins:
    """Half-widths, in logarithms, of intervals that cover 80 % of the errors: for held-out sizes and held-out rank
    counts.
    """

    size: float
    ranks: float


@dataclass(frozen=True)
class Calibration:
    """Measurements of ``machine`` (name of a cluster or a GPU). ``margins`` by kind."""

    machine: str
    gpu: str
    topology: str
    sweeps: tuple[CollectiveSweep, ...]
    margins: Mapping[str, Margins]
    provenance: Mapping[str, Any]
    format: Literal[1] = 1

    def versions(self) -> list[str]:
        """NCCL versions, oldest first; unknown ones come first."""
        return sorted({each.nccl for each in self.sweeps}, key=nccl_version)


def write_calibration(calibration: Calibration, directory: Path) -> Path:
    """Write ``directory/<machine>/collectives.json``; raises ``OutputError`` on failure."""
    path = directory / calibration.machine / NAME
    record = {
        "format": calibration.format,
        "machine": calibration.machine,
        "gpu": calibration.gpu,
        "topology": calibration.topology,
        "provenance": dict(calibration.provenance),
        "margins": {kind: vars(each) for kind, each in sorted(calibration.margins.items())},
        "sweeps": [vars(each) for each in calibration.sweeps],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _compact(record))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another directory with -o") from None
    forget_calibrations()
    return path


def forget_calibrations() -> None:
    """Clear the cache of calibrations after files were written."""
    _read_all.cache_clear()


def read_calibration(path: Path) -> Calibration:
    """Read the calibration in ``path``; raises ``InputError`` that names the file."""
    remedy = "install the package again, or fit your own with `python -m costmodel fit --nccl-log`"
    return read_record(path, Calibration, remedy)


def calibrations(directory: Path | None = None) -> list[Calibration]:
    """The user's calibrations, then those of ``directory`` (default: the shipped ones)."""
    return [*_read_all(user_directory() / "calibration"), *_read_all(directory or DIRECTORY)]


def calibrations_for(cluster: Cluster, directory: Path | None = None) -> list[list[Calibration]]:
    """Calibrations (:func:`calibrations`) in tiers, nearest to ``cluster`` first (:func:`tiers_of`)."""
    return tiers_of(calibrations(directory), cluster)


def tiers_of(measured: Sequence[Calibration], cluster: Cluster) -> list[list[Calibration]]:
    """Group ``measured`` into tiers: the cluster itself, then its GPU in the same topology; a GPU of the same
    architecture in that topology; any other GPU in it. Within a tier, one calibration fills the gaps of another.
    """
    known = [each for each in measured if each.sweeps]
    alike = [each for each in known if each.topology == cluster.topology]
    own = [each for each in known if each.machine == cluster.name]
    gpu = known_as(cluster.machine)
    own += [each for each in alike if each.gpu == gpu and each not in own]
    architecture = cluster.machine.chip().architecture
    relatives = [each for each in alike if each not in own and architecture_of(each.gpu) == architecture]
    others = [each for each in alike if each not in own and each not in relatives]
    return [own, relatives, *([each] for each in sorted(others, key=lambda each: _distance(each, cluster)))]


def _distance(other: Calibration, cluster: Cluster) -> tuple[bool, int]:
    """Sort key of another system: those with the same in-switch reduction capability first, then those with
    most kinds.
    """
    differs = adds(other) != can_reduce(cluster)
    return differs, -len({sweep.kind for sweep in other.sweeps})


def adds(measured: Calibration) -> bool:
    """True if the switches of the ``measured`` system can reduce."""
    path = cluster_files().get(measured.machine)
    allowed = path is None or read_cluster(path).in_switch
    return allowed and measured.topology == "switch" and architecture_adds(architecture_of(measured.gpu))


@lru_cache(maxsize=64)
def architecture_of(gpu: str) -> str:
    """Architecture of the GPU ``gpu``."""
    from costmodel.machines.machine_file import load_machine

    return load_machine(gpu).chip().architecture


@lru_cache(maxsize=8)
def _read_all(directory: Path) -> tuple[Calibration, ...]:
    return tuple(read_calibration(path) for path in sorted(directory.glob(f"*/{NAME}")))


def _compact(record: Mapping[str, Any]) -> str:
    """JSON text with one line per sweep."""
    head = {name: value for name, value in record.items() if name != "sweeps"}
    lines = ",\n".join("  " + json.dumps(each) for each in record["sweeps"])
    return json.dumps(head, indent=1)[:-2] + ',\n "sweeps": [\n' + lines + "\n ]\n}\n"
