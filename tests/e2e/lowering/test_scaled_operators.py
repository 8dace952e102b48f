"""8-bit products as scripts write them, and recipes of built-in models: which casts, how often."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from costmodel.base.errors import InputError
from costmodel.operators.device_work import ScaledCast, ScaledGemm
from costmodel.operators.experts import GroupedGemm
from e2e.capture.models.catalog import build_from_config
from e2e.capture.session import CapturedWorkload, capture
from e2e.lowering import lower
from e2e.step.options import RECIPES, StepOptions

ROWS, WIDTH, INNER = 64, 32, 48
SMALL = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


def operators(step):
    trace = capture(CapturedWorkload("step", torch.nn.Identity(), step), StepOptions())
    return [each for task in lower(trace).tasks for each in task.operators]


def eight(*shape):
    return torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")


def scales(*shape):
    return torch.empty(shape, dtype=torch.float32, device="meta")


@pytest.mark.parametrize("fast", [None, False, True])
def test_a_scaled_product_of_a_script_is_one_in_8_bits(fast):
    """It was an unknown operator of a few bytes once."""
    asked = {} if fast is None else {"use_fast_accum": fast}
    (found,) = operators(
        lambda: torch._scaled_mm(
            eight(ROWS, WIDTH), eight(INNER, WIDTH).t(), scales(), scales(), out_dtype=torch.bfloat16, **asked
        )
    )
    assert found == ScaledGemm(ROWS, INNER, WIDTH, "float8", "tensor", "bfloat16", split_sums=not fast)


def test_scales_of_rows_are_told_by_their_number():
    (found,) = operators(
        lambda: torch._scaled_mm(
            eight(ROWS, WIDTH), eight(INNER, WIDTH).t(), scales(ROWS, 1), scales(1, INNER), out_dtype=torch.bfloat16
        )
    )
    assert isinstance(found, ScaledGemm) and found.scaling == "row"


def test_integers_have_a_record_too():
    first, second = (torch.empty(shape, dtype=torch.int8, device="meta") for shape in ((ROWS, WIDTH), (WIDTH, INNER)))
    (found,) = operators(lambda: torch._int_mm(first, second))
    assert found == ScaledGemm(ROWS, INNER, WIDTH, "int8", "tensor", "int32")


def captured(mode="forward-backward", config=SMALL, **options):
    asked = StepOptions(mode=mode, dtype="bfloat16", **options)
    trace = capture(build_from_config(config, 2, ROWS // 2, asked, "small"), asked)
    return [each for task in lower(trace).tasks for each in task.operators]


# Of a layer: 7 linear layers with 4 distinct inputs (queries, keys and values share one, gate and up another).
@pytest.mark.parametrize(
    ("precision", "casts", "searches", "copies"),
    [
        ("fp8-delayed", 4 + 7 + 7, 0, 2),  # inputs, weights, gradients of outputs: once each, with the transposed copy
        ("fp8-current", 4 + 7 + 7, 4 + 7 + 7, 2),
        ("fp8-tensorwise", 4 + 7 + 7 + 7 + 7, 4 + 7 + 7 + 7 + 7, 1),  # inputs and weights again in the backward pass
        ("fp8-rowwise", 4 + 7 + 7 + 7 + 7 + 7, 0, 1),  # gradients along both dimensions
        ("fp8-block", 4 + 7 + 7, 0, 2),
    ],
)
def test_what_a_recipe_casts(precision, casts, searches, copies):
    found = [each for each in captured(precision=precision) if isinstance(each, ScaledCast)]
    assert Counter(each.outputs for each in found) == Counter(
        {copies: 2 * casts, **({0: 2 * searches} if searches else {})}
    )
    assert {each.scaling for each in found} == {RECIPES[precision].scaling}


def test_all_three_products_of_linear_layers_are_in_8_bits_but_not_those_of_the_head():
    plain, scaled = captured(), captured(precision="fp8-delayed")
    products = [each for each in scaled if isinstance(each, ScaledGemm)]
    assert len(products) == 3 * 7 * 2
    assert sum(each.split_sums for each in products) == 2 * 7 * 2  # gradients alone
    assert sum(each.flops for each in (*plain, *scaled) if type(each).__name__ == "Gemm") > 0
    kinds = [sum(each.flops for each in found if isinstance(each, (ScaledGemm,)) or type(each).__name__ == "Gemm")
             for found in (plain, scaled)]  # fmt: skip
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("precision", ["fp8-tensorwise", "fp8-current"])
def test_frozen_weights_have_no_gradient_in_8_bits_either(precision):
    """Adapters beside 14 products: each runs forward, and for the gradient of its input, but for the first three."""
    products = [each for each in captured(precision=precision, lora=4) if isinstance(each, ScaledGemm)]
    assert len(products) == 14 + 14 - 3


def test_a_stored_quantization_is_honoured_in_inference_alone():
    stored = {**SMALL, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    found = captured("inference", stored)
    assert len([each for each in found if isinstance(each, ScaledGemm) and each.scaling == "block"]) == 2 * 7
    assert len([each for each in found if isinstance(each, ScaledCast)]) == 2 * 4
    with pytest.raises(InputError, match="small: its quantization_config is for inference"):
        captured("train", stored)


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq"},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "torchao"},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}},
    ],
)
def test_what_is_not_known_is_refused_in_one_line(stored):
    with pytest.raises(InputError, match="quantization_config of .* is not known .*; remove it") as caught:
        captured("inference", {**SMALL, "quantization_config": stored})
    assert "\n" not in str(caught.value)


def test_weights_of_4_bits_are_named_and_8_bits_of_modelopt_priced():
    with pytest.raises(InputError, match=r"of 'mxfp4' is not known \(weights of 4 bits: no table"):
        captured("inference", {**SMALL, "quantization_config": {"quant_method": "mxfp4"}})
    stored = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    found = captured("inference", {**SMALL, "quantization_config": stored})
    assert {each.scaling for each in found if isinstance(each, ScaledGemm)} == {"tensor"}


def test_experts_of_a_quantized_model_are_multiplied_in_8_bits():
    mixture = {
        "model_type": "mixtral", "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 4,
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    found = [each for each in captured("inference", mixture) if isinstance(each, GroupedGemm)]
    assert [(each.dtype, each.rows, each.scaling) for each in found] == [("float8", 2 * ROWS, "tensor")] * 2


def test_a_recipe_needs_16_bits():
    with pytest.raises(InputError, match="--precision fp8-delayed is for models of 16 bits"):
        asked = StepOptions(precision="fp8-delayed")
        build_from_config(SMALL, 1, 16, asked, "small")
