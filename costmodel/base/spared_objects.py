"""Exclusion of existing objects from garbage collection while many long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_spared() -> Iterator[None]:
    """Freeze existing objects for the block, so that collections scan new objects only; afterwards all objects are
    scanned again.

    Libraries leave hundreds of thousands of objects, among which a full collection finds nothing to free. Does nothing
    if other code has frozen objects, since they would be unfrozen at the end.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
