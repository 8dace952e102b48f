"""FlashAttention 2 (``flash_attn``) and 3 (``flash_attn_interface``): attention of whole and of packed sequences, its
padding, rotary embeddings, norms, losses and dense layers; and its extensions that older scripts import themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from e2e.capture.cuda_packages.kernels import OPERATORS, attend, norm
from e2e.capture.known_values import known
from e2e.capture.models.stacks import FusedCrossEntropy, Gated, Rotary

_BOTH_SIDES = (-1, -1)


def lengths_of(bounds: torch.Tensor, tokens: int) -> list[int]:
    """Return the lengths of the sequences between ``bounds``; equal ones if their values are unknown."""
    values = bounds if bounds.device.type == "cpu" else known(bounds)
    count = max(bounds.numel() - 1, 1)
    if values is not None:
        found = [int(each) for each in values.diff().tolist() if each > 0]
        if sum(found) == tokens:
            return found
    return [tokens // count + (place < tokens % count) for place in range(count)]


def _window(size: Any, causal: bool) -> int:
    """Return the window as a number of keys, with the query's own, of (keys before, keys after)."""
    if size is None or tuple(size) == _BOTH_SIDES or max(size) < 0:
        return 0
    return int(size[0] if causal else max(size)) + 1


def _answer(output: torch.Tensor, whole: bool) -> Any:
    """Return the output, and if ``whole`` the sums of each row and the probabilities, of which there are none."""
    if not whole:
        return output
    return output, output.new_empty(output.shape[:-1], dtype=torch.float32), None


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
    window_size: Any = _BOTH_SIDES, softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of (batch, length, heads, width)."""
    window = _window(window_size, causal)
    return _answer(attend(q, k, v, kernel="flash2", causal=causal, window=window, dropout=dropout_p), return_attn_probs)


def flash_attn_kvpacked_func(q: Any, kv: Any, *how: Any, **named: Any) -> Any:
    """Attention with keys and values (batch, length, 2, heads, width)."""
    return _stacked((q, kv), *how, **named)


def flash_attn_qkvpacked_func(qkv: Any, *how: Any, **named: Any) -> Any:
    """Attention of (batch, length, 3, heads, width)."""
    return _stacked((qkv,), *how, **named)


def _stacked(
    given: tuple[Any, ...], dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
    window_size: Any = _BOTH_SIDES, softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    window = _window(window_size, causal)
    return _answer(attend(*given, kernel="flash2", causal=causal, window=window, dropout=dropout_p), return_attn_probs)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = _BOTH_SIDES,
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    **_: Any,
) -> Any:  # fmt: skip
    """Attention of the sequences packed in (tokens, heads, width)."""
    output = _packed("flash2", (q, k, v), cu_seqlens_q, cu_seqlens_k, causal, window_size, dropout_p)
    return _answer(output, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = _BOTH_SIDES,
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    **_: Any,
) -> Any:  # fmt: skip
    """Attention of packed sequences, with keys and values (tokens, 2, heads, width)."""
    output = _packed("flash2", (q, kv), cu_seqlens_q, cu_seqlens_k, causal, window_size, dropout_p)
    return _answer(output, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: Any = None, dropout_p: float = 0.0, softmax_scale: Any = None,
    causal: bool = False, window_size: Any = _BOTH_SIDES, softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """Attention of packed sequences (tokens, 3, heads, width)."""
    output = _packed("flash2", (qkv,), cu_seqlens, cu_seqlens, causal, window_size, dropout_p)
    return _answer(output, return_attn_probs)


def _packed(
    kernel: str, given: tuple[Any, ...], of_queries: Any, of_keys: Any, causal: bool, window: Any, dropout: float
) -> torch.Tensor:
    queries, keys = given[0], given[-1]
    rows = [each.unsqueeze(0) for each in given]
    lengths = lengths_of(of_queries, queries.shape[0])
    how: dict[str, Any] = {"kernel": kernel, "causal": causal, "window": _window(window, causal), "dropout": dropout}
    if queries.shape[0] == keys.shape[0]:
        return attend(*rows, packed=lengths, **how).squeeze(0)
    # Queries and keys of different lengths, as in cross attention: equal sequences of the mean lengths.
    count = len(lengths)
    even = [each[: each.shape[0] // count * count].unflatten(0, (count, -1)) for each in given]
    output = attend(*even, **how).flatten(0, 1)
    return F.pad(output, (0, 0, 0, 0, 0, queries.shape[0] - output.shape[0]))


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, *_: Any, causal: bool = False,
    window_size: Any = _BOTH_SIDES, **__: Any,
) -> Any:  # fmt: skip
    """Attention of new tokens over the whole cache."""
    return attend(q, k_cache, v_cache, kernel="flash2", causal=causal, window=_window(window_size, causal))


def flash3_func(
    q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False, qv: Any = None, *_: Any,
    window_size: Any = _BOTH_SIDES, return_attn_probs: bool = False, **__: Any,
) -> Any:  # fmt: skip
    """Attention of (batch, length, heads, width) by FlashAttention 3."""
    output = attend(q, k, v, kernel="flash3", causal=causal, window=_window(window_size, causal))
    return _answer(output, return_attn_probs)[:2] if return_attn_probs else output


def flash3_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, seqused_q: Any = None, seqused_k: Any = None, softmax_scale: Any = None,
    causal: bool = False, *_: Any, window_size: Any = _BOTH_SIDES, return_attn_probs: bool = False, **__: Any,
) -> Any:  # fmt: skip
    """Attention of packed sequences by FlashAttention 3."""
    output = _packed("flash3", (q, k, v), cu_seqlens_q, cu_seqlens_k, causal, window_size, 0.0)
    return _answer(output, return_attn_probs)[:2] if return_attn_probs else output


def flash3_qkvpacked_func(qkv: Any, softmax_scale: Any = None, causal: bool = False, **named: Any) -> Any:
    """Attention of (batch, length, 3, heads, width) by FlashAttention 3."""
    return attend(qkv, kernel="flash3", causal=causal, window=_window(named.get("window_size"), causal))


# --- padding ------------------------------------------------------------------------------------------


def index_first_axis(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows at ``indices``."""
    return rows[indices]


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: Any = None) -> tuple[Any, ...]:
    """Return the tokens that the mask leaves, their places, bounds of sequences, the longest and all lengths."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    places = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    longest = lengths.max().item() if known(lengths) is not None else attention_mask.shape[-1]
    bounds = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), places), places, bounds, longest, lengths


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Return the tokens at their places among all, zeros elsewhere."""
    whole = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return whole.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


