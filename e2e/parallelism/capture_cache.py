"""Captured models kept on disk: every way to spread a model that cuts its layers alike uses one capture.

They are pickles, and whoever makes a pickle decides what is run when it is loaded. So each begins with a seal made with
a key that only this user has: a folder that somebody else sent is made anew, not loaded.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import logging
import os
import pickle
import secrets
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from costmodel.base.staged_files import digest_of
from costmodel.base.user_folders import user_folder
from costmodel.base.whole_file import write_whole
from e2e.price.speed_band import SPEED_BAND

T = TypeVar("T")
_log = logging.getLogger(__name__)
_SEAL_BYTES = 32


def remembered(directory: Path | None, key: str, make: Callable[[], T]) -> T:
    """What ``make`` makes, from ``directory`` if an earlier call with this ``key`` left it there.

    ``key`` must cover all that the value depends on. A file that cannot be read, or that another user made, is made
    anew; where nothing can be written the value is still returned.
    """
    if directory is None:
        return make()
    path = directory / f"{key}.pickle"
    try:
        value: T = pickle.loads(_opened(path.read_bytes()))
        return value
    except FileNotFoundError:
        pass
    except Exception as error:  # pickle raises whatever a damaged file makes it call
        _log.info("%s: made anew: %s", path, error)
    value = make()
    _keep(path, value)
    return value


def _keep(path: Path, value: object) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        write_whole(path, _seal(content) + content)
    except OSError as error:
        _log.info("%s: not kept: %s", path, error)


def _opened(sealed: bytes) -> bytes:
    """What was sealed by this user; ``ValueError`` for anything else."""
    seal, content = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
    if not hmac.compare_digest(seal, _seal(content)):
        raise ValueError("not sealed with the key of this user")
    return content


def _seal(content: bytes) -> bytes:
    return hmac.digest(_key(), content, "sha256")


@functools.cache
def _key() -> bytes:
    """The user's own, made when it is first needed; where it cannot be kept, one of this process."""
    path = user_folder("XDG_CACHE_HOME", ".cache") / "capture-key"
    made = secrets.token_bytes(_SEAL_BYTES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".key-") as staged:  # readable by its owner alone
            staged.write(made)
            staged.flush()
            with suppress(FileExistsError):
                os.link(staged.name, path)
        found = path.read_bytes()
    except OSError as error:
        _log.info("%s: captures are not kept for other processes: %s", path, error)
        return made
    return found if len(found) == _SEAL_BYTES else made


def digest(record: Mapping[str, Any]) -> str:
    """A key of ``record``, of this program's own files and of the libraries that are captured: any change of these
    makes another key."""
    text = json.dumps([record, _program()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.cache
def _program() -> list[str]:
    root = Path(__file__).parents[2]
    files = [path for package in ("costmodel", "e2e") for path in (root / package).rglob("*") if path.is_file()]
    # What is kept does not depend on the band, or has its width in the key.
    kept = [path for path in files if path.suffix != ".pyc" and path != SPEED_BAND]
    return [digest_of(kept), version("torch"), version("transformers")]
