"""The folder of the public measurements, and how its tables are read: one rule for all commands and tests."""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from costmodel.base.output_files import user_folder

ENVIRONMENT = "COSTMODEL_DATA"
FETCH = "`python -m lab.data fetch`"
BROUGHT = f"{FETCH} brings it, or give the folder of the data with --data"
AGAIN = f"fetch the file again: {FETCH}"
_BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"  # beside a checkout


def user_data_directory() -> Path:
    """Folder into which `data fetch` writes: ``$XDG_DATA_HOME/costmodel/data``, else
    ``~/.local/share/costmodel/data``.
    """
    return user_folder("data") / "data"


def data_folder(given: Path | None = None) -> Path:
    """Folder of the measurements: ``given``, else ``$COSTMODEL_DATA``, else the user's own if it exists, else
    ``../shared/data`` beside the checkout; the user's own if none exists.
    """
    chosen = os.environ.get(ENVIRONMENT)
    if given is not None or chosen:
        return given if given is not None else Path(str(chosen))
    own = user_data_directory()
    return _BESIDE if not own.is_dir() and _BESIDE.is_dir() else own


Wanted = Callable[[Path], bool]


def everything(path: Path) -> bool:
    """Selection of every file."""
    return True


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn errors while ``path`` is read, which should be ``what``, into an ``InputError`` that names it."""
    try:
        yield
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read ({reason}); {AGAIN}") from None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not {what} ({' '.join(str(error).split()) or error!r}); {AGAIN}") from None


def csv_rows(path: Path, what: str) -> list[dict[str, str]]:
    """Read the rows of a table of ``what``, compressed or not."""
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with reading(path, what), opened(path, "rt", newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
