"""What a user chooses from, on the command line and in records: each choice is typed here, once."""

from __future__ import annotations

from typing import Literal

# What one step does: with optimizer step, without it, or the forward pass alone in evaluation mode.
Mode = Literal["train", "forward-backward", "inference"]
# Number type of the model; ``tf32``: float32 tensors whose matrix products run on TF32 units.
Dtype = Literal["float32", "tf32", "bfloat16", "float16"]
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
