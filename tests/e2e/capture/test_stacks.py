"""What a training stack launches in the place of the library's operators."""

from __future__ import annotations

from collections import Counter

import pytest

from costmodel.base.errors import InputError
from e2e.capture.models.catalog import build, build_from_config
from e2e.capture.models.stacks import STACKS, chunks, stack_of
from e2e.capture.session import capture
from e2e.lowering.lower_trace import lower, unknown_operators
from e2e.step.memory import peak_memory
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import StepOptions

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 64,
}  # fmt: skip
NEMOTRON = {**LLAMA, "model_type": "nemotron", "head_dim": 16}


def trace(stack: str | None, config: dict[str, object] = LLAMA) -> OperatorTrace:
    form = "fused" if stack_of(stack).fused_optimizer else "foreach"
    options = StepOptions(dtype="bfloat16", attention="flash", optimizer=form, stack=stack)
    return capture(build_from_config(config, 2, 64, options, "toy"), options)


def launches(found: OperatorTrace) -> Counter[str]:
    return Counter(call.name for call in found.calls)


def products(found: OperatorTrace) -> int:
    return sum(call.name in ("aten::mm", "aten::addmm") for call in found.calls)


def test_megatron_fuses_norms_rotation_activation_and_loss_and_packs_products() -> None:
    plain, fused = trace(None), trace("megatron")
    counts = launches(fused)
    assert counts["aten::_fused_rms_norm"] == 5 and counts["aten::_fused_rms_norm_backward"] == 5
    assert counts["stack::rotary"] == 4 and counts["stack::rotary_backward"] == 4  # queries and keys of 2 layers
    assert counts["stack::packed_gated"] == 2 and counts["stack::cross_entropy_backward_"] == 1
    # Of 7 products a layer 3 fewer; each has one forward and two backward.
    assert products(plain) - products(fused) == 2 * 3 * 3
    assert counts["aten::_fused_adamw_"] == 1 and launches(plain)["aten::_fused_adamw_"] == 0
    assert not unknown_operators(lower(fused))
    assert peak_memory(fused).peak_bytes < peak_memory(plain).peak_bytes


def test_parameters_are_as_many_in_every_stack() -> None:
    sizes = set()
    for name in (None, *STACKS):
        options = StepOptions(dtype="bfloat16", stack=name)
        module = build_from_config(LLAMA, 1, 8, options, "toy").module
        sizes.add(sum(each.numel() for each in module.parameters()))
    assert len(sizes) == 1


def test_packed_gradients_are_not_put_together_by_a_copy() -> None:
    backward = [call.name for call in trace("megatron").calls if call.phase == "backward"]
    assert "aten::cat" not in backward and "aten::slice_backward" not in backward


def test_llm_foundry_computes_its_metrics_besides_the_fused_loss() -> None:
    counts = launches(trace("llm-foundry"))
    assert counts["stack::cross_entropy"] == 1 and counts["aten::_log_softmax"] == 2
    assert counts["aten::_log_softmax_backward_data"] == 0


def test_liger_never_has_the_scores_of_all_tokens() -> None:
    counts = launches(trace("liger"))
    assert counts["stack::cross_entropy"] == len(chunks(128, 1000, 64)) == 16
    shapes = {tensor.shape for call in trace("liger").calls for tensor in call.outputs if hasattr(tensor, "shape")}
    assert (8, 1000) in shapes and (128, 1000) not in shapes


def test_in_inference_the_fused_modules_run_and_the_head_gives_scores() -> None:
    options = StepOptions(mode="inference", dtype="bfloat16", attention="flash", stack="liger")
    found = capture(build_from_config(LLAMA, 2, 64, options, "toy"), options)
    counts = launches(found)
    assert counts["stack::gated"] == 2 and counts["stack::cross_entropy"] == 0 and products(found) == 15


def test_squared_relu_and_the_norm_of_nemotron_are_one_kernel_each() -> None:
    plain, fused = launches(trace(None, NEMOTRON)), launches(trace("te", NEMOTRON))
    assert fused["stack::squared_relu"] == 2 and fused["stack::squared_relu_backward"] == 2
    assert plain["aten::add"] - fused["aten::add"] >= 5  # the 1 of each norm's weight


@pytest.mark.parametrize(("tokens", "words", "width", "count"), [(8192, 128256, 4096, 32), (100, 50, 64, 1)])
def test_chunks_cover_all_tokens(tokens: int, words: int, width: int, count: int) -> None:
    found = chunks(tokens, words, width)
    assert len(found) == count and found[0][0] == 0 and found[-1][1] == tokens
    assert all(first[1] == second[0] for first, second in zip(found, found[1:], strict=False))


def test_unknown_stacks_and_models_without_one_are_named() -> None:
    with pytest.raises(InputError, match="--stack fast: choose one of huggingface"):
        stack_of("fast")
    with pytest.raises(InputError, match="is for transformers"):
        build("resnet-50", 1, None, StepOptions(stack="megatron"))


def test_adapters_train_alone_and_frozen_products_have_no_weight_gradients() -> None:
    options = StepOptions(dtype="bfloat16", attention="flash", lora=4)
    workload = build_from_config(LLAMA, 2, 64, options, "toy")
    trained = {name for name, each in workload.module.named_parameters() if each.requires_grad}
    assert len(trained) == 2 * 3 * 2 and all("lora_" in name for name in trained)
    adapted, plain = launches(capture(workload, options)), launches(trace(None))
    # 14 products and a head: forward, gradient of the input and of the weight. Frozen: no third, and none of the first
    # layer's queries, keys and values; 6 pairs of thin ones have their third, the first 3 pairs lack the input's.
    assert plain["aten::mm"] == 3 * 15
    assert adapted["aten::mm"] == 2 * 15 - 3 + 6 * 6 - 3


def test_a_model_without_the_adapted_products_is_named() -> None:
    with pytest.raises(InputError, match="--lora 5000: no product of .* has more than 768 rows; give a lower rank"):
        build("gpt2", 1, 16, StepOptions(lora=5000))
    with pytest.raises(InputError, match="--lora 4: is for transformers"):
        build("resnet-50", 1, None, StepOptions(lora=4))
