"""FLOPs as MFU and HFU count them: of products, convolutions and attention, masked or not.

The convention is that of PaLM (Chowdhery et al., arXiv 2204.02311, appendix B), which PyTorch's ``FlopCounterMode``,
llm-foundry and torchtitan share. A multiply-accumulate is two; element-wise work, norms, softmax and optimizers count
as nothing; attention counts every query with every key, whatever a causal mask leaves out, so that the figure does not
depend on the kernel (eager products compute masked pairs too). Of the pairs that a window or the borders of packed
documents leave out nobody computes any: they do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import ConvolutionBackward, Gemm
from costmodel.operators.expert_work import ExpertLayer, GroupedGemm
from costmodel.operators.layers import Conv2d, Dense, FusedConvs
from costmodel.operators.linear_attention import CausalConvolution, LinearAttention
from costmodel.operators.scaled_work import ScaledGemm

_PRODUCTS = (Gemm, ScaledGemm, GroupedGemm, ExpertLayer, Conv2d, ConvolutionBackward, FusedConvs, Dense)


@dataclass(frozen=True, slots=True)
class CountedFlops:
    """Of one run of an operator: ``model``: what its result takes; ``executed``: with what the kernel computes again
    for the backward pass, as fused attention does with its scores.
    """

    model: int
    executed: int


NO_FLOPS = CountedFlops(0, 0)


def counted_flops(operator: AnyOperator) -> CountedFlops:
    """FLOPs of ``operator`` by the convention above; none of what is no product."""
    if isinstance(operator, _PRODUCTS):
        return CountedFlops(operator.flops, operator.flops)
    if isinstance(operator, Attention):
        return _attention(operator)
    if isinstance(operator, LinearAttention | CausalConvolution):
        # Backward: gradients of two operands; what `flops` has beyond that is the forward pass computed again.
        again = operator.flops // 3 if operator.direction == "backward" else 0
        return CountedFlops(operator.flops - again, operator.flops)
    return NO_FLOPS


def _attention(operator: Attention) -> CountedFlops:
    scored, mixed = operator.widths
    pairs = sum(queries * min(keys, operator.window or keys) for queries, keys in operator.pieces)
    each = 2 * operator.batch * operator.heads * pairs
    if operator.direction == "forward":
        return CountedFlops(each * (scored + mixed), each * (scored + mixed))
    return CountedFlops(each * 2 * (scored + mixed), each * (3 * scored + 2 * mixed))
