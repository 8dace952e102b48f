"""Operator records of attention: softmax attention as one operator, and linear attention.

**Softmax attention** has shapes (batch, heads, length, head_dim), as in ``scaled_dot_product_attention``; visible
query-key pairs are counted exactly.

**Linear attention** accumulates sequences in a matrix of states, after a short convolution. Every head keeps a
matrix of ``key_dim`` x ``value_dim`` states, which decays and is updated at each token; the output is read from it
by the query. Kernels for whole sequences compute chunks of tokens by matrix products and pass the states from chunk
to chunk; with a cache, one token updates the states. Kinds, and their implementations:

- ``ssd``: Mamba 2 (``mamba_chunk_scan_combined`` of mamba_ssm): keys and queries are B and C of the state space,
  shared by the value heads of a group; one decay per head.
- ``gated_delta``: the states' prediction for a key is subtracted before its value is added
  (``chunk_gated_delta_rule`` of flash-linear-attention). ``kimi_delta``: the same with a decay per key dimension.
- ``selective``: Mamba 1 (``selective_scan_fn`` of mamba_ssm): every channel is a value head of width 1 with
  ``key_dim`` states, token by token in registers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from costmodel.operators.layers import CountedWork, element_bytes
from costmodel.operators.lookups import Direction

# ``sdpa``: the kernel that PyTorch's ``scaled_dot_product_attention`` selects on the priced GPU; ``flash``: that of
# PyTorch's flash backend there. ``flash1``: of 2022, as in PyTorch 2.0 and 2.1, or Triton's port of it; ``flash2`` and
# ``flash3``: Tri Dao's second and third (the latter only for Hopper), ``flash4`` the one for datacenter Blackwell,
# ``flash3-fp8`` the third with 8-bit operands, forward; ``efficient``: xFormers' for CUTLASS; ``mla``: latent attention
# in the latent space, whose values are the first part of its keys (FlashMLA on Hopper, TensorRT-LLM's on others);
# ``math``: separate products and softmax. The engines of ENGINES: the kernel that they select by GPU, type and phase.
AttentionKernel = Literal[
    "sdpa", "flash", "flash1", "flash2", "flash3", "flash3-fp8", "flash4", "cudnn", "efficient", "mla", "math",
    "vllm", "sglang", "trtllm",
]  # fmt: skip
# Serving engines whose kernels have tables.
ENGINES: tuple[Literal["vllm", "sglang", "trtllm"], ...] = ("vllm", "sglang", "trtllm")
# Position of a causal mask with more keys than queries: at the ``end`` (the last query sees all keys: tokens with a
# cache), at the ``start`` (query i sees the first i + 1 keys), or ``spread`` (ranks of context parallelism have queries
# of the front and of the back, so that each computes the same share of the whole triangle).
CausalPlace = Literal["end", "start", "spread"]
# Phases with separate measured tables: ``encoder``: no mask, narrow heads; ``paged``: keys in the pages of a cache;
# ``decode``: few queries and many keys; ``forward`` and ``backward``: the rest, as in training.
AttentionPhase = Literal["encoder", "forward", "backward", "paged", "decode"]
_ENCODER_WIDTH = 96  # the widest heads of the encoder tables, rounded up
# Up to this many rows of queries (grouped queries of one key-value head together) a kernel splits the keys over blocks
# (flash-attention's decode path).
_DECODE_ROWS = 128


@dataclass(frozen=True)
class Attention(CountedWork):
    """Softmax of queries x keys, times values. The eager form is Gemm + Softmax + Gemm."""

    batch: int
    heads: int
    query_length: int
    key_length: int
    head_dim: int
    # Less than `heads` for grouped queries.
    kv_heads: int
    causal: bool = False
    dtype: str = "float16"
    direction: Direction = "forward"
    kernel: AttentionKernel = "sdpa"
    # Width of the values, 0 for `head_dim` (latent attention: 192 and 128).
    value_dim: int = 0
    # Most keys visible to a query, itself included; 0 for all of them.
    window: int = 0
    # A tensor with a bias for every pair is read.
    mask: bool = False
    # A learned score per head is added to every softmax.
    sinks: bool = False
    # Keys and values are stored in the pages of a cache, as in serving engines.
    paged: bool = False
    # Random numbers are drawn for every pair.
    dropout: bool = False
    placed: CausalPlace = "end"
    # Lengths of the sequences packed into each row of the batch, which only see themselves; empty for one sequence.
    packed: tuple[int, ...] = ()
    # Type of keys and values in the cache, if another than ``dtype``; no part of the text by which rows are drawn.
    cached: str = field(default="", repr=False)

    @property
    def widths(self) -> tuple[int, int]:
        """Head dimension of queries and keys, and of values and outputs."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Lengths of queries and of keys of every sequence in one row of the batch."""
        if self.packed:
            return tuple((length, length) for length in self.packed)
        return ((self.query_length, self.key_length),)

    @property
    def pairs(self) -> int:
        """Number of visible query-key pairs of one head and one row of the batch."""
        return sum(seen_pairs(*piece, self.causal, self.window, self.placed) for piece in self.pieces)

    @property
    def phase(self) -> AttentionPhase:
        """Phase of the measured tables to which this operator belongs."""
        if self.direction == "backward":
            return "backward"
        if self.kernel == "mla":
            return "decode"  # prefill computes keys and values of every head
        if self.query_length * self.heads <= _DECODE_ROWS * self.kv_heads and self.key_length > self.query_length:
            return "decode"
        if self.paged:
            return "paged"
        return "encoder" if max(self.widths) <= _ENCODER_WIDTH and not self.causal and not self.window else "forward"

    @property
    def keys_seen(self) -> int:
        """Number of keys of a batch row that are visible to any query: with a cache, a window excludes the
        first ones.
        """
        if not self.window or not self.causal:
            return self.key_length
        return min(self.key_length, self.query_length + self.window - 1)

    @property
    def flops(self) -> int:
        scored, mixed = self.widths
        # Backward: scores again, then the gradients of weights (of width values), values, queries and keys.
        work = scored + mixed if self.direction == "forward" else 3 * scored + 2 * mixed
        return 2 * self.batch * self.heads * self.pairs * work

    @property
    def mask_bytes(self) -> int:
        """Bytes of the bias, one for every query and key of every head (PyTorch expands it)."""
        pairs = self.batch * self.heads * self.query_length * self.key_length
        return pairs * element_bytes(self.dtype) if self.mask else 0

    @property
    def read_bytes(self) -> int:
        scored, mixed = self.widths
        queries = self.batch * self.heads * self.query_length
        keys = self.batch * self.kv_heads * self.keys_seen * (scored if self.kernel == "mla" else scored + mixed)
        # Backward: output and its gradient in addition.
        own = scored if self.direction == "forward" else scored + 2 * mixed
        wide = element_bytes(self.dtype)
        return queries * own * wide + keys * element_bytes(self.cached or self.dtype) + self.mask_bytes

    @property
    def write_bytes(self) -> int:
        scored, mixed = self.widths
        queries = self.batch * self.heads * self.query_length
        if self.direction == "forward":
            return queries * mixed * element_bytes(self.dtype)
        keys = self.batch * self.kv_heads * self.key_length * (scored + mixed)
        return (queries * scored + keys) * element_bytes(self.dtype)


