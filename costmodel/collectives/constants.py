"""Constants of the analytic model of collectives: NCCL protocols, fitted to measured systems by ``python -m lab.fit``.

Stored with their provenance in calibration/collectives.json.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.whole_file import write_whole

FILE = Path(__file__).parent.parent / "calibration" / "collectives.json"


@dataclass(frozen=True)
class Protocol:
    """Constants of one NCCL protocol."""

    name: str
    # Seconds of the launch and the first flag.
    start: float
    # Hop latency as a share of the latency in the link's file: inside a node, and over the network.
    gpu_hop: float
    network_hop: float
    # Share of the link's bandwidth.
    share: float
    # Requires 128-byte stores.
    nvlink_only: bool = False


@dataclass(frozen=True)
class Constants:
    """Constants of the analytic model. ``chunk``: bytes moved through a GPU's memory per byte of its own part."""

    protocols: tuple[Protocol, ...]
    in_switch: Protocol
    chunk: float


@lru_cache(maxsize=1)
def constants() -> Constants:
    """Shipped constants; raises ``InputError`` that names a corrupt file."""
    try:
        record = json.loads(FILE.read_text(encoding="utf-8"))
        protocols = tuple(Protocol(**each) for each in record["protocols"])
        return Constants(protocols, Protocol(**record["in_switch"]), float(record["chunk"]))
    except OSError as error:
        raise InputError(f"{FILE}: cannot be read ({error.strerror}); install the package again") from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{FILE}: corrupt ({error!r}); install the package again") from None


def write_constants(values: Constants, provenance: dict[str, Any], path: Path = FILE) -> Path:
    """Write ``values`` to ``path``; raises ``OutputError`` on failure."""
    record = {
        "provenance": provenance,
        "protocols": [dataclasses.asdict(each) for each in values.protocols],
        "in_switch": dataclasses.asdict(values.in_switch),
        "chunk": values.chunk,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another directory with -o") from None
    constants.cache_clear()
    return path
