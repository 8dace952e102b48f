"""Manifest of the public measurements, ``sources.yaml``: owner, origin and conversion of each file; and fetching them
from their repositories (``python -m lab.data fetch``).

``how``: conversion of a file: ``copy`` (unchanged), ``gzip`` (compressed here), ``rows`` (the lines of a table without
quotes whose first column is in ``keep``), ``derived`` (made by hand or by a program that is not here, from the sources
in ``made``; cannot be fetched). ``checked``: verification of the original in an index of public repositories when the
manifest was written: ``length`` (the path at the commit, and the same number of characters as ours), ``path`` (the path
at the commit), ``false`` (neither; see ``reason``). SHA-256 of the content verifies a fetched file in every case.

From each repository only one commit without history is fetched, and only the wanted files (partial clone, sparse
checkout). Every file is converted as the manifest says and verified before it is put in place; existing files are not
fetched again, so that a second run continues an interrupted one.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from costmodel.base.errors import InputError, MissingDependencyError, OutputError, Say
from costmodel.base.input_files import MALFORMED, content_digest, read_text
from costmodel.base.output_files import write_whole

MANIFEST = Path(__file__).with_name("sources.yaml")
HOW = ("copy", "gzip", "rows", "derived")
_DATASET = ("what", "licence", "repository", "commit", "how", "made", "checked", "reason", "keep")
_FILE = ("sha256", "from", "commit", "how", "checked", "keep", "repository")


@dataclass(frozen=True)
class SourceFile:
    """File of a dataset. ``path``: within the data folder; ``origin``: path at ``commit`` of ``repository``;
    ``sha256``: of the content (:func:`costmodel.base.input_files.content_digest`).
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
        return "there" if content_digest(path) == sha256 else "different"
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


_CLONES = ".fetching"
_POINTER = b"version https://git-lfs.github.com/spec/"
_UNREACHABLE = re.compile(
    r"could not resolve host|failed to connect|couldn't connect|unable to access|network is unreachable|timed out"
    r"|does not appear to be a git repository|could not read from remote|connection (?:refused|reset)",
    re.IGNORECASE,
)
# Lines of .git/info/sparse-checkout are patterns: special characters are escaped.
_SPECIAL, _ESCAPED = re.compile(r"([\\*?\[\]!# ])"), r"\\\1"
_AGAIN = "what was fetched stays, the same command goes on from there"


@dataclass
class Fetched:
    """Result of a fetch."""

    # Number of files that existed before.
    there: int = 0
    # Number of files fetched.
    brought: int = 0
    # Reason by path.
    failed: dict[str, str] = field(default_factory=dict)
    # Those of `failed` that no repository has, because they are derived from others.
    unfetchable: set[str] = field(default_factory=set)

    def record(self) -> dict[str, object]:
        """JSON-able content."""
        return {"there": self.there, "brought": self.brought, "failed": self.failed}


def fetch(sources: Sequence[DataSource], folder: Path, progress: Say) -> Fetched:
    """Fetch the files of ``sources`` missing in ``folder``; files with another content are replaced.

    :class:`InputError` if a repository cannot be reached, :class:`MissingDependencyError` without git,
    :class:`OutputError` if ``folder`` cannot be written. A file that does not match the manifest is discarded and
    listed in ``failed``, like one that cannot be fetched.
    """
    done = Fetched()
    wanted: dict[tuple[str, str], list[SourceFile]] = {}
    for source in sources:
        found = standing(source, folder)
        done.there += len(found.there)
        for each in (*found.missing, *found.different):
            if each.how == "derived":
                done.unfetchable.add(each.path)
                done.failed[each.path] = f"not fetched: {source.made or 'made from the original by hand'}"
            else:
                wanted.setdefault((each.repository, each.commit), []).append(each)
    for (repository, commit), files in wanted.items():
        progress(f"{repository} at {commit[:12]}: {len(files)} files")
        _bring(repository, commit, files, folder, done)
        progress(f"{repository} at {commit[:12]}: {done.brought} files brought so far, {len(done.failed)} not")
    shutil.rmtree(folder / _CLONES, ignore_errors=True)
    return done


