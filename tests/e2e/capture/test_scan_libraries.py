"""Layers of Mamba and gated delta rules as the fused kernels that their libraries would bring."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from costmodel.base.errors import InputError
from costmodel.operators.attention import CausalConvolution, LinearAttention
from e2e.capture.models.catalog import build_from_config
from e2e.capture.session import capture
from e2e.lowering.lower_trace import lower, unknown_operators
from e2e.sources.built_in_model import assumptions
from e2e.step.options import StepOptions

LENGTH = 96
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "num_attention_heads": 4, "head_dim": 16}
MAMBA2 = {**SIZES, "model_type": "mamba2", "num_heads": 8, "state_size": 32, "n_groups": 2, "chunk_size": 64}
MAMBA = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 128, "state_size": 16}
DELTA = {
    **SIZES,
    "model_type": "qwen3_next",
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def captured(config: dict[str, Any], form: Any, mode: Any = "train") -> Any:
    options = StepOptions(mode=mode, dtype="bfloat16", linear_attention=form)
    return capture(build_from_config(config, 2, LENGTH, options, "test"), options)


def records(trace: Any) -> list[LinearAttention | CausalConvolution]:
    graph = lower(trace)
    assert not unknown_operators(graph)
    return [op for task in graph.tasks for op in task.operators if isinstance(op, LinearAttention | CausalConvolution)]


def test_a_training_step_of_mamba_2():
    trace = captured(MAMBA2, "fused")
    found = records(trace)
    scans = [each for each in found if isinstance(each, LinearAttention)]
    assert scans[0] == LinearAttention("ssd", 2, LENGTH, 2, 32, 8, 16, 64)
    assert [each.direction for each in scans] == ["forward"] * 2 + ["backward"] * 2
    convolutions = [each for each in found if isinstance(each, CausalConvolution)]
    assert convolutions[0] == CausalConvolution(2, 128 + 2 * 2 * 32, LENGTH, 4)
    assert Counter(each.direction for each in convolutions) == {"forward": 2, "backward": 2}
    names = Counter(call.name for call in trace.calls)
    # What the library fuses besides: the gated norm; the last product stays one.
    assert names["scan::gated_norm"] == names["scan::gated_norm_backward"] == 2
    (line,) = assumptions([trace])
    assert "gradients of linear attention" in line


def test_every_parameter_gets_its_gradient():
    options = StepOptions(mode="forward-backward", dtype="bfloat16", linear_attention="fused")
    for config in (MAMBA2, MAMBA, DELTA):
        model = build_from_config(config, 2, LENGTH, options, "test")
        capture(model, options)
        missing = [name for name, each in model.module.named_parameters() if each.grad is None]
        # Experts that no token reaches aside; dt's own bias of Mamba 1 joins the scan without a gradient of its own.
        assert not [name for name in missing if "mixer" in name or "linear_attn" in name], missing


def test_the_gated_delta_rule_of_qwen3_next():
    found = records(captured(DELTA, "fused", "inference"))
    assert found[0] == CausalConvolution(2, 2 * 32 + 128, LENGTH, 4)
    assert found[1] == LinearAttention("gated_delta", 2, LENGTH, 2, 16, 4, 32)
    assert len(found) == 2


def test_mamba_1_has_one_scan_instead_of_one_step_per_token():
    trace = captured(MAMBA, "fused")
    scans = [each for each in records(trace) if isinstance(each, LinearAttention)]
    assert [each.direction for each in scans] == ["forward", "backward"]
    assert (scans[0].kind, scans[0].value_heads, scans[0].key_dim) == ("selective", 128, 16)
    assert len(trace.calls) < 400


def test_without_the_libraries_the_step_is_made_of_single_operators_and_says_so():
    trace = captured(DELTA, None, "inference")
    assert not records(trace)
    (line,) = assumptions([trace])
    assert "flash-linear-attention" in line and "--linear-attention fused" in line


def test_a_form_that_is_not_known():
    with pytest.raises(InputError, match="choose one of fused, unfused"):
        StepOptions(linear_attention="sometimes")  # type: ignore[arg-type]