@lru_cache(maxsize=65536)
def seen_pairs(queries: int, keys: int, causal: bool, window: int = 0, placed: CausalPlace = "end") -> int:
    """Number of visible query-key pairs; a window without a causal mask extends to both sides."""
    if placed == "spread" and causal:
        return seen_pairs(keys, keys, True, window) * queries // keys
    first, last = seen_keys(np.arange(queries), queries, keys, causal, window, placed)
    return int((last - first).sum())


def seen_keys(
    rows: np.ndarray, queries: int, keys: int, causal: bool, window: int = 0, placed: CausalPlace = "end"
) -> tuple[np.ndarray, np.ndarray]:
    """First key visible to each query of ``rows``, and the end (exclusive); ``spread`` counts as ``end``."""
    own = rows if placed == "start" else rows + keys - queries
    last = np.clip(own + 1, 0, keys) if causal else np.full(len(rows), keys)
    if window:
        last = np.clip(np.minimum(last, own + window), 0, keys)
    first = np.clip(own - window + 1, 0, keys) if window else np.zeros(len(rows), dtype=int)
    return first, np.maximum(last, first)


LinearKind = Literal["ssd", "gated_delta", "kimi_delta", "selective"]
# Flops per state and token of a token-by-token recurrence: decay and its exponential, two multiply-adds.
_STATE_FLOPS = 7