def _bring(repository: str, commit: str, files: Sequence[SourceFile], folder: Path, done: Fetched) -> None:
    clone = folder / _CLONES / sha256(f"{repository} {commit}".encode()).hexdigest()[:16]
    try:
        clone.mkdir(parents=True, exist_ok=True)
        _checkout(clone, repository, commit, files)
        for each in files:
            reason = _place(clone / each.origin, each, folder / each.path)
            if reason:
                done.failed[each.path] = reason
            else:
                done.brought += 1
    except OSError as error:
        place = error.filename or folder
        raise OutputError(f"{place}: {error.strerror or error}; choose another folder with --to") from None
    shutil.rmtree(clone, ignore_errors=True)


def _checkout(clone: Path, repository: str, commit: str, files: Sequence[SourceFile]) -> None:
    if not (clone / ".git").is_dir():
        _git(clone, repository, "init", "--quiet")
    else:
        for lock in (clone / ".git").glob("*.lock"):  # of an interrupted git
            lock.unlink()
    paths = "".join(f"/{_SPECIAL.sub(_ESCAPED, each.origin)}\n" for each in files)
    _git(clone, repository, "config", "core.sparseCheckout", "true")
    (clone / ".git" / "info").mkdir(exist_ok=True)
    (clone / ".git" / "info" / "sparse-checkout").write_text(paths, encoding="utf-8")
    _git(clone, repository, "config", "remote.origin.url", repository)
    _git(clone, repository, "config", "remote.origin.promisor", "true")
    _git(clone, repository, "config", "remote.origin.partialclonefilter", "blob:none")
    _git(clone, repository, "fetch", "--quiet", "--depth", "1", "--filter=blob:none", "origin", commit)
    _git(clone, repository, "checkout", "--quiet", "--force", "--detach", commit)


def _git(clone: Path, repository: str, *arguments: str) -> None:
    # No password prompts, no user hooks; messages in English, since they are parsed.
    environment: Mapping[str, str] = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", "-C", str(clone), *arguments]
    try:
        ran = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError:
        raise MissingDependencyError("fetching the measurements needs git; install it and run again") from None
    if ran.returncode == 0:
        return
    said = " ".join((ran.stderr.strip() or f"git {arguments[0]} failed").split())
    if _UNREACHABLE.search(said):
        raise InputError(f"{repository}: cannot be reached ({said}); with a network run it again: {_AGAIN}")
    raise InputError(f"{repository}: git {arguments[0]} failed ({said}); {_AGAIN}")


def _place(original: Path, file: SourceFile, target: Path) -> str | None:
    """Write ``target``; returns the reason on failure."""
    if not original.is_file():
        return f"{file.origin} is not in {file.repository} at {file.commit[:12]}"
    content = original.read_bytes()
    if content.startswith(_POINTER):
        return f"{file.repository} keeps it in Git LFS; install git-lfs (`git lfs install`) and fetch again"
    made = _made(content, file)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.stem}.fetched{target.suffix}")
    write_whole(staged, made)
    try:
        found = content_digest(staged)
    except InputError:
        found = "unreadable"
    if found != file.sha256:
        staged.unlink()
        return f"not what the manifest says (SHA-256 {found[:12]} instead of {file.sha256[:12]}); not kept"
    staged.replace(target)
    return None


def _made(content: bytes, file: SourceFile) -> bytes:
    """``content`` of the original, converted as the manifest says."""
    if file.how == "rows":
        lines = content.decode("utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.startswith("#") or line.split(",")[0] in file.keep]
        content = "".join(kept).encode()
    if file.how == "gzip":
        content = gzip.compress(content, 9, mtime=0)
    return content