# --- rotary embeddings --------------------------------------------------------------------------------


def apply_rotary_emb(
    x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False, *_: Any, **__: Any
) -> Any:
    """Rotate (batch, length, heads, width) in one kernel."""
    return Rotary.apply(x, cos, sin)


class _RotateFirst(torch.autograd.Function):
    """Rotation, in place, of the first ``count`` of what is stacked along dimension -3."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, count: int, cos: Any, sin: Any) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.count = count
        ctx.mark_dirty(whole)
        torch.ops.stack.rotary(whole.narrow(-3, 0, count), cos, sin)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        whole = gradients[0].contiguous()
        torch.ops.stack.rotary_backward(whole.narrow(-3, 0, ctx.count), *ctx.saved_tensors)
        return whole, None, None, None


def apply_rotary_emb_qkv_(qkv: Any, cos: Any, sin: Any, *_: Any, **__: Any) -> Any:
    """Rotate the queries and keys of (batch, length, 3, heads, width) in place."""
    return _RotateFirst.apply(qkv, 2, cos, sin)


def apply_rotary_emb_kv_(kv: Any, cos: Any, sin: Any, *_: Any, **__: Any) -> Any:
    """Rotate the keys of (batch, length, 2, heads, width) in place."""
    return _RotateFirst.apply(kv, 1, cos, sin)


class RotaryEmbedding(nn.Module):
    """Rotary embedding that keeps its tables."""

    def __init__(self, dim: int, base: float = 10000.0, interleaved: bool = False, *_: Any, **__: Any) -> None:
        super().__init__()
        self.dim = dim
        self._tables: tuple[torch.Tensor, ...] | None = None

    def _both(self, length: int, like: torch.Tensor) -> Any:
        if self._tables is None or self._tables[0].shape[0] < length or self._tables[0].dtype is not like.dtype:
            self._tables = tuple(like.new_empty(length, self.dim // 2) for _ in range(2))
        return self._tables

    def forward(self, qkv: Any, kv: Any = None, seqlen_offset: Any = 0, *_: Any, **__: Any) -> Any:
        """Rotate queries and keys: stacked with the values, or queries apart."""
        cos, sin = self._both(qkv.shape[1], qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin)
        return apply_rotary_emb(qkv, cos, sin), apply_rotary_emb_kv_(kv, cos, sin)


# --- norms, losses, dense layers ------------------------------------------------------------------------


def _norm_function(kind: str) -> Callable[..., Any]:
    def run(
        x: Any, weight: Any, bias: Any = None, residual: Any = None, x1: Any = None, weight1: Any = None,
        bias1: Any = None, eps: float = 1e-6, dropout_p: float = 0.0, rowscale: Any = None, prenorm: bool = False,
        residual_in_fp32: bool = False, *_: Any, **__: Any,
    ) -> Any:  # fmt: skip
        found = norm(x, kind, weight, bias, residual=residual)
        if residual is None:
            return (found, x) if prenorm else found
        return found if prenorm else found[0]

    return run


rms_norm_fn, layer_norm_fn = _norm_function("rms_norm"), _norm_function("layer_norm")


def rms_norm(x: Any, weight: Any, epsilon: float = 1e-6) -> Any:
    """RMS norm of the last dimension."""
    return norm(x, "rms_norm", weight)


def layer_norm(x: Any, weight: Any, bias: Any, epsilon: float = 1e-5) -> Any:
    """Layer norm of the last dimension."""
    return norm(x, "layer_norm", weight, bias)


def _dropout_add(kind: str) -> Callable[..., Any]:
    def run(x0: Any, residual: Any, weight: Any, bias: Any, *_: Any, prenorm: bool = False, **__: Any) -> Any:
        found = norm(x0, kind, weight, bias, residual=residual)
        if residual is None:
            return (found, x0) if prenorm else found
        return found if prenorm else found[0]

    return run


class RMSNorm(nn.Module):
    """RMS norm, of a sum if it is called with a residual."""

    kind = "rms_norm"

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        if self.kind == "layer_norm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Any, residual: Any = None, prenorm: bool = False, residual_in_fp32: bool = False) -> Any:
        """Return the norm; with ``prenorm`` the sum too."""
        return _norm_function(self.kind)(x, self.weight, self.bias, residual, prenorm=prenorm)


class LayerNorm(RMSNorm):
    """Layer norm, of a sum if it is called with a residual."""

    kind = "layer_norm"


class DropoutAddLayerNorm(LayerNorm):
    """Layer norm of the sum of a residual and of what dropout leaves."""

    def __init__(
        self, hidden_size: int, prenorm: bool = False, p: float = 0.0, eps: float = 1e-5, **named: Any
    ) -> None:
        super().__init__(hidden_size, eps, named.get("device"), named.get("dtype"))
        self.prenorm = prenorm

    def forward(self, x0: Any, residual: Any = None, *_: Any) -> Any:  # type: ignore[override]
        """Return the norm; with ``prenorm`` the sum too."""
        return _dropout_add(self.kind)(x0, residual, self.weight, self.bias, prenorm=self.prenorm)


class DropoutAddRMSNorm(DropoutAddLayerNorm):
    """RMS norm of the sum of a residual and of what dropout leaves."""

    kind = "rms_norm"


def cross_entropy_loss(logits: Any, labels: Any, *_: Any, **__: Any) -> Any:
    """Losses (tokens,) of scores (tokens, words), and the second loss, which is none."""
    losses = FusedCrossEntropy.apply(logits, labels)
    return losses, torch.zeros_like(losses)


class CrossEntropyLoss(nn.Module):
    """Cross entropy in one kernel each way."""

    def __init__(self, ignore_index: int = -100, reduction: str = "mean", *_: Any, **__: Any) -> None:
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction  # programs count the targets that are not ignored

    def forward(self, input: Any, target: Any, *_: Any) -> Any:
        """Return the loss of scores (tokens, words)."""
        losses = FusedCrossEntropy.apply(input, target)
        return {"mean": losses.mean, "sum": losses.sum}.get(self.reduction, lambda: losses)()


def swiglu(x: Any, y: Any) -> Any:
    """Gated activation."""
    return Gated.apply(x, y)


def fused_dense_func(x: Any, weight: Any, bias: Any = None, return_residual: bool = False, *_: Any, **__: Any) -> Any:
    """Product with the bias in its epilogue."""
    output = F.linear(x, weight, bias)
    return (output, x) if return_residual else output


class FusedDense(nn.Linear):
    """Dense layer with the bias in the product's epilogue."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *_: Any, **named: Any) -> None:
        super().__init__(in_features, out_features, bias, named.get("device"), named.get("dtype"))


