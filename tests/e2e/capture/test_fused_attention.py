"""Attention of libraries in captured models: sliding windows and sinks reach the record, no scores are written."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from costmodel.base.errors import InputError
from costmodel.operators.attention import Attention
from e2e.capture.models.catalog import build, build_from_config
from e2e.capture.session import capture
from e2e.lowering.lower_trace import lower
from e2e.step.options import StepOptions

LENGTH, WINDOW = 64, 16
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "sliding_window": WINDOW,
}
WITH_SINKS = {**SIZES, "model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1}
WINDOWED = {**SIZES, "model_type": "mistral"}


def attended(
    config: dict[str, Any], attention: Any, document: int | None = None
) -> tuple[list[Attention], Counter[str]]:
    """Records of attention and names of calls in a training step."""
    options = StepOptions(dtype="bfloat16", attention=attention, document_length=document)
    trace = capture(build_from_config(config, 1, LENGTH, options, "test"), options)
    graph = lower(trace, options)
    records = [each for task in graph.tasks for each in task.operators if isinstance(each, Attention)]
    return records, Counter(each.name for each in trace.calls)


def test_sinks_and_windows_of_a_named_kernel():
    records, _ = attended(WITH_SINKS, "flash2")
    assert [each.direction for each in records] == ["forward"] * 2 + ["backward"] * 2
    assert all(each.sinks and each.causal and each.kernel == "flash2" for each in records)
    # Every second layer looks through a window.
    assert sorted(each.window for each in records) == [0, 0, WINDOW, WINDOW]
    assert (records[0].heads, records[0].kv_heads, records[0].head_dim) == (4, 2, 16)


def test_without_a_kernel_the_sinks_are_a_column_of_scores():
    records, names = attended(WITH_SINKS, "eager")
    assert not records and names["aten::_softmax"] >= 2
    with pytest.raises(InputError, match="no fused attention for gpt_oss; use eager attention, or name a kernel"):
        attended(WITH_SINKS, "flash")


def test_a_window_is_a_mask_for_pytorch_and_skipped_by_a_library():
    by_torch, _ = attended(WINDOWED, "flash")
    assert all(each.mask and not each.window for each in by_torch)
    by_library, _ = attended(WINDOWED, "flash3")
    assert all(each.window == WINDOW and not each.mask and each.kernel == "flash3" for each in by_library)
    assert sum(each.flops for each in by_library) < 0.5 * sum(each.flops for each in by_torch)


def test_pytorchs_own_unfused_form():
    records, names = attended({**WINDOWED, "sliding_window": None}, "math")
    assert not records and names["aten::_safe_softmax"] == 2


def test_documents_of_a_packed_sequence_see_themselves_alone():
    whole, _ = attended({**WINDOWED, "sliding_window": None}, "cudnn")
    packed, _ = attended({**WINDOWED, "sliding_window": None}, "cudnn", document=24)
    assert all(each.packed == (24, 24, 16) and each.causal for each in packed) and len(packed) == len(whole)
    # Pairs of a causal mask: n * (n + 1) / 2 of each document.
    assert packed[0].pairs == 300 + 300 + 136 and whole[0].pairs == LENGTH * (LENGTH + 1) // 2
    longer, _ = attended({**WINDOWED, "sliding_window": None}, "cudnn", document=LENGTH)
    assert longer == whole


def test_documents_need_a_kernel_and_a_transformer():
    with pytest.raises(InputError, match=r"PyTorch's own attention knows no documents; name a kernel"):
        attended({**WINDOWED, "sliding_window": None}, "flash", document=24)
    with pytest.raises(InputError, match="--document-length is for transformers"):
        build("resnet-50", 1, None, StepOptions(document_length=24))
