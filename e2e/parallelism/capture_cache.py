"""Cache of captured models on disk: all parallel layouts with the same split of layers share one capture.

Captures are pickles, and a pickle can run any code when it is loaded. Each file therefore begins with a seal made with
a key of this user: a file from somebody else is replaced by a new capture, not loaded.
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

from costmodel.base.output_files import digest_of, user_folder, write_whole
from e2e.price.speed_band import SPEED_BAND

T = TypeVar("T")
_log = logging.getLogger(__name__)
_SEAL_BYTES = 32


def load_or_make(directory: Path | None, key: str, make: Callable[[], T]) -> T:
    """Return the value of ``make``, from ``directory`` if an earlier call with this ``key`` stored it.

    ``key`` must cover all dependencies of the value. A file that cannot be read, or that another user made, is
    replaced; if nothing can be written, the value is still returned.
    """
    if directory is None:
        return make()
    path = directory / f"{key}.pickle"
    try:
        value: T = pickle.loads(_opened(path.read_bytes()))
        return value
    except FileNotFoundError:
        pass
    except Exception as error:  # pickle raises any exception on a damaged file
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
    """Return the content sealed by this user; raise ``ValueError`` for any other."""
    seal, content = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
    if not hmac.compare_digest(seal, _seal(content)):
        raise ValueError("not sealed with the key of this user")
    return content


def _seal(content: bytes) -> bytes:
    return hmac.digest(_key(), content, "sha256")


@functools.cache
def _key() -> bytes:
    """Return the user's key, created on first use; if it cannot be stored, a key of this process."""
    path = user_folder("cache") / "capture-key"
    made = secrets.token_bytes(_SEAL_BYTES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".key-") as staged:  # readable by its owner only
            staged.write(made)
            staged.flush()
            with suppress(FileExistsError):
                os.link(staged.name, path)
        found = path.read_bytes()
    except OSError as error:
        _log.info("%s: captures are not kept for other processes: %s", path, error)
        return made
    return found if len(found) == _SEAL_BYTES else made


def capture_key(record: Mapping[str, Any]) -> str:
    """Return a key of ``record``, this program's files and the captured libraries: any change gives another key."""
    text = json.dumps([record, _program()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.cache
def _program() -> list[str]:
    root = Path(__file__).parents[2]
    files = [path for package in ("costmodel", "e2e") for path in (root / package).rglob("*") if path.is_file()]
    # The band file is excluded: cached values do not depend on it, or have its width in the key.
    kept = [path for path in files if path.suffix != ".pyc" and path != SPEED_BAND]
    return [digest_of(kept), version("torch"), version("transformers")]
