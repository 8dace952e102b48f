"""What is there already, out of the garbage collector's sight while much is made that lives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_spared() -> Iterator[None]:
    """Inside, collections look at objects made since alone; behind it at all again, what was made inside included.

    Libraries leave hundreds of thousands of objects, among which a full collection finds nothing to free. Where
    somebody else has frozen objects nothing is done, for they would be thawed at the end.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
