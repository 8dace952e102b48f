"""The models of NeuSight's measured labels (Lee et al., ASPLOS 2025) as their library ran them.

The labels were taken with transformers 4.36 to 4.40, whose eager attention launches other operators than today's, and
with the task heads that the authors' script asked for (``neusight/Tracing/trace.py`` in sitar-lab/NeuSight):

* inference: ``AutoModelForSequenceClassification`` for BERT, language models else, under ``no_grad``;
* training: ``AutoModelForPreTraining`` for BERT; forward, cross entropy, backward; gradients are never cleared, so that
  every backward pass adds to those that are there;
* every token is the same one.

``tests/lab/steps/test_labelled_models.py`` compares operators and shapes with those that the label files list. Masks
are made beforehand here: making them takes less than a thousandth of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from e2e.capture.models.transformer import build_transformer, quiet, without_cache
from e2e.capture.possible_values import true_share
from e2e.capture.session import CapturedWorkload

CLASSES = {
    ("bert", "inf"): "BertForSequenceClassification",
    ("bert", "train"): "BertForPreTraining",
}
# Layers that use one expert and layers that use two, alternating. All tokens of a sequence are the same at first, so
# that one expert takes as many as its capacity and the others none; later layers distinguish those tokens from the
# rest. On models with fewer channels and random weights 64 to 96 tokens per sequence and layer were processed by
# experts of capacity 64, 1.4 experts on average.
EXPERTS_USED = (1, 2, 1, 2, 1)

LabelledAttention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def label_workload(config: Mapping[str, Any], mode: str, batch: int, length: int, source: str) -> CapturedWorkload:
    """The step that NeuSight measured. ``mode``: ``inf`` or ``train``; sizes in sequences and tokens.

    ``ModelError`` if the library cannot build the configuration.
    """
    kind = config["model_type"]
    attention = f"label-{kind}-{batch}-{length}"
    if kind in _ATTENTION:
        _register(attention, _ATTENTION[kind](batch, length))
    named = CLASSES.get((kind, mode))
    settings = {**config, "architectures": [named]} if named else config
    model = build_transformer(settings, attention if kind in _ATTENTION else "eager", source)
    model.train(mode == "train")
    _route_alike_tokens(model, config.get("expert_capacity", 0))
    return CapturedWorkload(source, model, _step(model, mode, batch, length))


def _register(name: str, attention: LabelledAttention) -> None:
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(name, attention)


def _step(model: Any, mode: str, batch: int, length: int) -> Callable[[], None]:
    ids = torch.zeros((batch, length), dtype=torch.int64, device="meta")
    without_cache(model)
    arguments = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        arguments |= {"decoder_input_ids": ids, "attention_mask": ids}
    if mode == "train":
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)

    def step() -> None:
        with quiet():
            output = model(**arguments)
        if mode == "train":
            scores = output.get("prediction_logits", output.get("logits"))
            torch.nn.functional.cross_entropy(scores.view(-1, scores.shape[-1]), ids.view(-1)).backward()

    return step


# --- eager attention of the measured library ---------------------------------------------------------
def _weights(module: torch.nn.Module, scores: torch.Tensor, dropout: float) -> torch.Tensor:
    weights = torch.nn.functional.softmax(scores, dim=-1)
    return torch.nn.functional.dropout(weights, p=dropout, training=module.training)


def _gpt2(batch: int, length: int) -> LabelledAttention:
    """Attention with scores divided by a tensor on the device, masked by ``where``."""
    allowed = torch.ones((1, 1, length, length), dtype=torch.bool, device="meta")

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any) -> Any:
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / torch.full((), math.sqrt(value.shape[-1]), dtype=scores.dtype, device=scores.device)
        lowest = torch.full((), torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
        weights = _weights(module, torch.where(allowed, scores, lowest), dropout)
        return torch.matmul(weights, value).transpose(1, 2), weights

    return attention


def _bert(batch: int, length: int) -> LabelledAttention:
    """Attention with scores divided by a number; a mask without effect is added."""
    mask_of_all = torch.zeros((batch, 1, 1, length), device="meta")

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any) -> Any:
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(value.shape[-1])
        weights = _weights(module, scores + mask_of_all, dropout)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights

    return attention


def _opt(batch: int, length: int) -> LabelledAttention:
    """Attention with copies of queries, keys and values, batched products, an additive mask and a lower limit."""
    causal = torch.zeros((batch, 1, length, length), device="meta")
    lowest = torch.empty((), device="meta")

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any) -> Any:
        heads, width = query.shape[1], query.shape[-1]
        query, key, value = (each.contiguous().view(batch * heads, -1, width) for each in (query, key, value))
        scores = torch.bmm(query, key.transpose(1, 2)).view(batch, heads, length, length) + causal
        scores = torch.max(scores, lowest).view(batch * heads, length, length)
        weights = _weights(module, scores, dropout)
        return torch.bmm(weights, value).view(batch, heads, length, width).transpose(1, 2), weights

    return attention


def _switch(batch: int, length: int) -> LabelledAttention:
    """Attention without a scale; the bias of relative positions and the mask are added to each other once per stack, as
    in T5.
    """
    masks = {
        True: torch.zeros((batch, 1, length, length), device="meta"),
        False: torch.zeros((batch, 1, 1, length), device="meta"),
    }
    # The most recent bias, and its sum with the mask.
    latest: list[tuple[torch.Tensor, torch.Tensor]] = []

    def masked(bias: torch.Tensor, causal: bool) -> torch.Tensor:
        for known, total in latest:
            if known is bias:
                return total
        latest.append((bias, bias + masks[causal]))
        del latest[:-2]
        return latest[-1][1]

    def attention(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        dropout: float = 0.0,
        position_bias: Any = None,
        **_: Any,
    ) -> Any:
        scores = torch.matmul(query, key.transpose(3, 2))
        scores += masked(position_bias, module.is_causal)
        weights = _weights(module, scores, dropout)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights

    return attention


_ATTENTION: dict[str, Callable[[int, int], LabelledAttention]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "opt": _opt,
    "switch_transformers": _switch,
}


# --- experts of the measured library -----------------------------------------------------------------
def _route_alike_tokens(model: torch.nn.Module, capacity: int) -> None:
    layers = [module for module in model.modules() if type(module).__name__ == "SwitchTransformersSparseMLP"]
    for number, layer in enumerate(layers):
        used = EXPERTS_USED[number % len(EXPERTS_USED)]
        layer.forward = _sparse_layer(layer, used, capacity)  # type: ignore[method-assign]


def _sparse_layer(layer: Any, used: int, capacity: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sparse layer: the experts in turn on their tokens; tokens of no expert pass unchanged."""

    def forward(states: torch.Tensor) -> torch.Tensor:
        mask, probabilities, _ = layer.router(states)
        torch.argmax(mask, dim=-1)
        following = states.clone()
        share = min(1.0, capacity / states.shape[1])
        for place, expert in enumerate(layer.experts.values()):
            with true_share(share if place < used else 0.0):
                # Twice, as boolean indices on both sides of an assignment are looked up twice.
                taken = mask[:, :, place].bool().nonzero().unbind(1)
                given = mask[:, :, place].bool().nonzero().unbind(1)
            following[given] = expert(states[taken])
        return probabilities * following

    return forward
