"""Shares of links at their limits: none of a link, more than one, no multiprocessor left."""

from __future__ import annotations

from math import inf

import pytest

from e2e.simulate.link_sharing import LinkSharing, fair_speeds


def ends(sharing: LinkSharing) -> dict[str, float]:
    """What ends when; kernels leave."""
    found: dict[str, float] = {}
    while (moment := sharing.next_moment()) < inf:
        ended = sharing.step()
        if ended is not None:
            found[ended.what] = moment
            if ended.gpu:
                sharing.leave(ended, moment)
    return found


def test_more_than_the_whole_of_a_link_is_the_whole():
    sharing = LinkSharing()
    sharing.add("a", 0.0, 4.0, {"link": 2.0})
    assert ends(sharing) == {"a": 4}


def test_a_kernel_keeps_a_twentieth_of_its_speed_where_collectives_hold_everything():
    """Both at 2/3 for the memory. At 6 the collective ends, the kernel has done 6 x 2/3 / 20 = 0.2 of its 3 s."""
    sharing = LinkSharing()
    sharing.add("collective", 0.0, 4.0, {"memory": 0.5}, {"memory": 1.0})
    sharing.add_kernel("kernel", 0.0, 3.0, "memory", 1.0)
    assert ends(sharing) == {"collective": pytest.approx(6), "kernel": pytest.approx(8.8)}


def test_what_is_held_of_another_gpu_slows_nobody_here():
    sharing = LinkSharing()
    sharing.add("collective", 0.0, 4.0, {"memory": 0.5, "other": 0.5}, {"other": 1.0})
    sharing.add_kernel("kernel", 0.0, 3.0, "memory", 0.5)
    assert ends(sharing) == {"collective": 4, "kernel": 3}


@pytest.mark.parametrize(
    ("transfers", "speeds"),
    [
        ({}, {}),
        ({"a": {}}, {"a": 1.0}),
        ({"a": {"x": 1.0}}, {"a": 1.0}),
        ({"a": {"x": 0.25}, "b": {"x": 0.5}}, {"a": 1.0, "b": 1.0}),
        ({"a": {"x": 1.0}, "b": {"x": 0.5}}, {"a": 2 / 3, "b": 2 / 3}),
        # Three take the whole of x; b has the rest of y beside one of them.
        ({"a": {"x": 1.0}, "b": {"y": 1.0}, "c": {"x": 1.0, "y": 0.5}, "d": {"x": 1.0}},
         {"a": 1 / 3, "b": 5 / 6, "c": 1 / 3, "d": 1 / 3}),
        # x is full at 1/4, z at 1/2, y never.
        ({"a": {"x": 1.0}, "b": {"z": 1.0}, "c": {"x": 1.0, "y": 1.0}, "d": {"y": 1.0, "z": 1.0},
          "e": {"x": 1.0}, "f": {"x": 1.0}},
         {"a": 1 / 4, "b": 1 / 2, "c": 1 / 4, "d": 1 / 2, "e": 1 / 4, "f": 1 / 4}),
    ],
)  # fmt: skip
def test_speeds_rise_together_until_a_link_is_full(transfers, speeds):
    assert fair_speeds(transfers) == pytest.approx(speeds)
