"""Types of options with fixed choices, shared by the command line and the records."""

from __future__ import annotations

from typing import Literal

# Mode of a step: with optimizer step, without it, or the forward pass alone in evaluation mode.
Mode = Literal["train", "forward-backward", "inference"]
# Number type of the model; ``tf32``: float32 tensors whose matrix products run on TF32 units.
Dtype = Literal["float32", "tf32", "bfloat16", "float16"]
# Names of number types in other tools -> advice for the user.
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
    """Return advice for the unsupported number type or precision ``name``, or None if no tool has such a name."""
    return _INSTEAD.get(name.lower())


# Attention implementation: separate products and softmax, as in the library (``eager``) or in PyTorch (``math``); the
# kernel that ``scaled_dot_product_attention`` selects on the GPU (``flash``); or a kernel by name: FlashAttention 1
# (Triton's too) to 4, cuDNN, the memory-efficient kernel; ``mla``: latent attention over cached latents, as serving
# engines decode; ``flash3-fp8``: FlashAttention 3 over an 8-bit cache, forward only.
AttentionForm = Literal[
    "eager", "flash", "flash1", "flash2", "flash3", "flash3-fp8", "flash4", "cudnn", "efficient", "mla", "math"
]
# Memory layout of image batches: NCHW, or NHWC (``torch.channels_last``).
MemoryLayout = Literal["contiguous", "channels-last"]
# Expert implementation: fused permutation and grouped products, or the code of Hugging Face's library.
MixtureForm = Literal["grouped", "huggingface"]
# Linear attention (Mamba, gated delta rules): kernels of the libraries that fuse it, or single operators.
LinearAttentionForm = Literal["fused", "unfused"]
# Optimizer implementation if the model does not set one: tensor lists, operation by operation (PyTorch's default on
# GPUs), or one kernel.
OptimizerForm = Literal["foreach", "fused"]
