"""Calibration files of measured collectives, ``<folder>/<machine>/collectives.json``: knots by NCCL version, kind,
ranks.

Shipped files are in ``costmodel/calibration``, the user's in the folder ``calibration`` of the user's directory
(:func:`costmodel.machines.machine_catalog.user_directory`); the user's take precedence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.foreign_files import read_text
from costmodel.base.plain_json import MALFORMED, decoded
from costmodel.base.whole_file import write_whole
from costmodel.collectives.curve import Knots
from costmodel.collectives.physics import architecture_adds, can_reduce
from costmodel.gpu.residuals.references import known_as
from costmodel.machines.cluster import Cluster
from costmodel.machines.cluster_file import cluster_files, read_cluster
from costmodel.machines.machine_catalog import user_directory
from costmodel.operators.collective_transfer import COLLECTIVE_KINDS

DIRECTORY = Path(__file__).parent.parent / "calibration"
NAME = "collectives.json"
_FORMAT = 1


@dataclass(frozen=True)
class CollectiveSweep:
    """Measured times of one kind of collective among ``ranks`` ranks on ``nodes`` nodes, with one NCCL version (empty:
    unknown).
    """

    nccl: str
    kind: str
    ranks: int
    nodes: int
    knots: Knots


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

    def versions(self) -> list[str]:
        """NCCL versions, oldest first; unknown ones come first."""
        return sorted({each.nccl for each in self.sweeps}, key=version_key)


def version_key(version: str) -> tuple[int, ...]:
    """Sort key of a version: ``2.27.3`` as numbers; words count as 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.replace("-", ".").split(".")) if version else ()


def write_calibration(calibration: Calibration, directory: Path) -> Path:
    """Write ``directory/<machine>/collectives.json``; raises ``OutputError`` on failure."""
    path = directory / calibration.machine / NAME
    record = {
        "format": _FORMAT,
        "machine": calibration.machine,
        "gpu": calibration.gpu,
        "topology": calibration.topology,
        "provenance": dict(calibration.provenance),
        "margins": {kind: vars(each) for kind, each in sorted(calibration.margins.items())},
        "sweeps": [_sweep_record(each) for each in calibration.sweeps],
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
    try:
        record = decoded(read_text(path, "record"))
        if record["format"] != _FORMAT:
            raise ValueError("unknown format")
        return Calibration(
            machine=record["machine"],
            gpu=record["gpu"],
            topology=record["topology"],
            sweeps=tuple(_sweep(each) for each in record["sweeps"]),
            margins={kind: Margins(**each) for kind, each in record["margins"].items()},
            provenance=record["provenance"],
        )
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None
    except MALFORMED as error:
        raise InputError(
            f"{path}: corrupt ({error!r}); install the package again, or fit your own with "
            "`python -m costmodel fit --nccl-log`"
        ) from None


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
    from costmodel.machines.machine_catalog import load_machine

    return load_machine(gpu).chip().architecture


@lru_cache(maxsize=8)
def _read_all(directory: Path) -> tuple[Calibration, ...]:
    return tuple(read_calibration(path) for path in sorted(directory.glob(f"*/{NAME}")))


def _sweep_record(sweep: CollectiveSweep) -> dict[str, Any]:
    knots = {"sizes": list(sweep.knots.sizes), "seconds": list(sweep.knots.seconds)}
    return {"nccl": sweep.nccl, "kind": sweep.kind, "ranks": sweep.ranks, "nodes": sweep.nodes, **knots}


def _sweep(record: Mapping[str, Any]) -> CollectiveSweep:
    if record["kind"] not in COLLECTIVE_KINDS:
        raise ValueError(f"unknown kind {record['kind']!r}")
    if not 1 <= record["nodes"] <= record["ranks"]:
        raise ValueError(f"{record['nodes']} nodes, {record['ranks']} ranks")
    knots = Knots(tuple(record["sizes"]), tuple(record["seconds"]))
    return CollectiveSweep(record["nccl"], record["kind"], record["ranks"], record["nodes"], knots)


def _compact(record: Mapping[str, Any]) -> str:
    """JSON text with one line per sweep."""
    head = {name: value for name, value in record.items() if name != "sweeps"}
    lines = ",\n".join("  " + json.dumps(each) for each in record["sweeps"])
    return json.dumps(head, indent=1)[:-2] + ',\n "sweeps": [\n' + lines + "\n ]\n}\n"
