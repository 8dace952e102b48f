"""Old objects out of the collector's sight: and in it again, whatever happens."""

from __future__ import annotations

import gc
import weakref

import pytest

from costmodel.base.process import old_objects_spared


class Knot:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thawed():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_made_inside_is_collected_and_what_was_there_is_not():
    old = weakref.ref(Knot())
    with old_objects_spared():
        new = weakref.ref(Knot())
        gc.collect()
        assert new() is None and old() is not None
    gc.collect()
    assert old() is None, "behind it everything is looked at again"


def test_an_error_thaws_too():
    with pytest.raises(ValueError, match="inside"), old_objects_spared():
        raise ValueError("inside")
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_frozen_stays_so():
    gc.freeze()
    before = gc.get_freeze_count()
    with old_objects_spared():
        pass
    assert gc.get_freeze_count() > before / 2 > 0  # a few of them may have been released meanwhile
