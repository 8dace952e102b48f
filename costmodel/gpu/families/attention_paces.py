"""Speed of each attention kernel per tile on each GPU generation.

Fitted to the rows named, least absolute error of log times, where a source is named (mean error of the fit in
brackets); 62.5 cycles per 1,000 scores would be exponentials alone, 16 a cycle (CUDA C++ Programming Guide, throughput
of arithmetic instructions). Values without measurements are estimated as stated beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from costmodel.operators.attention import AttentionKernel, AttentionPhase


@dataclass(frozen=True)
class KernelPace:
    """Pace of an attention kernel."""

    # Share of the sustained GEMM rate.
    products: float
    # Cycles of a multiprocessor per 1,000 scores that are not hidden behind products.
    softmax: float
    # Additional cycles per block.
    block: float
    # Cost of launching the call, in shortest kernels.
    launches: float = 1.0


_TABLE: MappingProxyType[tuple[str, str, str], KernelPace] = MappingProxyType({
    # FlashAttention-3 paper, arXiv 2407.08608, figures 5 and 6: H100 SXM5, 16k tokens of width 2,048 (2 to 8 %).
    ("flash2", "forward", "hopper"): KernelPace(0.380, 5.0, 3800, 2.0),
    ("flash3", "forward", "hopper"): KernelPace(0.959, 48.3, 4470, 2.0),
    ("cudnn", "forward", "hopper"): KernelPace(0.764, 54.0, 2580, 1.8),
    ("flash2", "encoder", "hopper"): KernelPace(0.454, 39.7, 1610, 2.0),
    ("cudnn", "encoder", "hopper"): KernelPace(0.592, 33.6, 2080, 2.0),
    ("flash2", "backward", "hopper"): KernelPace(0.414, 113.6, 10200, 2.0),
    ("flash3", "backward", "hopper"): KernelPace(0.771, 90.4, 10400, 2.0),
    ("cudnn", "backward", "hopper"): KernelPace(0.690, 92.6, 9740, 2.0),
    # SimuMax, A100 PCIe 80 GB: causal, 4,096 tokens, widths 128 and 192 with 128 (3 to 5 %).
    ("flash2", "forward", "ampere"): KernelPace(1.05, 105.8, 50, 2.0),
    ("flash2", "backward", "ampere"): KernelPace(0.654, 0.5, 50, 2.0),
    # SimuMax, B200: the same and up to 131,072 tokens (10 and 12 %).
    ("cudnn", "forward", "blackwell"): KernelPace(1.05, 45.9, 50, 2.0),
    ("cudnn", "backward", "blackwell"): KernelPace(0.616, 0.5, 50, 1.0),
    # Dao-AILab/flash-attention pull request 2280, B200: 8,192 tokens of width 128, causal and not (1 and 4 %).
    ("flash4", "forward", "blackwell"): KernelPace(0.905, 0.5, 50, 2.0),
    ("flash4", "backward", "blackwell"): KernelPace(0.77, 0.5, 50, 2.0),
    # aiconfigurator, every so many rows: encoders of vLLM and SGLang (9 to 11 %), prefill and decode (15 to 39 %, which
    # trees correct).
    ("flash2", "encoder", "ada"): KernelPace(0.949, 51.7, 5810, 1.0),
    ("flash3", "encoder", "hopper"): KernelPace(1.05, 51.2, 8600, 2.0),
    ("flash2", "paged", "ampere"): KernelPace(0.693, 28.5, 4830, 4.0),
    ("flash2", "paged", "ada"): KernelPace(0.898, 214.1, 11400, 1.0),
    ("flash3", "paged", "hopper"): KernelPace(0.812, 35.2, 7900, 4.0),
    ("flash2", "decode", "ampere"): KernelPace(0.465, 32.6, 4130, 4.0),
    ("flash2", "decode", "ada"): KernelPace(0.316, 300.0, 10600, 1.0),
    ("flash3", "decode", "hopper"): KernelPace(0.355, 0.5, 4540, 3.6),
    # TensorRT-LLM (FlashMLA on Hopper, its own kernel on the others: 11 to 14 %) and FlashAttention 3 in 8 bits (15 and
    # 28 %; whole sequences as over a cache).
    ("mla", "decode", "hopper"): KernelPace(0.602, 4.8, 10600, 3.1),
    ("mla", "decode", "ampere"): KernelPace(0.430, 27.7, 7430, 1.0),
    ("mla", "decode", "ada"): KernelPace(0.929, 1.4, 9720, 1.0),
    ("flash3-fp8", "paged", "hopper"): KernelPace(0.574, 41.4, 60, 4.0),
    ("flash3-fp8", "decode", "hopper"): KernelPace(0.223, 0.5, 4260, 4.0),
    ("flash3-fp8", "forward", "hopper"): KernelPace(0.574, 41.4, 60, 2.0),
    # Estimated: Ada as its encoders and as A100 backward; FlashAttention 2 uses Ampere's instructions, which later
    # datacenter chips run at Hopper's rate (0.38 of 929 TFLOP/s there, 0.22 of 1,700 on B200).
    ("flash2", "forward", "ada"): KernelPace(0.949, 51.7, 5810, 1.0),
    ("flash2", "backward", "ada"): KernelPace(0.654, 0.5, 50, 2.0),
    ("flash2", "forward", "blackwell"): KernelPace(0.22, 5.0, 3800, 2.0),
    ("flash2", "backward", "blackwell"): KernelPace(0.23, 113.6, 10200, 2.0),
    ("cudnn", "forward", "ampere"): KernelPace(1.05, 105.8, 50, 2.0),
    ("cudnn", "backward", "ampere"): KernelPace(0.654, 0.5, 50, 2.0),
    ("cudnn", "forward", "ada"): KernelPace(0.949, 51.7, 5810, 1.0),
    ("cudnn", "backward", "ada"): KernelPace(0.654, 0.5, 50, 2.0),
    # Text of the FlashAttention-2 paper, arXiv 2307.08691, section 1: FlashAttention reaches 30 to 50 % of A100's peak
    # forward and 25 to 35 % backward; the middle of both at width 128. Hopper by the ratio that the second one has of
    # its share there to that on A100, 0.58. xFormers' kernel is as fast as FlashAttention there (figures 4 to 6).
    **{
        (kernel, phase, architecture): KernelPace(products, 60.0, 3000, 2.0)
        for kernel in ("flash1", "efficient")
        for architecture, forward, backward in (
            ("volta", 0.517, 0.36),
            ("ampere", 0.517, 0.36),
            ("hopper", 0.30, 0.21),
            ("blackwell", 0.17, 0.12),
        )
        for phase, products in (("forward", forward), ("backward", backward))
    },
})  # fmt: skip

# Substitutes for a phase or a generation without a line of its own.
_AS_PHASE: MappingProxyType[str, AttentionPhase] = MappingProxyType(
    {"encoder": "forward", "paged": "forward", "decode": "forward"}
)
_AS_GENERATION = MappingProxyType(
    {"ada": "ampere", "turing": "volta", "pascal": "volta", "blackwell": "hopper", "blackwell-rtx": "ampere"}
)


def pace_of(kernel: AttentionKernel, phase: AttentionPhase, generation: str) -> KernelPace:
    """Pace of ``kernel`` in ``phase`` on a ``generation`` of GPUs, or that of the nearest known phase and
    generation.
    """
    if kernel == "math":
        raise KeyError("the unfused form has no pace of its own")
    for name in (generation, _AS_GENERATION.get(generation, "ampere"), "ampere", "hopper"):
        for kind in (phase, _AS_PHASE.get(phase, phase)):
            found = _TABLE.get((kernel, kind, name))
            if found is not None:
                return found
    raise KeyError((kernel, phase, generation))
