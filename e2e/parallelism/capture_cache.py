"""Captured models kept on disk: every way to spread a model that cuts its layers alike uses one capture."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import pickle
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from costmodel.base.whole_file import write_whole
from e2e.price.release_spread import RELEASE_SPREAD
from e2e.price.speed_band import SPEED_BAND

T = TypeVar("T")
_log = logging.getLogger(__name__)


def remembered(directory: Path | None, key: str, make: Callable[[], T]) -> T:
    """What ``make`` makes, from ``directory`` if an earlier call with this ``key`` left it there.

    ``key`` must cover all that the value depends on. A file that cannot be read is made anew; where nothing can be
    written the value is still returned. The folder holds pickles: it must be one's own.
    """
    if directory is None:
        return make()
    path = directory / f"{key}.pickle"
    try:
        value: T = pickle.loads(path.read_bytes())
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
        write_whole(path, pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    except OSError as error:
        _log.info("%s: not kept: %s", path, error)


def digest(record: Mapping[str, Any]) -> str:
    """A key of ``record``, of this program's own files and of the libraries that are captured: any change of these
    makes another key."""
    text = json.dumps([record, _program()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.cache
def _program() -> list[str]:
    found = hashlib.sha256()
    for package in ("costmodel", "e2e"):
        root = Path(__file__).parents[2] / package
        for path in sorted(each for each in root.rglob("*") if each.is_file() and each.suffix != ".pyc"):
            if path in (SPEED_BAND, RELEASE_SPREAD):  # of intervals: what is kept does not depend on them
                continue
            found.update(path.relative_to(root).as_posix().encode())
            found.update(path.read_bytes())
    return [found.hexdigest(), version("torch"), version("transformers")]