class FusedMLP(nn.Module):
    """Two dense layers with the activation between them."""

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None, bias1: bool = True,
        bias2: bool = True, activation: str = "gelu_approx", *_: Any, device: Any = None, dtype: Any = None, **__: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = hidden_features or 4 * in_features
        self.fc1 = nn.Linear(in_features, hidden, bias1, device, dtype)
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias2, device, dtype)
        self.activation = activation

    def forward(self, x: Any, *_: Any) -> Any:
        """Apply both layers; the activation is in the first product's epilogue, its gradient in the second's."""
        hidden = self.fc1(x)
        return self.fc2(F.relu(hidden) if self.activation == "relu" else F.gelu(hidden, approximate="tanh"))


class Mlp(FusedMLP):
    """Two dense layers with a function between them."""

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        activation: Any = F.gelu, bias1: bool = True, bias2: bool = True, return_residual: bool = False,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, hidden_features, out_features, bias1, bias2, device=device, dtype=dtype)
        self.function = activation

    def forward(self, x: Any, *_: Any) -> Any:
        """Apply both layers."""
        return self.fc2(self.function(self.fc1(x)))


class GatedMlp(nn.Module):
    """Gated dense layers: one product for both halves."""

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        activation: Any = F.sigmoid, bias1: bool = True, bias2: bool = True, multiple_of: int = 128,
        return_residual: bool = False, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = hidden_features or int(8 * in_features / 3)
        hidden = -(-hidden // multiple_of) * multiple_of
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias1, device, dtype)
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias2, device, dtype)
        self.activation = activation

    def forward(self, x: Any) -> Any:
        """Apply the layers."""
        both, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(Gated.apply(gate, both) if self.activation is F.silu else both * self.activation(gate))


