"""Operands that lie otherwise in memory than the result."""

from __future__ import annotations

import pytest

from e2e.lowering.families.work import strided_reads
from e2e.lowering.lower_trace import lower
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor


def test_an_operand_that_lies_as_the_result_wastes_nothing():
    assert strided_reads((4, 8), (8, 1), (8, 1), 4) == (0.0, 0)


def test_threads_along_a_row_read_a_column_each_from_its_own_sector():
    # The result is 100 rows of 50 floats, the operand a transposed 50 x 100: the next row reads the next element of
    # the sectors that this row touched, after 50 sectors of 32 bytes.
    assert strided_reads((100, 50), (50, 1), (1, 100), 4) == (1.0, 50 * 32)


def test_heads_that_lie_next_to_each_other_are_read_whole_planes_apart():
    # A bias of relative positions: 8 heads innermost, read for results of (heads, 16, 16).
    assert strided_reads((8, 16, 16), (256, 16, 1), (1, 128, 8), 4) == (1.0, 256 * 32)


def test_short_steps_share_sectors():
    share, _ = strided_reads((10, 2), (2, 1), (2, 20), 2)
    assert share == 1.0
    # Every other number of two bytes: half of each sector, as if one more number of two were read.
    share, _ = strided_reads((10,), (1,), (2,), 2)
    assert share == pytest.approx(2 / 30)


def test_one_element_and_expanded_operands_waste_nothing():
    assert strided_reads((1, 1), (1, 1), (5, 5), 4) == (0.0, 0)
    assert strided_reads((4, 8), (8, 1), (1, 0), 4) == (0.0, 0)


def test_the_record_of_an_addition_says_so():
    plane, heads = (16, 16), 8
    scores = Tensor(1, 1, (heads, *plane), "float32", "cuda:0", (256, 16, 1))
    bias = Tensor(2, 2, (heads, *plane), "float32", "cuda:0", (1, 128, 8))
    call = OperatorCall(0, "aten::add_", None, 0, (scores, bias, 1), (scores,))
    (task,) = lower(OperatorTrace((call,))).tasks
    (record,) = task.operators
    assert (record.inputs, record.strided_elements, record.reuse_bytes) == (2, heads * 256, 256 * 32)
