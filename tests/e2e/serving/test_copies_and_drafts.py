"""Copies of a model for prompts and for decoding, and drafts of speculative decoding."""

from __future__ import annotations

import pytest

from costmodel.base.errors import InputError
from e2e.capture.models.served_model import named_model
from e2e.serving.deployment import ServingParallel, read_disaggregation, read_speculation
from e2e.serving.serving_answer import cache_transfer, deployment_of, serve
from e2e.serving.serving_request import ServingRequest
from e2e.serving.step_price import Prompt, StepPrice, table_error

_SMALL = ServingRequest(model="llama-3.2-1b", gpu="h100-sxm", concurrency=4, requests=8)


def test_copies_have_their_own_parallelism() -> None:
    split = read_disaggregation("prefill=2,decode=3,decode-tp=4,decode-ep=2", ServingParallel(2))
    assert split.prefill_parallel == ServingParallel(2)
    assert split.decode_parallel == ServingParallel(4, ep=2)
    assert split.gpus == 2 * 2 + 3 * 4


@pytest.mark.parametrize("text", ["prefill=2", "prefill=2,decode=0", "prefill=2,decode=x"])
def test_each_kind_of_copies_needs_a_number(text: str) -> None:
    with pytest.raises(InputError, match="write how many copies do what|must be a whole number"):
        read_disaggregation(text, ServingParallel())


def test_a_longer_cache_takes_longer_and_the_network_longer_still() -> None:
    one = deployment_of(_SMALL)
    near, far = cache_transfer(one, one, "h100-sxm", 2), cache_transfer(one, one, "h100-sxm", 16)
    assert 0 < near(100) < near(10_000) < far(10_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens=3", "write tokens=3,acceptance=0.7"),
        ("tokens=0,acceptance=0.5", "must be from 1 to 64"),
        ("tokens=3,acceptance=2", "must be from 0 to 1"),
        ("tokens=3,acceptance=0.5", "has no layers that predict"),
    ],
)
def test_a_draft_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_speculation(text, named_model("llama-3.2-1b"))


def test_expected_tokens_of_a_step() -> None:
    model = named_model("deepseek-v3")
    found = read_speculation("tokens=2,acceptance=0.5", model)
    assert found is not None
    assert found.tokens_per_step == 1 + 0.5 + 0.25
    assert found.draft.depth == 1


def test_verification_costs_more_than_a_step_and_less_than_its_tokens() -> None:
    request = ServingRequest(model="deepseek-v3", gpu="h200-sxm", gpus=8, speculate="tokens=1,acceptance=1")
    drafted, plain = deployment_of(request), deployment_of(ServingRequest(model="deepseek-v3", gpu="h200-sxm", gpus=8))
    step = StepPrice(plain).step_seconds(8, 1000)
    assert step < StepPrice(drafted).step_seconds(8, 1000) < 2 * step


def test_tabulated_steps_are_near_those_priced_one_by_one() -> None:
    median, largest = table_error(StepPrice(deployment_of(_SMALL)), 64, (500, 1500), 1024, 6)
    assert median < 0.02
    assert largest < 0.1


def test_more_copies_answer_sooner() -> None:
    one, two = serve(_SMALL), serve(ServingRequest(**{**_SMALL.given_values(), "replicas": 2}))
    assert two.gpus == 2
    assert two.run.last.max() < one.run.last.max()
    apart = serve(ServingRequest(**{**_SMALL.given_values(), "disaggregate": "prefill=1,decode=2"}))
    assert apart.gpus == 3
    assert (apart.tpot_seconds < one.tpot_seconds.min()).all()


def test_steps_of_a_prompt_are_dearer_than_of_a_token() -> None:
    price = StepPrice(deployment_of(_SMALL))
    assert price.step_seconds(1, 1000) < price.step_seconds(1, 1000, [Prompt(1000)])