class FlashSelfAttention(nn.Module):
    """Attention of (batch, length, 3, heads, width)."""

    def __init__(
        self, causal: bool = False, softmax_scale: Any = None, attention_dropout: float = 0.0, **_: Any
    ) -> None:
        super().__init__()
        self.causal, self.drop = causal, attention_dropout

    def forward(self, qkv: Any, causal: Any = None, cu_seqlens: Any = None, max_seqlen: Any = None) -> Any:
        """Attend, to sequences packed between ``cu_seqlens`` if it is given."""
        causal, dropout = self.causal if causal is None else causal, self.drop if self.training else 0.0
        if cu_seqlens is not None:
            return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout, causal=causal)
        return flash_attn_qkvpacked_func(qkv, dropout, causal=causal)


class MHA(nn.Module):
    """Multi-head attention on one product of queries, keys and values."""

    def __init__(
        self, embed_dim: int, num_heads: int, num_heads_kv: int | None = None, cross_attn: bool = False,
        qkv_proj_bias: bool = True, out_proj_bias: bool = True, dropout: float = 0.0, softmax_scale: Any = None,
        causal: bool = False, layer_idx: Any = None, dwconv: bool = False, rotary_emb_dim: int = 0, *_: Any,
        window_size: Any = _BOTH_SIDES, device: Any = None, dtype: Any = None, **__: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads = num_heads, num_heads_kv or num_heads
        self.width, self.causal, self.dropout, self.window = embed_dim // num_heads, causal, dropout, window_size
        out = self.width * (self.heads + 2 * self.kv_heads)
        self.Wqkv = nn.Linear(embed_dim, out, qkv_proj_bias, device, dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, out_proj_bias, device, dtype)
        self.rotary_emb = RotaryEmbedding(rotary_emb_dim) if rotary_emb_dim else None

    def forward(self, x: Any, *_: Any, cu_seqlens: Any = None, max_seqlen: Any = None, **__: Any) -> Any:
        """Attend to ``x`` itself."""
        whole = self.Wqkv(x).unflatten(-1, (-1, self.width))
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        query, key, value = whole.split(sizes, dim=-2)
        if self.rotary_emb is not None:
            cos, sin = self.rotary_emb._both(x.shape[-2], x)
            query, key = apply_rotary_emb(query, cos, sin), apply_rotary_emb(key, cos, sin)
        how = {"causal": self.causal, "window_size": self.window, "dropout_p": self.dropout if self.training else 0.0}
        if cu_seqlens is not None:
            found = flash_attn_varlen_func(query, key, value, cu_seqlens, cu_seqlens, **how)
        else:
            found = flash_attn_func(query, key, value, **how)
        return self.out_proj(found.flatten(-2))


# --- extensions that scripts import themselves ----------------------------------------------------------


def _apply_rotary(x1: Any, x2: Any, cos: Any, sin: Any, out1: Any, out2: Any, conj: bool) -> None:
    OPERATORS.one_pass("rotary", [x1, x2, cos, sin], [out1, out2])


def _xentropy_forward(logits: Any, labels: Any, *_: Any) -> Any:
    return torch.ops.stack.cross_entropy(logits, labels)


def _xentropy_backward(gradient: Any, logits: Any, sums: Any, labels: Any, *_: Any) -> Any:
    torch.ops.stack.cross_entropy_backward_(logits, labels, sums, gradient)
    return logits


def _norm_forward(
    x0: Any, residual: Any, gamma: Any, beta: Any, rowscale: Any, colscale: Any, x0_subset: Any, z_subset: Any,
    dropout_p: float, epsilon: float, rowscale_const: float, z_numrows: int, gen: Any, residual_in_fp32: bool,
    is_rms_norm: bool,
) -> Any:  # fmt: skip
    kind = "rms_norm" if is_rms_norm else "layer_norm"
    output, total, sums = OPERATORS.norm(x0, residual, [each for each in (gamma, beta) if each is not None], kind)
    return output, x0 if residual is None else total, x0.new_empty(0, dtype=torch.uint8), sums, sums


def _norm_backward(
    dz: Any, dx: Any, x: Any, x0: Any, dmask: Any, mu: Any, rsigma: Any, gamma: Any, rowscale: Any, colscale: Any,
    x0_subset: Any, z_subset: Any, dropout_p: float, rowscale_const: float, x0_numrows: int, has_residual: bool,
    is_rms_norm: bool,
) -> Any:  # fmt: skip
    kind = "rms_norm" if is_rms_norm else "layer_norm"
    of_data, of_parameters = OPERATORS.norm_backward(dz, dx, x, [gamma], kind)
    return of_data, of_data if has_residual else None, of_parameters[0], of_parameters[0], None, None


_FLASH2 = {
    each.__name__: each
    for each in (
        flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache,
    )
}  # fmt: skip
_FLASH3 = {
    "flash_attn_func": flash3_func,
    "flash_attn_varlen_func": flash3_varlen_func,
    "flash_attn_qkvpacked_func": flash3_qkvpacked_func,
    "flash_attn_with_kvcache": flash_attn_with_kvcache,
}
_NORMS: dict[str, Any] = {
    "rms_norm_fn": rms_norm_fn,
    "layer_norm_fn": layer_norm_fn,
    "RMSNorm": RMSNorm,
    "layer_norm": layer_norm,
}

MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": _FLASH2,
    "flash_attn.flash_attn_interface": {
        **_FLASH2,
        "flash_attn_unpadded_func": flash_attn_varlen_func,
        "flash_attn_unpadded_kvpacked_func": flash_attn_varlen_kvpacked_func,
        "flash_attn_unpadded_qkvpacked_func": flash_attn_varlen_qkvpacked_func,
    },
    "flash_attn.flash_attention": {"FlashAttention": FlashSelfAttention, "FlashMHA": MHA},
    "flash_attn.bert_padding": {
        "index_first_axis": index_first_axis,
        "unpad_input": unpad_input,
        "pad_input": pad_input,
    },
    "flash_attn.layers.rotary": {
        "RotaryEmbedding": RotaryEmbedding,
        "apply_rotary_emb": apply_rotary_emb,
        "apply_rotary_emb_func": apply_rotary_emb,
        "apply_rotary_emb_qkv_": apply_rotary_emb_qkv_,
        "apply_rotary_emb_kv_": apply_rotary_emb_kv_,
    },
    "flash_attn.losses.cross_entropy": {"CrossEntropyLoss": CrossEntropyLoss},
    "flash_attn.ops.triton.cross_entropy": {"cross_entropy_loss": cross_entropy_loss},
    "flash_attn.ops.triton.rotary": {"apply_rotary": apply_rotary_emb},
    "flash_attn.ops.triton.layer_norm": _NORMS,
    "flash_attn.ops.triton.layernorm": _NORMS,
    "flash_attn.ops.rms_norm": {
        "RMSNorm": RMSNorm,
        "rms_norm": rms_norm,
        "dropout_add_rms_norm": _dropout_add("rms_norm"),
        "DropoutAddRMSNorm": DropoutAddRMSNorm,
    },
    "flash_attn.ops.layer_norm": {
        "layer_norm": layer_norm,
        "dropout_add_layer_norm": _dropout_add("layer_norm"),
        "DropoutAddLayerNorm": DropoutAddLayerNorm,
    },
    "flash_attn.ops.fused_dense": {
        "FusedDense": FusedDense,
        "FusedMLP": FusedMLP,
        "fused_dense_func": fused_dense_func,
    },
    "flash_attn.ops.activations": {"swiglu": swiglu},
    "flash_attn.modules.mha": {"MHA": MHA, "FlashSelfAttention": FlashSelfAttention},
    "flash_attn.modules.mlp": {"Mlp": Mlp, "GatedMlp": GatedMlp, "FusedMLP": FusedMLP},
    "flash_attn_interface": _FLASH3,
    "dropout_layer_norm": {"dropout_add_ln_fwd": _norm_forward, "dropout_add_ln_bwd": _norm_backward},
    "rotary_emb": {"apply_rotary": _apply_rotary},
    "xentropy_cuda_lib": {"forward": _xentropy_forward, "backward": _xentropy_backward},
}
