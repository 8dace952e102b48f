"""Sets of output files that appear together once all are complete; an interrupted job resumes with those
already made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from costmodel.base.errors import OutputError
from costmodel.base.folder_lock import lock_folder
from costmodel.base.whole_file import remove_partials

UNFINISHED = ".unfinished-"  # prefix of the name of the staging folder
PACKAGE = Path(__file__).parents[1]


class StagedFiles:
    """Files of ``output`` that are first written to :attr:`folder`; a context manager, one at a time per ``output``.

    ``made_from``: all inputs of the files, as JSON data. Files finished by an interrupted job with the same inputs and
    the same program are reused; those of other inputs are removed. ``what``: description of the files for the
    ``OutputError`` raised if they cannot be written or another process is writing them.
    """

    def __init__(self, output: Path, what: str, made_from: Any) -> None:
        self.output, self._what = output, what
        text = json.dumps([made_from, _program()], sort_keys=True, default=str)
        self.folder = output / f"{UNFINISHED}{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def __enter__(self) -> StagedFiles:
        self._lock = lock_folder(self.output, self._what)
        try:
            others = [path.name for path in self.output.glob(f"{UNFINISHED}*") if path != self.folder]
            self._lock.clear(*others)
            self.folder.mkdir(exist_ok=True)
            remove_partials(self.output, self.folder, *(path for path in self.folder.rglob("*") if path.is_dir()))
        except OSError as error:
            self._lock.close()
            raise OutputError(
                f"{self.output}: {self._what} cannot be written: {error.strerror}; choose another place, or free some"
            ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        if not any(path.is_file() for path in self.folder.rglob("*")):
            self._lock.clear(self.folder.name)
        self._lock.close()

    def once(self, name: str, make: Callable[[], object]) -> bool:
        """Run ``make``, which must write ``name``, a path within :attr:`folder`, atomically, unless an interrupted job
        had finished that file. Returns True if it was made now.
        """
        if (self.folder / name).is_file():
            return False
        make()
        return True

    def install(self, names: Sequence[str]) -> list[Path]:
        """Move the files ``names`` to their final places and return their paths; remaining files were only
        intermediate.
        """
        try:
            for name in names:
                (self.output / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).replace(self.output / name)
        except OSError as error:
            raise OutputError(
                f"{self.output}: {self._what} cannot be written: {error.strerror}; choose another place, or free some"
            ) from error
        self._lock.clear(self.folder.name)
        return [self.output / name for name in names]


def _program() -> str:
    """Digest of this package's modules and machine files: another program version makes other files."""
    return digest_of(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".yaml"))


def digest_of(paths: Iterable[Path], root: Path = PACKAGE.parent) -> str:
    """Hexadecimal SHA-256 of the names within ``root`` and the contents of ``paths``."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.relative_to(root).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()
