"""A converted network in BF16 on PyTorch: cast whole, or under autocast. Inputs and outputs stay in FP32, as with other
engines; the casts are part of what is timed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from fusion.comparing.engines.base import Unavailable


class InBfloat16(torch.nn.Module):
    """``graph`` with weights, activations and constants in BF16."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.graph = _cast(graph)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs in the precision that ``graph`` has them in."""
        halved = [each.to(torch.bfloat16) if each.dtype == torch.float32 else each for each in inputs]
        return _widened(self.graph(*halved))


class UnderAutocast(torch.nn.Module):
    """``graph`` with the operators in BF16 that PyTorch's autocast takes as safe: convolutions and products."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.graph = copy.deepcopy(graph)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs in FP32."""
        # Without the cache a trace holds the casts of weights, which freezing evaluates.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            results = self.graph(*inputs)
        return _widened(results)


def require_bfloat16() -> str:
    """What computes BF16 on this CPU; ``Unavailable`` where PyTorch's convolutions have no BF16."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise Unavailable(f"PyTorch {torch.__version__} has no BF16 convolutions for this CPU: it lacks AVX-512")
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else "BF16 converted to FP32: the CPU has none"


def _cast(graph: GraphModule) -> GraphModule:
    """A copy whose floating-point constants are of BF16, as are the types that single operators ask for."""
    cast = copy.deepcopy(graph).to(torch.bfloat16)
    for node in cast.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, _type), map_aggregate(node.kwargs, _type)
    cast.recompile()
    return cast


def _type(argument: Any) -> Any:
    return torch.bfloat16 if argument is torch.float32 else argument


def _widened(results: Any) -> tuple[torch.Tensor, ...]:
    return tuple(each.float() if each.dtype == torch.bfloat16 else each for each in results)
