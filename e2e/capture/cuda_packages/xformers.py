"""xformers: memory-efficient attention with its biases, SwiGLU, RMS norm.

Attention in 16 bits without a tensor of biases is FlashAttention 2, as xformers dispatches it; other attention is its
own kernel for CUTLASS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from e2e.capture.cuda_packages.flash_attention import rms_norm
from e2e.capture.cuda_packages.kernels import attend
from e2e.capture.models.stacks import PackedGated


class AttentionBias:
    """Mask of attention: causal or not, over a window, between sequences packed in one row."""

    causal = False

    def __init__(self, lengths: Sequence[int] = (), window: int = 0, of_keys: Sequence[int] = ()) -> None:
        self.lengths, self.window, self.of_keys = tuple(lengths), window, tuple(of_keys or lengths)
        self.batches = [1] * len(self.lengths)

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, **_: Any) -> Any:
        """Return the mask of sequences of these lengths."""
        return cls(q_seqlen, of_keys=kv_seqlen or q_seqlen)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the mask of several batches, and the one row in which they are packed."""
        lengths = [each.shape[1] for each in tensors for _ in range(each.shape[0])]
        mask = cls(lengths)
        mask.batches = [each.shape[0] for each in tensors]
        return mask, torch.cat([each.reshape(1, -1, *each.shape[2:]) for each in tensors], dim=1)

    def split(self, tensor: torch.Tensor) -> Any:
        """Return the sequences packed in ``tensor``, in the batches that they came from."""
        parts = list(tensor.split(self.lengths, dim=1))
        found = []
        for count in self.batches:
            group, parts = parts[:count], parts[count:]
            found.append(torch.cat(group) if count > 1 else group[0])
        return found

    def make_causal(self) -> Any:
        """Return the causal form of the mask."""
        return BlockDiagonalCausalMask(self.lengths, self.window, self.of_keys)

    def make_local_attention(self, window_size: int) -> Any:
        """Return the mask over a window."""
        return BlockDiagonalCausalMask(self.lengths, window_size, self.of_keys)

    def to(self, *_: Any, **__: Any) -> Any:
        """Return the mask itself, which has no tensors."""
        return self


class BlockDiagonalMask(AttentionBias):
    """Sequences that see themselves."""


class BlockDiagonalCausalMask(AttentionBias):
    """Sequences that see themselves up to each query."""

    causal = True


class LowerTriangularMask(AttentionBias):
    """Causal mask of the whole row."""

    causal = True

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def add_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return a bias that is added beside the mask."""
        return bias


class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularMask):
    """Causal mask over a window."""

    def __init__(self, _window_size: int, *_: Any) -> None:
        super().__init__()
        self.window = _window_size


class LocalAttentionFromBottomRightMask(AttentionBias):
    """Mask over a window on both sides."""

    def __init__(self, window_left: int, window_right: int, *_: Any) -> None:
        super().__init__(window=max(window_left, window_right) + 1)


def memory_efficient_attention(
    query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: Any = None, *, op: Any = None,
    output_dtype: Any = None,
) -> Any:  # fmt: skip
    """Attention of (batch, length, heads, width), of one head without that dimension, or in groups of heads."""
    dims = query.dim()
    if dims == 3:
        query, key, value = (each.unsqueeze(2) for each in (query, key, value))
    if dims == 5:
        key, value = (each[:, :, :, :1] if each.stride(3) == 0 else each for each in (key, value))
        query, key, value = (each.flatten(2, 3) for each in (query, key, value))
    bias = attn_bias if isinstance(attn_bias, torch.Tensor) else None
    mask = attn_bias if isinstance(attn_bias, AttentionBias) else AttentionBias()
    half = query.dtype in (torch.float16, torch.bfloat16)
    kernel = "flash2" if half and bias is None and query.shape[-1] <= 256 else "efficient"
    how: dict[str, Any] = {"kernel": kernel, "causal": mask.causal, "window": mask.window, "dropout": p, "bias": bias}
    if mask.lengths and sum(mask.lengths) == query.shape[1] == key.shape[1]:
        how["packed"] = mask.lengths
    elif mask.lengths:
        count = len(mask.lengths)  # lengths of queries and keys that differ: equal sequences of the mean
        query, key, value = (
            each[:, : each.shape[1] // count * count].reshape(count, -1, *each.shape[2:])
            for each in (query, key, value)
        )
        return attend(query, key, value, **how).reshape(1, -1, *query.shape[2:])
    output = attend(query, key, value, **how)
    if dims == 3:
        return output.squeeze(2)
    return output.unflatten(2, (-1, output.shape[2])) if dims == 5 else output


class SwiGLU(nn.Module):
    """Gated dense layers: one product for gate and data."""

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int | None = None, bias: bool = True, *,
        _pack_weights: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.w12 = nn.Linear(in_features, 2 * hidden_features, bias)
        self.w3 = nn.Linear(hidden_features, out_features or in_features, bias)

    def forward(self, x: torch.Tensor) -> Any:
        """Apply the layers."""
        return self.w3(PackedGated.apply(self.w12(x)))


def swiglu(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, w3: Any, b3: Any, *, op: Any = None) -> Any:
    """Gated dense layers of weights that are given apart."""
    both = torch.cat((F.linear(x, w1, b1), F.linear(x, w2, b2)), dim=-1)
    return F.linear(PackedGated.apply(both), w3, b3)


def rms_norm_function(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    """RMS norm of the last dimension."""
    return rms_norm(x, weight, eps)


class _AnyKernel:
    """Name of a kernel, which the stand-in chooses itself."""

    def __class_getitem__(cls, key: Any) -> Any:
        return cls


_BIASES = {
    each.__name__: each
    for each in (
        AttentionBias, BlockDiagonalMask, BlockDiagonalCausalMask, LowerTriangularMask,
        LowerTriangularFromBottomRightLocalAttentionMask, LocalAttentionFromBottomRightMask,
    )
}  # fmt: skip
_BIASES["LowerTriangularFromBottomRightMask"] = LowerTriangularMask
_BIASES["BlockDiagonalCausalFromBottomRightMask"] = BlockDiagonalCausalMask
_KERNELS = dict.fromkeys(
    ("MemoryEfficientAttentionFlashAttentionOp", "MemoryEfficientAttentionCutlassOp", "AttentionOp"), _AnyKernel
)
_ATTENTION = {"memory_efficient_attention": memory_efficient_attention, **_BIASES, **_KERNELS}

MODULES: dict[str, dict[str, Any]] = {
    "xformers": {"_is_triton_available": lambda: False},
    "xformers.ops": {
        **_ATTENTION,
        "SwiGLU": SwiGLU,
        "swiglu": swiglu,
        "rms_norm": rms_norm_function,
        "unbind": torch.unbind,
    },
    "xformers.ops.fmha": _ATTENTION,
    "xformers.ops.fmha.attn_bias": _BIASES,
    "xformers.ops.swiglu_op": {"SwiGLU": SwiGLU},
    "xformers.ops.rmsnorm": {"rms_norm": rms_norm_function},
}
