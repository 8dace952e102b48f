"""What ranks that are run share: objects that one gives to its group, and barriers at which they meet."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote


@dataclass(frozen=True)
class SharedObjects:
    """Objects of all ranks of a job, by name, in a folder, since ranks may be processes that run at the same time.

    Unlike an object sent to one rank, they are no reason to model the rank that gives them. A rank that never comes to
    a broadcast or barrier, since its step was found before, ends, and the others go on without it.
    """

    folder: Path

    def give(self, name: str, objects: list[Any]) -> None:
        """Store ``objects`` as ``name``."""
        try:
            content = pickle.dumps(objects)
        except Exception:  # of any kind, by the objects' own methods
            content = b""
        unfinished = self._file(f"unfinished {name}")
        unfinished.write_bytes(content)
        unfinished.replace(self._file(name))

    def found(self, name: str) -> bool:
        """True if the objects ``name`` have been given."""
        return self._file(name).exists()

    def take(self, name: str) -> list[Any] | None:
        """Return the objects ``name``, which have been given; None if they cannot be read here."""
        try:
            return list(pickle.loads(self._file(name).read_bytes()))
        except Exception:  # of any kind, by the objects' own methods
            return None

    def begin(self, rank: int) -> None:
        """Note that ``rank`` runs."""
        self._file(f"running {rank}").touch()

    def end(self, rank: int, for_now: bool) -> None:
        """Note that ``rank`` does not run any more; unless ``for_now``, it gives nothing more."""
        if not for_now:
            self._file(f"ended {rank}").touch()
        for note in (f"running {rank}", f"waiting {rank}"):
            self._file(note).unlink(missing_ok=True)

    def runs(self, rank: int) -> bool:
        """True if ``rank`` runs now."""
        return self._file(f"running {rank}").exists()

    @contextmanager
    def waiting(self, rank: int, other: int) -> Iterator[None]:
        """Context in which ``rank`` waits for ``other``."""
        note = self._file(f"waiting {rank}")
        note.write_text(str(other))
        try:
            yield
        finally:
            note.unlink(missing_ok=True)

    def waits(self, rank: int, other: int) -> bool:
        """True if ``rank`` waits for ``other`` now."""
        try:
            return self._file(f"waiting {rank}").read_text() == str(other)
        except FileNotFoundError:
            return False

    def has_ended(self, rank: int) -> bool:
        """True if ``rank`` gives nothing more."""
        return self._file(f"ended {rank}").exists()

    def _file(self, name: str) -> Path:
        return self.folder / quote(name, safe="")
