"""Words of four neighbouring columns: which taps of which output lie where."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

pytest.importorskip("tvm")

from costmodel.operators.layers import Conv2d
from schedules.loops import emit
from schedules.loops.dot_products import QuadPlan, TapPlaces, pack_depthwise_quads, quad_plan, sums_pairs, sums_quads
from schedules.loops.emit import Axis


def depthwise(kernel: int, stride: int = 1, width: int = 20, padding: int | None = None, dtype: str = "int8") -> Conv2d:
    pads = (kernel // 2 if padding is None else padding,) * 4
    shape = (1, 16, 20, width, 16)
    return Conv2d(*shape, (kernel, kernel), (stride, stride), pads, groups=16, dtype=dtype)


@pytest.mark.parametrize(
    ("kernel", "stride", "outputs", "words", "products"),
    [
        (3, 1, 2, 1, 1.0),  # columns 0 to 3 hold both windows
        (3, 2, 1, 1, 1.0),
        (5, 1, 4, 2, 2.0),  # eight columns hold four windows of five
        (5, 2, 4, 3, 2.0),
        (7, 1, 2, 2, 2.0),
    ],
)
def test_outputs_share_the_words_that_hold_their_windows(kernel, stride, outputs, words, products):
    plan = quad_plan(depthwise(kernel, stride))
    assert (plan.outputs, plan.words, plan.products) == (outputs, words, products)
    assert plan.reach == 4 * words


def test_two_windows_of_three_lie_in_one_word():
    words = QuadPlan(kernel=3, stride=1, outputs=2, words=1).tile(4)
    assert [word.offset for word in words] == [0, 2]
    assert words[0].users == words[1].users[:0] + ((0, TapPlaces(0, 0, 3)), (1, TapPlaces(1, 0, 3)))
    assert [member for member, _ in words[1].users] == [2, 3]


def test_at_the_ends_of_a_row_words_move_inwards():
    """A row of six columns, one of padding on either side: output 0 lacks its first tap, output 5 its last."""
    plan, axis = QuadPlan(kernel=3, stride=1, outputs=2, words=1), Axis(size=6, kernel=3, stride=1, before=1)
    first, middle, last = plan.tile(6, 0, axis)
    assert (first.offset - 1, middle.offset - 1, last.offset - 1) == (0, 1, 2)  # the window of output 0 begins at -1
    assert first.users == ((0, TapPlaces(0, 1, 2)), (1, TapPlaces(0, 0, 3)))
    assert last.users == ((4, TapPlaces(1, 0, 3)), (5, TapPlaces(2, 0, 2)))


ROWS = list(product((2, 3, 4, 5, 7), (1, 2, 3), (0, 1, 2, 3), (4, 5, 7, 14, 23)))


@pytest.mark.parametrize(("kernel", "stride", "before", "size"), ROWS)
def test_every_tap_inside_the_row_is_taken_once_and_nothing_beside_it(kernel, stride, before, size):
    """By tiles of any width, as a kernel cuts a row into them."""
    outputs = (size + 2 * before - kernel) // stride + 1
    if outputs < 1 or before >= kernel:
        return
    conv = depthwise(kernel, stride, size, before)
    plan, axis = quad_plan(conv), Axis(size, kernel, stride, before)
    reach = Axis(size, max(plan.reach, kernel), stride, before)
    for columns in {1, 3, 4, outputs}:
        taken: dict[tuple[int, int], int] = {}
        for segment in emit.segments(outputs, columns, reach):
            for start in range(segment.start, segment.start + segment.count * segment.width, segment.width):
                border = (start, axis) if segment.border else (None, None)
                for word in plan.tile(segment.width, *border):
                    begin = start * stride - before + word.offset
                    assert 0 <= begin <= size - 4
                    for member, taps in word.users:
                        assert taps.place >= 0 and taps.place + taps.count <= 4
                        for index in range(taps.count):
                            tap, column = taps.first + index, begin + taps.place + index
                            assert column == (start + member) * stride - before + tap
                            taken[start + member, tap] = taken.get((start + member, tap), 0) + 1
        inside = {(o, tap): 1 for o in range(outputs) for tap in range(kernel) if axis.inside(o, tap)}
        assert taken == inside


def test_taps_of_a_row_lie_four_to_a_word():
    weight = np.arange(1, 11).reshape(2, 1, 1, 5)
    packed = pack_depthwise_quads(weight, 16)
    assert packed.shape == (1, 1, 2, 64) and packed.dtype == np.int8
    assert packed[0, 0, 0, :8].tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert packed[0, 0, 1, :8].tolist() == [5, 0, 0, 0, 10, 0, 0, 0]
    assert not packed[..., 8:].any()


def test_which_convolutions_take_several_columns_at_a_time():
    assert sums_quads(depthwise(3)) and not sums_pairs(depthwise(3))
    assert sums_pairs(depthwise(3, dtype="bfloat16")) and not sums_quads(depthwise(3, dtype="bfloat16"))
    assert not sums_quads(depthwise(3, width=3)), "a row holds fewer columns than a word"
    assert not sums_quads(depthwise(9)), "no registers hold its weights"
    assert not sums_quads(Conv2d(1, 16, 20, 20, 16, (3, 3), padding=(1, 1, 1, 1), dtype="int8"))
    assert not sums_quads(Conv2d(1, 16, 20, 20, 16, (3, 3), dilation=(2, 2), groups=16, dtype="int8"))
