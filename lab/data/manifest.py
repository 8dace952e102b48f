"""Manifest of the public measurements, ``sources.yaml``: owner, origin and conversion of each file.

``how``: conversion of a file: ``copy`` (unchanged), ``gzip`` (compressed here), ``rows`` (the lines of a table without
quotes whose first column is in ``keep``), ``derived`` (made by hand or by a program that is not here, from the sources
in ``made``; cannot be fetched). ``checked``: verification of the original in an index of public repositories when the
manifest was written: ``length`` (the path at the commit, and the same number of characters as ours), ``path`` (the path
at the commit), ``false`` (neither; see ``reason``). SHA-256 of the content verifies a fetched file in every case.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from costmodel.base.errors import InputError
from costmodel.base.foreign_files import digest, read_text
from costmodel.base.plain_json import MALFORMED

MANIFEST = Path(__file__).with_name("sources.yaml")
HOW = ("copy", "gzip", "rows", "derived")
_DATASET = ("what", "licence", "repository", "commit", "how", "made", "checked", "reason", "keep")
_FILE = ("sha256", "from", "commit", "how", "checked", "keep", "repository")


@dataclass(frozen=True)
class SourceFile:
    """File of a dataset. ``path``: within the data folder; ``origin``: path at ``commit`` of ``repository``;
    ``sha256``: of the content (:func:`costmodel.base.foreign_files.digest`).
    """

    path: str
    sha256: str
    repository: str
    commit: str
    origin: str
    how: str
    checked: str
    keep: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSource:
    """One dataset with its licence and files."""

    name: str
    what: str
    licence: str
    made: str
    reason: str
    files: tuple[SourceFile, ...]


@dataclass(frozen=True)
class Standing:
    """State of ``source`` in a folder: correct files, missing ones, and those with another content."""

    source: DataSource
    there: Sequence[SourceFile]
    missing: Sequence[SourceFile]
    different: Sequence[SourceFile]

    def record(self) -> dict[str, Any]:
        """JSON-able content."""
        files = self.source.files
        return {
            "dataset": self.source.name,
            "what": self.source.what,
            "licence": self.source.licence,
            "files": len(files),
            "there": len(self.there),
            "missing": [each.path for each in self.missing],
            "different": [each.path for each in self.different],
            "derived": sum(each.how == "derived" for each in files),
            "checked": dict(Counter(each.checked for each in files)),
            "reason": self.source.reason,
            "repositories": sorted({each.repository for each in files}),
        }


@lru_cache(maxsize=4)
def read_sources(path: Path = MANIFEST) -> tuple[DataSource, ...]:
    """Read every dataset of the manifest ``path``; :class:`InputError` describes a defect."""
    try:
        text = read_text(path, "settings")
        if _DEEP.search(text):  # on which the parser in C crashes
            raise ValueError("nested too deeply")
        content = yaml.load(text, Loader=_LOADER)["datasets"]
        return tuple(_source(name, each) for name, each in content.items())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); install the package again") from None
    except (yaml.YAMLError, *MALFORMED) as error:
        raise InputError(
            f"{path}: not a manifest of datasets ({' '.join(str(error).split())}); correct it there"
        ) from None


def sources_named(names: Sequence[str]) -> list[DataSource]:
    """Datasets named ``names``, by default all; :class:`InputError` for an unknown one."""
    known = {each.name: each for each in read_sources(MANIFEST)}
    for name in names:
        if name not in known:
            raise InputError(f"dataset {name}: not known; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def standing(source: DataSource, folder: Path) -> Standing:
    """State of ``source`` in ``folder``; an unreadable file counts as different."""
    groups: dict[str, list[SourceFile]] = {"there": [], "missing": [], "different": []}
    for each in source.files:
        groups[_state(folder / each.path, each.sha256)].append(each)
    return Standing(source, **groups)


def _state(path: Path, sha256: str) -> str:
    if not path.is_file():
        return "missing"
    try:
        return "there" if digest(path) == sha256 else "different"
    except InputError:
        return "different"


def _source(name: str, record: Mapping[str, Any]) -> DataSource:
    _only(record, (*_DATASET, "files"), name)
    files = tuple(_file(path, each, record) for path, each in record["files"].items())
    what, licence, made, reason = (str(record.get(key, "")) for key in ("what", "licence", "made", "reason"))
    return DataSource(name, what, licence, made, reason, files)


def _file(path: str, record: Mapping[str, Any], dataset: Mapping[str, Any]) -> SourceFile:
    _only(record, _FILE, path)

    def value(key: str) -> Any:
        return record.get(key, dataset.get(key, ""))

    how, keep = value("how") or "copy", tuple(str(each) for each in value("keep") or ())
    if how not in HOW or Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError(f"{path}: how {how!r}, known: {', '.join(HOW)}; paths stay within the data folder")
    if how != "derived" and not (value("commit") and value("repository") and record.get("from")):
        raise ValueError(f"{path}: needs repository, commit and from")
    checked = str(value("checked") or False).lower()
    texts = {key: value(key) for key in ("sha256", "repository", "from")}
    if not all(isinstance(each, str) for each in texts.values()) or "\0" in path:
        raise ValueError(f"{path}: sha256, repository and from are texts")
    return SourceFile(
        path, record["sha256"], value("repository"), str(value("commit")), record.get("from", ""), how, checked, keep
    )


def _only(record: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    unknown = set(record) - set(known)
    if unknown:
        raise ValueError(f"{where}: unknown {', '.join(sorted(unknown))}; known: {', '.join(known)}")


_DEEP = re.compile(r"(?:[\[{][^\[\]{}]{0,40}){100}|(?:[-?] ){100}")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
