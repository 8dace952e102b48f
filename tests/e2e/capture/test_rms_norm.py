"""Root-mean-square norm: one kernel forward and one operator backward where CUDA has them, PyTorch's own elsewhere."""

from __future__ import annotations

import pytest
import torch

from costmodel.operators.device_work import Normalization
from e2e.capture import CapturedWorkload, capture
from e2e.lowering.lower_trace import lower

SHAPE = (4, 16, 64)


def captured(norm_dtype: torch.dtype = torch.bfloat16, data_dtype: torch.dtype = torch.bfloat16):
    with torch.device("meta"):
        norm = torch.nn.RMSNorm(64).to(norm_dtype)
        data = torch.empty(SHAPE, dtype=data_dtype, requires_grad=True)
    trace = capture(CapturedWorkload("norm", norm, lambda: norm(data).sum().backward()))
    assert data.grad is not None and data.grad.shape == SHAPE
    assert norm.weight.grad is not None and norm.weight.grad.shape == (64,)
    return trace


def test_forward_and_backward_are_fused():
    trace = captured()
    names = [call.name for call in trace.calls]
    assert names.count("aten::_fused_rms_norm") == names.count("aten::_fused_rms_norm_backward") == 1
    assert "aten::rsqrt" not in names
    by_name = {call.name: call for call in trace.calls}
    forward, backward = by_name["aten::_fused_rms_norm"], by_name["aten::_fused_rms_norm_backward"]
    assert trace.calls[forward.parent].name == "aten::rms_norm"
    assert forward.sequence == backward.sequence
    assert (forward.thread, backward.thread) == (0, 1)
    # What the backward pass reads is what the forward pass wrote: one factor per row.
    assert backward.inputs[3] == forward.outputs[1] and forward.outputs[1].shape == (64,)
    records = [task.operators[0] for task in lower(trace).tasks if "rms_norm" in task.name]
    assert records[0] == Normalization("rms_norm", 64, 64, "bfloat16")
    assert records[1] == Normalization("rms_norm", 64, 64, "bfloat16", "backward")


def test_weights_of_another_type_make_pytorch_take_it_apart():
    with pytest.warns(UserWarning, match="Cannot dispatch to fused implementation"):  # as on a GPU
        names = [call.name for call in captured(torch.float32).calls]
    assert "aten::_fused_rms_norm" not in names and "aten::rsqrt" in names
