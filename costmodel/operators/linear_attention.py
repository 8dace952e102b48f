"""Linear attention: sequences that are read into a matrix of states, and the short convolution in front of it.

Every head keeps a matrix of ``key_dim`` x ``value_dim`` states, which each token lets decay and adds to; its output is
what its query reads from them. Kernels for whole sequences compute chunks of tokens by matrix products and hand the
states from chunk to chunk; behind a cache one token updates the states. Kinds, and whose kernels they are:

* ``ssd``: Mamba 2 (``mamba_chunk_scan_combined`` of mamba_ssm): keys and queries are B and C of the state space, shared
  by the value heads of a group; one decay per head.
* ``gated_delta``: what the states already say of a key is taken back before its value is added
  (``chunk_gated_delta_rule`` of flash-linear-attention). ``kimi_delta``: the same with a decay per key dimension.
* ``selective``: Mamba 1 (``selective_scan_fn`` of mamba_ssm): every channel is a value head of width 1 with
  ``key_dim`` states, token by token in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from costmodel.operators.counted_work import CountedWork
from costmodel.operators.layers import element_bytes
from costmodel.operators.lookups import Direction

LinearKind = Literal["ssd", "gated_delta", "kimi_delta", "selective"]
# Of one state and token in a recurrence token by token: decay and its exponential, two multiply-adds.
_STATE_FLOPS = 7


@dataclass(frozen=True)
class LinearAttention(CountedWork):
    """``batch`` sequences of ``length`` tokens through the states of ``value_heads`` heads.

    ``key_heads``: that the keys and queries have, each for a group of value heads. ``chunk``: tokens that are computed
    together. ``keeps_states``: they are written behind, and for one token read before (a cache), in ``state_dtype``.
    """

    kind: LinearKind
    batch: int
    length: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    chunk: int = 64
    dtype: str = "bfloat16"
    direction: Direction = "forward"
    keeps_states: bool = False
    state_dtype: str = "float32"

    @property
    def one_token(self) -> bool:
        """Whether a token behind a cache updates the states, which no chunk of tokens does."""
        return self.length == 1 and self.keeps_states

    @property
    def chunks(self) -> int:
        """Chunks of a sequence."""
        return -(-self.length // self.chunk)

    @property
    def states(self) -> int:
        """States of all sequences and heads."""
        return self.batch * self.value_heads * self.key_dim * self.value_dim

    @property
    def flops(self) -> int:
        if self.kind == "selective" or self.one_token:
            work = _STATE_FLOPS * self.length * self.states
        else:
            work = self.batch * self.chunks * self.chunk * self._token_flops()
        return work if self.direction == "forward" else 3 * work

    def _token_flops(self) -> int:
        """Of one token in a chunk, all heads. Scores of keys with queries once per group."""
        keys, values, heads = self.key_dim, self.value_dim, self.value_heads
        if self.kind == "ssd":
            return 2 * (self.chunk * (keys * self.key_heads + values * heads) + 2 * keys * values * heads)
        # Keys with keys, the inverse applied to keys and values, scores and their values; three products with states.
        return 2 * heads * (self.chunk * (3 * keys + 2 * values) + 3 * keys * values)

    @property
    def operand_bytes(self) -> int:
        """Of keys, queries, values and gates, each once."""
        tokens, size = self.batch * self.length, element_bytes(self.dtype)
        gates = self.value_heads * (size if self.kind in ("ssd", "selective") else 2 * 4)
        if self.kind == "kimi_delta":
            gates += self.value_heads * self.key_dim * 4
        return tokens * ((2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim) * size + gates)

    @property
    def output_bytes(self) -> int:
        """Of the outputs, one value per head, value dimension and token."""
        return self.batch * self.length * self.value_heads * self.value_dim * element_bytes(self.dtype)

    @property
    def state_bytes(self) -> int:
        """Of the states that are kept, once; 0 where none are."""
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
    """A convolution over time of each of ``channels`` by itself, ``width`` tokens back, with its activation.

    ``update``: one token behind a cache of the ``width - 1`` tokens before it, which is updated.
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
        """Results of the forward pass."""
        return self.batch * self.channels * self.length

    @property
    def flops(self) -> int:
        forward = 2 * self.elements * self.width
        return forward if self.direction == "forward" else 3 * forward

    @property
    def state_elements(self) -> int:
        """Of the cache that is read and written."""
        return self.batch * self.channels * (self.width - 1) if self.update else 0

    @property
    def read_bytes(self) -> int:
        tensors = 1 if self.direction == "forward" else 2
        elements = tensors * self.elements + self.state_elements + self.channels * self.width
        return elements * element_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        return (self.elements + self.state_elements) * element_bytes(self.dtype)
