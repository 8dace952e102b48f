"""Cache of keys and values of earlier tokens, for steps that decode (``--cache-length``). Imports ``torch``.

The cache is written in place, one row per new token, and read without a copy, as in serving engines and the static
cache of Transformers; the library's default cache copies itself for every token. Layers with a sliding window keep all
tokens here and attend to those in the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from costmodel.base.errors import InputError
from e2e.capture.fused_attention import CACHED


def decoding_arguments(
    model: Any, ids: torch.Tensor, tokens: int, source: str, dtype: torch.dtype | None = None
) -> Mapping[str, Any]:
    """Return the arguments of a Transformers ``model`` for new tokens ``ids`` (batch, length) after ``tokens`` cached
    ones, stored as ``dtype`` (None: the model's type).

    Raise ``InputError`` if the model's cache is not of keys and values, or if the model has an encoder.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(
            f"{source}: --cache-length: it has an encoder too; leave --cache-length out, or give a --script"
        )
    cache = DynamicCache(config=model.config)
    kinds = {type(layer) for layer in cache.layers}
    if not kinds or not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        named = ", ".join(sorted(kind.__name__ for kind in kinds)) or "no cache"
        raise InputError(f"{source}: --cache-length is for caches of keys and values, it has {named}; give a --script")
    in_place = _in_place(DynamicLayer)
    cache.layers = [in_place(tokens, dtype) for _ in cache.layers]
    for module in model.modules():
        setattr(module, CACHED, tokens)
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = True
    return {"input_ids": ids, "past_key_values": cache, "use_cache": True}


def _in_place(base: type[Any]) -> type[Any]:
    """Return a layer of the library's cache, which is imported only here."""

    class LayerInPlace(base):  # type: ignore[misc]
        """Keys and values of ``tokens`` tokens and those of the step, which each call writes again."""

        def __init__(self, tokens: int, kept: torch.dtype | None) -> None:
            super().__init__()
            self.tokens, self.kept = tokens, kept
            self.is_initialized = False

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            if not self.is_initialized:
                self.keys, self.values = (self._longer(each) for each in (key_states, value_states))
                self.is_initialized = True
            for kept, new in ((self.keys, key_states), (self.values, value_states)):
                kept[:, :, self.tokens :].copy_(new)
            return self.keys, self.values

        def get_seq_length(self) -> int:
            return self.tokens

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.tokens + query_length, 0

        def _longer(self, new: torch.Tensor) -> torch.Tensor:
            return new.new_empty((*new.shape[:2], self.tokens + new.shape[2], new.shape[3]), dtype=self.kept)

    return LayerInPlace
