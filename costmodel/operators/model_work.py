"""FLOPs as counted for MFU and HFU: products, convolutions and attention, masked or not.

The convention is that of PaLM (Chowdhery et al., arXiv 2204.02311, appendix B), shared by PyTorch's
``FlopCounterMode``, llm-foundry and torchtitan. A multiply-accumulate is two; element-wise work, norms, softmax and
optimizers count as zero; attention counts every query with every key, even those excluded by a causal mask, so that the
figure does not depend on the kernel (eager products compute masked pairs too). Pairs excluded by a window or the
borders of packed documents are never computed and do not count.
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
    """FLOPs of one run of an operator. ``model``: needed for its result; ``executed``: including the kernel's
    recomputation for the backward pass, such as the scores of fused attention.
    """

    model: int
    executed: int


NO_FLOPS = CountedFlops(0, 0)


def counted_flops(operator: AnyOperator) -> CountedFlops:
    """FLOPs of ``operator`` by the convention above; zero for anything but products."""
    if isinstance(operator, _PRODUCTS):
        return CountedFlops(operator.flops, operator.flops)
    if isinstance(operator, Attention):
        return _attention(operator)
    if isinstance(operator, LinearAttention | CausalConvolution):
        # Backward: gradients of two operands; the rest of `flops` is the recomputed forward pass.
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
