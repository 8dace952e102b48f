"""Recipes: what they set, that options override them, and that every road asks for the same step."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from costmodel.base.errors import InputError

pytest.importorskip("torch")

import e2e
from e2e.capture.models.stacks import STACKS
from e2e.parallelism.spec import Recompute, keys_of, parse_parallel, require_consistent, text_of
from e2e.sources.recipes import TRAINING_RECIPES
from e2e.sources.requests import Model, SpreadModel

TRAINING = [name for name, recipe in TRAINING_RECIPES.items() if not recipe.serves]
WAYS = ["dp=8", "fsdp=8", "tp=4", "tp=2,cp=2", "tp=2,pp=2,micro-batches=4", "fsdp=2,pp=2,tp=2,micro-batches=4", "cp=8"]


def asked(parallel: str | None, gpu: str = "h100-sxm", model: str = "gpt2", **options) -> Model | SpreadModel:
    options = {"batch_size": 1, "sequence_length": 64, "gpu": gpu, **options}
    return Model(model, **options) if parallel is None else SpreadModel(model, parallel=parallel, gpus=8, **options)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_recipe_sets_is_consistent_whole_and_the_same_when_it_is_asked_for(name: str, way: str):
    found = asked(way, recipe=name).with_defaults()
    spec = found.parallel
    require_consistent(spec, 8)
    assert found.stack is None or found.stack in STACKS
    for other in (name, "plain"):  # everything is said: a recipe changes nothing
        whole = replace(found, parallel=parse_parallel(text_of(spec), 8), recipe=other).with_defaults()
        assert keys_of(whole.parallel) == keys_of(spec) and whole.attention == found.attention
    assert found.with_defaults() == found


@pytest.mark.parametrize("name", TRAINING)
def test_what_is_asked_for_overrides_a_recipe(name: str):
    way = "fsdp=4,tp=2,zero=3,sp=no,master-weights=no,reduce-dtype=same,overlap-gather=no,tp-overlap=no"
    found = asked(way, recipe=name, attention="eager", stack="te", dtype="float16").with_defaults()
    assert text_of(found.parallel) == text_of(parse_parallel(way)) and found.attention == "eager"
    assert (found.stack, found.dtype) == ("te", "float16")


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("word", get_args(Recompute))
def test_a_word_of_recomputation_means_what_the_tool_of_the_recipe_does(name: str, word: Recompute):
    found = asked(f"fsdp=8,recompute={word}", recipe=name).with_defaults().parallel
    meant = "operators" if (name, word) == ("torchtitan", "selective") else word
    assert found == asked(f"fsdp=8,recompute={meant}", recipe=name).with_defaults().parallel
    assert found.recompute == meant


def test_what_a_word_was_taken_for_is_told_and_what_goes_with_another_tool_is_refused():
    step = e2e.predict(
        "gpt2", gpu="h100-sxm", parallel="dp=1,recompute=selective", recipe="torchtitan", sequence_length=64
    )
    (told,) = (each.value for each in step.asked if each.option == "--parallel" and each.given)
    assert told == "recompute=selective (torchtitan's selective: recompute=operators here)"
    with pytest.raises(InputError, match="recompute-modules is Megatron's; torchtitan"):
        asked("fsdp=8,recompute=selective,recompute-modules=mlp", recipe="torchtitan").with_defaults()


def test_a_gpu_without_bf16_trains_in_what_it_has_and_only_transformers_follow_a_recipe():
    assert asked(None, "v100-sxm2-32gb").with_defaults().dtype == "float16"
    assert asked(None, "p4").with_defaults().dtype == "float32"
    images = asked(None, model="resnet-50")
    assert images.with_defaults() == images


def test_a_recipe_for_serving_is_refused_in_training_and_an_unknown_one_everywhere():
    assert asked(None, recipe="vllm", mode="inference").with_defaults().stack == "te"
    with pytest.raises(InputError, match="--recipe vllm: is for inference"):
        asked(None, recipe="vllm").with_defaults()
    with pytest.raises(InputError, match="--recipe best: choose one of plain, hf-trainer"):
        e2e.predict("gpt2", gpu="h100-sxm", recipe="best")


def test_models_take_the_nearest_attention_that_they_have():
    for model, kernel in (("xlnet-base", "eager"), ("gpt-oss-20b", "flash2"), ("gpt2", "flash")):
        request = asked(None, model=model)
        assert request.with_defaults().attention == kernel
    assert asked(None, recipe="megatron").with_defaults().attention == "cudnn"
    assert asked(None, "a100-sxm-80gb", recipe="megatron").with_defaults().attention == "flash2"


def test_one_gpu_has_master_weights_as_one_replica_has_and_pure_bf16_is_asked_for():
    question = {"gpu": "h100-sxm", "sequence_length": 64}
    one, replica = e2e.predict("gpt2", **question), e2e.predict("gpt2", parallel="dp=1", **question)
    pure = e2e.predict("gpt2", recipe="pure-bf16", **question)
    assert one.iteration_seconds == pytest.approx(replica.iteration_seconds, rel=1e-3)
    assert one.peak_memory_bytes > pure.peak_memory_bytes and one.optimizer_seconds > pure.optimizer_seconds
    unsaid = e2e.predict("gpt2", parallel="dp=1,master-weights=no", **question)
    assert unsaid.iteration_seconds == pytest.approx(pure.iteration_seconds, rel=1e-3)
    told = {each.option: each.value for each in replica.asked if not each.given}
    assert told["--parallel"] == "master-weights=yes" and told["--dtype"].startswith("bfloat16 (FP32 master")


def test_predict_and_sweep_ask_for_the_same_step():
    for recipe in (None, "torchtitan"):
        (row,) = e2e.sweep(
            "gpt2", gpu="h100-sxm", gpus=2, parallel="fsdp=2", sequence_length=64, recipe=recipe, workers=1
        )
        step = e2e.predict("gpt2", gpu="h100-sxm", gpus=2, parallel="fsdp=2", sequence_length=64, recipe=recipe)
        assert row.iteration_seconds == step.iteration_seconds and row.peak_memory_bytes == step.peak_memory_bytes
