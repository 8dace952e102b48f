"""Low-rank adapters (``--lora``) beside the frozen weights of a Hugging Face model. Imports ``torch``.

``y = W x + (alpha / rank) B A x`` (Hu et al., arXiv 2106.09685): adds two thin products, a scaling and an addition;
``W`` has no gradient. As in NeMo's performance recipes and PEFT's defaults, queries, keys and values are adapted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from costmodel.base.errors import InputError

ADAPTED = ("q_proj", "k_proj", "v_proj", "packed_proj", "c_attn", "query", "key", "value")


def add_adapters(model: nn.Module, rank: int, source: str) -> None:
    """Freeze ``model`` and adapt its products of queries, keys and values; raise ``InputError`` if it has none, or if
    the rank is too high.
    """
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] in ADAPTED and _weighs(module)]
    if not found:
        raise InputError(
            f"--lora {rank}: {source} has no products of queries, keys and values to adapt; leave --lora out"
        )
    widest = max(min(module.weight.shape) for module in found)  # type: ignore[union-attr, arg-type]
    if rank > widest:
        raise InputError(f"--lora {rank}: no product of {source} has more than {widest:,} rows; give a lower rank")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in found:
        _adapt(module, rank)


def _weighs(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.dim() == 2  # type: ignore[operator]


def _adapt(module: Any, rank: int) -> None:
    rows, columns = module.weight.shape
    if type(module).__name__ == "Conv1D":  # GPT-2 stores (in, out)
        rows, columns = columns, rows
    kind = {"dtype": module.weight.dtype, "device": "meta"}
    module.lora_down = nn.Parameter(torch.empty(rank, columns, **kind))
    module.lora_up = nn.Parameter(torch.empty(rows, rank, **kind))
    module.forward = _adapted(module, module.forward)


def _adapted(module: Any, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(given: torch.Tensor) -> torch.Tensor:
        thin = nn.functional.linear(given, module.lora_down)
        return forward(given) + nn.functional.linear(thin, module.lora_up) * 2.0

    return run
