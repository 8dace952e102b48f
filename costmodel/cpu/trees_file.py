"""File of pre-trained trees from :func:`costmodel.cpu.learned_residual.train_together`."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.foreign_files import read_bytes
from costmodel.base.plain_json import MALFORMED, decoded
from costmodel.base.whole_file import write_whole
from costmodel.cpu.boosted_trees import BoostedResidual
from costmodel.cpu.learned_residual import FamilyTrees

_FORMAT = 2


def write_trees(path: Path, key: str, trees: Mapping[str, FamilyTrees], provenance: Mapping[str, Any]) -> None:
    """Write ``path`` atomically; ``key`` identifies the platform of the training data. ``OutputError`` on failure."""
    families = {family: {"knobs": list(knobs), "trees": each.to_record()} for family, (knobs, each) in trees.items()}
    content = {"format": _FORMAT, "key": key, "provenance": dict(provenance), "families": families}
    try:
        write_whole(path, gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place, or free some") from None


def read_trees(path: Path, key: str) -> dict[str, FamilyTrees]:
    """Read trees written by :func:`write_trees` for ``key``; ``InputError`` names the file and the remedy."""
    try:
        content = decoded(read_bytes(path, "record"))
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError("unknown format")
        if content.get("key") != key:
            raise InputError(f"{path}: was trained for {content.get('key')!r}, not for {key!r}; train it again")
        return {
            family: (tuple(entry["knobs"]), BoostedResidual.from_record(entry["trees"]))
            for family, entry in content["families"].items()
        }
    except FileNotFoundError:
        raise InputError(f"{path}: missing; train it with `python -m fusion records train`") from None
    except (OSError, EOFError, zlib.error, *MALFORMED) as error:
        raise InputError(f"{path}: damaged ({error}); train it again") from None
