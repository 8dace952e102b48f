"""Fetching of the public measurements from their repositories: ``python -m lab.data fetch``.

From each repository only one commit without history, and only the wanted files (partial clone, sparse checkout). Every
file is converted as the manifest says and verified by its SHA-256 before it is put in place; existing files are not
fetched again, so that a second run continues an interrupted one.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from costmodel.base.errors import InputError, MissingDependencyError, OutputError
from costmodel.base.foreign_files import digest
from costmodel.base.say import Say
from costmodel.base.whole_file import write_whole
from lab.data.manifest import DataSource, SourceFile, standing

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
        found = digest(staged)
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