@dataclass(frozen=True)
class LinearAttention(CountedWork):
    """Linear attention over ``batch`` sequences of ``length`` tokens with the states of ``value_heads`` heads."""

    kind: LinearKind
    batch: int
    length: int
    # Heads of keys and queries, each for a group of value heads.
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    # Tokens that are computed together.
    chunk: int = 64
    dtype: str = "bfloat16"
    direction: Direction = "forward"
    # States are written at the end, and for one token read first (a cache), in `state_dtype`.
    keeps_states: bool = False
    state_dtype: str = "float32"

    @property
    def one_token(self) -> bool:
        """True if one token with a cache updates the states, without chunks."""
        return self.length == 1 and self.keeps_states

    @property
    def chunks(self) -> int:
        """Number of chunks of a sequence."""
        return -(-self.length // self.chunk)

    @property
    def states(self) -> int:
        """Number of states of all sequences and heads."""
        return self.batch * self.value_heads * self.key_dim * self.value_dim

    @property
    def flops(self) -> int:
        if self.kind == "selective" or self.one_token:
            work = _STATE_FLOPS * self.length * self.states
        else:
            work = self.batch * self.chunks * self.chunk * self._token_flops()
        return work if self.direction == "forward" else 3 * work

    def _token_flops(self) -> int:
        """Flops of one token in a chunk, all heads. Scores of keys with queries are computed once per group."""
        keys, values, heads = self.key_dim, self.value_dim, self.value_heads
        if self.kind == "ssd":
            return 2 * (self.chunk * (keys * self.key_heads + values * heads) + 2 * keys * values * heads)
        # Keys with keys, the inverse applied to keys and values, scores and their values; three products with states.
        return 2 * heads * (self.chunk * (3 * keys + 2 * values) + 3 * keys * values)

    @property
    def operand_bytes(self) -> int:
        """Bytes of keys, queries, values and gates, each once."""
        tokens, size = self.batch * self.length, element_bytes(self.dtype)
        gates = self.value_heads * (size if self.kind in ("ssd", "selective") else 2 * 4)
        if self.kind == "kimi_delta":
            gates += self.value_heads * self.key_dim * 4
        return tokens * ((2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim) * size + gates)

    @property
    def output_bytes(self) -> int:
        """Bytes of the outputs, one value per head, value dimension and token."""
        return self.batch * self.length * self.value_heads * self.value_dim * element_bytes(self.dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of the stored states, once; 0 without a cache."""
        return self.states * element_bytes(self.state_dtype) if self.keeps_states else 0

    @property
    def read_bytes(self) -> int:
        backward = self.output_bytes if self.direction == "backward" else 0
        return self.operand_bytes + (self.state_bytes if self.one_token else 0) + backward

    @property
    def write_bytes(self) -> int:
        if self.direction == "backward":
            return self.operand_bytes
        return self.output_bytes + self.state_bytes


@dataclass(frozen=True)
class CausalConvolution(CountedWork):
    """Depthwise convolution over time of ``channels`` channels, ``width`` tokens back, with its activation.

    ``update``: one token with a cache of the ``width - 1`` preceding tokens, which is updated.
    """

    batch: int
    channels: int
    length: int
    width: int
    dtype: str = "bfloat16"
    direction: Direction = "forward"
    update: bool = False

    @property
    def elements(self) -> int:
        """Number of outputs of the forward pass."""
        return self.batch * self.channels * self.length

    @property
    def flops(self) -> int:
        forward = 2 * self.elements * self.width
        return forward if self.direction == "forward" else 3 * forward

    @property
    def state_elements(self) -> int:
        """Elements of the cache that is read and written."""
        return self.batch * self.channels * (self.width - 1) if self.update else 0

    @property
    def read_bytes(self) -> int:
        tensors = 1 if self.direction == "forward" else 2
        elements = tensors * self.elements + self.state_elements + self.channels * self.width
        return elements * element_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        return (self.elements + self.state_elements) * element_bytes(self.dtype)
