"""Linear attention: sequences accumulated in a matrix of states, and the short convolution in front of it.

Every head keeps a matrix of ``key_dim`` x ``value_dim`` states, which decays and is updated at each token; the output
is read from it by the query. Kernels for whole sequences compute chunks of tokens by matrix products and pass the
states from chunk to chunk; with a cache, one token updates the states. Kinds, and their implementations:

- ``ssd``: Mamba 2 (``mamba_chunk_scan_combined`` of mamba_ssm): keys and queries are B and C of the state space, shared
  by the value heads of a group; one decay per head.
- ``gated_delta``: the states' prediction for a key is subtracted before its value is added (``chunk_gated_delta_rule``
  of flash-linear-attention). ``kimi_delta``: the same with a decay per key dimension.
- ``selective``: Mamba 1 (``selective_scan_fn`` of mamba_ssm): every channel is a value head of width 1 with ``key_dim``
  states, token by token in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from costmodel.operators.counted_work import CountedWork
from costmodel.operators.layers import element_bytes
from costmodel.operators.lookups import Direction

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
