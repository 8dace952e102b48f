"""Constants of the analytic model: protocols, fitted to the measured systems by ``python -m lab.fit``.

calibration/collectives.json holds them with their provenance.
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
    """``start``: seconds of the launch and the first flag. ``gpu_hop``, ``network_hop``: of a hop, as a share of the
    latency that the link's file gives. ``share``: of the link's bandwidth. ``nvlink_only``: needs 128-byte stores.
    """

    name: str
    start: float
    gpu_hop: float
    network_hop: float
    share: float
    nvlink_only: bool = False


@dataclass(frozen=True)
class Constants:
    """``chunk``: bytes that move through a GPU's memory per byte of its own part."""

    protocols: tuple[Protocol, ...]
    in_switch: Protocol
    chunk: float


@lru_cache(maxsize=1)
def constants() -> Constants:
    """The constants that are shipped; ``InputError`` names a corrupt file."""
    try:
        record = json.loads(FILE.read_text(encoding="utf-8"))
        protocols = tuple(Protocol(**each) for each in record["protocols"])
        return Constants(protocols, Protocol(**record["in_switch"]), float(record["chunk"]))
    except OSError as error:
        raise InputError(f"{FILE}: cannot be read ({error.strerror}); install the package again") from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{FILE}: corrupt ({error!r}); install the package again") from None


def write_constants(values: Constants, provenance: dict[str, Any], path: Path = FILE) -> Path:
    """Writes ``values`` into ``path``; ``OutputError`` if it cannot."""
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
