"""Clusters and networks as records for text output and ``--json``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from costmodel.base.errors import ProjectError
from costmodel.base.units import format_quantity
from costmodel.machines.cluster_file import (
    ClusterFile,
    NetworkFile,
    cluster_files,
    find_cluster,
    find_network,
    network_files,
    read_cluster,
    read_network,
)

_UNITS = {"bandwidth": "B/s", "datasheet": "B/s", "latency": "s"}


def listing() -> list[dict[str, str]]:
    """Name, kind, description and file of every cluster and network; a malformed file gives a row with its error."""
    rows = [_row(name, path, "cluster") for name, path in sorted(cluster_files().items())]
    return rows + [_row(name, path, "network") for name, path in sorted(network_files().items())]


def _row(name: str, path: Path, kind: str) -> dict[str, str]:
    try:
        description = (read_cluster(path) if kind == "cluster" else read_network(path)).description
    except ProjectError as error:
        kind, description = "?", f"not usable: {error}"
    return {"name": name, "kind": kind, "description": description, "file": str(path)}


def described(name_or_path: str) -> dict[str, Any] | None:
    """Record of the cluster or network named ``name_or_path``, or of a cluster file; ``None`` for anything else."""
    if name_or_path in network_files():
        return _record(find_network(name_or_path), "network")
    file = find_cluster(name_or_path)
    return None if file is None else _record(file, "cluster")


def _record(file: ClusterFile | NetworkFile, kind: str) -> dict[str, Any]:
    content = {name: value for name, value in dataclasses.asdict(file).items() if value not in (None, "")}
    written = {
        name: format_quantity(value, _UNITS[name]) if name in _UNITS else value for name, value in content.items()
    }
    return {"name": written["name"], "kind": kind, **{key: each for key, each in written.items() if key != "name"}}
