"""Another batch through the operators of a step: what a capture of that batch gives, and errors where nobody knows."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from costmodel.base.errors import InputError
from e2e.lowering.lower_trace import lower
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor
from e2e.whatif.extents import Part, SplitError, fixed, proportional, reshaped, share, size_at, stride_at
from e2e.whatif.other_batch import recorded_batch, resized


def sizes(extents, more):
    return tuple(size_at(extent, more) for extent in extents)


def test_views_join_and_part_the_batch_as_they_put_it_together():
    tokens = (proportional(4, 4), *fixed((6, 8)))
    rows = reshaped(tokens, (24, 8), 4)
    assert sizes(rows, 4) == (48, 8)
    heads = reshaped(rows, (4, 6, 2, 4), 4)
    assert sizes(heads, 4) == (8, 6, 2, 4)
    # Where the sequence is in front, four of it are not taken for the batch of four.
    behind = ((Part(4),), proportional(4, 4), (Part(8),))
    assert sizes(reshaped(reshaped(behind, (16, 8), 4), (4, 4, 8), 4), 4) == (4, 8, 8)


def test_a_batch_of_one_is_followed_too():
    tokens = (proportional(1, 1), *fixed((6, 8)))
    assert sizes(reshaped(tokens, (6, 8), 1), 2) == (18, 8)
    assert sizes(reshaped(reshaped(tokens, (6, 8), 1), (1, 6, 8), 1), 2) == (3, 6, 8)


def test_a_dimension_that_the_batch_is_cut_out_of_is_an_error():
    with pytest.raises(SplitError):
        reshaped((proportional(12, 6),), (4, 3), 6)
    assert share((Part(12, Fraction(2)),), 6) == (Part(6, Fraction(1)),)


def test_strides_keep_the_order_of_dimensions():
    assert stride_at((2, 3, 4), (12, 4, 1), (6, 3, 4)) == (12, 4, 1)
    assert stride_at((3, 2, 4), (4, 12, 1), (3, 6, 4)) == (4, 12, 1)
    assert stride_at((8, 2, 5), (1, 8, 16), (8, 6, 5)) == (1, 8, 48)  # what lies outside of the batch moves apart
    assert stride_at((2, 5), (0, 1), (6, 5)) == (0, 1)


GPU = "cuda:0"


class Script:
    """Writes a trace call by call."""

    def __init__(self):
        self.calls, self.tensors = [], 0

    def tensor(self, *shape, dtype="float32"):
        self.tensors += 1
        return Tensor(self.tensors, self.tensors, shape, dtype, GPU)

    def call(self, name, *inputs, shape, phase="forward"):
        output = self.tensor(*shape)
        self.calls.append(OperatorCall(len(self.calls), name, None, 0, inputs, (output,), phase))
        return output

    def trace(self):
        return OperatorTrace(tuple(self.calls), source="drawn")


def test_weights_as_large_as_the_batch_stay():
    """A layer of 32 to 32 with 32 samples: only positions tell which 32 is which."""
    script = Script()
    data, weight, bias = script.tensor(32, 32), script.tensor(32, 32), script.tensor(32)
    hidden = script.call("aten::addmm", bias, data, weight, shape=(32, 32))
    script.call("aten::mm", script.call("aten::t", hidden, shape=(32, 32)), data, shape=(32, 32), phase="backward")
    trace = script.trace()
    assert recorded_batch(trace) == 32
    forward, turned, gradient = resized(trace, 128).calls
    assert [each.shape for each in forward.inputs] == [(32,), (128, 32), (32, 32)]
    assert forward.outputs[0].shape == (128, 32) and turned.outputs[0].shape == (32, 128)
    assert gradient.outputs[0].shape == (32, 32)  # the batch is summed over


def test_steps_that_begin_with_several_sizes_ask_which_is_the_batch():
    script = Script()
    script.call("aten::relu", script.tensor(16, 4), shape=(16, 4))
    script.call("aten::relu", script.tensor(20, 4), shape=(20, 4))
    with pytest.raises(InputError, match=r"may be 16 \(float32 \[16, 4\] of aten::relu\) or 20 .*batch=16:32"):
        resized(script.trace(), 64)
    assert [call.outputs[0].shape[0] for call in resized(script.trace(), 64, 20).calls] == [16, 64]
    with pytest.raises(InputError, match="has 7 samples in front"):
        resized(script.trace(), 64, 7)


def test_a_batch_that_is_cut_where_nobody_knows_is_an_error_that_names_the_tensor():
    script = Script()
    joined = script.call("aten::cat", (script.tensor(6, 2), script.tensor(2, 2)), 0, shape=(8, 2))
    script.call("aten::view", joined, (4, 4), shape=(4, 4))
    with pytest.raises(InputError, match=r"aten::view makes float32 \[4, 4\].*cannot be resized"):
        resized(script.trace(), 12, 6)


@pytest.mark.parametrize(
    ("name", "length", "mode", "batch", "other"),
    [
        ("resnet-50", None, "train", 16, 64),
        ("resnet-50", None, "train", 64, 24),  # as many samples as channels
        ("gpt2", 64, "train", 4, 12),
        ("gpt2", 64, "train", 12, 5),  # as many samples as heads
        ("bert-large", 32, "inference", 8, 3),
        ("dlrm", None, "train", 256, 1024),
        ("dlrm-ddp", None, "train", 128, 2048),
    ],
)
def test_resized_captures_launch_what_captures_of_that_batch_do(name, length, mode, batch, other):
    """To the last operator: the best test that there is."""
    pytest.importorskip("torch")
    from e2e.capture.models.catalog import build
    from e2e.capture.session import capture
    from e2e.step.options import StepOptions

    options = StepOptions(mode=mode)
    small, large = (capture(build(name, size, length, options), options) for size in (batch, other))
    assert recorded_batch(small) == batch
    made, wanted = (
        Counter(record for task in lower(trace).tasks for record in task.operators)
        for trace in (resized(small, other), large)
    )
    assert made == wanted
