"""What a user chooses from, on the command line and in records: each choice is typed here, once."""

from __future__ import annotations

from typing import Literal

# What one step does: with optimizer step, without it, or the forward pass alone in evaluation mode.
Mode = Literal["train", "forward-backward", "inference"]
# Number type of the model; ``tf32``: float32 tensors whose matrix products run on TF32 units.
Dtype = Literal["float32", "tf32", "bfloat16", "float16"]
# How attention is computed: products and softmax apart, or the fused kernel that CUDA would choose.
AttentionForm = Literal["eager", "flash"]
# How experts are computed: fused permutation and grouped products, or as Hugging Face's library writes them.
MixtureForm = Literal["grouped", "huggingface"]
