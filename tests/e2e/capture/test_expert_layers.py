"""Experts with biases, as Megatron-LM adds them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from e2e.capture.models.expert_layers import products_by_expert, use_grouped_experts
from e2e.capture.session import CapturedWorkload, capture
from e2e.step.options import StepOptions

EXPERTS, WIDTH, INNER, ROWS = 3, 4, 8, 6


class Experts(torch.nn.Module):
    """Weights of gpt-oss, (experts, in, out)."""

    is_transposed, has_gate, num_experts = True, True, EXPERTS

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * INNER))
        self.down_proj = torch.nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.down_proj_bias = torch.nn.Parameter(torch.empty(EXPERTS, WIDTH))


@pytest.mark.parametrize(("by_expert", "times"), [(True, EXPERTS), (False, 0)])
def test_biases_are_added_one_expert_after_the_other(by_expert, times):
    """Weighed by the routing, in FP32, behind the second product; a launch for all experts adds them inside."""
    with torch.device("meta"):
        layer = Experts().bfloat16()
        rows = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)
        selected, weights = torch.empty(ROWS, 1, dtype=torch.int64), torch.empty(ROWS, 1, dtype=torch.bfloat16)
    assert use_grouped_experts(layer, products_by_expert, waits=by_expert) == 1
    options = StepOptions(mode="forward-backward", dtype="bfloat16")

    def step() -> None:
        layer.forward(rows, selected, weights).sum().backward()

    trace = capture(CapturedWorkload("experts", layer, step), options)
    forward = [call for call in trace.calls if call.phase == "forward"]
    names = Counter(call.name for call in forward)
    assert (names["aten::mul"], names["aten::add"], names["aten::cat"]) == (times, times, 1 if times else 0)
    wide = [each for call in forward if call.name == "aten::mul" for each in call.outputs]
    assert {(each.shape, each.dtype) for each in wide} == ({((ROWS // EXPERTS, WIDTH), "float32")} if times else set())
    assert ("aten::sum" in {call.name for call in trace.calls if call.phase == "backward"}) == bool(times)
