"""What a user chooses from, on the command line and in records: each choice is typed here, once."""

from __future__ import annotations

from typing import Literal

# What one step does: with optimizer step, without it, or the forward pass alone in evaluation mode.
Mode = Literal["train", "forward-backward", "inference"]
# Number type of the model; ``tf32``: float32 tensors whose matrix products run on TF32 units.
Dtype = Literal["float32", "tf32", "bfloat16", "float16"]
# Names under which other tools have number types -> what is asked instead.
_SHORT = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
_MIXED = (
    "a transformer in bfloat16 or float16 keeps FP32 master weights as --recipe says; autocast over FP32 weights (AMP) "
    "is predicted of a --script that enters torch.autocast, not of built-in models"
)
_FOUR_BITS = (
    "weights of 4 bits (QLoRA, NF4) are not predicted: no table has their products; --lora RANK trains adapters beside "
    "frozen weights of 16 bits"
)
_EIGHT_BITS = "linear layers train in 8 bits by --precision, such as fp8-tensorwise, with --dtype bfloat16"
_INSTEAD = {
    **{name: f"write {dtype}" for name, dtype in _SHORT.items()},
    **dict.fromkeys(("amp", "autocast", "mixed", "mixed-precision"), _MIXED),
    **dict.fromkeys(("qlora", "nf4", "fp4", "int4", "4bit", "nvfp4", "mxfp4"), _FOUR_BITS),
    **dict.fromkeys(("fp8", "float8", "int8", "mxfp8"), _EIGHT_BITS),
}


def instead_of(name: str) -> str | None:
    """What is asked instead of the number type or precision ``name``, which there is none of; ``None`` for names that
    no tool has.
    """
    return _INSTEAD.get(name.lower())


# How attention is computed: products and softmax apart, the library's (``eager``) or PyTorch's (``math``);
# by the kernel that ``scaled_dot_product_attention`` takes on the GPU (``flash``); or by one that is named:
# FlashAttention 1 (Triton's too) to 4, cuDNN's, the memory-efficient one; ``mla``: latent attention over the cached
# latents themselves, as serving engines decode it; ``flash3-fp8``: the third over a cache in 8 bits, forward.
AttentionForm = Literal[
    "eager", "flash", "flash1", "flash2", "flash3", "flash3-fp8", "flash4", "cudnn", "efficient", "mla", "math"
]
# How a batch of images lies in memory: NCHW, or NHWC (``torch.channels_last``).
MemoryLayout = Literal["contiguous", "channels-last"]
# How experts are computed: fused permutation and grouped products, or as Hugging Face's library writes them.
MixtureForm = Literal["grouped", "huggingface"]
# Linear attention (Mamba, gated delta rules): by the kernels of the libraries that fuse it, or in single operators.
LinearAttentionForm = Literal["fused", "unfused"]
# How an optimizer that leaves it open updates its parameters: list by list (PyTorch's default on GPUs), or in one
# kernel.
OptimizerForm = Literal["foreach", "fused"]
